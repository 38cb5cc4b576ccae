"""Ops that exchange a little between ranks while they run on parts.

- A vocabulary, or the classes of a loss, may be cut. Each rank looks up the rows that it has, or looks at the labels
  among its own classes, which is one summand of the result. The logarithm of softmax needs one number of each row from
  each rank.
- The norm of a cut tensor comes from those of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from sacplan._factors.rule import Kind, Rule
from sacplan._shard.linear import dtype_of
from sacplan._shard.placements import PARTIAL, REPLICATED, Placement
from sacplan._torch.calls import Call

Reduce: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""From a summand and an axis of the mesh to the sum over the ranks of the axis."""

_NONE, _MEAN = 0, 1  # at::Reduction
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


class Divided(NamedTuple):
    """The outputs of an op whose classes are cut.

    Attributes:
        outputs: their placements; none if they are cut with the inputs.
        reduces, inside_bytes: as in ``AxisStrategy``.
        nests: parts may be of several pieces.
    """

    outputs: tuple[Placement, ...] = ()
    reduces: tuple[int, ...] = ()
    inside_bytes: int = 0
    nests: bool = False


def nbytes(t: Any) -> int:
    """Return the bytes of an unsharded tensor, or of a description of one."""
    count: int = math.prod(t.shape) * dtype_of(t).itemsize
    return count


def norm_order(call: Call) -> float | None:
    """Return the exponent of a norm that comes from norms of parts by a sum; None for any other op."""
    if call.name not in ("linalg_vector_norm", "_foreach_norm"):
        return None
    # 0 counts elements and inf is a maximum: neither is a root of a sum of powers.
    order = float(call["ord"])
    return order if 0 < order < math.inf else None


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


def along_classes(call: Call, factor: int, rule: Rule, ranks: int = 1) -> Divided | None:
    """Return how an op runs if a factor is its vocabulary or its classes, and is cut; None if it is neither."""
    # The results of parts can be put together as they are: nothing special to do.
    if all(kinds[factor] is not Kind.BLOCK for kinds in rule.kinds):
        return None
    first = [f for factors in rule.inputs[0] for f in factors] if rule.inputs else []
    # Ranks exchange one number of each row: forward those of all ranks (each fills its own slot), backward a
    # sum.
    if call.name in ("_log_softmax", "_log_softmax_backward_data"):
        x = call.inputs[0]
        rows = math.prod(x.shape) // x.shape[call["dim"]]
        numbers = rows * (ranks if call.name == "_log_softmax" else 1)
        return Divided((), (), numbers * max(4, dtype_of(x).itemsize), nests=True)
    # The factor is the vocabulary, dimension 0 of the weight. A row of zeros where another rank has the word:
    # summands.
    if call.name == "embedding" and factor in first:
        return Divided((PARTIAL,))
    if call.name == "embedding_dense_backward" and any(factor in factors for factors in rule.outputs[0]):
        return Divided()
    if call.name not in (
        "nll_loss_forward",
        "nll_loss2d_forward",
        "nll_loss_backward",
        "nll_loss2d_backward",
    ):
        return None
    # Each rank has the gradient of its own classes, so the output is cut with the input.
    if call.name.endswith("backward"):
        return Divided()
    # A mean divides by the total weight, which each rank sees only a part of: that is all-reduced inside of
    # the call. The loss itself stays partial.
    if call["reduction"] == _MEAN:
        return Divided((PARTIAL, REPLICATED), (1,), nbytes(call.outputs[1]))
    return Divided((PARTIAL, REPLICATED if call["reduction"] == _NONE else PARTIAL))


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
