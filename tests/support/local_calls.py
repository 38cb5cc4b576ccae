"""How one rank would run a call with the strategies of the search, to show that they compute what the op computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from sacplan.core.factors.axes import FactorAxis, resized_arguments
from sacplan.core.factors.rule import Rule
from sacplan.distributed.sharding.divided import along_classes, norm_order
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.strategies import AxisStrategy, _rule
from sacplan.torch_compat.calls import Call, flat_tensors
from sacplan.torch_compat.ops import arguments_by_name

Reduce: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""From a summand and an axis of the mesh to the sum over the ranks of the axis."""

_SUM = 2  # at::Reduction
_IGNORED = -100


class ClassAxis(NamedTuple):
    """An axis of the mesh that cuts classes.

    Attributes:
        axis: which one.
        ranks: on it.
        classes: of one rank.
    """

    axis: int
    ranks: int
    classes: int


@dataclass(frozen=True, slots=True)
class LocalCall:
    """How one rank runs its part of a call.

    Attributes:
        func: the op.
        rule: its factors, of the global call.
        cuts: by axis of the mesh, what is cut.
        scales: outputs and what their local results are multiplied by.
        weighed: axes over which the total weight of a weighted mean is summed.
        reduced: by axis, outputs that are norms of parts.
        order: of a norm.
        divided: axes on which classes, or a vocabulary, are cut.
    """

    func: OpOverload
    rule: Rule | None
    cuts: tuple[FactorAxis | None, ...]
    scales: tuple[tuple[int, float], ...] = ()
    weighed: tuple[int, ...] = ()
    reduced: tuple[tuple[int, ...], ...] = ()
    order: float = 0.0
    divided: tuple[ClassAxis, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the op returns the rank's part as it is; else ``run`` must be used."""
        return not (self.scales or self.weighed or self.reduced or self.divided)

    def args(self, args: Sequence[Any]) -> list[Any]:
        """Return positional arguments with local sizes, from ``args`` with local tensors and global sizes."""
        found = list(args)
        for within in self.cuts:
            if within is not None and self.rule is not None:
                found = resized_arguments(self.rule, found, within, 1)
        # A weighted mean is computed as a sum, and divided in ``finish`` by the weight of all ranks.
        if self.weighed:
            found[list(arguments_by_name(self.func, args, {})).index("reduction")] = _SUM
        return found

    def finish(self, outputs: Any, reduce: Reduce) -> Any:
        """Return the rank's part from the results of the op.

        A mean is scaled in place. A weighted mean, which was computed as a sum, is divided by the total weight.
        """
        tensors = list(flat_tensors(outputs))
        for i, scale in self.scales:
            tensors[i].mul_(scale)
        if self.reduced:
            return norms_of_parts(outputs, self.reduced, self.order, reduce)
        if not self.weighed:
            return outputs
        total, weight = tensors
        for axis in self.weighed:
            weight = reduce(weight, axis)
        return total / weight, weight

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], reduce: Reduce, at: Sequence[int]) -> Any:
        """Run the call on local tensors.

        Args:
            args, kwargs: with local tensors and global sizes.
            reduce: all-reduces over an axis.
            at: the rank's position on each axis.
        """
        found = self.args(args)
        if self.divided:
            return self.finish(run_divided(self.func, found, kwargs, self.divided, reduce, at), reduce)
        return self.finish(self.func(*found, **kwargs), reduce)


def local_call(call: Call, chosen: Sequence[AxisStrategy], mesh: Mesh) -> LocalCall:
    """Return how one rank of a mesh runs a call with a strategy for each axis.

    Args:
        call: of unsharded tensors.
        chosen: by axis of the mesh.
        mesh: whose ranks run it.
    """
    scales = []
    for i in range(len(chosen[0].outputs) if chosen else 0):
        ranks = math.prod(n for s, n in zip(chosen, mesh.ranks, strict=True) if i in s.averages)
        # A rank has taken the mean over its part: the sum of these is too large by the number of ranks that
        # cut.
        if ranks > 1:
            scales.append((i, 1 / ranks))
    rule = _rule(call) if any(s.cut for s in chosen) else None
    order = norm_order(call)
    reduced = tuple(s.reduces for s in chosen)
    classes = tuple(
        ClassAxis(axis, n, s.cut.outer * s.cut.inner)
        for axis, (s, n) in enumerate(zip(chosen, mesh.ranks, strict=True))
        if rule is not None and s.cut is not None and along_classes(call, s.cut.factor, rule) is not None
    )
    return LocalCall(
        call.func,
        rule,
        tuple(s.cut for s in chosen),
        tuple(scales),
        weighed=tuple(axis for axis, which in enumerate(reduced) if which) if order is None else (),
        reduced=reduced if order is not None and any(reduced) else (),
        order=order or 0.0,
        divided=classes,
    )


