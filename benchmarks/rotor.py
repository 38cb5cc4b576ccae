"""Seconds and memory of the Rotor solver, engine by engine.

    python -m benchmarks.rotor [--stages 20 80 150] [--slots 500] [--engines fast reference] [--json FILE]

Chains are random, from a fixed seed: 4 to 12 KB for a stage's output and up to 20 KB more saved. The budget is a share
of what the step keeps without recomputation. Each figure is one run in a process of its own. Memory is the growth of
the peak resident size while the solver ran (Linux), and the bytes that Python and numpy had allocated at the most (the
fast engine; traced in a second run, since tracing takes time). Engines must agree on a digest of table, choices and
operations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import sacplan
from benchmarks.common import RESULTS, describe, machine, write_results

ENGINES = ("fast", "reference")
_COLUMNS = ("seconds", "cpu_seconds", "peak_growth_mb", "traced_mb")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[20, 80, 150])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.4, help="budget, of what the step takes unplanned")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--json", type=Path, default=RESULTS / "rotor.json")
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "STAGES", "TRACE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        engine, stages, trace = arguments.one
        print(json.dumps(run(engine, int(stages), arguments.slots, arguments.share, trace == "trace")))
        return
    print(describe(machine()))
    print(f"{'stages':>6} {'engine':>10} " + " ".join(f"{k:>15}" for k in _COLUMNS) + "  recomputation")
    rows = []
    for stages in arguments.stages:
        for engine in arguments.engines:
            row = _in_a_process(engine, stages, arguments.slots, arguments.share)
            rows.append(row)
            print(
                f"{stages:>6} {engine:>10} "
                + " ".join(f"{row[k]:15.2f}" if k in row else f"{'-':>15}" for k in _COLUMNS)
                + f"  {100 * (row['total_ms'] / row['step_ms'] - 1):.1f} %",
                flush=True,
            )
        same = {row["digest"] for row in rows if row["stages"] == stages}
        if len(same) > 1:
            raise SystemExit(f"the engines disagree on {stages} stages")
    write_results(arguments.json, rows)


def random_chain(stages: int, seed: int = 1) -> sacplan.Chain:
    """A chain of unlike stages."""
    rng = random.Random(seed)
    output = [rng.randint(4_000, 12_000) for _ in range(stages + 1)]
    return sacplan.Chain(
        [rng.uniform(1, 10) for _ in range(stages)],
        [rng.uniform(2, 20) for _ in range(stages + 1)],
        output,
        [size + rng.randint(0, 20_000) for size in output],
        [rng.randint(0, 4_000) for _ in range(stages)],
        [rng.randint(0, 12_000) for _ in range(stages + 1)],
    )


def run(engine: str, stages: int, slots: int, share: float, trace: bool) -> dict[str, Any]:
    """One solve, in this process."""
    chain = random_chain(stages)
    whole = chain.output_bytes[0] + sum(chain.saved_bytes[1:]) + chain.output_bytes[-1]
    if trace:
        tracemalloc.start()
        sacplan.rotor(chain, int(share * whole), slots, engine)
        return {"traced_mb": tracemalloc.get_traced_memory()[1] / 1e6}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _peak_resident_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    found = sacplan.rotor(chain, int(share * whole), slots, engine)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    growth = _peak_resident_bytes() - before
    digest = hashlib.sha256(found.table.tobytes() + found.choices.tobytes() + repr(found.operations).encode())
    return {
        "stages": stages, "slots": slots, "engine": engine, "seconds": wall, "cpu_seconds": cpu,
        "peak_growth_mb": growth / 1e6, "total_ms": found.total_ms, "step_ms": chain.step_ms,
        "operations": len(found.operations), "digest": digest.hexdigest()[:16],
    }  # fmt: skip


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _in_a_process(engine: str, stages: int, slots: int, share: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for trace in ("plain", "trace") if engine == "fast" else ("plain",):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rotor", "--slots", str(slots)]
        command += ["--share", str(share), "--one", engine, str(stages), trace]
        row |= json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return row


if __name__ == "__main__":
    main()
