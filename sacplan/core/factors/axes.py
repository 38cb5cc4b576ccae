"""Slices along a factor: where it lies in a tensor, and how to cut there.

Where a dimension merges batch and sequence, slices of the sequence lie inside the dimension: ``outer`` times, and with
``inner`` elements to each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sacplan.core.factors.rule import Dims, Rule


class Axis(NamedTuple):
    """Where a tensor is sliced: dimension ``dim`` is (``outer``, ``size``, ``inner``), and ``size`` is cut."""

    dim: int
    outer: int
    size: int
    inner: int


class FactorAxis(NamedTuple):
    """Where a factor is sliced: it is (``outer``, ``size``, ``inner``), and ``size`` is cut."""

    factor: int
    outer: int
    size: int
    inner: int


def into_factor(dims: Dims, sizes: Sequence[int], axis: Axis) -> FactorAxis | None:
    """Return where in a factor an axis of a tensor lies; None if it is not within a single factor."""
    # The dimension is (before, factor, after) for each of its factors in turn, slowest first. The axis lies in the
    # factor for which ``before`` divides ``axis.outer``, ``after`` divides ``axis.inner``, and the rest makes up the
    # factor.
    factors = dims[axis.dim]
    before, after = 1, math.prod(sizes[f] for f in factors)
    # Empty, or sizes that are not those of this rule.
    if after == 0 or axis.outer * axis.size * axis.inner != after:
        return None
    for factor in factors:
        after //= sizes[factor]
        outer, outer_rest = divmod(axis.outer, before)
        inner, inner_rest = divmod(axis.inner, after)
        if not outer_rest and not inner_rest and outer * axis.size * inner == sizes[factor]:
            return FactorAxis(factor, outer, axis.size, inner)
        before *= sizes[factor]
    return None


def from_factor(dims: Dims, sizes: Sequence[int], within: FactorAxis) -> Axis | None:
    """Return where in a tensor an axis of a factor lies; None if the tensor does not have the factor.

    A factor is in at most one dimension of a tensor.
    """
    for dim, factors in enumerate(dims):
        if within.factor in factors:
            at = factors.index(within.factor)
            before = math.prod(sizes[f] for f in factors[:at])
            after = math.prod(sizes[f] for f in factors[at + 1 :])
            return Axis(dim, before * within.outer, within.size, within.inner * after)
    return None


def take(t: torch.Tensor, axis: Axis, start: int, stop: int) -> torch.Tensor:
    """Return the slice [``start``, ``stop``) along an axis: a view if it is in one piece, else possibly a copy.

    An op that writes in place needs a view.
    """
    dim, outer, size, inner = axis
    # With ``outer`` pieces, the flattened result is a view only if its strides allow one.
    if outer == 1:
        return t.narrow(dim, start * inner, (stop - start) * inner)
    parts: torch.Tensor = t.unflatten(dim, (outer, size, inner)).narrow(dim + 1, start, stop - start)
    return parts.flatten(dim, dim + 2)


def put(buffer: torch.Tensor, axis: Axis, start: int, stop: int, x: torch.Tensor) -> None:
    """Copy ``x`` into the slice [``start``, ``stop``) of ``buffer`` along an axis."""
    dim, outer, size, inner = axis
    if outer == 1:
        buffer.narrow(dim, start * inner, (stop - start) * inner).copy_(x)
        return
    parts = buffer.unflatten(dim, (outer, size, inner)).narrow(dim + 1, start, stop - start)
    parts.copy_(x.unflatten(dim, (outer, stop - start, inner)))


def resized_arguments(rule: Rule, args: Sequence[Any], within: FactorAxis, length: int) -> list[Any]:
    """Return positional arguments for a slice of ``length``, with sizes scaled as the rule says.

    A size of -1 (what is left, or the same as before) stays.
    """

    def scaled(size: int) -> int:
        # Divided first, which is exact: ``size`` is a multiple of ``within.size``.
        return size if size == -1 else size // within.size * length

    found = list(args)
    for argument, position, factors in rule.resized:
        # The slice does not touch this size, or the call leaves it to its default.
        if within.factor not in factors or argument >= len(found) or found[argument] is None:
            continue
        if position is None:
            found[argument] = scaled(found[argument])
        else:
            sizes = list(found[argument])
            sizes[position] = scaled(sizes[position])
            found[argument] = sizes
    return found
