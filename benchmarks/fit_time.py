"""How many seconds does ``sacplan fit`` take for Llama-3-8B, from the start of the process to the verdict?

    python -m benchmarks.fit_time [--json FILE] [--runs N] [--before FOLDER]

Three questions: batch 1 of 8192 tokens on an RTX 4090, where nothing fits, and on an H100, where it fits with a plan;
and 2048 tokens on an H200, where it fits without one. A row is a question, with the largest sizes that fit or without
them. It has seconds by the clock and of the processor: on a machine that is busy, the first are more. Each run is a
process of its own, imports and the model included; the one of N that took the processor least counts. The bytecode of
all modules is compiled before, as pip does when it installs a package.

With ``--before``, the checkout of an earlier version in FOLDER is asked in turn with this one, so that both see the
same machine. Its answers may be others: what counts as fitting has changed since.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.command import Parser
from benchmarks.harness.results import Row, write_results

RUNS = (("rtx-4090", 8192), ("h100", 8192), ("h200", 2048))
MODEL = "hf:meta-llama/Meta-Llama-3-8B"


_HERE = Path(__file__).parents[1]


def main() -> None:
    parser = Parser(__doc__, "fit_time.json")
    parser.add_argument("--runs", type=int, default=3, help="how often each is asked (default: %(default)s)")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version, asked in turn")
    arguments = parser.begin()
    versions = {"now": _HERE} | ({} if arguments.before is None else {"before": arguments.before.resolve()})
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        for folder in versions.values():
            ask(folder, Path(bytecode), *RUNS[0], True)
        for device, seq in RUNS:
            for sizes in (True, False):
                # In turn, so that a machine that gets busier does so for both.
                runs = [
                    (name, run(name, folder, Path(bytecode), device, seq, sizes))
                    for _ in range(arguments.runs)
                    for name, folder in versions.items()
                ]
                rows += [
                    min((row for by, row in runs if by == name), key=lambda row: row["processor_seconds"])
                    for name in versions
                ]
    write_results(arguments.json, rows)


def ask(folder: Path, bytecode: Path, device: str, seq: int, sizes: bool) -> str:
    """Run the command of the checkout in ``folder`` once, and return what it prints."""
    words = [MODEL, "--device", device, "--seq", str(seq), *([] if sizes else ["--no-sizes"])]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, "-m", "sacplan", "fit", *words, "--json"],
        check=False, capture_output=True, text=True, cwd=folder, env=environment,
    ).stdout  # fmt: skip


def run(version: str, folder: Path, bytecode: Path, device: str, seq: int, sizes: bool) -> Row:
    """Ask once, and time it."""
    began, used = time.perf_counter(), os.times()
    said = ask(folder, bytecode, device, seq, sizes)
    seconds, now = time.perf_counter() - began, os.times()
    processor = now.children_user + now.children_system - used.children_user - used.children_system
    facts = json.loads(said)  # the exit code is 3 where the step does not fit
    print(
        f"{version:6} {seconds:6.1f} s, {processor:6.1f} s of the processor: {facts['verdict']}", flush=True
    )
    return {
        "version": version, "device": device, "seq": seq, "sizes": sizes, "seconds": seconds,
        "processor_seconds": processor, "verdict": facts["verdict"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
