"""What a new technique takes: a toy that keeps activations in half precision, all of it in this file.

It offers options for the regions that recomputation names, rewrites programs, and runs: a plan that does all three
things is measured to the byte.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import sacplan
from sacplan.core.call_sites import CallSites
from sacplan.core.decisions import Decision, SiteDecision
from sacplan.core.derived import derived
from sacplan.core.program import CallSite, Event, Op, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder
from sacplan.planning.context import planning_context
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Installed, Technique, ToInstall
from sacplan.techniques.registry import TECHNIQUES, rewritten
from sacplan.techniques.runtime.stand_ins import InstalledStandIns, StandIn
from sacplan.torch_compat.ops import is_computation, tensors_in
from sacplan.torch_compat.private import storage_key
from tests.support.steps import assert_predicted, grads_of
from tests.zoo import language_models as models

# --- the technique ---


class Half(SiteDecision, frozen=True, tag="half"):
    """Keep what an op makes in half precision."""


class HalfPrecision(Technique):
    name, decision = "half", Half

    def options(self, step: PlanStep, region: Region) -> Sequence[Option]:
        """One option: halve what the region keeps, but for what is pinned or taken by an offer."""
        free = [(m, ops) for m, ops in enumerate(region.members) if step.pins.kept_ops.isdisjoint(ops)]
        saved = [m for m, ops in free if any(saved_floats(step.program, op, region.unit) for op in ops)]
        return [Option(1e-3 * len(saved), 0, tuple(saved), "half")] if saved else []

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        return halved(
            program, {s for op in region.ops(option) for s in saved_floats(program, op, region.unit)}
        )

    def decisions(
        self, program: Program, taken: Sequence[tuple[Region, Option]], units: Collection[str] | None = None
    ) -> tuple[Decision, ...]:
        ops = {op: region.unit for region, option in taken for op in region.ops(option)}
        calls = {call: unit for unit in ops.values() for call in program.calls[unit]}
        sites = (
            (u, *site) for c, u in calls.items() for op, site in program.sites(c).items() if ops.get(op) == u
        )
        return tuple(Half(*site) for site in dict.fromkeys(sites))  # type: ignore[misc]

    def patch(self, program: Program, decisions: Sequence[Decision], device: Any) -> Patch:
        wanted = {decision.site for decision in decisions}
        calls = {call: unit for unit, *_ in wanted for call in program.calls[unit]}
        ops = {
            op: u for c, u in calls.items() for op, site in program.sites(c).items() if (u, *site) in wanted
        }
        return halved(program, {s for op, u in ops.items() for s in saved_floats(program, op, u)})

    def install(self, wanted: ToInstall) -> Iterator[Installed]:
        yield InstalledHalves(wanted.model, wanted.decisions)


def saved_floats(program: Program, op: int, unit: str) -> list[int]:
    """What an op makes that autograd keeps whole, in float32, and takes inside of the unit alone."""
    handles, tensors = kept_handles(program), program.tensors

    def is_whole(handle: int) -> bool:
        tensor = tensors[program.handle_tensors[handle]]
        return tensor.dtype == "float32" and 4 * prod(tensor.shape) == program.storage_bytes[tensor.storage]

    def is_inside(handle: int) -> bool:
        scope = program.liveness.handle_scopes[handle]
        return not unit or unit in (
            program.scopes[s].fqn for s in (scope, *program.ancestors(scope)) if s >= 0
        )

    return [
        s
        for s in program.ops[op].writes
        if s in handles and all(is_whole(handle) and is_inside(handle) for handle in handles[s])
    ]


@derived
def kept_handles(program: Program) -> dict[int, list[int]]:
    """By storage, the handles of autograd: what code holds besides stays as it is."""
    found: dict[int, list[int]] = {}
    for handle, (storage, tensor) in enumerate(
        zip(program.handle_storages, program.handle_tensors, strict=True)
    ):
        if tensor >= 0:
            found.setdefault(storage, []).append(handle)
    return found


def halved(program: Program, storages: set[int]) -> Patch:
    draft = PatchBuilder(program)
    casts: dict[tuple[int, int], int] = {}  # (PACK, handle) or (UNPACK, instance) to the storage of a cast
    for position, (code, arg) in enumerate(program.events):
        if code not in (Event.PACK, Event.RELEASE, Event.UNPACK, Event.DROP):
            continue
        s = program.storage_of(code, arg)
        handle = arg if code in (Event.PACK, Event.RELEASE) else program.instance_handles[arg]
        if s not in storages or program.handle_tensors[handle] < 0:
            continue
        if code in (Event.RELEASE, Event.DROP):  # the event behind the one that made the cast
            draft.events[position] = ((int(Event.FREE), casts.pop((code - 1, arg))),)
            continue
        share = 2 if code == Event.PACK else 1
        made = casts[code, arg] = draft.new_storage(program.storage_bytes[s] // share, StorageKind.ACTIVATION)
        source = s if code == Event.PACK else casts[int(Event.PACK), handle]
        op = draft.ops.add(
            Op("toy.cast", Phase.FORWARD, -1, 1e-3, 0, 0, (source,), (made,), (), recomputable=False)
        )
        draft.events[position] = ((int(Event.OP), op),)
    return draft.patch()


# --- its executor ---


class InstalledHalves(InstalledStandIns):
    def __init__(self, model: torch.nn.Module, decisions: Sequence[Decision]) -> None:
        super().__init__()
        sites: dict[str, set[CallSite]] = {}
        for decision in decisions:
            assert isinstance(decision, Half)
            sites.setdefault(decision.unit, set()).update(decision.sites)
        self._put_on(HalfForward(model.get_submodule(unit), unit, own) for unit, own in sites.items())


class HalfForward(StandIn):
    """A unit's forward, of which some call sites' outputs are kept in half precision."""

    def __init__(self, module: torch.nn.Module, fqn: str, sites: set[CallSite]) -> None:
        super().__init__(module, fqn)
        self.sites = sites

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        halving = Halving(self.sites, {id(m): name for name, m in self.module.named_modules() if name})
        with (
            register_module_forward_pre_hook(lambda module, _: halving.enter(module)),
            register_module_forward_hook(lambda module, _, __: halving.leave(module), always_call=True),
            torch.autograd.graph.saved_tensors_hooks(halving.pack, unpack),
            halving,
        ):
            return self.call_original(*args, **kwargs)


class Halving(TorchDispatchMode):
    """Follows the call sites of a unit, and knows what those made that are halved."""

    def __init__(self, sites: set[CallSite], names: Mapping[int, str]) -> None:
        super().__init__()
        self.sites, self.names = sites, names
        self.calls = 0
        self.around: list[tuple[int, str]] = []  # the module calls that run: number and name
        self.places = CallSites()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.packing = False

    def enter(self, module: torch.nn.Module) -> None:
        if id(module) in self.names:
            self.calls += 1
            self.around.append((self.calls, self.names[id(module)]))

    def leave(self, module: torch.nn.Module) -> None:
        if id(module) in self.names:
            self.around.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if not self.packing and is_computation(name):
            place = self.places.at(self.around)
            site = CallSite(name, self.seen[name, place], place)
            self.seen[name, place] += 1
            if site in self.sites:
                storages = [t.untyped_storage() for t in tensors_in(out)]
                self.made.update((storage_key(s), weakref.ref(s)) for s in storages)
        return out

    def pack(self, t: torch.Tensor) -> tuple[torch.Tensor, bool]:
        storage = t.untyped_storage()
        known = self.made.get(storage_key(storage))
        wanted = known is not None and known() is storage and t.dtype is torch.float32
        self.packing = True
        kept = t.detach().half() if wanted else t.detach()
        self.packing = False
        return kept, wanted


def unpack(kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
    tensor, wanted = kept
    return tensor.float() if wanted else tensor


# --- what it gets for that ---


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> sacplan.Profile:
    monkeypatch.setitem(TECHNIQUES, "half", HalfPrecision())
    torch.manual_seed(0)
    return sacplan.profile(models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64)), device="cpu")


def test_its_effects_add_up_with_those_of_recomputation(profile: sacplan.Profile) -> None:
    """What the solver's numbers say is the peak of the rewritten program, for each option of each region."""
    effects = planning_context(PlanStep(profile.program), ("recompute", "half")).effects(1)
    tried = 0
    for i, region in enumerate(effects.regions):
        for o, option in enumerate(region.options[1:], start=1):
            technique = TECHNIQUES[option.technique]
            program = rewritten(profile.program, technique.decisions(profile.program, [(region, option)]))
            assert program.footprint.peak_bytes == effects.problem.peak({i: o})
            tried += option.technique == "half"
    assert tried >= 4


