"""A stretch of ops that is collected first, and then runs in one loop of the engine.

In training a factor flows from what enters a region, and an op is cut when it is deferred. For a stretch the sliced
axis of the last result is known instead. So each op becomes a node when it is reached, and when all are there, cuts are
found backwards from the last op (``techniques/chunk/flow.py``), as the planner has found them in the recording.

What is needed after the stretch has a buffer from the start, an ordinary tensor that the loop fills; views of it are
ordinary too. Other results are lazy. Where a factor does not flow through the ops, or something asks for a tensor too
early, the loop has one slice and no op is cut: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from sacplan.core.decisions import Chunk
from sacplan.core.factors.axes import Axis
from sacplan.core.factors.rule import Kind, rule_of
from sacplan.errors import RecipeError
from sacplan.techniques.chunk.executor.lazy import Lazy, real
from sacplan.techniques.chunk.executor.loop import needed_nodes, run_nodes
from sacplan.techniques.chunk.executor.values import (
    Choose,
    DeferredOp,
    DeferredTensor,
    SlicedRegion,
    Stage,
)
from sacplan.techniques.chunk.flow import FactorCut, FlowOp, Window, axes_of, cuts, slices_made, splits_of
from sacplan.techniques.runtime.recording import unrecorded
from sacplan.torch_compat.local_tensors import DEFERRED_TYPES
from sacplan.torch_compat.ops import is_alias, op_traits, tensors_in
from sacplan.torch_compat.private import is_plain, modes_off, storage_key


class StretchTensor(Lazy):
    """A lazy result of a stretch. An op that reads it and is not collected has the stretch computed.

    Attributes:
        stretch: the stretch that makes it.
    """

    stretch: Stretch
    is_deferred = True  # the kernels of an emulated device are chosen for it, too (``device/kernels.py``)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*computed(args), **computed(kwargs or {}))

    def settle(self) -> None:
        """Compute the whole stretch, without slices: ops that write in place must not run again for other results."""
        with unrecorded():
            self.stretch.run_whole()
        super().settle()  # an error, if the stretch has run in slices


DEFERRED_TYPES.add(StretchTensor)


def computed(arguments: Any) -> Any:
    """Return arguments with ordinary tensors for the lazy ones of stretches.

    Raises:
        RecipeError: a stretch has run in slices, and one of its tensors is gone.
    """
    return tree_map(lambda x: real(x) if isinstance(x, StretchTensor) else x, arguments)


def _is_gone(shape: tuple[int, ...]) -> NoReturn:
    raise RecipeError(
        f"a tensor of shape {shape} was computed in slices and is gone, since nothing read it in the step that was "
        "planned for. Make the profile of a step that reads it, or remove the plan."
    )


class Stretch:
    """The ops of a stretch in the order in which they are reached.

    Args:
        decision: what is sliced of the first output of the last op, and in how many slices.

    Attributes:
        decision: see above.
        is_over: whether the ops have run.
    """

    def __init__(self, decision: Chunk) -> None:
        self.decision = decision
        self.is_over = False
        self._region = SlicedRegion(1, 1)
        self._nodes: list[DeferredOp] = []
        # Fake tensors by value: results have the strides that kernels give.
        self._fake = FakeTensorMode(allow_non_fake_inputs=False)
        self._like: dict[DeferredTensor, torch.Tensor] = {}
        self._inputs: dict[int, DeferredTensor] = {}  # by id of the tensor, which the value keeps alive
        self._buffers: list[torch.Tensor] = []
        # From lazy tensors, buffers and views of them to values.
        self._bound: WeakIdKeyDictionary = WeakIdKeyDictionary()

    # --- collecting ---

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for a result of the stretch that is not computed yet, or is a view of one."""
        return not self.is_over and tensor in self._bound

    def is_touched_by(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call reads what is put off, or writes to a storage that the loop will read or fill."""
        if any(map(self.waits_for, tensors_in((args, kwargs)))):
            return True
        written: tuple[torch.Tensor, ...] = ()
        if isinstance(func, torch._ops.OpOverload):
            written = tuple(filter(is_plain, tensors_in(op_traits(func).written(args, kwargs))))
        used = (*(value.whole() for value in self._inputs.values()), *self._buffers) if written else ()
        keys = {storage_key(t.untyped_storage()) for t in used}
        return any(storage_key(t.untyped_storage()) in keys for t in written)

    def may_defer(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the loop could run a call as the step would."""
        if not isinstance(func, torch._ops.OpOverload):
            return False  # a higher-order op, which has no schema
        traits = op_traits(func)
        written = traits.written(args, kwargs)
        if not written:
            return True
        if not traits.in_place or len(written) != 1:
            return False  # it writes to out=, or to several tensors
        value = self._bound.get(args[0])
        # Only a result of the stretch that has no views may be overwritten: views would have to see the new values.
        return value is not None and not value.aliased

    def _value(self, tensor: torch.Tensor) -> DeferredTensor:
        """Return the value of an argument. One from outside becomes an input of the loop."""
        if tensor in self._bound:
            return self._bound[tensor]  # type: ignore[no-any-return]
        tensor = computed(tensor)
        known = self._inputs.get(id(tensor))
        if known is None:
            known = self._inputs[id(tensor)] = DeferredTensor(self._region, tensor, data=tensor)
            with modes_off(), self._fake:
                self._like[known] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
        return known

    def defer(self, func: Any, args: Any, kwargs: Any, kept: Sequence[int] = ()) -> Any:
        """Put off a call for which ``may_defer``.

        Args:
            func, args, kwargs: the call.
            kept: which of the tensors that it returns are needed after the stretch.

        Returns:
            Tensors that stand for its results. A view of a buffer is made at once.
        """
        tensors = list(tensors_in((args, kwargs)))
        values = {id(t): self._value(t) for t in tensors}
        node_args, node_kwargs = tree_map(
            lambda x: values[id(x)] if isinstance(x, torch.Tensor) else x, (tuple(args), dict(kwargs))
        )
        fake_args, fake_kwargs = tree_map(
            lambda x: self._like[x] if isinstance(x, DeferredTensor) else x, (node_args, node_kwargs)
        )
        with modes_off(), self._fake:
            # Fake tensors have the strides that the device's kernels give: buffers need them. No mode sees this.
            fake_out = func(*fake_args, **fake_kwargs)
        rule = rule_of(func, fake_args, fake_kwargs, list(tensors_in(fake_out)))
        node = DeferredOp(func, node_args, node_kwargs, Stage.FREE, rule=rule)
        self._nodes.append(node)
        results = [node.new_output(self._region, like) for like in tensors_in(fake_out)]
        self._like.update(zip(results, tensors_in(fake_out), strict=True))
        if op_traits(func).in_place:
            self._bind(args[0], results[0])
            return args[0]
        if is_alias(str(func)):
            for value in (*node.values, *results):
                value.aliased = True
            if any(t in self._bound for t in tensors if not isinstance(t, StretchTensor)):
                views = func(*args, **kwargs)
                for t, value in zip(tensors_in(views), results, strict=True):
                    self._bind(t, value)
                return views
        stand_ins = iter([self._stand_in(value, i in kept) for i, value in enumerate(results)])
        return tree_map(lambda x: next(stand_ins) if isinstance(x, torch.Tensor) else x, fake_out)

    def _stand_in(self, value: DeferredTensor, kept: bool) -> torch.Tensor:
        if kept:
            made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
            self._buffers.append(made)
        else:
            made = StretchTensor(value)
            made.stretch = self
        self._bind(made, value)
        return made

    def _bind(self, tensor: torch.Tensor, value: DeferredTensor) -> None:
        """Let a tensor stand for a value, perhaps for a new one that an op has written to it."""
        self._bound[tensor] = value
        if isinstance(tensor, StretchTensor):
            tensor.value = value

    # --- running ---

    def run(self, choose: Choose | None = None) -> bool:
        """Run the loop; without slices, if it cannot be sliced as asked.

        Args:
            choose: see ``SlicedRegion``.

        Returns:
            Whether it ran in slices.
        """
        last = self._nodes[-1].made[0]
        nodes = needed_nodes([*self._filled(), *([] if last is None else [last])])
        size = self._cut(nodes)
        if not size:
            self.run_whole()
            return False
        region = SlicedRegion(size, min(self.decision.slices, size), choose=choose)
        run_nodes(region, nodes, (), self._filled())
        self._end()
        return True

    def run_whole(self) -> None:
        """Run the ops as they are, and keep all that somebody refers to."""
        if self.is_over:
            return
        self.is_over = True  # ops that run now may ask for the same tensors, and come here again
        for value in self._like:
            if value.node is not None:
                value.combined = Kind.PASS  # the one slice makes the whole
        wanted = [value for t, value in self._bound.items() if isinstance(t, StretchTensor)]
        filled = self._filled()
        for value, data in run_nodes(self._region, self._nodes, wanted, filled).items():
            if value not in filled:
                value.settle(data)
        self._end()

    def _filled(self) -> dict[DeferredTensor, torch.Tensor]:
        """Return the buffers by the value that each has in the end: the last one written to it."""
        return {self._bound[buffer]: buffer for buffer in self._buffers}

    def _end(self) -> None:
        """Let go of everything but the values of lazy tensors. Those that have no data are gone for good."""
        self.is_over = True
        for value in self._like:
            if value.data is None:
                value.node, value.source = None, partial(_is_gone, value.shape)
        self._nodes.clear()
        self._like.clear()
        self._inputs.clear()
        self._buffers.clear()
        self._bound = WeakIdKeyDictionary()

    def _cut(self, nodes: Sequence[DeferredOp]) -> int:
        """Cut the nodes along the axis that was asked for, or one like it where sizes differ.

        Returns:
            The size of the axis; 0 if there is none, so that the stretch runs whole: slower, never wrong.
        """
        last, dim = self._nodes[-1].made[0], self.decision.dim
        if last is None or dim >= len(last.shape):
            return 0  # nobody refers to the last result, or it has too few dimensions
        ops = [FlowOp(node.rule, node.inputs, node.made) for node in nodes]
        for axis in _axes_like(self.decision, last, nodes):
            found = cuts(ops, {last: [Window(axis)]})
            if len(found) == len(nodes):
                for i, node in enumerate(nodes):
                    _cut(node, found[i])
                return axis.size
        return 0


def _axes_like(asked: Chunk, last: DeferredTensor, nodes: Sequence[DeferredOp]) -> Iterator[Axis]:
    """Yield the axis that was asked for, then others within the same dimension.

    A dimension of batch times sequence is ``outer * size * inner`` with the batch size of the recorded step in
    ``outer``. In a step with another one the axis is a factor of the dimension in some op's rule.
    """
    size, remainder = divmod(last.shape[asked.dim], asked.outer * asked.inner)
    if not remainder and size > 1:
        yield Axis(asked.dim, asked.outer, size, asked.inner)
    rules = [node.rule for node in nodes if node.rule is not None]
    own = last.node.rule if last.node is not None else None
    for axis in axes_of(own, splits_of(rules)) if own is not None else ():
        # A guess is the outermost part of the dimension exactly if the planned axis was, and likewise the innermost.
        if axis.dim == asked.dim and [axis.outer == 1, axis.inner == 1] == [
            asked.outer == 1,
            asked.inner == 1,
        ]:
            yield axis


def _cut(node: DeferredOp, cut: FactorCut) -> None:
    made = slices_made(node.rule, cut) if node.rule is not None else None
    assert made is not None
    node.cut = cut
    for value, (window, combined) in zip(node.made, made, strict=True):
        if value is not None:
            value.window, value.combined = window, combined
