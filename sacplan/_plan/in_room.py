"""Find a plan whose reserved segments fit: plan, play the allocator, lower the budget by the excess, and plan again.

    budget = room
    repeat: plan for the budget; reserved <= room ends it; else budget = peak - (reserved - room)

A solver knows tensors and not segments, since where holes are depends on the whole order of allocations and frees. So
the found plan is one that fits, and not always the cheapest that does: another plan with the same peak may leave fewer
holes. A lower budget usually has fewer reserved bytes, but need not: what is reserved goes up and down by whole
segments. So the steps grow (``lowered``), and their number is limited.

``plan`` and ``fit`` share this function, so that a row of ``fit`` is the plan that ``plan`` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

ROUNDS = 6
"""How many plans are tried at most. For large models, two are enough."""


@dataclass(frozen=True, slots=True)
class InRoom(Generic[T]):
    """The plan that was found, or the one that comes nearest.

    Attributes:
        made: The plan.
        budget_bytes: The limit for the peak that it was made for.
        reserved_bytes: What the allocator reserves with it; None if its tensors alone do not fit.
        fits: Whether the room is enough.
    """

    made: T
    budget_bytes: int
    reserved_bytes: int | None
    fits: bool


def plan_in_room(
    room_bytes: int,
    plan_at: Callable[[int], T],
    peak_of: Callable[[T], int],
    reserved_of: Callable[[T], int],
) -> InRoom[T]:
    """Return a plan for which the allocator reserves at most ``room_bytes``, or the one that needs the fewest.

    Args:
        room_bytes: What the allocator may reserve.
        plan_at: Plans for a budget. If no plan holds it, it returns the one with the smallest peak.
        peak_of, reserved_of: Peak and reserved bytes of a plan.
    """
    budget_bytes = room_bytes
    best: InRoom[T] | None = None
    for i in range(1, ROUNDS + 1):
        made = plan_at(budget_bytes)
        peak = peak_of(made)
        if peak > room_bytes:  # only in the first round: the tensors do not fit
            return InRoom(made, room_bytes, None, fits=False)
        reserved = reserved_of(made)
        if best is None or best.reserved_bytes is None or reserved < best.reserved_bytes:
            # If no plan holds the budget, the one with the smallest peak is above it. Then its peak is the limit that
            # it keeps.
            best = InRoom(made, max(budget_bytes, peak), reserved, reserved <= room_bytes)
        if best.fits or peak > budget_bytes:  # it fits, or there is no smaller peak
            break
        # Counted from the peak and not from the budget. A plan may be well below its budget, and a budget between the
        # two might give the same plan again.
        budget_bytes = max(1, lowered(peak, reserved - room_bytes, room_bytes, i))
    assert best is not None
    return best


def lowered(peak_bytes: int, excess_bytes: int, room_bytes: int, tried: int) -> int:
    """Return the next limit for the peak, after ``tried`` plans that reserve too much.

    The first step is what would be enough if the holes stayed. Later ones are at least a share of the room.
    """
    # If the first step was not enough, the holes have moved. From then on, the least step grows with each plan, by 1/64
    # of the room.
    least = 0 if tried == 1 else room_bytes * tried // 64
    return peak_bytes - max(excess_bytes, least)
