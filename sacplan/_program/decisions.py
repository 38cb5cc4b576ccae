"""What a plan does to a step: decisions, one class for each technique, told apart in files by ``technique``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

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

    @property
    def sites(self) -> tuple[CallSite, ...]:
        """The call sites in the unit that it is about: this one."""
        return (CallSite(self.op, self.occurrence, self.place),)


class Recompute(SiteDecision, frozen=True, tag="recompute", omit_defaults=True):
    """Discard what an op makes and run the op again when the backward pass asks for it.

    Attributes:
        times: how often the values are dropped: first after the forward pass, then each time they were
            recomputed on the way to something else.
    """

    times: Positive = 1


Accumulate: TypeAlias = Literal["parameter", "float32"]
"""In what gradients of parameters in half precision are summed up over slices, see ``Chunk``."""


class Chunk(AnyDecision, frozen=True, tag="chunk", omit_defaults=True):
    """Run some ops in slices of one dimension.

    What a slice makes inside is gone before the next one begins. The size is split into ``slices`` slices of equal
    length; the last one may be shorter. It is the size that a call has, not the recorded one.

    Attributes:
        unit: fqn of the module, ``""`` for the model itself.
        span: which ops. ``"stretch"``: those at ``sites``, in one call of the unit, without gradients. ``"module"``:
            the unit's forward, and its backward, in which the forward of each slice runs again. ``"rest"``: all that is
            computed from the unit's input until it is reduced to numbers, forward and backward in one loop.
        slices: how many.
        dim, outer, inner: what is sliced. Dimension ``dim``, seen as (outer, size, inner), is sliced along the middle.
            It is a dimension of the unit's input; for a stretch, of what the op at its last site makes.
        sites: call sites of a stretch, in order, views aside. They run when the last one is reached.
        exits: of a stretch, what is needed after it: (position in ``sites``, which tensor the op returns).
        accumulate: in what gradients of parameters in half precision are summed up over the slices. In ``"float32"``
            their error is that of the plain step within 10 %. In their own type, ``"parameter"``, it takes half the
            memory for the largest of them while the loop runs, and their error grows with the number of slices: 1.4
            times at 8, 4 to 6 times at 64 (bfloat16).
    """

    unit: str
    span: Literal["stretch", "module", "rest"]
    slices: Positive
    dim: Count
    outer: Positive = 1
    inner: Positive = 1
    sites: tuple[CallSite, ...] = ()
    exits: tuple[tuple[Count, Count], ...] = ()
    accumulate: Accumulate = "float32"


Decision: TypeAlias = Recompute | Chunk  # a further technique is a class above, and a member here

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
