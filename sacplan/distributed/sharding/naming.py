"""Names of the strategies of a matrix product, as in ColossalAI: of the output, the input and the weight.

``S0S1 = S0R x RS1_2`` has the rows of input and output cut on axis 0 of the mesh, in their physical dimension 2, and
the columns of weight and output on axis 1. ``R`` is not cut. On several axes, rows that are cut in two dimensions, or
while another axis does nothing, have no name there: they are called by their layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sacplan.distributed.sharding.placements import Placements, format_layout


def product_name(x: Placements, weight: Placements, rank: int, out_dim: int) -> str | None:
    """Return the name of the strategy of a product of ``x`` (..., in) and a weight; None if it has none.

    Args:
        x: of the input.
        weight: of the weight.
        rank: number of dimensions of the input; the last one is summed over.
        out_dim: the dimension of the weight that the output has: 0 for (out, in), 1 for (in, out).
    """
    rows: list[tuple[int, int]] = []
    columns, summed, idle = [], [], 0
    for axis, (p, w) in enumerate(zip(x, weight, strict=True)):
        # Each axis does one of four things: it cuts rows, the sum, columns, or nothing. Anything else has no
        # name.
        if p.is_cut and p.dim < rank - 1 and not w.is_cut:
            rows.append((axis, p.dim))
        elif p.is_cut and w.is_cut and w.dim != out_dim:
            summed.append(axis)
        elif w.is_cut and w.dim == out_dim and not p.is_cut:
            columns.append(axis)
        elif p.is_cut or w.is_cut or p.is_partial or w.is_partial:
            return None
        else:
            idle += 1
    dims = {dim for _, dim in rows}
    # Rows in two dimensions, or beside an idle axis: ColossalAI does not list these.
    if len(dims) > 1 or (rows and idle):
        return None
    m, n, k = _axes([axis for axis, _ in rows]), _axes(columns), _axes(summed)
    return f"{m}{n} = {m}{k} x {k}{n}" + (f"_{dims.pop()}" if dims else "")


def _axes(axes: Sequence[int]) -> str:
    return "S" + "".join(map(str, axes)) if axes else "R"


def name_of_layouts(inputs: Sequence[Placements], outputs: Sequence[Placements]) -> str:
    """Return a name made of layouts: ``"S0,R x R,S1 -> S0,S1"``."""
    return f"{' x '.join(map(format_layout, inputs))} -> {' x '.join(map(format_layout, outputs))}"
