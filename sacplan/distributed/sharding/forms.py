"""The forms of a few ops on one axis of a mesh: placements of their tensors under which nothing moves between them.

Ops are traced with fake tensors. Forms are then extended op by op, with each strategy that fits the placements so far.
So a Linear has a form for each batch dimension, one for its input, one for its output, and the replicated one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan.device.op_kernels import Call
from sacplan.distributed.sharding.placements import REPLICATED, Placement, cut
from sacplan.distributed.sharding.strategies import AxisStrategy, axis_strategies
from sacplan.errors import PlanError
from sacplan.torch_compat.ops import is_alias, tensors_in

_MOST_FORMS = 4096


class Leaf(NamedTuple):
    """A tensor that the ops are given."""

    name: str
    role: str
    tensor: torch.Tensor


class Tracer(TorchDispatchMode):
    """Records the ops that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        # Ops without tensors, such as a size that is read, place nothing.
        if any(True for _ in tensors_in(out)):
            self.ops.append(Call(func, args, kwargs or {}, out))
        return out


class Trace(NamedTuple):
    """The ops that ran, the tensors that they were given, and those that they returned."""

    ops: Sequence[Call]
    leaves: Sequence[Leaf]
    outputs: Sequence[torch.Tensor]

    def logical(self, t: torch.Tensor) -> torch.Size:
        """Return the shape in which the first op that is no view reads a tensor, or the last one has made it."""
        maker = {id(o): op for op in self.ops for o in op.outputs}
        # Back through views to their base.
        while id(t) in maker and is_alias(str(maker[id(t)].func)):
            t = maker[id(t)].inputs[0]
        # The base is made by an op that computes, whose output has the logical shape.
        if id(t) in maker:
            return t.shape
        return self._read(t)

    def _read(self, t: torch.Tensor) -> torch.Size:
        for op in self.ops:
            if any(i is t for i in op.inputs):
                return self._read(op.outputs[0]) if is_alias(str(op.func)) else t.shape
        return t.shape


@dataclass(frozen=True)
class AxisForm:
    """The placements of all tensors of a trace on one axis.

    Attributes:
        places: placements, by the tensor's ``id``.
        taken: the strategy of each op.
    """

    places: Mapping[int, Placement]
    taken: tuple[AxisStrategy, ...] = ()

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[Placement, ...]:
        """Return the placements of these tensors."""
        return tuple(self.places.get(id(t), REPLICATED) for t in tensors)


def forms(trace: Trace, ranks: int, nested: Sequence[int] = ()) -> list[AxisForm]:
    """Return all forms on an axis of so many ranks, in the order of what the ops offer.

    Args:
        trace: of the ops.
        ranks: of the axis.
        nested: further values of ``outer`` at which leaves may be cut.

    Raises:
        PlanError: there are thousands.
    """
    options = {id(leaf.tensor): _options(leaf.tensor, ranks, nested) for leaf in trace.leaves}
    found = [AxisForm({})]
    for op in trace.ops:
        found = [longer for form in found for longer in _with(op, form, options, ranks)]
        # Forms multiply with each op: those of a module of many ops are too many for a list.
        if len(found) > _MOST_FORMS:
            raise PlanError(
                f"there are more than {_MOST_FORMS} ways to place {len(trace.leaves)} tensors at {op.func}; "
                "ask for the strategies of a smaller module, or plan with a mesh."
            )
    return found


def _options(t: torch.Tensor, ranks: int, nested: Sequence[int]) -> list[Placement]:
    """Return the placements that a tensor may have: replicated, or cut along a dimension."""
    cuts = itertools.product(range(t.dim()), dict.fromkeys((1, *nested)))
    return [REPLICATED, *(cut(d, o) for d, o in cuts if t.shape[d] and t.shape[d] % (o * ranks) == 0)]


def _with(op: Call, form: AxisForm, options: Mapping[int, list[Placement]], ranks: int) -> Iterator[AxisForm]:
    """Yield a form extended by each strategy of one more op under which nothing moves."""
    available = [
        [form.places[id(t)]] if id(t) in form.places else options.get(id(t), [REPLICATED]) for t in op.inputs
    ]
    written = {id(op.inputs[i]) for i in op.written}
    for strategy in axis_strategies(op, ranks, available):
        places = dict(form.places)
        for t, placement, allowed in zip(op.inputs, strategy.inputs, available, strict=True):
            # A bias that is added to summands is the only leaf that may be partial.
            is_bias = placement.is_partial and id(t) in options and id(t) not in form.places and strategy.cut
            # Something would have to move between ops: this is no form.
            if (placement not in allowed and not is_bias) or places.setdefault(id(t), placement) != placement:
                break
        else:
            for t, placement in zip(op.outputs, strategy.outputs, strict=True):
                # An output may be a tensor that was there before: a view of itself, or an input written in
                # place.
                if places.setdefault(id(t), placement) != placement and id(t) not in written:
                    break
            else:
                yield AxisForm(places, (*form.taken, strategy))


def traced(run: Callable[[], Any], leaves: Sequence[Leaf]) -> Trace:
    """Run ops on fake tensors, and return what ran."""
    with torch.no_grad(), Tracer() as seen:
        outputs = list(tensors_in(_as_tree(run())))
    return Trace(seen.ops, leaves, outputs)


def _as_tree(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def local_flops(trace: Trace, chosen: Sequence[AxisForm], ranks: Sequence[int]) -> int:
    """Return the floating-point operations of one rank: those of an op that is cut are divided."""
    total = 0
    for i, op in enumerate(trace.ops):
        parts = math.prod(n for form, n in zip(chosen, ranks, strict=True) if form.taken[i].cut)
        total += op.flops // parts
    return total
