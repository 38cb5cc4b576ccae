"""What a new technique touches: a toy that keeps activations in half precision, from options to the plan's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import sacplan
from sacplan._plan.context import planning_context
from sacplan._plan.techniques import TECHNIQUES, rewritten
from sacplan._program.decisions import Decision, SiteDecision
from sacplan._program.program import Event, Op, Patch, Program, StorageKind
from sacplan._program.regions import Option, Region
from sacplan._program.technique import Installed, View
from tests import models

# --- the technique ---


class Half(SiteDecision, frozen=True, tag="half"):
    """Keep what an op makes in half precision."""


class HalfPrecision:
    name, decision = "half", Half

    def options(self, program: Program, region: Region, costs: Sequence[float]) -> Sequence[Option]:
        saved = [m for m, ops in enumerate(region.members) if any(saved_floats(program, op) for op in ops)]
        return [Option(1e-3 * len(saved), 0, tuple(saved), "half")] if saved else []

    def option_patch(self, program: Program, region: Region, option: Option, view: View) -> Patch:
        return halved(program, {s for op in region.ops(option) for s in saved_floats(program, op)}, view)

    def decisions(self, program: Program, taken: Sequence[tuple[Region, Option]]) -> tuple[Decision, ...]:
        chosen = [(region.unit, region.ops(option)) for region, option in taken]
        calls = [(unit, ops, call) for unit, ops in chosen for call in program.calls[unit]]
        sites = (
            (unit, *site) for unit, ops, c in calls for op, site in program.sites(c).items() if op in ops
        )
        return tuple(Half(*site) for site in dict.fromkeys(sites))  # type: ignore[misc]

    def patch(self, program: Program, decisions: Sequence[Decision]) -> Patch:
        wanted = {decision.site for decision in decisions}
        calls = [(unit, call) for unit in {site.unit for site in wanted} for call in program.calls[unit]]
        ops = {op for unit, c in calls for op, site in program.sites(c).items() if (unit, *site) in wanted}
        view = [(position, *event) for position, event in enumerate(program.events)]
        return halved(program, {s for op in ops for s in saved_floats(program, op)}, view)

    def install(self, model: torch.nn.Module, decisions: Sequence[Decision], *, check: bool) -> Installed:
        raise NotImplementedError("a simulation")


def saved_floats(program: Program, op: int) -> list[int]:
    full = {
        program.tensors[t].storage for t in program.ops[op].outputs if program.tensors[t].dtype == "float32"
    }
    return [s for s in program.ops[op].writes if s in full and s in program.handle_storages]


def halved(program: Program, storages: set[int], view: View) -> Patch:
    events: dict[int, Any] = {}
    ops: list[Op] = []
    sizes: list[int] = []
    halves: dict[int, list[int]] = {}  # storage to [its half, handles on it]
    full: dict[int, int] = {}  # instance to the tensor that autograd is given

    def cast(source: int, n_bytes: int, like: Op) -> tuple[tuple[int, int], int]:
        sizes.append(n_bytes)
        made = len(program.storage_bytes) + len(sizes) - 1
        ops.append(Op("toy.cast", like.phase, like.scope, 1e-3, 0, 0, (source,), (made,), (), False))
        return (int(Event.OP), len(program.ops) + len(ops) - 1), made

    for position, code, arg in view:
        if code in (Event.OP, Event.ENTER, Event.EXIT) or program.liveness.storage(code, arg) not in storages:
            continue
        s = program.liveness.storage(code, arg)
        n_bytes, like = program.storage_bytes[s], program.ops[program.writer[s]]
        if code == Event.PACK:
            run, made = cast(s, n_bytes // 2, like) if s not in halves else (None, halves[s][0])
            halves.setdefault(s, [made, 0])[1] += 1
            events[position] = (run,) if run else ()
        elif code == Event.RELEASE:
            halves[s][1] -= 1
            events[position] = () if halves[s][1] else ((int(Event.FREE), halves.pop(s)[0]),)
        elif code == Event.UNPACK:
            run, full[arg] = cast(halves[s][0], n_bytes, like)
            events[position] = (run,)
        elif code == Event.DROP:
            events[position] = ((int(Event.FREE), full.pop(arg)),)
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
        sacplan.PlanError, match=r"unknown technique 'offload'; known are 'recompute', 'half'"
    ):
        sacplan.plan(profile, "80%", techniques=("offload",))
    with pytest.raises(sacplan.PlanError, match="is the string"):
        sacplan.plan(profile, "80%", techniques="recompute")
