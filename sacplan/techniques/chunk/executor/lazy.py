"""Lazy tensors: autograd runs its own formulas on them, and what they compute runs later, in slices.

A ``Lazy`` is a wrapper subclass without storage. ``defer`` decides about each op on one, in this order:

1. An alias is the same value.
2. An op that writes in place makes another value for the same lazy tensor (``_written``). That is only possible while
   no other tensor shares its memory, as far as code can tell; else it is a ``ChunkError``.
3. An op that reads a number for code runs now, and so does one whose lazy arguments are all computed. A scalar filled
   like a lazy one, as the gradient with which a backward pass begins, needs no value.
4. An op that divides by something that belongs to the whole is put together of others (``losses.py``).
5. All others become nodes (``_Deferral``). The shapes of their results come from meta tensors, their cut from the
   factor rule. No dispatch mode sees them.

An op that cannot be sliced is computed at once from whole tensors, which costs memory and is never wrong
(``SlicedRegion.note_whole``). An op is cut when it is deferred, as its arguments are cut by then. The ops of a stretch
(``collected.py``) are cut when all are there, since what is known is the axis of the last result.

Shapes come from meta tensors here, which is cheap. A stretch needs the strides that kernels give, and takes fake
tensors on its device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from sacplan.core.factors.axes import Axis
from sacplan.core.factors.rule import Kind, Rule, rule_of
from sacplan.errors import ChunkError
from sacplan.techniques.chunk.executor.loop import compute
from sacplan.techniques.chunk.executor.values import (
    DeferredOp,
    DeferredTensor,
    Held,
    SlicedRegion,
    Stage,
)
from sacplan.techniques.chunk.flow import FactorCut, Window, cut_of_inputs, slices_made
from sacplan.techniques.runtime.tensors import history_free_aliases
from sacplan.torch_compat.autograd import backward_number, in_backward, runs_in_backward
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.local_tensors import DEFERRED_TYPES
from sacplan.torch_compat.ops import arguments_by_name, op_traits, tensors_in
from sacplan.torch_compat.private import is_batched

aten = torch.ops.aten

_ALIASES = frozenset((aten.detach.default, aten.alias.default))
_READS = frozenset((aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default))
_FILLED = frozenset(
    (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default)
)


class Lazy(torch.Tensor):
    """A tensor that is computed when somebody asks.

    Attributes:
        value: what it stands for.
    """

    value: DeferredTensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: DeferredTensor) -> Lazy:
        """Make a lazy tensor without history."""
        t: Lazy = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride, dtype=value.dtype, device=value.device
        )
        t.value = value
        return t

    def __init__(self, value: DeferredTensor) -> None:
        # A formula of autograd runs without gradients; the forward pass of a checkpoint runs with them.
        if in_backward() and not torch.is_grad_enabled():
            value.region.note_gradient(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Defer every op on it."""
        return defer(func, args, kwargs or {})

    def settle(self) -> None:
        """Compute what it stands for, and keep it."""
        settle([self.value])

    # These read memory without an op, so no dispatch would tell that the tensor must be there.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(real(self))

    def __format__(self, spec: str) -> str:
        return format(real(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return real(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        return memo.setdefault(id(self), real(self).clone())

    def numpy(self, *, force: bool = False) -> Any:
        """Return the computed tensor as an array."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return real(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the computed tensor's values."""
        return real(self).tolist()

    def data_ptr(self) -> int:
        """Return the address of the computed tensor."""
        return real(self).data_ptr()

    def untyped_storage(self) -> Any:
        """Return the storage of the computed tensor."""
        return real(self).untyped_storage()


DEFERRED_TYPES.add(Lazy)

REWRITTEN: dict[Any, Callable[[Any, Sequence[Any]], Any]] = {}
"""By op, a function that makes its outputs with ops that can be sliced (``losses.py``)."""


def real(lazy: Lazy) -> torch.Tensor:
    """Return the computed tensor, without history. It is kept for as long as anybody refers to the lazy one."""
    if lazy.value.data is None:
        lazy.settle()
    assert lazy.value.data is not None
    return lazy.value.data


def settle(values: Sequence[DeferredTensor]) -> None:
    """Compute values in one loop, and keep them; if all are scalars, with all scalars that somebody may read."""
    if not any(value.shape for value in values):
        pending = (v for region in {value.region for value in values} for v in region.pending)
        values = list(dict.fromkeys((*values, *pending)))
    for value, data in zip(values, compute(values), strict=True):
        value.settle(data)


def root(region: SlicedRegion, tensor: torch.Tensor, axis: Axis) -> Lazy:
    """Return a lazy tensor for one that is there and is taken in slices along ``axis``: a region begins with it."""
    return Lazy(DeferredTensor(region, tensor, window=Window(axis), data=tensor))


def free(region: SlicedRegion, tensor: torch.Tensor) -> Lazy:
    """Return a lazy tensor for one that is there and does not depend on the slices, such as the gradient of a loss."""
    return Lazy(DeferredTensor(region, tensor, data=tensor))


@functools.cache
def import_meta_kernels() -> None:
    """Let PyTorch import what computes shapes outside of a step: frames of the import live until garbage collection."""
    t = torch.empty(1, device="meta")
    torch.mul(t, t)


# --- deferring


def defer(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs of an op as lazy tensors; or as tensors if they must be, or already are, computed.

    Args:
        func: an op as dispatch modes see it.
        args, kwargs: its arguments; one of them at least is lazy.

    Raises:
        ChunkError: it writes in place to what another tensor shares.
    """
    # The cases are those at the top of this file, in the same order.
    lazies = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Lazy)]
    if func in _ALIASES:
        value = lazies[0].value
        value.aliased = True
        return Lazy(value)
    if op_traits(func).written_names:
        return _written(func, args, kwargs)
    if func in _READS or all(x.value.data is not None and not x.value.sliced for x in lazies):
        return func(*_real(args), **_real(kwargs))
    if func in _FILLED and not lazies[0].shape:
        return _filled(func, args, kwargs)
    watch(lazies)
    rewritten = REWRITTEN.get(func)
    if rewritten is not None:
        return rewritten(func, args)
    return deferred(func, args, kwargs)


def deferred(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs of an op that is neither read nor rewritten, as lazy tensors."""
    lazies = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Lazy)]
    return _Deferral(func, args, kwargs, lazies).deferred()


def _real(value: Any) -> Any:
    wanted = [x.value for x in tree_leaves(value) if isinstance(x, Lazy) and x.value.data is None]
    settle(list(dict.fromkeys(wanted)))
    return tree_map(lambda x: real(x) if isinstance(x, Lazy) else x, value)


def _filled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a scalar like a lazy one that need not be computed, such as the gradient a backward pass begins with."""
    watch([args[0]])
    like = torch.empty((), dtype=args[0].dtype, device=args[0].device)
    made: torch.Tensor = func(like, *args[1:], **kwargs)
    return made


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that writes in place."""
    traits = op_traits(func)
    written = [t for t in tensors_in(traits.written(args, kwargs)) if isinstance(t, Lazy)]
    if not written:  # it only reads lazy tensors
        return func(*_real(args), **_real(kwargs))
    lazy = written[0]
    # Four cases: an op that returns the result is deferred instead; a sliced tensor is computed first and written as a
    # whole; what is not sliced is computed and written in place; a write to a sliced tensor with views is refused.
    alone = traits.in_place and not lazy.value.aliased
    if alone and (functional := _without_writing(func)) is not None and not traits.random:
        made = defer(functional, args, kwargs)
        lazy.value = made.value if isinstance(made, Lazy) else _settled(lazy.value, made)
    elif alone and lazy.value.sliced:
        lazy.value.region.note_whole(str(func), "it can only be computed in place")
        lazy.value = _settled(lazy.value, real(lazy).clone())
        func(*_real(args), **_real(kwargs))
    elif not any(t.value.sliced for t in written):
        pending = lazy.value.region.pending  # they may read what is written
        settle(list(dict.fromkeys((*(t.value for t in written if t.value.data is None), *pending))))
        func(*_real(args), **_real(kwargs))  # every alias has the same memory
    else:
        raise ChunkError(
            f"{func} writes to a tensor of shape {tuple(lazy.shape)} that is computed in slices later, and of which "
            "there are views. Write to a clone() of it, or use an op that returns a new tensor (torch.where, "
            "masked_fill); or leave this chunk out of the plan."
        )
    return lazy if len(written) == 1 else written


def _settled(before: DeferredTensor, data: torch.Tensor) -> DeferredTensor:
    return DeferredTensor(before.region, data, window=before.window, data=data)


def _without_writing(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the op that returns what this one writes to its first argument, if there is one."""
    name = func._schema.name.partition("::")[2]
    special = {"zero_": aten.zeros_like.default}
    if name in special:
        return special[name]
    packet = getattr(getattr(torch.ops, func.namespace), name.removesuffix("_"), None)
    found: torch._ops.OpOverload | None = getattr(packet, func._overloadname, None)
    return found


class _Deferral(Call):
    """A call that is to be deferred.

    Attributes:
        lazies: its lazy arguments.
        region: the region of its results.
        device: the device of its results, which meta tensors do not tell.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lazies: Sequence[Lazy]
    ) -> None:
        super().__init__(func, args, kwargs)
        self.lazies = lazies
        self.region = lazies[0].value.region
        self.device = _device_of(args, kwargs) or lazies[0].device

    def deferred(self) -> Any:
        """Make a node of it, or compute it at once; see ``values.py`` for which arguments make which results."""
        shapes = self._shapes()
        if shapes is None:
            return self._whole("its shape depends on data")
        args, kwargs, made = shapes
        outputs = list(tensors_in(made))
        if not outputs:
            return self._whole("it returns no tensor")
        # From here on in the order of the rules in ``values.py``: all free; none sliced, so late; sliced with some
        # reduced, which need a loop first; sliced in one region or several.
        values = [x.value for x in self.lazies]
        if all(value.free for value in values):
            return self._made(made, Stage.FREE, rule=rule_of(self.func, args, kwargs, made))
        if not any(value.sliced for value in values):
            if len({id(value.region) for value in values}) > 1:
                self.region = SlicedRegion(1, 1)  # of its own: no loop of these regions computes it along
            return self._made(made, Stage.LATE)
        reduced = [x for x in self.lazies if not (x.value.sliced or x.value.free)]
        if reduced:
            # The op is in the loop and reads a whole value that the loop makes: that takes a loop before this one.
            settle(list(dict.fromkeys(x.value for x in reduced if x.value.data is None)))
            settled = {id(x): x.value.data for x in reduced}
            self.args, self.kwargs = tree_map(lambda x: settled.get(id(x), x), (self.args, self.kwargs))
            return defer(self.func, self.args, self.kwargs)
        regions = {id(value.region) for value in values if value.sliced}
        if len(regions) > 1:
            return self._whole("it reads tensors that are sliced in different ways")
        self.region = next(value.region for value in values if value.sliced)
        # Before the factor rule, for which a slice along the sliced axis needs all of its input.
        moved = self._moved(outputs)
        if moved is not None:
            if moved.start < 0 or moved.start + moved.axis.size > self.region.size:
                return self._whole("it goes beyond what is sliced")
            return self._made(made, Stage.LOOP, windows=[(moved, None)], move=True)
        return self._sliced(args, kwargs, made)

    def _sliced(self, args: Any, kwargs: Any, made: Any) -> Any:
        rule = rule_of(self.func, args, kwargs, made)
        if rule is None:
            return self._whole("no rule")
        cut = cut_of_inputs(rule, [x.value.window if isinstance(x, Lazy) else None for x in self.inputs])
        if cut is None:
            return self._whole("its arguments are sliced in different ways")
        windows = slices_made(rule, cut)
        if windows is None:
            return self._whole("it cannot be sliced along this axis")
        return self._made(made, Stage.LOOP, rule=rule, cut=cut, windows=windows)

    def _shapes(self) -> tuple[Any, Any, Any] | None:
        """Return arguments and results as meta tensors, unseen by dispatch modes; None if they cannot be had so."""
        memo: dict[int, torch.Tensor] = {}

        def meta(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("meta")
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in memo:
                memo[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return memo[id(x)]

        with torch._C._DisableTorchDispatch(), torch.no_grad():
            args, kwargs = tree_map(meta, (tuple(self.args), dict(self.kwargs)))
            try:
                return args, kwargs, self.func(*args, **kwargs)
            except (NotImplementedError, RuntimeError):
                return None  # data decides, or the op has no meta kernel; if it is an error, the op itself says so

    def _whole(self, reason: str) -> Any:
        """Compute the op at once, and note it as run whole, unless all its arguments were there already."""
        if not all(x.value.there for x in self.lazies):
            self.region.note_whole(str(self.func), reason)
        return self.func(*_real(self.args), **_real(self.kwargs))

    def _moved(self, outputs: Sequence[torch.Tensor]) -> Window | None:
        """Return the window of a slice along the axis that is sliced, or of the backward of one; None for other ops.

        A shifted tensor, such as logits without the last position, thus stays in the loop of the region.
        """
        if self.func not in (aten.slice.Tensor, aten.slice_backward.default):
            return None
        window = self.lazies[0].value.window
        assert window is not None
        axis, given = window.axis, arguments_by_name(self.func, self.args, self.kwargs)
        if axis.outer != 1 or axis.inner != 1:
            return None  # the axis is only a part of the dimension
        # The shape before slicing. The backward op returns this shape: the gradient between zeros.
        forward = self.func is aten.slice.Tensor
        shape = self.args[0].shape if forward else given["input_sizes"]
        dim, begin = given["dim"] % len(shape), given["start"] or 0
        begin = max(0, begin + shape[dim]) if begin < 0 else min(begin, shape[dim])
        size = outputs[0].shape[dim]
        if dim != axis.dim or given["step"] != 1 or size == self.args[0].shape[dim]:
            return None  # not along the axis, not in one piece, or all of it: the factor rule decides
        return Window(Axis(dim, 1, size, 1), window.start + (begin if forward else -begin))

    def _made(
        self,
        made: Any,
        stage: Stage,
        *,
        windows: Sequence[tuple[Window | None, Kind | None]] | None = None,
        rule: Rule | None = None,
        cut: FactorCut | None = None,
        move: bool = False,
    ) -> Any:
        """Make the node, and return lazy tensors for its outputs."""
        shared = _shares_memory(self.func)
        held: dict[int, DeferredTensor | Held] = {}
        others = [x for x in tensors_in((self.args, self.kwargs)) if not isinstance(x, Lazy)]
        _keep_gradients_real(others, self.region)
        for x, alias in zip(others, history_free_aliases(others), strict=True):
            held[id(x)] = Held(alias)
        for x in self.lazies:
            held[id(x)] = x.value
            x.value.aliased |= shared
        args, kwargs = tree_map(
            lambda x: held[id(x)] if isinstance(x, torch.Tensor) else x,
            (tuple(self.args), dict(self.kwargs)),
        )
        node = DeferredOp(self.func, args, kwargs, stage, rule=rule, cut=cut, move=move)

        def lazy(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            window, combined = windows[len(node.outputs)] if windows is not None else (None, None)
            value = node.new_output(self.region, t, device=self.device, window=window, combined=combined)
            value.aliased = shared
            if window is None and not value.shape:
                self.region.note_scalar(value)
            return Lazy(value)

        return tree_map(lazy, made)


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    return next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)), None)


def _shares_memory(func: torch._ops.OpOverload) -> bool:
    """Whether code may tell that an output is a view of an input."""
    return func.is_view or any(r.alias_info is not None for r in func._schema.returns)


# --- gradients that leave a region, or enter it


class Targets:
    """The tensors that an entry's node returns gradients for, besides its input, and their lazy gradients.

    Autograd hands a gradient on to a tensor as soon as a formula has made it. A lazy one is taken away before that
    (``watch``) and waits for the entry's loop, so that what is added to a tensor's gradient is a real tensor, and no
    loop is for one gradient alone.

    Attributes:
        edges: by edge of autograd's graph, the index of its tensor.
    """

    def __init__(self, entry: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._entry = weakref.ref(entry)
        # The first edge is that of the input.
        self.edges = {edge: i for i, edge in enumerate(entry.next_functions[1:])}
        self._n = len(tensors)
        # Edges keep leaves alive, so their ids stay theirs.
        self._leaves = {id(t) for t in tensors if t.is_leaf}
        self._waiting: dict[int, dict[int, Lazy] | None] = {}  # by backward pass; None when its loop is over

    def take(self, edge: Any, gradient: Lazy) -> bool:
        """Keep the gradient of a tensor until the loop; return whether there will be one in this backward pass."""
        waiting = self._waiting.setdefault(backward_number(), {} if runs_in_backward(self._entry()) else None)
        if waiting is None:
            return False
        i = self.edges[edge]
        waiting[i] = waiting[i] + gradient if i in waiting else gradient  # type: ignore[assignment]
        return True

    def take_all(self) -> list[Lazy | None]:
        """Return the gradients by tensor, at the time of the loop."""
        waiting = self._waiting.get(backward_number()) or {}
        self._waiting[backward_number()] = None
        return [waiting.get(i) for i in range(self._n)]

    def receive_whole_gradient_of(self, t: torch.Tensor) -> bool:
        """Whether the gradient of ``t`` is handed on to nothing but these tensors and the region's input.

        If so, the nodes that hand it on are watched. After ``_NODES_LOOKED_AT`` nodes the answer is no, which costs a
        loop and is never wrong.
        """
        if t.is_leaf:
            return id(t) in self._leaves
        waiting: list[Any] = [(t.grad_fn, t.output_nr)]
        seen: set[Any] = set()
        while waiting and len(seen) < _NODES_LOOKED_AT:
            edge = waiting.pop()
            node = edge[0]
            if edge in self.edges or node is self._entry() or node in seen:
                continue
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            # With ``entered_region``, it is another region's, whose loop would read this one's lazy gradients slice by
            # slice. Without edges, it ends the history, such as a leaf, which would store a lazy gradient as it is.
            if hasattr(node, "entered_region") or not edges:
                return False
            seen.add(node)
            waiting.extend(edges)
        if waiting:  # the limit is reached
            return False
        for node in seen:
            self.watch(node)
        return True

    def watch(self, node: Any) -> None:
        """Take lazy gradients that a node of autograd hands on to one of the tensors."""
        edges = node.next_functions
        if node is self._entry() or self.edges.keys().isdisjoint(edges) or _WATCHED in node.metadata:
            return
        # One hook is enough where several regions read a tensor: a lazy gradient tells its region.
        node.metadata[_WATCHED] = True
        node.register_hook(functools.partial(_handed_on, edges))


_NODES_LOOKED_AT = 64
_WATCHED = "sacplan.watched"


def _handed_on(edges: Sequence[Any], gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
    """Return the gradients that a node hands on, without those that wait for the loop of their region."""
    found = list(gradients)
    for i, (gradient, edge) in enumerate(zip(gradients, edges, strict=True)):
        targets = gradient.value.region.targets() if isinstance(gradient, Lazy) else None
        if targets is not None and edge in targets.edges and targets.take(edge, gradient):
            found[i] = None
    return tuple(found)


def watch(lazies: Sequence[Lazy]) -> None:
    """Watch the nodes that have made lazy tensors, and let the gradients of reduced ones be lazy.

    So what autograd expands those gradients to is sliced, too.
    """
    for x in lazies:
        node, value = x.grad_fn, x.value
        if node is None:
            continue
        if value.combined is not None and not value.hooked:
            value.hooked = True
            x.register_hook(functools.partial(_made_lazy, value.region))
        if (targets := value.region.targets()) is not None:
            targets.watch(node)


def _made_lazy(region: SlicedRegion, gradient: torch.Tensor) -> Lazy | None:
    return None if isinstance(gradient, Lazy) else free(region, once(gradient))


def once(gradient: Any) -> Any:
    """Return a gradient that comes into a region, once it is checked.

    Raises:
        ChunkError: it is to be differentiated again, or is a batch of several gradients.
    """
    if torch.is_grad_enabled() or (gradient is not None and is_batched(gradient)):
        raise ChunkError(
            "the backward pass through a chunk was asked for a graph of its own (create_graph=True), or for several "
            "gradients at once (is_grads_batched=True, vectorize=True), but a chunk can be differentiated once only. "
            "Leave this chunk out of the plan for that."
        )
    return gradient


def _keep_gradients_real(others: Sequence[torch.Tensor], region: SlicedRegion) -> None:
    """Have gradients computed for tensors of an op that are not lazy: in the entry's loop, or loops of their own."""
    if not torch.is_grad_enabled():
        return
    targets = region.targets()
    for t in others:
        if t.requires_grad and (targets is None or not targets.receive_whole_gradient_of(t)):
            keep_gradient_real(t, region)


def keep_gradient_real(t: torch.Tensor, region: SlicedRegion) -> None:
    """Have the gradient of a tensor computed, in a loop of its own, if it is still lazy when autograd hands it on."""
    handle = t.register_hook(_made_real)
    t._backward_hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]  # other hooks expect a real one
    region.hooks.append(handle)


def _made_real(gradient: torch.Tensor) -> torch.Tensor | None:
    return real(gradient) if isinstance(gradient, Lazy) else None
