"""Ranks of a test, in processes of their own.

``python -m tests.support.processes`` imports what they import, so that Python writes what it has compiled.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    # sacplan/__init__.py imports nothing until it is asked for a name.
    "sacplan._plan.planning",
    "sacplan._apply.apply",
    "sacplan._verify.verify",
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


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