def norms_of_parts(norms: Any, cut: Sequence[Sequence[int]], order: float, reduce: Reduce) -> Any:
    """Return the norms of unsharded tensors from those of their parts.

    Args:
        norms: a tensor, or a list of them.
        cut: by axis of the mesh, which of them are of parts on that axis. They are sent together.
        order: of the norm.
        reduce: sums over an axis.
    """
    given = [norms] if isinstance(norms, torch.Tensor) else list(norms)
    # In float32 at least, and all norms of an axis in one collective.
    powers = [t.to(torch.promote_types(t.dtype, torch.float32)).pow(order) for t in given]
    for axis, which in enumerate(cut):
        if which:
            together = reduce(torch.cat([powers[i].flatten() for i in which]), axis)
            pieces = together.split([powers[i].numel() for i in which])
            for i, piece in zip(which, pieces, strict=True):
                powers[i] = piece.view_as(powers[i])
    found = [p.pow(1 / order).to(t.dtype) for p, t in zip(powers, given, strict=True)]
    return found[0] if isinstance(norms, torch.Tensor) else found


def run_divided(
    func: OpOverload,
    args: list[Any],
    kwargs: Mapping[str, Any],
    divided: Sequence[ClassAxis],
    reduce: Reduce,
    at: Sequence[int],
) -> Any:
    """Run an op on the rank's classes.

    Args:
        func, args, kwargs: with local tensors and sizes.
        divided: the axes that cut classes.
        reduce: sums over an axis.
        at: the rank's position on each axis.
    """
    name = str(func._schema.name).removeprefix("aten::")
    # Those with a rule of their own, also for several axes.
    if name == "_log_softmax":
        return _log_softmax(args, divided, reduce, at)
    if name == "_log_softmax_backward_data":
        return _log_softmax_backward(args, divided, reduce)
    # All others are cut on one axis only: ``Divided.nests`` is False for them.
    ((axis, _, n),) = divided
    start = at[axis] * n
    if name == "embedding":
        weight, indices, *rest = args
        here, outside = _among(indices, start, n)
        return func(weight, here.masked_fill_(outside, 0), *rest, **kwargs).masked_fill_(
            outside[..., None], 0
        )
    if name == "embedding_dense_backward":
        grad, indices, _, padding, *rest = args
        here, outside = _among(indices, start, n)
        # The padding row is on one rank; on the others no row is left out.
        padding = padding - start if 0 <= padding - start < n else -1
        # One row more takes the gradients of the others' rows.
        return func(grad, here.masked_fill_(outside, n), n + 1, padding, *rest, **kwargs).narrow(0, 0, n)
    names = [a.name for a in func._schema.arguments]
    target, ignored = names.index("target"), names.index("ignore_index")
    here, outside = _among(args[target], start, n)
    given = list(args)
    # A label of another rank is ignored like a padded one. ``ignore_index`` itself may be a valid class after
    # the shift, so both get the index that no rank has.
    given[target] = here.masked_fill_(outside | (args[target] == args[ignored]), _IGNORED)
    given[ignored] = _IGNORED
    return func(*given, **kwargs)


def _among(indices: torch.Tensor, start: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices relative to the classes of this rank, and a mask of those that are on other ranks."""
    here = indices - start
    return here, (here < 0) | (here >= n)


def _log_softmax(
    args: Sequence[Any], axes: Sequence[ClassAxis], reduce: Reduce, at: Sequence[int]
) -> torch.Tensor:
    """Compute totals in float32 at least: one that is rounded would shift a whole row."""
    x, dim, to_float = args
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    total = exact.logsumexp(dim, keepdim=True)
    for axis in axes:
        # logsumexp of all classes from the ranks' logsumexps: each fills its slot, the sum gathers them.
        totals = total.new_zeros((axis.ranks, *total.shape))
        totals[at[axis.axis]] = total
        total = reduce(totals, axis.axis).logsumexp(0)
    found: torch.Tensor = exact - total
    return found if to_float else found.to(x.dtype)


def _log_softmax_backward(args: Sequence[Any], axes: Sequence[ClassAxis], reduce: Reduce) -> torch.Tensor:
    grad, output, dim, dtype = args
    total = grad.sum(dim, keepdim=True, dtype=torch.promote_types(grad.dtype, torch.float32))
    for axis in axes:
        total = reduce(total, axis.axis)
    found: torch.Tensor = grad - output.to(total.dtype).exp().mul_(total)
    return found.to(dtype)
