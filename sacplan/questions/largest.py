"""Find the largest size that fits by trying few sizes. Each try may take a trace and a search for a plan.

The search keeps a bracket: ``low`` fits, and ``high``, the next larger size tried, does not. Peaks are nearly linear
in the size, so the line through the two peaks nearest to the budget gives the next guess (the secant method). After
``_PATIENCE`` tries, every second try halves the bracket, so the number of tries is at most logarithmic in its size.

A model may need less memory from some size on. So the claim is only about sizes that were tried: the result fits, the
next size does not, and no larger size that was tried does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Point = TypeVar("Point")

_GROWTH = 16  # while no size is too large, the next one is at most this many times the largest that fits
_PATIENCE = 3  # tries along lines before every second try halves the bracket


def largest(
    points: Mapping[int, Point],
    look: Callable[[int], object],
    limit: int,
    fits: Callable[[Point], bool],
    excess: Callable[[Point], float],
) -> int:
    """Return the largest tried size that fits, such that the next one was tried and does not; 0 if none fits.

    Args:
        points: Sizes tried so far, and their results.
        look: Tries a size, and adds it to ``points``.
        limit: The largest size to try.
        fits: Whether a result fits.
        excess: By how many bytes a result exceeds the budget; negative if it fits.
    """
    looks = 0
    while True:
        # The largest that fits, even if a smaller one does not: memory need not grow with the size.
        low = max((n for n, point in points.items() if fits(point)), default=0)
        if low == limit:  # nothing larger may be tried
            return low
        high = min((n for n in points if n > low), default=None)
        if high == low + 1:  # the bracket is closed
            return low
        looks += 1
        if high is not None and looks > _PATIENCE and looks % 2:
            guess = (low + high) // 2
        else:
            # Without a line that rises, double. A guess of 0 is no problem: the bracket below raises it.
            guess = _on_a_line({n: excess(point) for n, point in points.items()}) or 2 * low
        # Whatever the guess, stay inside the bracket, so that it shrinks with every try.
        last = min(_GROWTH * max(low, 1), limit) if high is None else high - 1
        look(min(max(guess, low + 1), last))


def largest_within(excess: Callable[[int], int], limit: int, *, first: Sequence[int] = ()) -> int:
    """Return the largest size at which ``excess`` is not positive, as ``largest`` does; ``first`` are tried first."""
    looked = {n: excess(n) for n in first}
    return largest(looked, lambda n: looked.update({n: excess(n)}), limit, lambda found: found <= 0, float)


def _on_a_line(excess: Mapping[int, float]) -> int | None:
    """Return the size at which the line through the two peaks nearest to the budget meets the budget.

    None if there are fewer than two sizes, or the line does not rise.
    """
    near = sorted(excess, key=lambda n: abs(excess[n]))[:2]
    if len(near) < 2 or excess[near[0]] == excess[near[1]]:
        return None
    a, b = near
    slope = (excess[b] - excess[a]) / (b - a)
    return int(a - excess[a] / slope) if slope > 0 else None
