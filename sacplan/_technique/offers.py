"""Offers: regions of a technique whose ops the others leave alone."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass

from sacplan._program.decisions import Decision
from sacplan._technique.regions import Region


@dataclass(frozen=True, slots=True)
class Offer:
    """A choice of one technique that excludes every other choice about the same ops.

    The regions of the forward pass belong to all techniques, which add options to them. The ops of an offer are taken
    out of these regions. So plans with it and without it are searched for separately, and the cheaper one wins.

    Attributes:
        region: the choice. Its first option leaves everything as it is; the others have a decision and a patch. The
            last one has the lowest peak.
        ops: those that it is about. If a user's pattern names one of them, the offer is dropped.
        kept: ops that no other technique may discard while it stands.
        alone: modules that no other technique may make a unit.
    """

    region: Region
    ops: frozenset[int]
    kept: frozenset[int]
    alone: tuple[str, ...] = ()

    @property
    def first(self) -> Decision:
        """The decision of the first option that changes something."""
        return self._decision(1)

    @property
    def furthest(self) -> Decision:
        """The decision of the option with the lowest peak."""
        return self._decision(-1)

    def _decision(self, option: int) -> Decision:
        # Only the first option, which leaves everything as it is, may be without a decision.
        found = self.region.options[option].decision
        assert found is not None
        return found

    def goes_with(self, other: Offer) -> bool:
        """Whether both may stand: neither begins where the other ends."""
        # A patch has one entry for a position, so two that change the same one cannot be applied together.
        return self._touched().isdisjoint(other._touched())

    def _touched(self) -> KeysView[int]:
        # The last option lowers the peak most, and stands for the others.
        patch = self.region.options[-1].patch
        assert patch is not None
        return patch.events.keys()
