"""How many seconds does ``sacplan fit`` take, from the start of the process to its first row and to the verdict?

    python -m benchmarks.fit_time [--json FILE] [--runs N]

Four questions: GPT-2 on an H100, which fits as it is; and Llama-3-8B with batch 1 of 8192 tokens on an RTX 4090, where
nothing fits, and on an H100, where it fits with a plan; and 2048 tokens on an H200, where it fits without one. A row is
a question, with the largest sizes that fit or without them. It has seconds by the clock and of the processor, and those
of the processor at which the first row was printed. Each run is a process of its own, imports and the model included;
the one of N that took the processor least counts. The bytecode of all modules is compiled before, as pip does when it
installs a package.
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
from benchmarks.harness.results import ROOT, Row, write_results

LLAMA = "hf:meta-llama/Meta-Llama-3-8B"
RUNS = (
    ("hf:gpt2", "h100", 1024),
    (LLAMA, "rtx-4090", 8192),
    (LLAMA, "h100", 8192),
    (LLAMA, "h200", 2048),
)


def main() -> None:
    parser = Parser(__doc__, "fit_time.json")
    parser.add_argument("--runs", type=int, default=3, help="how often each is asked (default: %(default)s)")
    arguments = parser.begin()
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        run(environment, *RUNS[0], True)
        for question in RUNS:
            for sizes in (True, False):
                asked = (run(environment, *question, sizes) for _ in range(arguments.runs))
                rows.append(min(asked, key=lambda row: row["processor_seconds"]))
    write_results(arguments.json, rows)


def run(environment: dict[str, str], model: str, device: str, seq: int, sizes: bool) -> Row:
    """Ask once, and time it."""
    words = [model, "--device", device, "--seq", str(seq), *([] if sizes else ["--no-sizes"])]
    began, used, first = time.perf_counter(), os.times(), 0.0
    # The exit code is 3 where the step does not fit.
    with tempfile.TemporaryFile("w+") as said:
        asked = subprocess.Popen(
            [sys.executable, "-m", "sacplan", "fit", *words, "--json"],
            stdout=said, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        for line in asked.stderr:
            if ", as it is: " in line and not first:
                fields = Path(f"/proc/{asked.pid}/stat").read_text().rpartition(")")[2].split()
                first = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # user and system time
        asked.wait()
        said.seek(0)
        verdict = json.load(said)["verdict"]
    seconds, now = time.perf_counter() - began, os.times()
    processor = now.children_user + now.children_system - used.children_user - used.children_system
    print(f"{seconds:6.1f} s; of the processor {first:6.1f} and {processor:6.1f} s: {verdict}", flush=True)
    return {
        "model": model, "device": device, "seq": seq, "sizes": sizes, "first_row_seconds": first, "seconds": seconds,
        "processor_seconds": processor, "verdict": verdict,
    }  # fmt: skip


if __name__ == "__main__":
    main()
