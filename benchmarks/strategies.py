"""Does every way to spread an op over ranks give the op's own result, on simulated ranks?

    python -m benchmarks.strategies [--only steps models]

The ops are those of small steps and of eight small models. Each call of an op is split by the placements of each
strategy, run for every rank, and put together by the placements of its outputs; that is compared with the op on whole
tensors (1e-10 in float64). On one axis of 2 and of 4 ranks inputs may lie in any way, inside dimensions and as partial
sums too; on a mesh of 2 x 2, at most ``--pairs`` pairs of strategies of a call are run.

A row is an op: its calls, the strategies that ran on each mesh, how many of them take partial sums or need collectives,
and those that were wrong. Strategies that draw random numbers are counted as ``drawn`` and not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.harness.command import Parser
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.steps import seed_everything
from benchmarks.harness.table import Table
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.strategies import AxisStrategy
from tests.support.op_steps import STEPS, calls_of
from tests.support.placed import assert_right, offered, random_pairs
from tests.support.slices import OpCall
from tests.zoo.op_models import MODELS, calls_of_model

MESHES = {"2": Mesh.of(2), "4": Mesh.of(4), "2x2": Mesh.of({"dp": 2, "tp": 2})}
ONLY: dict[str, Callable[[], Iterator[OpCall]]] = {
    "steps": lambda: (call for step in STEPS.values() for call in calls_of(step)),
    "models": lambda: (call for name in MODELS for call in calls_of_model(name)),
}


def strategies_of(call: OpCall, mesh: Mesh, pairs: int) -> Sequence[tuple[AxisStrategy, ...]]:
    """Return the strategies of a call that run on a mesh."""
    if len(mesh.ranks) == 1:
        return [(s,) for s in offered(call, mesh.size)]
    return random_pairs(call, mesh, pairs)


class Tally:
    """Counts of one op: calls, and strategies by mesh."""

    def __init__(self) -> None:
        self.calls, self.linear, self.reduced = 0, 0, 0
        self.run: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, call: OpCall, pairs: int) -> None:
        """Run all strategies of a call."""
        self.calls += 1
        for name, mesh in MESHES.items():
            for chosen in strategies_of(call, mesh, pairs):
                if any(s.draws for s in chosen):
                    self.drawn[name] += 1
                    continue
                self.run[name] += 1
                self.linear += any(p.is_partial for s in chosen for p in s.inputs)
                self.reduced += any(s.reduces for s in chosen)
                try:
                    assert_right(call, chosen, mesh)
                except (AssertionError, RuntimeError) as error:
                    self.wrong.append(str(error).partition("\n")[0])

    def row(self, op: str) -> Row:
        """Return the row of the op."""
        return {
            "op": op, "calls": self.calls, "strategies": dict(self.run), "with_summands": self.linear,
            "with_collectives": self.reduced, "drawn": sum(self.drawn.values()), "wrong": self.wrong,
        }  # fmt: skip


_TABLE = Table(
    ("op", "<56"), ("calls", ">5"), *((f"{name} ranks", ">10") for name in MESHES), ("wrong", ">6")
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, and write the figures."""
    parser = Parser(__doc__, "strategies.json")
    parser.choice("--only", ONLY)
    parser.add_argument("--pairs", type=int, default=12)
    arguments = parser.begin(None if argv is None else list(argv))
    torch.set_default_dtype(torch.float64)
    found: dict[str, Tally] = {}
    for part in arguments.only:
        seed_everything(0)
        for call in ONLY[part]():
            found.setdefault(str(call.func), Tally()).add(call, arguments.pairs)
    rows = [found[op].row(op) for op in sorted(found)]
    print(_TABLE.head)
    for row in rows:
        counts = (row["strategies"].get(name, 0) for name in MESHES)
        print(_TABLE.row(row["op"], row["calls"], *counts, len(row["wrong"])))
    totals = {name: sum(row["strategies"].get(name, 0) for row in rows) for name in MESHES}
    wrong = sum(len(row["wrong"]) for row in rows)
    ran = ", ".join(f"{n} on {name}" for name, n in totals.items())
    print(f"{len(rows)} ops: {ran}; {wrong} wrong")
    write_results(arguments.json, rows, row_a_line=True, ops=len(rows), strategies=totals, wrong=wrong)


if __name__ == "__main__":
    main()
