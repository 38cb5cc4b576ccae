"""How one rank would run a call with the strategies of the search, to show that they compute what the op computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from sacplan.core.factors.axes import FactorAxis, resized_arguments
from sacplan.core.factors.rule import Kind, Rule
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.strategies import AxisStrategy, _along_classes, _rule
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
        weighed: axes over which the total weight of a weighted mean is summed.
        divided: axes on which classes, or a vocabulary, are cut.
    """

    func: OpOverload
    rule: Rule | None
    cuts: tuple[FactorAxis | None, ...]
    weighed: tuple[int, ...] = ()
    divided: tuple[ClassAxis, ...] = ()

    def args(self, args: Sequence[Any]) -> list[Any]:
        """Return positional arguments with local sizes, from ``args`` with local tensors and global sizes."""
        found = list(args)
        for within in self.cuts:
            if within is not None and self.rule is not None:
                found = resized_arguments(self.rule, found, within, 1)
        # A weighted mean is computed as a sum, and divided in ``run`` by the weight of all ranks.
        if self.weighed:
            found[list(arguments_by_name(self.func, args, {})).index("reduction")] = _SUM
        return found

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], reduce: Reduce, at: Sequence[int]) -> Any:
        """Run the call on local tensors.

        Args:
            args, kwargs: with local tensors and global sizes.
            reduce: all-reduces over an axis.
            at: the rank's position on each axis.
        """
        found = self.args(args)
        if self.divided:
            outputs = run_divided(self.func, found, kwargs, self.divided, reduce, at)
        else:
            outputs = self.func(*found, **kwargs)
        if not self.weighed:
            return outputs
        total, weight = flat_tensors(outputs)
        for axis in self.weighed:
            weight = reduce(weight, axis)
        return total / weight, weight


def local_call(call: Call, chosen: Sequence[AxisStrategy], mesh: Mesh) -> LocalCall:
    """Return how one rank of a mesh runs a call with a strategy for each axis.

    Args:
        call: of unsharded tensors.
        chosen: by axis of the mesh.
        mesh: whose ranks run it.
    """
    rule = _rule(call) if any(s.cut for s in chosen) else None
    classes = tuple(
        ClassAxis(axis, n, s.cut.outer * s.cut.inner)
        for axis, (s, n) in enumerate(zip(chosen, mesh.ranks, strict=True))
        if rule is not None and s.cut is not None and _cuts_classes(call, s.cut, rule)
    )
    weighed = tuple(axis for axis, s in enumerate(chosen) if s.inside_bytes and call.name.startswith("nll"))
    return LocalCall(call.func, rule, tuple(s.cut for s in chosen), weighed, classes)


def _cuts_classes(call: Call, within: FactorAxis, rule: Rule) -> bool:
    is_blocked = any(kinds[within.factor] is Kind.BLOCK for kinds in rule.kinds)
    return is_blocked and _along_classes(call, within, rule) is not None


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
    # All others are cut on one axis only, in one piece for each rank.
    ((axis, _, n),) = divided
    start = at[axis] * n
    if name == "embedding":
        weight, indices, *rest = args
        here, outside = _among(indices, start, n)
        return func(weight, here.masked_fill_(outside, 0), *rest, **kwargs).masked_fill_(
            outside[..., None], 0
        )
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
