"""The largest size that fits, with few looks: a look may be a trace and a search for a plan.

Peaks grow nearly in a line with the size, so a line through two sizes says where to look next. Where that leads
nowhere, every other look halves what is left. A model may need less memory from some size on, so the claim is about
what was looked at: the result fits, the next size does not, and no larger size that was looked at does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Point = TypeVar("Point")

_GROWTH = 16  # times the largest size that fits, at most, to look at next
_PATIENCE = 3  # looks along lines, before every other look halves the bracket


def largest(
    points: Mapping[int, Point],
    look: Callable[[int], object],
    limit: int,
    fits: Callable[[Point], bool],
    excess: Callable[[Point], float],
) -> int:
    """Return a size that fits where one more does not: of those that were looked at, the largest that fits; or 0.

    Args:
        points: What is known, by size.
        look: Adds a size to the points.
        limit: No larger size is looked at.
        fits: Whether a point fits.
        excess: How many bytes a point takes more than there are; less than 0 where it fits.
    """
    looks = 0
    while True:
        low = max((n for n, point in points.items() if fits(point)), default=0)
        if low == limit:
            return low
        high = min((n for n in points if n > low), default=None)
        if high == low + 1:
            return low
        looks += 1
        if high is not None and looks > _PATIENCE and looks % 2:
            guess = (low + high) // 2
        else:
            guess = _on_a_line({n: excess(point) for n, point in points.items()}) or 2 * low
        last = min(_GROWTH * max(low, 1), limit) if high is None else high - 1
        look(min(max(guess, low + 1), last))


def _on_a_line(excess: Mapping[int, float]) -> int | None:
    """Return the size at which the line through the two sizes nearest to the budget meets it."""
    near = sorted(excess, key=lambda n: abs(excess[n]))[:2]
    if len(near) < 2 or excess[near[0]] == excess[near[1]]:
        return None
    a, b = near
    slope = (excess[b] - excess[a]) / (b - a)
    return int(a - excess[a] / slope) if slope > 0 else None
