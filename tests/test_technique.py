"""What a new technique touches: a toy that keeps activations in half precision, from options to the plan's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import sacplan
from sacplan._executor.technique import Installed
from sacplan._plan.context import planning_context
from sacplan._program.decisions import Decision, SiteDecision
from sacplan._program.program import Event, Op, Patch, Phase, Program, StorageKind
from sacplan._program.regions import Option, Region
from sacplan._techniques import TECHNIQUES, rewritten
from tests import models

# --- the technique ---


class Half(SiteDecision, frozen=True, tag="half"):
    """Keep what an op makes in half precision."""


class HalfPrecision:
    name, decision = "half", Half

    def options(self, program: Program, region: Region, costs: Sequence[float]) -> Sequence[Option]:
        saved = [m for m, ops in enumerate(region.members) if any(saved_floats(program, op) for op in ops)]
        return [Option(1e-3 * len(saved), 0, tuple(saved), "half")] if saved else []

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        return halved(program, {s for op in region.ops(option) for s in saved_floats(program, op)})

    def decisions(self, program: Program, taken: Sequence[tuple[Region, Option]]) -> tuple[Decision, ...]:
        ops = {op: region.unit for region, option in taken for op in region.ops(option)}
        calls = {call: unit for unit in ops.values() for call in program.calls[unit]}
        sites = (
            (u, *site) for c, u in calls.items() for op, site in program.sites(c).items() if ops.get(op) == u
        )
        return tuple(Half(*site) for site in dict.fromkeys(sites))  # type: ignore[misc]

    def patch(self, program: Program, decisions: Sequence[Decision], device: Any) -> Patch:
        wanted = {decision.site for decision in decisions}
        calls = {call: unit for unit, *_ in wanted for call in program.calls[unit]}
        ops = {op for c, u in calls.items() for op, site in program.sites(c).items() if (u, *site) in wanted}
        return halved(program, {s for op in ops for s in saved_floats(program, op)})

    def install(self, model: torch.nn.Module, decisions: Any, recorded: Any, *, check: bool) -> Installed:
        raise NotImplementedError("a simulation")


def saved_floats(program: Program, op: int) -> list[int]:
    full = {
        program.tensors[t].storage for t in program.ops[op].outputs if program.tensors[t].dtype == "float32"
    }
    return [s for s in program.ops[op].writes if s in full and s in program.handle_storages]


def halved(program: Program, storages: set[int]) -> Patch:
    events: dict[int, Any] = {}
    ops: list[Op] = []
    casts: dict[tuple[int, int], int] = {}  # (PACK, handle) or (UNPACK, instance) to the storage of a cast
    sizes: list[int] = []
    for position, (code, arg) in enumerate(program.events):
        saved = code in (Event.PACK, Event.RELEASE, Event.UNPACK, Event.DROP)
        s = program.storage_of(code, arg) if saved else -1
        if s not in storages:
            continue
        if code in (Event.RELEASE, Event.DROP):  # the event behind the one that made the cast
            events[position] = ((int(Event.FREE), casts.pop((code - 1, arg))),)
            continue
        casts[code, arg] = len(program.storage_bytes) + len(sizes)
        sizes.append(program.storage_bytes[s] // (2 if code == Event.PACK else 1))
        source = s if code == Event.PACK else casts[int(Event.PACK), program.instance_handles[arg]]
        ops.append(Op("toy.cast", Phase.FORWARD, -1, 1e-3, 0, 0, (source,), (casts[code, arg],), (), False))
        events[position] = ((int(Event.OP), len(program.ops) + len(ops) - 1),)
    return Patch(events, tuple(ops), {}, tuple(sizes), (StorageKind.ACTIVATION,) * len(sizes))


# --- what it gets for that ---


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> sacplan.Profile:
    monkeypatch.setitem(TECHNIQUES, "half", HalfPrecision())
    torch.manual_seed(0)
    return sacplan.profile(models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64)), device="cpu")


def test_its_effects_add_up_with_those_of_recomputation(profile: sacplan.Profile) -> None:
    """What the solver's numbers say is the peak of the rewritten program, for each option of each region."""
    effects = planning_context(profile.program, techniques=("recompute", "half")).effects(1)
    tried = 0
    for i, region in enumerate(effects.regions):
        for o, option in enumerate(region.options[1:], start=1):
            technique = TECHNIQUES[option.technique]
            program = rewritten(profile.program, technique.decisions(profile.program, [(region, option)]))
            assert program.footprint.peak_bytes == effects.problem.peak({i: o})
            tried += option.technique == "half"
    assert tried >= 4


def test_the_solver_weighs_it_against_recomputation(profile: sacplan.Profile) -> None:
    smallest = sacplan.plan_smallest(profile).peak_bytes
    budget = f"{(profile.peak_bytes + smallest) // 2}B"
    alone = sacplan.plan(profile, budget)
    both = sacplan.plan(profile, budget, techniques=("recompute", "half"))
    assert {type(d).__name__ for d in both.decisions} >= {"Half"}
    assert both.recompute_ms < alone.recompute_ms
    assert both.peak_bytes == rewritten(profile.program, both.decisions).footprint.peak_bytes
    assert both.peak_bytes <= int(budget[:-1])
    assert both.provenance.techniques == ("recompute", "half")


def test_techniques_are_checked(profile: sacplan.Profile) -> None:
    with pytest.raises(
        sacplan.PlanError, match=r"unknown technique 'offload'; known are 'chunk', 'recompute', 'half'"
    ):
        sacplan.plan(profile, "80%", techniques=("offload",))
    with pytest.raises(sacplan.PlanError, match="is the string"):
        sacplan.plan(profile, "80%", techniques="recompute")
