"""How many seconds does ``sacplan fit`` take for Llama-3-8B, from the start of the process to the verdict?

    python -m benchmarks.fit_time [--json FILE] [--runs N]

Three questions: batch 1 of 8192 tokens on an RTX 4090, where nothing fits, and on an H100, where it fits with a plan;
and 2048 tokens on an H200, where it fits without one. A row is a question, with the largest sizes that fit or without
them. It has seconds by the clock and of the processor: on a machine that is busy, the first are more. Each run is a
process of its own, imports and the model included; the one of N that took the processor least counts. The bytecode of
all modules is compiled before, as pip does when it installs a package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.harness.command import Parser
from benchmarks.harness.results import ROOT, Row, write_results

RUNS = (("rtx-4090", 8192), ("h100", 8192), ("h200", 2048))
MODEL = "hf:meta-llama/Meta-Llama-3-8B"


def main() -> None:
    parser = Parser(__doc__, "fit_time.json")
    parser.add_argument("--runs", type=int, default=3, help="how often each is asked (default: %(default)s)")
    arguments = parser.begin()
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        run(environment, *RUNS[0], True)
        for device, seq in RUNS:
            for sizes in (True, False):
                asked = (run(environment, device, seq, sizes) for _ in range(arguments.runs))
                rows.append(min(asked, key=lambda row: row["processor_seconds"]))
    write_results(arguments.json, rows)


def run(environment: dict[str, str], device: str, seq: int, sizes: bool) -> Row:
    """Ask once, and time it."""
    words = [MODEL, "--device", device, "--seq", str(seq), *([] if sizes else ["--no-sizes"])]
    began, used = time.perf_counter(), os.times()
    # The exit code is 3 where the step does not fit.
    said = subprocess.run(
        [sys.executable, "-m", "sacplan", "fit", *words, "--json"],
        check=False, capture_output=True, text=True, cwd=ROOT, env=environment,
    ).stdout  # fmt: skip
    seconds, now = time.perf_counter() - began, os.times()
    processor = now.children_user + now.children_system - used.children_user - used.children_system
    verdict = json.loads(said)["verdict"]
    print(f"{seconds:6.1f} s, {processor:6.1f} s of the processor: {verdict}", flush=True)
    return {
        "device": device, "seq": seq, "sizes": sizes, "seconds": seconds, "processor_seconds": processor,
        "verdict": verdict,
    }  # fmt: skip


if __name__ == "__main__":
    main()
