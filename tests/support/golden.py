"""Four models planned in every way, as values that a file holds.

``python -m tests.support.golden`` writes the files again:

    python -m tests.support.golden                  # all, into tests/data/golden
    python -m tests.support.golden layers --print   # one, as JSON on the standard output

A row is one plan: its decisions, its figures, and a digest of the program of the step with it. They hang on the models
here, on what is searched, and on the versions of the solvers (``constraints.txt``), and on nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

import sacplan
from sacplan.core.program import Event, Program
from sacplan.planning.plan import Plan
from sacplan.techniques.registry import rewritten
from tests.zoo.language_models import LM, Block, cross_entropy, tokens
from tests.zoo.wide import Transformer

FOLDER = Path(__file__).parents[1] / "data" / "golden"
SHARES = (75, 50, 25, 0)
"""Budgets, in percent of the way from the smallest peak that a search finds to that without a plan."""


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    return sum(
        (part.square().mean() for part in (out if isinstance(out, tuple) else (out,))), torch.zeros(())
    )


class Case(NamedTuple):
    """A model, its batch and loss, and the meshes that it is spread over."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss_fn: Callable[..., Tensor] | None = _mean_square
    optimizer: Any = None
    meshes: tuple[dict[str, int], ...] = ()


CASES: dict[str, Case] = {
    "layers": Case(
        lambda: LM(layers=4, dim=64, vocab=512), lambda: tokens(4, 64, 512), cross_entropy, torch.optim.AdamW
    ),
    "spread": Case(
        lambda: LM(layers=1, dim=64, heads=4, vocab=256, dropout=0.0),
        lambda: tokens(4, 32, 256),
        cross_entropy,
        torch.optim.AdamW,
        ({"tp": 4}, {"dp": 2, "tp": 2}),
    ),
    "transformer": Case(lambda: Transformer(32, 2, 3), lambda: torch.randn(2, 64, 32)),
    "block": Case(lambda: Block(64, 4, 0.1), lambda: torch.randn(8, 64, 64)),
}
"""Training steps; those in ``INFERENCE`` are planned without gradients as well."""

INFERENCE = ("transformer",)

SOLVERS: dict[str, Any] = {
    "best": "best",
    "milp": "milp",
    "greedy": "greedy",
    "rotor": sacplan.Rotor(stages=12),
}


def rows_of(name: str) -> dict[str, Any]:
    """What the plans of a case are, by technique, solver and budget."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    torch.manual_seed(0)
    case = CASES[name]
    with torch.device("meta"):
        model = case.model()
    batch = case.batch()
    profile = sacplan.profile(model, batch, case.loss_fn, case.optimizer, device="h100")
    rows = dict(_rows(profile, "recompute", [("recompute",)], SOLVERS))
    rows |= _rows(profile, "chunk", [("chunk",), ("recompute", "chunk")], {"best": "best"})
    for mesh in case.meshes:
        rows |= _rows(profile, f"mesh {mesh}", [("shard", "recompute")], {"best": "best"}, mesh=mesh)
    if name in INFERENCE:
        step = sacplan.profile(model.eval(), batch, device="h100", mode="inference")
        rows |= _rows(step, "inference", [("chunk",)], {"best": "best"})
    return rows


def _rows(
    profile: sacplan.Profile,
    label: str,
    techniques: Sequence[tuple[str, ...]],
    solvers: dict[str, Any],
    **more: Any,
) -> Iterator[tuple[str, Any]]:
    smallest_bytes = {names: _smallest_bytes(profile, names, **more) for names in techniques}
    for names, solver, share in itertools.product(techniques, solvers, SHARES):
        key = f"{label}: {'+'.join(names)}, {solver}, {share}%"
        smallest = smallest_bytes[names]
        budget = smallest + (profile.peak_bytes - smallest) * share // 100
        try:
            plan = sacplan.plan(profile, f"{budget}B", solvers[solver], techniques=names, **more)
        except sacplan.InfeasibleBudget as error:
            yield key, {"smallest_feasible_bytes": error.smallest_feasible_bytes}
        except sacplan.errors.PlanError as error:
            yield key, {"refused": str(error).split(".")[0]}
        else:
            yield key, _figures(profile, plan)


def _smallest_bytes(profile: sacplan.Profile, techniques: tuple[str, ...], **more: Any) -> int:
    try:
        return sacplan.plan(profile, "1B", techniques=techniques, **more).peak_bytes
    except sacplan.InfeasibleBudget as error:
        return int(error.smallest_feasible_bytes or 0)


def _figures(profile: sacplan.Profile, plan: Plan) -> dict[str, Any]:
    on_rank = profile.on_ranks(plan.ranks)
    program = rewritten(on_rank.program, plan.decisions, on_rank.spec)
    return {
        "peak_bytes": plan.peak_bytes,
        "recompute_ms": _rounded(plan.recompute_ms),
        "recompute_flops": plan.recompute_flops,
        "added_ms": _rounded(plan.added_ms),
        "step_ms": _rounded(plan.step_ms),
        "status": plan.status,
        "solver": plan.solver,
        "limits_reached": not isinstance(plan.provenance.limits_reached, msgspec.UnsetType),
        "decisions": len(plan.decisions),
        "decisions_digest": _digest(msgspec.json.encode(plan.decisions)),
        "sharding_digest": _digest(msgspec.json.encode(plan.ranks)),
        "program_digest": digest_of(program),
    }


def _rounded(ms: float) -> float:
    """To digits that the order of a sum does not change."""
    return float(f"{ms:.6g}") if abs(ms) > 1e-9 else 0.0


def digest_of(program: Program) -> str:
    """Of what happens in a step: its events, with sizes and times, whatever the numbers of ops and storages are.

    What is let go of between two ops is so in no particular order: that makes no difference to memory, and may follow
    from where objects lie in the process.
    """
    known: dict[int, int] = {}
    said: list[object] = []
    gone: list[tuple[int, int]] = []  # (event, storage)

    def size(storage: int) -> int:
        return program.storage_bytes[storage]

    def say_gone() -> None:
        gone.sort(key=lambda each: (each[0], known.get(each[1], len(program.storage_bytes)), size(each[1])))
        said.extend((code, known.setdefault(s, len(known)), size(s)) for code, s in gone)
        gone.clear()

    for code, arg in program.events:
        if code in (Event.FREE, Event.RELEASE):
            gone.append((int(code), program.storage_of(code, arg)))
            continue
        if code in (Event.UNPACK, Event.DROP):
            continue
        say_gone()
        if code == Event.OP:
            op = program.ops[arg]
            where = "" if op.scope < 0 else program.scopes[op.scope].fqn
            storages = [known.setdefault(s, len(known)) for s in op.writes]
            sizes = [program.storage_bytes[s] for s in op.writes]
            said.append((op.name, int(op.phase), where, storages, sizes, f"{op.time_ms:.6g}", op.flops))
        elif code in (Event.ALLOC, Event.PACK):
            storage = program.storage_of(code, arg)
            said.append((int(code), known.setdefault(storage, len(known)), size(storage)))
        elif code == Event.RESIZE:
            storage, _, n_bytes = program.resizes[arg]
            said.append((int(code), known.setdefault(storage, len(known)), n_bytes))
        else:
            said.append((int(code), program.scopes[arg].fqn))
    say_gone()
    return _digest(repr(said).encode())


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:16]


def file_of(name: str) -> Path:
    """Of a case."""
    return FOLDER / f"{name}.json"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--print", action="store_true", dest="prints")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = {name: rows_of(name) for name in options.names or CASES}
    if options.prints:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        file_of(name).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
