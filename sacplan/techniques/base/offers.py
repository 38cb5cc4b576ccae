"""Offers: choices of one technique about ops that the others leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from sacplan.core.decisions import Decision
from sacplan.techniques.base.regions import Option, Region


# Without slots, since ``region`` is kept in ``__dict__``.
@dataclass(frozen=True, eq=False)
class Offer:
    """A choice of one technique that excludes every other choice about the same ops.

    The regions of the forward pass belong to all techniques, which add options to them. The ops of an offer are taken
    out of these regions. So plans with it and without it are searched for separately, and the cheaper one wins.

    What an option costs and frees may take a rehearsal. So options are worked out when they are asked for.

    Attributes:
        unit: the module that the choice is about.
        decisions: what may be chosen, by rising cost; the last one has the lowest peak.
        option_of: works out the option of one of the decisions, with its cost and patch.
        ops: those that the choice is about. If a user's pattern names one of them, the offer is dropped.
        kept: ops that no other technique may discard while the offer stands.
        alone: modules that no other technique may make a unit.
    """

    unit: str
    decisions: tuple[Decision, ...]
    option_of: Callable[[Decision], Option]
    ops: frozenset[int]
    kept: frozenset[int]
    alone: tuple[str, ...] = ()

    @property
    def first(self) -> Decision:
        """The decision that costs least."""
        return self.decisions[0]

    @property
    def furthest(self) -> Decision:
        """The decision with the lowest peak."""
        return self.decisions[-1]

    def options(self) -> Iterator[Option]:
        """Yield the options by rising cost. Each is worked out when it is asked for."""
        return map(self.option_of, self.decisions)

    @cached_property
    def region(self) -> Region:
        """The offer as a region. Its first option leaves everything as it is; the others are the offered ones."""
        options = tuple(self.options())
        technique = options[0].technique
        # Without the name of the unit, so that the offers of layers that are alike are of one kind.
        offered = tuple(
            (msgspec.structs.replace(decision, unit=""), f"{option.cost:.9g}")
            for decision, option in zip(self.decisions, options, strict=True)
        )
        return Region(
            unit=self.unit,
            members=tuple((op,) for op in sorted(self.ops)),
            kind=(technique, offered),
            options=(Option(0.0, 0, (), technique), *options),
            units=((), *((self.unit,),) * len(options)),
            wide=(False,) * (1 + len(options)),
        )

    def goes_with(self, other: Offer) -> bool:
        """Whether both offers may stand, whatever is chosen of each: their patches change no common position."""
        # A patch has one entry for a position, so two patches that change the same position exclude each other.
        return self._touched.isdisjoint(other._touched)

    @cached_property
    def _touched(self) -> frozenset[int]:
        return frozenset(at for option in self.options() if option.patch for at in option.patch.events)