def test_the_solver_weighs_it_against_recomputation(profile: sacplan.Profile) -> None:
    smallest = sacplan.plan(profile, "smallest").peak_bytes
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
        sacplan.errors.PlanError,
        match=r"unknown technique 'other'; known are 'chunk', 'recompute', 'offload', 'half'",
    ):
        sacplan.plan(profile, "80%", techniques=("other",))
    with pytest.raises(sacplan.errors.PlanError, match="is the string"):
        sacplan.plan(profile, "80%", techniques="recompute")


@pytest.mark.slow
def test_it_runs_beside_recomputation_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan does all three, and the step takes what it says: traced and measured."""
    monkeypatch.setitem(TECHNIQUES, "half", HalfPrecision())
    torch.manual_seed(0)
    model, batch = models.LM(layers=2, vocab=1024), torch.randint(0, 1024, (8, 64))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    names = ("recompute", "chunk", "half")
    smallest = sacplan.plan(profile, "smallest", techniques=names)
    budget = smallest.peak_bytes + (profile.peak_bytes - smallest.peak_bytes) // 10
    plan = sacplan.plan(profile, f"{budget}B", techniques=names)
    assert {type(decision).__name__ for decision in plan.decisions} == {"Recompute", "Chunk", "Half"}
    assert plan.recompute_ms < sacplan.plan(profile, f"{budget}B", techniques=names[:2]).recompute_ms
    assert_predicted(model, batch, plan, models.cross_entropy)
    plain = grads_of(model, batch, models.cross_entropy)
    with sacplan.apply(model, plan):
        halved = grads_of(model, batch, models.cross_entropy)
    for one, other in zip(plain, halved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
