"""A stretch of ops that is collected first, and then runs in one loop of the engine.

In training a factor flows from what enters a region, and an op is cut when it is deferred. Of a stretch it is known
what is sliced of the last result. So each op becomes a node when it is reached, and when all are there their cuts are
found from the last one (``_StretchCuts``).

What is needed after the stretch has a buffer from the start, an ordinary tensor that the loop fills; views of it are
ordinary too. Other results are lazy. Where a factor does not flow through the ops, or something asks for a tensor too
early, the loop has one slice and no op is cut: slower, never wrong.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from sacplan._chunk.executor.lazy import Lazy, real
from sacplan._chunk.executor.loop import run_nodes, slices_made, slices_read
from sacplan._chunk.executor.values import (
    Choose,
    DeferredOp,
    DeferredTensor,
    FactorCut,
    SlicedRegion,
    Stage,
    Window,
)
from sacplan._executor.recording import unrecorded
from sacplan._factors.axes import Axis, into_factor
from sacplan._factors.rule import Dims, Kind, Rule, rule_of
from sacplan._torch.local_tensors import DEFERRED_TYPES
from sacplan._torch.ops import is_alias, op_traits, tensors_in
from sacplan._torch.private import modes_off, storage_key
from sacplan.errors import RecipeError


class StretchTensor(Lazy):
    """A lazy result of a stretch. An op that reads it and is not collected has the stretch computed.

    Attributes:
        stretch: to which it belongs.
    """

    stretch: Stretch
    is_deferred = True  # the kernels of an emulated device are chosen for it, too (``_device/kernels.py``)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*computed(args), **computed(kwargs or {}))

    def settle(self) -> None:
        """Compute its stretch whole: alone it could be computed, but what ops write in place only once."""
        with unrecorded():
            self.stretch.run_whole()
        super().settle()  # an error, if the stretch has run in slices


DEFERRED_TYPES.add(StretchTensor)


def computed(arguments: Any) -> Any:
    """Arguments with ordinary tensors for the lazy ones of stretches.

    Raises:
        RecipeError: a stretch has run in slices, and one of its tensors is gone.
    """
    return tree_map(lambda x: real(x) if isinstance(x, StretchTensor) else x, arguments)


def _is_gone(shape: tuple[int, ...]) -> NoReturn:
    raise RecipeError(
        f"a tensor of shape {shape} was computed in slices and is gone, since nothing read it in the step that was "
        "planned for. Make the profile of a step that reads it, or remove the plan."
    )


class _ThreadMode(threading.local):
    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=False)


_local = _ThreadMode()


class Stretch:
    """Ops in the order in which they are reached.

    Args:
        dim, outer, inner: what is sliced of the first output of the last op, see ``Axis``.
        slices: how many.

    Attributes:
        is_over: the ops have run.
    """

    def __init__(self, dim: int, outer: int, inner: int, slices: int) -> None:
        self.is_over = False
        self._asked = dim, outer, inner, slices
        self._region = SlicedRegion(1, 1)
        self._fake = _local.mode
        self._nodes: list[DeferredOp] = []
        self._like: dict[DeferredTensor, torch.Tensor] = {}  # fake, since meta tensors have other strides
        self._inputs: dict[int, DeferredTensor] = {}  # by id of the tensor, which the value keeps
        self._lazies: list[weakref.ref[StretchTensor]] = []
        self._buffers: list[torch.Tensor] = []
        self._bound: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffers and views of them to values
        self._storages: set[int] = set()  # of inputs and buffers

    # --- collecting ---

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the stretch that is not computed yet, or a view of its memory."""
        return not self.is_over and self._known(tensor) is not None

    def uses_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether the loop will read or fill the storage of an ordinary tensor."""
        return not self.is_over and storage_key(tensor.untyped_storage()) in self._storages

    def may_defer(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the loop could run a call as the step would."""
        if not isinstance(func, torch._ops.OpOverload):
            return False
        traits = op_traits(func)
        written = traits.written(args, kwargs)
        if not written:
            return True
        if not traits.in_place or len(written) != 1:
            return False
        value = self._known(args[0])
        # Only all of what an op of the stretch made may be overwritten: views of it would see the new values.
        return value is not None and not value.aliased

    def _known(self, tensor: torch.Tensor) -> DeferredTensor | None:
        """The value of a tensor that the loop makes."""
        if isinstance(tensor, StretchTensor):
            return tensor.value if tensor.stretch is self else None
        found: DeferredTensor | None = self._bound.get(tensor)
        return found

    def _value(self, tensor: torch.Tensor) -> DeferredTensor:
        known = self._known(tensor)
        if known is not None:
            return known
        tensor = computed(tensor)
        known = self._inputs.get(id(tensor))
        if known is None:
            known = self._inputs[id(tensor)] = DeferredTensor(self._region, tensor, data=tensor)
            self._storages.add(storage_key(tensor.untyped_storage()))
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
            What stands for its results. A view of a buffer is made at once.
        """
        tensors = list(tensors_in((args, kwargs)))
        values = {id(t): self._value(t) for t in tensors}
        of_node, named = tree_map(
            lambda x: values[id(x)] if isinstance(x, torch.Tensor) else x, (tuple(args), dict(kwargs))
        )
        likes, named_likes = tree_map(
            lambda x: self._like[x] if isinstance(x, DeferredTensor) else x, (of_node, named)
        )
        with modes_off(), self._fake:
            made = func(*likes, **named_likes)
        rule = rule_of(func, likes, named_likes, list(tensors_in(made)))
        node = DeferredOp(func, of_node, named, Stage.LOOP, rule=rule)
        self._nodes.append(node)
        results = [node.new_output(self._region, like) for like in tensors_in(made)]
        self._like.update(zip(results, tensors_in(made), strict=True))
        if op_traits(func).in_place:
            self._rebind(args[0], results[0])
            return args[0]
        if is_alias(str(func)):
            for value in (*node.values, *results):
                value.aliased = True
            if any(t in self._bound for t in tensors if not isinstance(t, StretchTensor)):
                views = func(*args, **kwargs)
                for t, value in zip(tensors_in(views), results, strict=True):
                    self._bound[t] = value
                return views
        stand_ins = iter([self._stand_in(value, i in kept) for i, value in enumerate(results)])
        return tree_map(lambda x: next(stand_ins) if isinstance(x, torch.Tensor) else x, made)

    def _stand_in(self, value: DeferredTensor, kept: bool) -> torch.Tensor:
        if not kept:
            lazy = StretchTensor(value)
            lazy.stretch = self
            self._lazies.append(weakref.ref(lazy))
            return lazy
        buffer = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
        self._bound[buffer] = value
        self._buffers.append(buffer)
        self._storages.add(storage_key(buffer.untyped_storage()))
        return buffer

    def _rebind(self, tensor: torch.Tensor, value: DeferredTensor) -> None:
        """A tensor has been overwritten."""
        if isinstance(tensor, StretchTensor):
            tensor.value = value
        else:
            self._bound[tensor] = value

    # --- running ---

    def run(self, choose: Choose | None = None) -> bool:
        """Run the loop; whole, if it cannot be sliced as asked.

        Args:
            choose: see ``SlicedRegion``.

        Returns:
            Whether it ran in slices.
        """
        nodes = self._needed()
        size = self._cut(nodes)
        if not size:
            self.run_whole()
            return False
        region = SlicedRegion(size, min(self._asked[3], size), choose=choose)
        run_nodes(region, nodes, (), self._filled())
        self._end()
        return True

    def run_whole(self) -> None:
        """Run the ops as they are, and keep all that somebody refers to."""
        if self.is_over:
            return
        self.is_over = True  # what runs now may look at what was asked for
        for value in self._like:
            if value.node is not None:
                value.combined = Kind.PASS  # of the one slice that there is
        wanted = [lazy.value for lazy in (ref() for ref in self._lazies) if lazy is not None]
        filled = self._filled()
        for value, data in run_nodes(self._region, self._nodes, wanted, filled).items():
            if value not in filled:
                value.settle(data)
        self._end()

    def _filled(self) -> dict[DeferredTensor, torch.Tensor]:
        """The buffers, by the values that they have in the end."""
        return {self._bound[buffer]: buffer for buffer in self._buffers}

    def _end(self) -> None:
        """Let go of everything, but for what lazy tensors have."""
        self.is_over = True
        for value in self._like:
            if value.data is None:
                value.node, value.source = None, partial(_is_gone, value.shape)
        self._nodes.clear()
        self._like.clear()
        self._inputs.clear()
        self._lazies.clear()
        self._buffers.clear()
        self._bound = WeakIdKeyDictionary()

    def _needed(self) -> list[DeferredOp]:
        """The ops that compute something, and the views that are kept or that one of these reads."""
        wanted = set(self._filled())
        found = []
        for node in reversed(self._nodes):
            if not is_alias(str(node.func)) or not wanted.isdisjoint(node.made):
                found.append(node)
                wanted.update(node.values)
        return found[::-1]

    def _cut(self, nodes: Sequence[DeferredOp]) -> int:
        """Cut the nodes along the axis that was asked for, or one like it where sizes differ.

        Returns the size of the axis, or 0 if there is none.
        """
        rules = [node.rule for node in nodes if node.rule is not None]
        if len(rules) < len(nodes):
            return 0
        dim, outer, inner, _ = self._asked
        (last, *_) = self._nodes[-1].made
        if last is None or dim >= len(last.shape):
            return 0
        for axis in _axes_like(Axis(dim, outer, 0, inner), int(last.shape[dim]), rules):
            if _StretchCuts(nodes).apply(last, axis):
                return axis.size
        return 0


def _axes_like(asked: Axis, size: int, rules: Sequence[Rule]) -> Iterator[Axis]:
    """The axis that was asked for, and others within the same dimension, such as with another batch size."""
    dim, outer, _, inner = asked
    rest, remainder = divmod(size, outer * inner)
    seen = set()
    if not remainder and rest > 1:
        seen.add((outer, rest, inner))
        yield Axis(dim, outer, rest, inner)
    for rule in rules:
        for factors in (factors for dims in (*rule.inputs, *rule.outputs) for factors in dims):
            sizes = [rule.sizes[f] for f in factors]
            before, after = 1, math.prod(sizes)
            if after != size or len(sizes) < 2:
                continue
            for n in sizes:
                after //= n
                split = before, n, after
                before *= n
                if n > 1 and split not in seen and (after == 1) == (inner == 1):
                    seen.add(split)
                    yield Axis(dim, *split)


class _StretchCuts:
    """How each of some nodes is sliced, so that slices of one result follow along an axis.

    The cut of an op says which slices it reads and makes; those say how the ops are cut that make and read these
    values, until nothing is new. All nodes must be reached, and each in one way.
    """

    def __init__(self, nodes: Sequence[DeferredOp]) -> None:
        self.cuts: dict[DeferredOp, FactorCut | None] = dict.fromkeys(nodes)
        self.sliced: dict[DeferredTensor, Window] = {}
        self.combined: dict[DeferredTensor, Kind | None] = {}
        self.waiting: list[DeferredTensor] = []
        self.made_by: dict[
            DeferredTensor, tuple[DeferredOp, Dims]
        ] = {}  # with the factors that it has in the op's rule
        self.read_by: dict[DeferredTensor, list[tuple[DeferredOp, Dims]]] = defaultdict(list)
        for node in nodes:
            assert node.rule is not None
            for value, dims in zip(node.made, node.rule.outputs, strict=True):
                if value is not None:
                    self.made_by[value] = node, dims
            for value, dims in zip(node.values, node.rule.inputs, strict=True):
                self.read_by[value].append((node, dims))

    def apply(self, last: DeferredTensor, axis: Axis) -> bool:
        """Cut the nodes and what they make so that one value is cut along an axis; False if that is not possible."""
        self._slice(last, Window(axis))
        while self.waiting:
            value = self.waiting.pop()
            for node, dims in (self.made_by[value], *self.read_by[value]):
                assert node.rule is not None
                within = into_factor(dims, node.rule.sizes, self.sliced[value].axis)
                if within is None or not self._cut(node, FactorCut(within)):
                    return False
        if None in self.cuts.values() or not self.combined.keys().isdisjoint(self.read_by):
            return False  # no slice reaches an op, or one reads parts before they are put together
        for node, cut in self.cuts.items():
            node.cut = cut
        for value in self.made_by:
            value.window, value.combined = self.sliced.get(value), self.combined.get(value)
        return True

    def _cut(self, node: DeferredOp, cut: FactorCut) -> bool:
        known = self.cuts[node]
        if known is not None:
            return known == cut
        assert node.rule is not None
        made = slices_made(node.rule, cut)
        if made is None:
            return False
        self.cuts[node] = cut
        read = zip(node.values, slices_read(node, cut), strict=True)
        if not all(self._slice(value, window) for value, window in read if value in self.made_by):
            return False
        for value, (window, kind) in zip(node.made, made, strict=True):
            if value is not None and window is None:
                self.combined[value] = kind
            elif value is not None and not self._slice(value, window):
                return False
        return True

    def _slice(self, value: DeferredTensor, window: Window | None) -> bool:
        """Whether a value may be sliced so. None: a slice of the loop would need all of it, before it is there."""
        known = self.sliced.get(value)
        if window is not None and known is None:
            self.sliced[value] = window
            self.waiting.append(value)
        return window is not None and known in (None, window)
