"""``advise``: the causes of the peak of a step, and remedies, each tried on the recording.

A remedy is a rewrite of the recorded program or of its optimizer. The peak and the time that it reports are those of
the rewritten step, so nothing is claimed that was not computed. Only changes of the model itself need a new recording.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from sacplan.core.arguments import checked, opened
from sacplan.core.budget import format_bytes
from sacplan.core.program import Phase, Program
from sacplan.errors import PlanError
from sacplan.planning.make import smallest_plan
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.planning.request import Request
from sacplan.profiling.optimizer_table import BY_NAME, CANDIDATES, OptimizerCandidate
from sacplan.profiling.optimizers import (
    OptimizerStep,
    is_replaceable,
    recorded_step,
    with_optimizer,
    without_optimizer,
)
from sacplan.profiling.profile import Profile, ProfileOrPath
from sacplan.questions.changes import changes, recorded
from sacplan.questions.parts import Part, moment_of, parts_of
from sacplan.questions.planned import planned
from sacplan.record.step import LossFn, check_model, resolve_batch
from sacplan.techniques.chunk.entries import ChunkOptions, loss_chunks

_SAME = 0.1  # fewer slices are good enough if they miss at most this share of what the most slices save

Kind = Literal["loss", "recompute", "optimizer", "model"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes the peak of a step smaller.

    Attributes:
        name: Its name, such as ``"chunked-loss"`` or ``"adamw-fused"``.
        kind: The part of the step that it changes.
        sentence: Its effect in words.
        saves_bytes: By how much the peak of the step gets smaller.
        peak_bytes: Peak of the step with it.
        added_ms: Predicted time that it adds to the step; negative if the step gets quicker.
        code: Python code for it. ``profile`` and ``params`` stand for the user's own.
        option: The same for the command line; ``""`` if there is no such option.
    """

    name: str
    kind: Kind
    sentence: str
    saves_bytes: int
    peak_bytes: int
    added_ms: float
    code: str
    option: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The causes of the peak of a step, and remedies.

    Attributes:
        model: Class name of the model.
        device: Name of the device.
        peak_bytes: Peak of the whole step.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``: the phase of the peak.
        op, module: The op that runs at the peak, and its module.
        moment: Phase, op and module in words.
        alive: Everything that is alive at the peak, in parts, the largest first. Their bytes add up to the peak.
        remedies: Those that save memory, the one that saves most first. Each was tried alone; two together may save
            more or less than the sum.
    """

    model: str
    device: str
    peak_bytes: int
    phase: str
    op: str
    module: str
    moment: str
    alive: tuple[Part, ...]
    remedies: tuple[Remedy, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """A sentence on the cause of the peak, then one for each remedy."""
        return (self.cause, *(remedy.sentence for remedy in self.remedies))

    @property
    def cause(self) -> str:
        """A sentence on when the peak is, and on what is alive then. Parts below 1% are added up as the rest."""
        shown = [part for part in self.alive if part.n_bytes >= self.peak_bytes / 100]
        rest = self.peak_bytes - sum(part.n_bytes for part in shown)
        parts = [str(part) for part in shown] + ([f"the rest {format_bytes(rest)}"] if rest else [])
        return f"The peak, {format_bytes(self.peak_bytes)}, is {self.moment}. Alive then: {', '.join(parts)}."

    def __str__(self) -> str:
        return "\n".join([self.cause, *(f"- {remedy.sentence}" for remedy in self.remedies)])


@checked(PlanError, "model", "batch", "optimizer")
def advise(
    profile: ProfileOrPath,
    plan: PlanOrPath | None = None,
    model: Any = None,
    batch: Any = None,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
) -> Advice:
    """Explain the peak of a step, and try what would make it smaller.

        print(sacplan.advise(profile))
        for remedy in sacplan.advise(profile, plan).remedies: ...

    Remedies are the loss in slices, recomputation (the plan with the smallest peak), and other optimizers. Each is
    tried alone: the recorded step is rewritten, and its peak is computed. A remedy that saves nothing is left out. The
    peak is a maximum, so saving memory at one moment helps only down to the next highest one.

    With the model, and the other arguments that the profile was recorded with, more is tried if the model keeps memory
    for nothing: keys and values that nobody reads (``use_cache``), or attention scores. These are kept with ``"eager"``
    attention, and by calls of ``scaled_dot_product_attention`` that no fused kernel of the GPU can run; the remedy says
    why, and what such a kernel needs. The step is then recorded again. The model is not changed.

    Args:
        profile: A profile from ``sacplan.profile``, or the path of one.
        plan: A plan made from that profile. The advice is then about the step with the plan.
        model, batch, loss_fn, optimizer: The arguments that the profile was recorded with. They may be left out.

    Returns:
        The advice: peaks in bytes, times in ms.

    Raises:
        PlanMismatch: The plan was made from another profile.
        PlanError: A model without its batch, or a batch without its model.
        TraceError: The model is not a module, the batch holds no tensor, or the step cannot be recorded with another
            configuration of the model.
    """
    if (model is None) != (batch is None):
        raise PlanError("give both the model and the batch that the profile was recorded with, or neither.")
    if model is not None:
        check_model(model)
        batch = resolve_batch(batch)
    profile, plan = opened(profile, Profile), opened(plan, Plan)
    tried = _Tried(profile, plan)
    found = [*tried.loss(), *tried.recomputation(), *tried.optimizers()]
    if model is not None:
        found += tried.configurations(model, batch, loss_fn, optimizer)
    phase, op, module, moment = moment_of(tried.program, tried.model)
    return Advice(
        model=tried.model,
        device=profile.device,
        peak_bytes=tried.peak_bytes,
        phase=phase.name.lower(),
        op=op,
        module=module,
        moment=moment,
        alive=parts_of(tried.program, tried.optimizer_name),
        remedies=tuple(sorted(found, key=lambda remedy: remedy.peak_bytes)),
    )


@dataclass(frozen=True)
class _Tried:
    """A step, and the remedies that are tried on it."""

    profile: Profile
    plan: Plan | None

    @cached_property
    def program(self) -> Program:
        return planned(self.profile, self.plan)

    @property
    def model(self) -> str:
        return self.profile.fingerprint.model_class

    @property
    def peak_bytes(self) -> int:
        return self.program.footprint.peak_bytes

    @property
    def _trains(self) -> bool:
        return self.profile.mode == "train"

    def _remedy(
        self, name: str, kind: Kind, what: str, program: Program, code: str, option: str
    ) -> Iterator[Remedy]:
        """Yield a remedy if the peak of the rewritten program is smaller."""
        peak = program.footprint.peak_bytes
        saves = self.peak_bytes - peak
        if saves <= 0:  # no remedy
            return
        added = program.step_ms - self.program.step_ms
        share = added / self.program.step_ms if self.program.step_ms else 0.0
        # A smaller share would be printed as 0.0%.
        if abs(share) < 5e-4:
            time = "at no cost in time"
        elif added > 0:
            time = f"and adds {added:.3g} ms to the step ({share:.1%})"
        else:
            time = f"and takes {-added:.3g} ms less ({-share:.1%})"
        # Once this moment needs less, another one may have the peak, and limits what the remedy saves.
        now, then = moment_of(self.program, self.model)[3], moment_of(program, self.model)[3]
        behind = "" if then == now else f", which is then {then}"
        sentence = f"{what} saves {format_bytes(saves)} {time}: peak {format_bytes(peak)}{behind}."
        yield Remedy(name, kind, sentence, saves, peak, added, code, option)

    def loss(self) -> Iterator[Remedy]:
        """Try the loss in slices.

        If there is a plan, this is tried in its place: a plan with both would take minutes to search for.
        """
        # An inference profile has no loss; the plan has chunks already; or the step is spread over ranks, and slices
        # are planned for one device (``Chunking.one_device``).
        if not self._trains or (self.plan is not None and self.plan.chunks) or self.profile.is_of_a_rank:
            return
        if self.profile.runs_compiled:  # torch.compile cannot run slices
            return
        found = loss_chunks(self.profile.program, self.profile.spec)
        if not isinstance(found, ChunkOptions):  # no module can begin the slices; these are the reasons
            return
        # Each number of slices is tried on the recorded step. More slices save less and less and take more
        # time, so the fewest are taken that save nearly as much as the most.
        programs = {chunk.slices: self.profile.with_plan((chunk,)) for chunk in found.chunks}
        smallest = min(program.footprint.peak_bytes for program in programs.values())
        enough = smallest + _SAME * max(0, self.peak_bytes - smallest)
        slices = min(n for n, program in programs.items() if program.footprint.peak_bytes <= enough)
        yield from self._remedy(
            "chunked-loss",
            "loss",
            f"A chunked loss ({slices} slices from {found.unit} on)"
            + (" in place of this plan" if self.plan is not None else ""),
            programs[slices],
            f'sacplan.policy("chunked-loss", slices={slices}, profile=profile)',
            f"sacplan policy TARGET chunked-loss --slices {slices}",
        )

    def recomputation(self) -> Iterator[Remedy]:
        """Try the plan with the smallest peak."""
        # In inference there is nothing to recompute. On a mesh, a plan chooses the sharding as well
        # (``meshes.py``).
        if not self._trains or self.profile.ranks.sharding is not None:
            return
        names = ("recompute",) if self.plan is None else tuple(self.plan.provenance.techniques)
        more = "Recomputing activations" if self.plan is None else "A plan that recomputes more"
        smallest = smallest_plan(Request(techniques=names), self.profile, without_rotor=True)
        # Rounded up: there is no plan for a budget below the smallest peak.
        unit, n_bytes, places = ("GiB", 2**30, 100) if smallest.peak_bytes >= 2**30 else ("MiB", 2**20, 10)
        budget = f"{math.ceil(smallest.peak_bytes / n_bytes * places) / places:.{2 if places == 100 else 1}f}{unit}"
        asked = "" if names == ("recompute",) else f", techniques={names!r}"
        option = "".join(f" --technique {name}" for name in names) if asked else ""
        yield from self._remedy(
            "recompute",
            "recompute",
            more,
            self.profile.with_plan(smallest),
            f'sacplan.plan(profile, "{budget}"{asked})',
            f"sacplan plan TARGET --budget {budget}{option}",
        )

    # --- optimizers

    @cached_property
    def _has_optimizer(self) -> bool:
        return any(op.phase == Phase.OPTIMIZER for op in self.profile.recorded.ops)

    @cached_property
    def _steps(self) -> dict[str, OptimizerStep]:
        """By name, the step of each candidate on the parameters of the profile."""
        return {one.name: recorded_step(self.profile, one.make) for one in CANDIDATES}

    @cached_property
    def _same(self) -> OptimizerCandidate | None:
        """The candidate that the profile was recorded with, recognised by its ops; None if it is none of them."""
        if not self._has_optimizer or self.profile.is_of_a_rank:
            return None
        return recognised(self.profile, self._steps)

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer, or "the optimizer" if it is not recognised."""
        return "the optimizer" if self._same is None else self._same.says.split()[0]

    def optimizers(self) -> Iterator[Remedy]:
        """Try other optimizers in the place of the recorded one. Of those with the same peak, the first is taken."""
        if not self._has_optimizer or not is_replaceable(self.profile):
            return
        decisions = () if self.plan is None else self.plan.decisions
        step = self.profile
        if step.runs_compiled and self.plan is not None:  # the plan is in the run with it
            step, decisions = step.run_with(self.plan), ()
        bare = without_optimizer(step)
        peaks: dict[int, str] = {}
        for name, other in self._steps.items():
            one = BY_NAME[name]
            if one is self._same:
                continue
            # Decisions are about what the model runs, so the plan holds with any optimizer.
            program = with_optimizer(bare, other).with_plan(decisions)
            for found in self._remedy(name, "optimizer", one.says, program, one.code, one.option):
                # Several may lower the peak only to that of another moment, and are equal then: the first is enough.
                if peaks.setdefault(found.peak_bytes, name) == name:
                    yield found

    # --- configurations

    def configurations(
        self, model: Any, batch: Any, loss_fn: LossFn | None, optimizer: Any
    ) -> Iterator[Remedy]:
        """Try changes of the model that stop it from keeping memory for nothing. Each is recorded again."""
        for change in changes(self.profile, model):
            again = recorded(change, self.profile, model, batch, loss_fn, optimizer)
            program = again.with_plan(() if self.plan is None else self.plan)
            yield from self._remedy(change.name, "model", change.says, program, change.code, "")


def recognised(of: Profile, steps: dict[str, OptimizerStep]) -> OptimizerCandidate | None:
    """Return the candidate whose step runs the same ops as that of a profile, and has as much state; None if none."""
    recorded = OptimizerStep(of.recorded, ())
    # A recording does not name its optimizer, but ops and bytes of state tell the candidates apart.
    for name, step in steps.items():
        if step.names == recorded.names and step.state_bytes == recorded.state_bytes:
            return BY_NAME[name]
    return None
