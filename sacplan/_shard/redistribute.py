"""Redistribution of a tensor on real ranks, by the steps that ``costs.py`` finds.

One axis changes at a time: parts are gathered, exchanged or cut off, summands reduced, with all parts of one size. All
ranks take the same steps. Along dimension 0 a collective reads and writes parts where they are; other dimensions need a
copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sacplan._shard.costs import RedistributeStep, after, redistribution_path
from sacplan._shard.placements import Placement, Placements, format_layout, local_axis
from sacplan._torch import collectives
from sacplan._torch.private import is_dense
from sacplan.errors import PlanError


def redistribute(
    local: torch.Tensor,
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    ranks: Sequence[int],
    groups: Sequence[str],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """Return this rank's part of a tensor in another layout. It may be a view of the part before, along dimension 0.

    The result is dense, since kernels such as those of normalization assume that of the tensors that they save.

    Args:
        local: this rank's part.
        shape: of the unsharded tensor.
        source, target: layouts.
        ranks, groups: number of ranks and name of the process group, by axis of the mesh.
        coordinate: of this rank on each axis.

    Raises:
        PlanError: there is no way.
    """
    path = redistribution_path(tuple(ranks), tuple(shape), source, target)
    # An empty path: the layouts are equal. None: there is none.
    if not path:
        if path is not None:
            return local
        raise PlanError(
            f"a tensor of shape {tuple(shape)} cannot go from {format_layout(source)} to {format_layout(target)} "
            f"on {' x '.join(map(str, ranks))} ranks: the ranks do not divide it evenly."
        )
    layout = source
    for step in path:
        local = _in_memory_order(local, layout, step, ranks, groups[step.axis], coordinate[step.axis])
        layout = after(layout, step)
    return local if is_dense(local) else local.clone()


def kept(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may stay on a rank for long: a copy, if it is a view of more memory than it needs."""
    return local if local.untyped_storage().nbytes() == local.nbytes else local.clone()


def _in_memory_order(
    local: torch.Tensor,
    layout: Placements,
    step: RedistributeStep,
    ranks: Sequence[int],
    group: str,
    position: int,
) -> torch.Tensor:
    """Take a step on dimensions in the order of memory, so that a transposed weight is gathered without a copy."""
    strides: tuple[int, ...] = local.stride()
    order = sorted(range(local.dim()), key=lambda dim: -strides[dim])
    # Contiguous already, so dimension 0 is the outermost in memory as well.
    if order == sorted(order):
        return take_step(local, layout, step, ranks, group, position)

    def there(placement: Placement) -> Placement:
        return placement._replace(dim=order.index(placement.dim)) if placement.is_cut else placement

    same = step._replace(source=there(step.source), target=there(step.target))
    moved = take_step(local.permute(order), tuple(map(there, layout)), same, ranks, group, position)
    return moved.permute([order.index(dim) for dim in range(local.dim())])


def take_step(
    local: torch.Tensor,
    layout: Placements,
    step: RedistributeStep,
    ranks: Sequence[int],
    group: str,
    position: int,
) -> torch.Tensor:
    """Take one step of a path.

    Args:
        local, layout: this rank's part, and its layout before the step.
        step: the change of one placement.
        ranks: of each axis.
        group: name of the process group of the axis that changes.
        position: of this rank on it.
    """
    n, here, there = ranks[step.axis], step.source, step.target
    # All placements on an axis of one rank are the same tensor.
    if n == 1:
        return local
    if local.dtype is torch.bool and here.is_cut:  # not every backend sends bits
        return take_step(local.view(torch.uint8), layout, step, ranks, group, position).view(torch.bool)
    # All-to-all. Both cuts hold while it runs: each rank's part is cut once more along the target dimension,
    # and the pieces are put together along the source dimension. So the ``outer`` of either is seen within a
    # layout that has both.
    if there.is_cut and here.is_cut:
        outer = local_axis((*after(layout, step), here), (*ranks, n), step.axis)
        into = local_axis((*after(layout, step), here), (*ranks, n), len(ranks))
        parts = _parts_first(local, there.dim, outer, n)
        return _parts_into(collectives.all_to_all(parts, n, group), here.dim, into)
    # From replicated: take a part. From partial: reduce-scatter.
    if there.is_cut:
        outer = local_axis(after(layout, step), ranks, step.axis)
        if not here.is_partial:
            return _part(local, there.dim, outer, n, position)
        parts = _parts_first(local, there.dim, outer, n)
        part = collectives.reduce_scatter(parts.flatten(0, 1), here.reduce, n, group)
        return part.view(parts.shape[1:])
    # All-gather: dimension 0 of the result is the rank.
    if here.is_cut:
        parts = collectives.all_gather(local, n, group).view(n, *local.shape)
        return _parts_into(parts, here.dim, local_axis(layout, ranks, step.axis))
    if here.is_partial:
        return collectives.all_reduce(local, here.reduce, group)
    # Zeros on all ranks but the first. All run the same ops, so that the step of one is that of the others.
    elsewhere = torch.full((), position > 0, dtype=torch.bool, device=local.device)
    return local.masked_fill(elsewhere, 0)


def _part(x: torch.Tensor, dim: int, outer: int, n: int, position: int) -> torch.Tensor:
    """Return this rank's part of a dimension (``outer``, ``n``, rest)."""
    size = x.shape[dim] // (outer * n)
    # One piece: a view. Inside of a dimension it is several pieces, so a copy.
    if outer == 1:
        return x.narrow(dim, position * size, size)
    split: torch.Tensor = x.unflatten(dim, (outer, n, size))
    return split.select(dim + 1, position).flatten(dim, dim + 1)


def _parts_first(x: torch.Tensor, dim: int, outer: int, n: int) -> torch.Tensor:
    """Return the parts of a dimension (``outer``, ``n``, rest), one after the other: (n, *shape of a part).

    A view where dimension 0 is cut into ``n`` pieces; else a copy. Part by part has at least two dimensions.
    """
    size = x.shape[dim] // (outer * n)
    parts: torch.Tensor = x.unflatten(dim, (outer, n, size)).movedim(dim + 1, 0)
    return parts.flatten(dim + 1, dim + 2).contiguous()


def _parts_into(parts: torch.Tensor, dim: int, outer: int) -> torch.Tensor:
    """Put parts (n, *shape of a part) together: the inverse of ``_parts_first``."""
    n, size = parts.shape[0], parts.shape[dim + 1] // outer
    if dim == 0 and outer == 1:
        return parts.flatten(0, 1)
    split: torch.Tensor = parts.unflatten(dim + 1, (outer, size)).movedim(0, dim + 1)
    return split.reshape(*parts.shape[1 : dim + 1], outer * n * size, *parts.shape[dim + 2 :])
