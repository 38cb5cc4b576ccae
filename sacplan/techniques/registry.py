"""The registry of techniques. A new one is a subclass of ``Technique`` in a package of its own, and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Decision
from sacplan.core.derived import derived
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec
from sacplan.device.library_workspaces import with_workspaces_moved
from sacplan.errors import PlanError
from sacplan.techniques.base.regions import Option, Region, units_of
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Installed, Technique, ToInstall
from sacplan.techniques.chunk.technique import Chunking
from sacplan.techniques.offload.technique import Offloading
from sacplan.techniques.recompute.technique import Recomputation

# Programs are rewritten in this order. Chunks come first, since recomputation names call sites of the ops that they
# leave. Offloading comes last, since a tensor has to be back when a recipe reads it.
TECHNIQUES: dict[str, Technique] = {
    technique.name: technique for technique in (Chunking(), Recomputation(), Offloading())
}

_KEPT = 4  # rewritten programs that a program remembers for each technique

DEFAULT_TECHNIQUES = tuple(
    name for name, technique in TECHNIQUES.items() if technique.keeps_bits and not technique.takes_host
)
"""The techniques of a plan for training by default: all that keep every bit of the gradients."""

INFERENCE_TECHNIQUES = ("chunk",)
"""The techniques of a plan for inference by default: without a backward pass, there is nothing to recompute."""


def resolve_techniques(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of techniques as a tuple, once they are checked.

    Raises:
        PlanError: A name is unknown, or ``names`` is a string instead of a tuple.
    """
    if isinstance(names, str):
        raise PlanError(f"techniques is the string {names!r}; give a tuple, ({names!r},).")
    found = tuple(names)
    unknown = [name for name in found if name not in TECHNIQUES]
    if unknown:
        raise PlanError(f"unknown technique {unknown[0]!r}; known are {', '.join(map(repr, TECHNIQUES))}.")
    return found


def why_uncompiled(decisions: Sequence[Decision]) -> str:
    """Say why a step with these decisions cannot be compiled as a whole, and what to do; empty if it can."""
    reasons = [technique.uncompiled for technique, _ in by_technique(decisions)]
    if any(getattr(decision, "times", 1) > 1 for decision in decisions):
        reasons.append('torch.compile recomputes a value only once: plan with solver="milp".')
    return " ".join(filter(None, reasons))


def longest_run(step: PlanStep) -> int:
    """Return how many neighbouring regions can be joined at most."""
    return max(technique.longest_run(step) for technique in TECHNIQUES.values())


def regions(step: PlanStep, size: int, names: Sequence[str]) -> list[Region]:
    """Return the regions of a step, with up to ``size`` neighbours joined, and the options of these techniques.

    Every technique can use every region. If the technique that names a region is not asked for, the region stays, with
    only the option that changes nothing and those of the other techniques.
    """
    found = []
    for technique in TECHNIQUES.values():
        for region in technique.regions(step, size):
            own = region if technique.name in names else region.only([0])
            more = [option for name in names for option in TECHNIQUES[name].options(step, own)]
            if more:
                # Regions of one kind have the same options, so the kind has to tell these options apart as well.
                kind = own.kind, tuple((o.key, o.cost, o.kept_bytes) for o in more)
                own = own.extended(more, kind)
            # A region without ops has options of its own technique only, and is left out if those are not asked for.
            if own.members or len(own.options) > 1:
                found.append(own)
    return found


def decisions_of(
    program: Program, taken: Sequence[tuple[Region, Option]], device: DeviceSpec | None = None
) -> tuple[Decision, ...]:
    """Return the decisions for the chosen options of regions.

    The techniques go in their listed order. Each names call sites of the program as those before it have rewritten it.
    """
    found: list[Decision] = []
    # Recomputation and copies run under one recorder in each unit, so their units are chosen together, and do not nest.
    sharing = [(region, option) for region, option in taken if TECHNIQUES[option.technique].shares_units]
    units = units_of(sharing)
    for technique in TECHNIQUES.values():
        own = [(region, option) for region, option in taken if technique.name in option.techniques]
        found += technique.decisions(rewritten(program, found, device), own, units)
    return tuple(found)


def by_technique(decisions: Sequence[Decision]) -> Iterator[tuple[Technique, list[Decision]]]:
    """Yield each technique that has decisions among these, with its own decisions."""
    for technique in TECHNIQUES.values():
        own = [decision for decision in decisions if isinstance(decision, technique.decision)]
        if own:
            yield technique, own


def installed_on(
    decisions: Sequence[Decision], recorded: Mapping[str, Sequence[OpSequence]], model: torch.nn.Module
) -> InstalledParts:
    """Install decisions on a model that is known to be the recorded one, so that no step is compared with it."""
    parts = (
        part
        for technique, own in by_technique(decisions)
        for part in technique.install(ToInstall(model, own, recorded, False))
    )
    return InstalledParts(tuple(parts))


@dataclass(frozen=True, slots=True)
class InstalledParts:
    """Techniques that are installed on a model, to be removed together."""

    parts: tuple[Installed, ...]

    def forget_differences(self) -> None:
        """Forget where calls differed from the recorded ones."""
        for part in self.parts:
            part.forget_differences()

    def remove(self) -> None:
        """Take the techniques off the model, the last one first."""
        for part in reversed(self.parts):
            part.remove()


def rewritten(program: Program, decisions: Sequence[Decision], device: DeviceSpec | None = None) -> Program:
    """Return the program of the step with the decisions of a plan. Techniques rewrite it in the order of the registry.

    ``device`` is the target device. A technique needs it if it changes the sizes that kernels are called with.

    Raises:
        PlanError: a decision cannot be carried out on this step, or not together with another one.
    """
    for technique, own in by_technique(decisions):
        program = _rewritten_by(technique, program, tuple(own), device)
    return program


def why_not(program: Program, decisions: Sequence[Decision], device: DeviceSpec | None = None) -> str:
    """Return why a program cannot be ``rewritten`` with these decisions together, a sentence; empty if it can."""
    try:
        rewritten(program, decisions, device)
    except PlanError as error:
        return str(error)
    return ""


def _rewritten_by(
    technique: Technique, program: Program, decisions: tuple[Decision, ...], device: DeviceSpec | None
) -> Program:
    """Rewrite a program for one technique. The last few results are kept: plans often differ in one technique."""
    known = _rewritings(program, technique.name, device)
    if decisions not in known:
        if len(known) == _KEPT:
            del known[next(iter(known))]
        found = program.with_(technique.patch(program, decisions, device))
        known[decisions] = found if device is None else with_workspaces_moved(found, program, device)
    return known[decisions]


@derived
def _rewritings(
    program: Program, technique: str, device: DeviceSpec | None
) -> dict[tuple[Decision, ...], Program]:
    """Return by decisions the programs that a technique last made from this one; ``_rewritten_by`` fills the dict."""
    return {}
