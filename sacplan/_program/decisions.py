"""What a plan does to a step: decisions, one class for each technique, told apart in files by ``technique``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from sacplan._program.files import Count, Name, Positive
from sacplan._program.program import CallSite


class Site(NamedTuple):
    """Where an op runs: equal to the tuple (unit, op, occurrence, place).

    Attributes:
        unit: fqn of the module, ``""`` for the model itself.
        op, occurrence, place: as in ``CallSite``.
    """

    unit: str
    op: str
    occurrence: int
    place: str = ""


class AnyDecision(Struct, frozen=True, forbid_unknown_fields=True, tag_field="technique"):
    """Base of decisions; the tag of each is the name of its technique."""


class SiteDecision(AnyDecision, frozen=True):
    """Base of decisions about one call site.

    Attributes:
        unit, op, occurrence, place: the call site, see ``Site``.
    """

    unit: str
    op: Name
    occurrence: Count
    place: str = ""

    @property
    def site(self) -> Site:
        """Where the op runs."""
        return Site(self.unit, self.op, self.occurrence, self.place)


class Recompute(SiteDecision, frozen=True, tag="recompute", omit_defaults=True):
    """Discard what an op makes and run the op again when the backward pass asks for it.

    Attributes:
        times: how often the values are dropped: first after the forward pass, then each time they were
            recomputed on the way to something else.
    """

    times: Positive = 1


Decision: TypeAlias = Recompute  # a further technique is a class above, and a member here: Recompute | Chunk

Discarded = Mapping[str, Mapping[CallSite, int]]
"""Unit to the call sites that it discards, each with the number of times that its values are dropped."""


def discarded_by(decisions: Iterable[Decision]) -> dict[str, dict[CallSite, int]]:
    """By unit, what is recomputed."""
    found: dict[str, dict[CallSite, int]] = {}
    for one in decisions:
        if isinstance(one, Recompute):
            found.setdefault(one.unit, {})[CallSite(one.op, one.occurrence, one.place)] = one.times
    return found


def as_decisions(discarded: Discarded) -> tuple[Recompute, ...]:
    """The inverse of ``discarded_by``; a unit that discards nothing needs no decision."""
    return tuple(
        Recompute(unit, op, occurrence, place, times)
        for unit, sites in discarded.items()
        for (op, occurrence, place), times in sites.items()
    )
