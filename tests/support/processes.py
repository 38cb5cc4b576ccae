"""Ranks and commands of a test, in processes of their own.

``python -m tests.support.processes`` imports what they import, so that Python writes what it has compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    # sacplan/__init__.py imports nothing until it is asked for a name.
    "sacplan.planning.planning",
    "sacplan.running.apply",
    "sacplan.running.verify",
    "transformers.trainer",
]


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], n_ranks: int) -> None:
    """Run ``function(rank, *arguments)`` on every rank, and raise what one of them raised.

    The ranks are forked from a server that has imported torch and sacplan, and run nothing. A process that is spawned
    imports them by itself, which takes longer than most of these tests. The ranks see the environment as it was when
    the first of all was started.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(function, arguments, nprocs=n_ranks, start_method=METHOD)


@contextlib.contextmanager
def gloo(rank: int, n_ranks: int, directory: str) -> Iterator[None]:
    """Be a rank of a gloo group, quietly and on one thread. The ranks find each other by a file in ``directory``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_python(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python FILE ...``, ``python -m MODULE ...`` or ``python -c CODE`` in the current directory.

    The result is that of ``subprocess.run([sys.executable, *arguments], env=env)``, but the process is forked from the
    server of ``run_ranks``, which saves seconds of imports. So it does not show what happens while torch is imported.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        written = [str(Path(folder, name)) for name in ("out", "err")]
        process = multiprocessing.get_context(METHOD).Process(
            target=_as_python,
            args=(arguments, dict(os.environ if env is None else env), str(Path.cwd()), written),
        )
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, 120)
        assert process.exitcode is not None
        out, err = (Path(path).read_text(encoding="utf-8") for path in written)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _as_python(
    arguments: tuple[str, ...], environment: dict[str, str], folder: str, written: list[str]
) -> None:
    for stream, path in enumerate(written, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    first, *rest = arguments
    # As Python itself does: the folder of a file, else the current one.
    sys.path.insert(0, folder if first in ("-m", "-c") else str(Path(first).resolve().parent))
    sys.argv = [first, *rest[1:]] if first in ("-m", "-c") else list(arguments)
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
