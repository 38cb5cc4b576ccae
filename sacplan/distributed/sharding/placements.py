"""Layouts: the placements of a tensor on the ranks of a mesh, one for each axis.

A dimension that is cut is seen as (outer, ranks, inner), as slices in ``core/factors/axes.py`` are: each rank has one
index of the middle. ``outer`` counts parts of the full tensor, so the placements on two axes do not depend on each
other, even where both cut the same dimension. As in DTensor, only sizes that the ranks divide are cut.

In messages: ``"R"`` replicated, ``"S1"`` cut along dimension 1, ``"S1/8"`` the same with an outer size of 8,
``"P"`` one summand on each rank; ``"Pavg"``, ``"Pmax"``, ``"Pmin"``. A layout has a comma between axes: ``"S0,R"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Placement(NamedTuple):
    """The placement of a tensor on one axis of a mesh.

    Attributes:
        kind: ``"R"``: replicated. ``"S"``: cut. ``"P"``: partial, the tensor is the sum (or ``reduce``) over ranks.
        dim, outer: of a cut, see above.
        reduce: of a partial value: ``"sum"``, ``"avg"``, ``"max"`` or ``"min"``.
    """

    kind: str
    dim: int = -1
    outer: int = 1
    reduce: str = ""

    def __str__(self) -> str:
        if self.kind == "S":
            return f"S{self.dim}" + (f"/{self.outer}" if self.outer > 1 else "")
        return self.kind + ("" if self.reduce in ("", "sum") else self.reduce)

    @property
    def is_cut(self) -> bool:
        """Whether each rank has a part."""
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        """Whether ranks have to reduce their values to get the tensor."""
        return self.kind == "P"


REPLICATED = Placement("R")
PARTIAL = Placement("P", reduce="sum")

Placements: TypeAlias = tuple[Placement, ...]
"""By axis of the mesh, the slowest first."""


def cut(dim: int, outer: int = 1) -> Placement:
    """Return the placement of a tensor that is cut along a dimension."""
    return Placement("S", dim, outer)


def format_layout(layout: Placements) -> str:
    """Return the text of a layout."""
    return ",".join(map(str, layout))


def fits(shape: Sequence[int], layout: Placements, ranks: Sequence[int]) -> bool:
    """Whether each rank gets a part of the same size, and axes that cut one dimension do not overlap.

    Axes on which a value is partial must reduce alike: a maximum of sums is not a sum of maxima. A mean is a sum.
    """
    # Ranks would have to reduce in one order, and a layout has none.
    if len({"sum" if p.reduce == "avg" else p.reduce for p in layout if p.is_partial}) > 1:
        return False
    cuts: dict[int, list[tuple[int, int]]] = {}
    for placement, n in zip(layout, ranks, strict=True):
        if placement.is_cut:
            # Another tensor's dimension, or parts that are not even.
            if not 0 <= placement.dim < len(shape) or shape[placement.dim] % (placement.outer * n):
                return False
            cuts.setdefault(placement.dim, []).append((placement.outer, n))
    # By outer size: each cut must divide the parts of the cut before it, or two ranks would have the same elements.
    for among in cuts.values():
        end = 1
        for outer, n in sorted(among):
            # The parts of this cut would reach across parts of the cut before it.
            if outer % end:
                return False
            end = outer * n
    return all(shape[dim] % (max(o * n for o, n in among)) == 0 for dim, among in cuts.items())


def local_shape(shape: Sequence[int], layout: Placements, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one rank's part of a tensor."""
    sizes = list(shape)
    for placement, n in zip(layout, ranks, strict=True):
        if placement.is_cut:
            sizes[placement.dim] //= n
    return tuple(sizes)
