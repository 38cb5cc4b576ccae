"""A search begins with a basis: the step, what is settled in it, and offers about its peaks.

A technique can do two things about the peak of a plan. It *settles* decisions, the same for all modules that are alike:
the step is then planned as if it had been recorded with them. It *offers* choices in addition to those of the regions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from sacplan.core.decisions import Decision
from sacplan.core.derived import derived, settled_from
from sacplan.core.elements import pattern_of
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.liveness import Footprint, bytes_at_ops, summits
from sacplan.core.pins import resolve_pins
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec
from sacplan.planning.candidate import Candidate
from sacplan.planning.context import PlanningContext, planning_context
from sacplan.techniques.base.offers import Offer
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.registry import TECHNIQUES, rewritten, why_not

# With offers about the peak alone, norms that could be sliced stayed whole, and the smallest peak was higher. So all
# moments near the peak are asked about.
_MOMENTS = 8  # kinds of modules that are asked about at a time, those with the highest moments
_WORTH_OFFERING = 0.01  # share of the smallest peak that an offer about a moment has to free at some op
# On three of the golden models, at four budgets, .5 to .95 find the same plans.
_NEAR_PEAK = 0.8  # a moment is near the smallest peak if it has at least this share of its bytes


# Without slots, since cached properties are kept in ``__dict__``.
@dataclass(frozen=True, eq=False)
class Basis:
    """The step that a search plans, with what is settled in it and what is offered.

    Attributes:
        recorded: The step as it was recorded, with the requirements on a plan.
        fingerprint: Of the model, for the modules that pins can name.
        techniques: Names of the techniques that plans may use.
        settled: Decisions that every plan has: the step is planned as if it had been recorded with them.
        offers: Choices in addition to those of the regions.
        peaks: Footprints whose peaks the offers should lower.
    """

    recorded: PlanStep
    fingerprint: Fingerprint
    techniques: tuple[str, ...]
    settled: tuple[Decision, ...] = ()
    offers: tuple[Offer, ...] = ()
    peaks: tuple[Footprint, ...] = ()

    @property
    def is_further(self) -> bool:
        """Whether anything is settled, or offered about a peak."""
        return bool(self.settled or self.peaks)

    @cached_property
    def step(self) -> PlanStep:
        """The step to plan: as it was recorded, or with what is settled."""
        if not self.settled:
            return self.recorded
        program = _settled_program(self.recorded.program, self.settled, self.recorded.device)
        # Pins name ops by number, and the ops of the settled step have other numbers.
        pins = self.recorded.pins
        pins = resolve_pins(program, self.fingerprint, pins.keep, pins.never)
        return replace(self.recorded, program=program, pins=pins)

    @cached_property
    def context(self) -> PlanningContext:
        """Regions, effects and bounds of the step. The ops and modules of offers are pinned for other techniques."""
        pins = self.step.pins
        # The other techniques see these modules as if the user had named them in ``never``, and the ops in ``keep``.
        alone = [unit for offer in self.offers for unit in offer.alone]
        if alone:
            pins = resolve_pins(self.step.program, self.fingerprint, pins.keep, (*pins.never, *alone))
        kept = pins.kept_ops.union(*(offer.kept for offer in self.offers))
        return planning_context(
            replace(self.step, pins=replace(pins, kept_ops=kept)), self.techniques, self.offers
        )

    def offered(self) -> Basis:
        """Return this basis with the offers that may pay at any budget, and those about ``peaks``."""
        basis = replace(self, offers=())
        for peak in (None, *self.peaks):
            basis = basis._with_offers(peak)
        return basis

    def further(self, smallest: Candidate) -> Basis | None:
        """Return this basis with more settled or offered about the peak of ``smallest``; None if there is no more.

        If techniques can do nothing about the peak itself, they are asked about all moments near it: a plan with more
        choices may have its peak at any of these.
        """
        if not any(TECHNIQUES[name].is_about_peaks for name in self.techniques):
            return None
        return self._further_about(smallest, 1.0) or self._further_about(smallest, _NEAR_PEAK)

    def _further_about(self, smallest: Candidate, share: float) -> Basis | None:
        """Do what ``further`` does about all moments with at least this share of the peak, the highest first.

        Settling costs little, and leaves the other techniques their choices. So offers are only looked for at moments
        about which nothing new is settled.
        """
        plan = tuple(one for one in smallest.decisions if one not in self.settled)
        near, basis = tuple(islice(summits(smallest.program, share), _MOMENTS)), self
        for peak in near:
            # Only about the highest moment may a unit be settled a second time.
            settled = basis._settled_at(peak, plan, again=peak is near[0])
            if settled is not basis:
                basis = settled
                continue
            offered = basis._with_offers(peak)
            further = offered.offers[len(basis.offers) :]
            # Offers about one moment are about modules that are alike, so only the first one is measured.
            if further and basis._frees(further[0], _WORTH_OFFERING * near[0].peak_bytes):
                basis = replace(offered, peaks=(*basis.peaks, peak))
        return None if basis is self else basis

    def _settled_at(self, peak: Footprint, plan: tuple[Decision, ...], *, again: bool) -> Basis:
        """Return this basis with what techniques settle about ``peak``.

        It is returned unchanged if nothing new is settled, or if that conflicts with the plan.

        Args:
            peak: A moment of the plan.
            plan: The decisions of the plan, without the settled ones.
            again: Also replace what is already settled about a unit, and repeat with the new peak, as long as that
                is lower and in a module of the same kind.
        """
        taken = (*self.settled, *plan, *(offer.furthest for offer in self.offers))
        left_alone = () if again else {one.unit for one in self.settled}
        found = [
            one
            for name in self.techniques
            # Asked about the recorded step, since decisions are carried out on it.
            for one in TECHNIQUES[name].settled(self.recorded, peak, taken)
            if one.unit not in left_alone
        ]
        # New decisions replace those that were settled about the same units.
        units = {one.unit for one in found}
        settled = (*(one for one in self.settled if one.unit not in units), *found)
        recorded, together = self.recorded, (*settled, *plan)
        # Nothing new, or in conflict with the plan's own decisions.
        if settled == self.settled or why_not(recorded.program, together, recorded.device):
            return self
        # The ops of the settled step have other numbers, so offers about the same peaks are asked for again.
        basis = replace(self, settled=settled).offered()
        now = rewritten(recorded.program, together, recorded.device).footprint
        same = pattern_of(now.peak_fqn) == pattern_of(peak.peak_fqn)
        if again and same and now.peak_bytes < peak.peak_bytes:
            return basis._settled_at(now, plan, again=True)
        return basis

    def _with_offers(self, peak: Footprint | None) -> Basis:
        """Return this basis with further offers that are compatible: about a peak; None: that may pay at any budget."""
        # Whether offers of a kind go with what is settled: all layers that are alike do, or none.
        goes: dict[Hashable, bool] = {}
        known = self.offers
        for name in self.techniques:
            for offer in TECHNIQUES[name].offers(self.step, peak):
                # Skipped if the user's patterns name one of its ops, or if it clashes with a known offer.
                if not self.step.pins.named_ops.isdisjoint(offer.ops) or not all(map(offer.goes_with, known)):
                    continue
                # Working out a kind works out all options of the offer, so only if it is needed.
                kind = offer.region.kind if self.settled else None
                if kind not in goes:
                    # The offer is made for the settled step, but plans are carried out on the recorded one: try it.
                    step, together = self.recorded, (*self.settled, offer.furthest)
                    goes[kind] = not self.settled or not why_not(step.program, together, step.device)
                if goes[kind]:
                    known = (*known, offer)
        return replace(self, offers=known)

    def _frees(self, offer: Offer, least_bytes: float) -> bool:
        """Whether an offer frees at least so many bytes at some op of the step."""
        program, device, furthest = self.step.program, self.step.device, (offer.furthest,)
        # The offer cannot be carried out on this step.
        if why_not(program, furthest, device):
            return False
        before, now = bytes_at_ops(program), bytes_at_ops(rewritten(program, furthest, device))
        # Ops that the offer adds come after the recorded ones, and are cut off. A recorded op that no longer runs has
        # 0 bytes, but nothing was freed at it, so it does not count.
        now = now[: len(before)]
        freed: int = (before - now)[now > 0].max(initial=0)
        return freed >= least_bytes


@derived
def _settled_program(program: Program, decisions: tuple[Decision, ...], device: DeviceSpec | None) -> Program:
    """Return the program with the settled decisions, renumbered in execution order. Searches share it."""
    found = rewritten(program, decisions, device).renumbered()
    settled_from(found).append(program)
    return found
