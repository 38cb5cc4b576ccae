"""Placed tensors: DTensors whose ops run as ``choose.py`` says, below autograd, forward and backward.

Autograd and the user's code see unsharded shapes. The inputs of an op are redistributed, the op runs on this rank's
parts, and its outputs get the layouts of its strategy. Plain tensors count as replicated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch

from sacplan._shard.executor.grid import Grid, PlacedForm, layout_of
from sacplan._shard.executor.prepare import Prepared, prepare
from sacplan._shard.placements import REPLICATED, Placements, is_reduced
from sacplan._shard.redistribute import kept
from sacplan._torch import dtensors
from sacplan._torch.calls import flat_tensors
from sacplan._torch.dtensors import DTensor
from sacplan._torch.ops import op_traits
from sacplan.errors import PlanError


class PlacedTensor(DTensor):
    """A DTensor of a sharded model.

    It has the shape of the unsharded tensor, and ``placements``, ``to_local()``, ``full_tensor()`` and
    ``torch.distributed.checkpoint`` work on it as on others. It is saved as a plain DTensor.
    """

    _form: PlacedForm
    _grid: Grid
    _is_copy = False
    """It is a view of a redistributed copy: a write to it would not reach its base, so such writes are refused."""

    _is_reduced = False
    """Its values have been reduced since it was made: views of it that were made before show the summands."""

    _has_views = False

    _same: list[weakref.ref[PlacedTensor]] | None = None
    """This tensor and those detached from it, while their values are partial: they are reduced together."""

    holds_base = True
    """A view may lie on other memory than its base, and autograd holds the base, too."""

    # Each op would go through Python twice, and plain results become placed ones.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self._form.spec
        return (
            f"PlacedTensor(local_tensor={self._local_tensor}, device_mesh={spec.mesh}, "
            f"placements={spec.placements})"
        )

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part. Its gradient has ``grad_placements``, or those of this tensor."""
        layout = self._form.layout
        grad = tuple(REPLICATED if p.is_partial else p for p in layout)
        if grad_placements is not None:
            grad = self._layout_of(grad_placements)
        return _ToLocal.apply(self, layout, grad)  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the unsharded tensor, on each rank."""
        whole = self._grid.replicated
        grad = whole if grad_placements is None else self._layout_of(grad_placements)
        return _ToLocal.apply(self, whole, grad)  # type: ignore[no-any-return]

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **_: Any
    ) -> PlacedTensor:
        """Return the same tensor with other placements."""
        target = self._form.spec.placements if placements is None else placements
        return _Redistribute.apply(self, self._layout_of(target))  # type: ignore[no-any-return]

    def _layout_of(self, placements: Sequence[Any]) -> Placements:
        # Users give negative dimensions; layouts have none.
        normal = [
            dtensors.shard(p.dim % self.dim(), 1) if getattr(p, "dim", 0) < 0 else p for p in placements
        ]
        layout = layout_of(normal, self.shape, self._grid.ranks)
        if layout is None:
            raise PlanError(
                f"a tensor of shape {tuple(self.shape)} cannot have placements {tuple(placements)} on mesh "
                f"{self._grid.mesh}: its parts would not be of one size."
            )
        return layout

    def as_dtensor(self) -> DTensor:
        """Return the same as a plain DTensor, without gradient; they share memory."""
        made: DTensor = dtensors.new_dtensor(DTensor, self._local_tensor.detach(), self._form.spec)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_dtensor().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def pieces(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the blocks of the full tensor that this rank has: where each begins, and its values, a view."""
        local = self._local_tensor.detach()
        by_dim = [self._stretches(dim) for dim in range(self.dim())]
        sizes = [local.shape[dim] // len(starts) for dim, starts in enumerate(by_dim)]
        for index in product(*(range(len(starts)) for starts in by_dim)):
            block = local
            for dim, (i, size) in enumerate(zip(index, sizes, strict=True)):
                block = block.narrow(dim, i * size, size)
            yield tuple(starts[i] for starts, i in zip(by_dim, index, strict=True)), block

    def _stretches(self, dim: int) -> list[int]:
        """Return where this rank's stretches of a dimension begin, in order. They have one size."""
        grid, size = self._grid, self.shape[dim]
        cuts = sorted(
            (p.outer, n, at)
            for p, n, at in zip(self._form.layout, grid.ranks, grid.coordinate, strict=True)
            if p.is_cut and p.dim == dim
        )
        # Invariant: ``starts`` are the beginnings of the stretches that this rank has after the cuts so far,
        # from the outermost inwards. Each further cut leaves ``repeated`` stretches of each.
        starts = [0]
        before = 1
        for outer, n, at in cuts:
            stretch, part = size // outer, size // (outer * n)
            repeated = outer // before
            starts = [s + r * stretch + at * part for s in starts for r in range(repeated)]
            before = outer * n
        return starts

    # The protocol of ``torch.distributed.checkpoint`` (``planner_helpers.py``). DTensor's own methods write
    # one chunk for each rank, but a part that is cut inside of a dimension is several blocks of the full
    # tensor.
    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return [
            dtensors.checkpoint_write_item(fqn, dtensors.checkpoint_chunk(at, block.shape), block, self.shape)
            for at, block in self.pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [dtensors.checkpoint_chunk(at, block.shape) for at, block in self.pieces()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for at, block in self.pieces():
            if index.offset is None or tuple(index.offset) == at:
                return block
        raise ValueError(f"this rank has no piece of {index.fqn} at {tuple(index.offset)}")


def place(local: torch.Tensor, form: PlacedForm, grid: Grid, requires_grad: bool = False) -> PlacedTensor:
    """Return this rank's part as a placed tensor."""
    made: PlacedTensor = dtensors.new_dtensor(PlacedTensor, local, form.spec, requires_grad)
    made._form, made._grid = form, grid
    return made


def placed_from(whole: torch.Tensor, layout: Placements, grid: Grid, weight: bool = False) -> PlacedTensor:
    """Return a tensor, of which each rank has all, in a layout. Where it is cut, each rank keeps its part alone."""
    form = grid.form(layout, whole.shape, whole.stride(), whole.dtype, weight)
    local = grid.move(whole, whole.shape, grid.replicated, layout)
    return place(kept(local), form, grid)


def moved_to(t: torch.Tensor, layout: Placements, grid: Grid) -> PlacedTensor:
    """Return a placed or a plain tensor in another layout, below autograd, with no more memory than its part."""
    # A plain tensor is replicated: only cut.
    if type(t) is not PlacedTensor:
        return placed_from(t, layout, grid)
    if t._form.layout == layout:
        return t
    form = t._form
    grid.make_room(form.shape, form.layout, layout)
    local = kept(grid.move(t._local_tensor, form.shape, form.layout, layout))
    return place(local, grid.form(layout, form.shape, form.stride, form.dtype), grid)


class _Redistribute(torch.autograd.Function):
    """Redistributes a tensor, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, t: PlacedTensor, target: Placements) -> PlacedTensor:
        ctx.grid = t._grid
        ctx.back = tuple(REPLICATED if p.is_partial else p for p in t._form.layout)
        moved = moved_to(t, target, t._grid)
        # ``moved_to`` returns its argument if nothing moves, and autograd needs a tensor of its own.
        return place(moved._local_tensor, moved._form, t._grid)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return moved_to(grads[0], ctx.back, ctx.grid), None


class _ToLocal(torch.autograd.Function):
    """Returns the local tensor of a layout. Its gradient is this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, t: PlacedTensor, target: Placements, grad: Placements) -> torch.Tensor:
        ctx.grid, ctx.form = t._grid, t._grid.form(grad, t._form.shape, t._form.stride, t._form.dtype)
        local = moved_to(t, target, t._grid)._local_tensor
        # As DTensor's ``to_local`` does (``torch/distributed/tensor/_api.py``): autograd writes its metadata
        # into what is returned, so this must not be the tensor that the placed one holds.
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return place(grads[0], ctx.form, ctx.grid), None, None


_MOST_CALLS = 1 << 14  # with shapes that vary, calls are forgotten at times


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one op on placed and plain tensors.

    Raises:
        PlanError: it cannot run with the layouts of its inputs.
    """
    if func is _FOREACH_NORM:
        return _norms(*args, **kwargs)
    tensors: list[Any] = []
    parts: list[Any] = []
    key: list[Any] = [id(func)]  # an op lives as long as the process, and is slow to hash
    # The key is built and looked up in each op of each step, so it holds forms by identity and nothing that
    # is slow to hash or compare.
    for value in args:
        if not _describe(value, key, tensors, parts):
            return _with_dtensors(func, args, kwargs)
    for name, value in kwargs.items():
        key.append(name)
        if not _describe(value, key, tensors, parts):
            return _with_dtensors(func, args, kwargs)
    grid = next(t._grid for t in tensors if type(t) is PlacedTensor)
    asked = None
    if grid.modules:
        asked = grid.place_of(str(func))
        key.append(id(asked))
    prepared = grid.prepared.get(at := tuple(key))
    if prepared is None:
        if len(grid.prepared) >= _MOST_CALLS:
            grid.prepared.clear()
        prepared = grid.prepared[at] = prepare(
            grid, func, args, kwargs, [_form(t, grid) for t in tensors], asked
        )
    # A write to a copy would be lost without a word.
    if prepared.writes:
        _refuse_copies(func, args, kwargs)
    # Plain tensors count as replicated. If they differ between ranks, results do silently.
    if grid.agreement.is_checking:
        written = {id(t) for t in flat_tensors(op_traits(func).written(args, kwargs))}
        plain = [t for t in tensors if type(t) is not PlacedTensor and id(t) not in written]
        grid.agreement.check_plain(str(func), grid.modules[-1][0] if grid.modules else "", plain)
    for i, layout in prepared.moves:
        parts[i] = _moved_input(tensors, i, layout, grid)
    if prepared.strides is not None and parts[0].stride() != prepared.strides:
        parts[0] = _with_strides(parts[0], prepared.strides)
    following = iter(parts)
    local_args = [_with_parts(value, following) for value in args]
    local_kwargs = {name: _with_parts(value, following) for name, value in kwargs.items()}
    out = _on_parts(prepared, func, local_args, local_kwargs, grid)
    # In place: the caller must get the objects that it has passed, with their autograd state.
    if prepared.returns:
        return _written(prepared, args, kwargs)
    made = _wrapped(out, prepared.outputs, grid)
    # ``detach`` shares memory. If one of the two is reduced, the other would still count as summands of the
    # same values.
    if func is _DETACH and made._form.is_partial:
        _tie(tensors[0], made)
    # Noted for ``_refuse_copies``: see ``_has_views`` and ``_is_copy``.
    if prepared.is_view:
        tensors[0]._has_views = True
        if _is_detached(tensors[0], parts[0], prepared, out):
            for t in flat_tensors(made):
                t._is_copy = True
    return made


_FOREACH_NORM = torch.ops.aten._foreach_norm.Scalar
_DETACH = torch.ops.aten.detach.default


def _tie(t: PlacedTensor, detached: PlacedTensor) -> None:
    if t._same is None:
        t._same = [weakref.ref(t)]
    t._same.append(weakref.ref(detached))
    detached._same = t._same


def _norms(tensors: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Take norms one by one, since each tensor may have another layout, and its norm come from norms of parts."""
    one = torch.ops.aten.linalg_vector_norm.default
    return [one(t, order, dtype=dtype) for t in tensors]


def _moved_input(tensors: list[Any], i: int, layout: Placements, grid: Grid) -> torch.Tensor:
    """Return an input as a call needs it. A sum takes the place of its summands, so that it is computed once."""
    t = tensors[i]
    if type(t) is not PlacedTensor:
        return grid.moved(t, t.shape, grid.replicated, layout, _version(t))
    form = t._form
    # If the op takes the tensor twice, the other position was prepared for the layout that it has now.
    if is_reduced(form.layout, layout) and sum(other is t for other in tensors) == 1:
        part = grid.move(t._local_tensor, form.shape, form.layout, layout)
        reduced = grid.form(layout, form.shape, form.stride, form.dtype, form.weight)
        for same in (t, *(ref() for ref in t._same or ())):
            # Only those that are still the same summands.
            if same is not None and same._form is form:
                same._local_tensor, same._form, same._spec = part, reduced, reduced.spec
                same._is_reduced = True
        return part
    return grid.moved(t._local_tensor, form.shape, form.layout, layout, _version(t))


def _describe(value: Any, key: list[Any], tensors: list[Any], parts: list[Any]) -> bool:
    """Add the key of a call's preparation, its tensors, and this rank's parts. False for somebody else's DTensor."""
    kind = type(value)
    if kind is PlacedTensor:
        tensors.append(value)
        parts.append(value._local_tensor)
        key.append(value._form)
    elif isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            return False
        tensors.append(value)
        parts.append(value)
        key.extend((value.shape, value.stride(), value.dtype, value.device))
    elif kind is list or kind is tuple:
        key.append(len(value))
        return all(_describe(item, key, tensors, parts) for item in value)
    else:
        key.append(value)
        key.append(kind)
    return True


def _with_strides(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _form(t: Any, grid: Grid) -> PlacedForm:
    if type(t) is PlacedTensor:
        return t._form
    return grid.form(grid.replicated, t.shape, t.stride(), t.dtype)


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _with_parts(value: Any, parts: Iterator[Any]) -> Any:
    kind = type(value)
    if kind is PlacedTensor or isinstance(value, torch.Tensor):
        return next(parts)
    if kind is list or kind is tuple:
        return type(value)([_with_parts(item, parts) for item in value])
    return value


def _on_parts(prepared: Prepared, func: Any, args: list[Any], kwargs: dict[str, Any], grid: Grid) -> Any:
    call = prepared.call
    # The order: what needs collectives inside; sizes of parts; views by ``reshape``; random numbers;
    # everything else.
    if not call.is_plain:
        return call.run(args, kwargs, grid.reduce, grid.coordinate)
    if prepared.resizes:
        args = call.args(args)
    if prepared.reshapes:
        return args[0].reshape(args[1])
    if prepared.draws is not None:
        generator = kwargs.get("generator") or _default_generator(args)
        with grid.drawing(generator, prepared.draws):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _default_generator(args: Sequence[Any]) -> torch.Generator:
    device = next(flat_tensors(args)).device
    if device.type == "cpu":
        return torch.default_generator
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    generator: torch.Generator = torch.get_device_module(device).default_generators[index]
    return generator


def _wrapped(out: Any, forms: tuple[PlacedForm, ...] | None, grid: Grid) -> Any:
    if isinstance(out, torch.Tensor):
        return place(out, forms[0] if forms else _form(out, grid), grid)
    if isinstance(out, (tuple, list)):
        following = iter(forms) if forms is not None else None
        made = [
            place(t, _form(t, grid) if following is None else next(following), grid)
            if isinstance(t, torch.Tensor)
            else t
            for t in out
        ]
        return type(out)(made)
    return out


def _is_detached(t: Any, part: torch.Tensor, prepared: Prepared, out: Any) -> bool:
    """Whether a view shows a copy: one that a redistribution made, or ``reshape``."""
    if bool(prepared.moves) or getattr(t, "_is_copy", False):
        return True
    return prepared.reshapes and out.untyped_storage()._cdata != part.untyped_storage()._cdata


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    traits = op_traits(func)
    return traits.written_positions, traits.written_names


def _refuse_copies(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    positions, names = _written_arguments(func)
    written = [args[i] for i in positions if i < len(args)] + [kwargs[n] for n in names if n in kwargs]
    for t in flat_tensors(written):
        if type(t) is PlacedTensor and (t._is_copy or _has_lost_its_base(t)):
            raise PlanError(
                f"{func} writes a view of shape {tuple(t.shape)} of a tensor that had to be redistributed, so the "
                f"tensor itself would not change. Write to the tensor, or make a new one (torch.where)."
            )


def _has_lost_its_base(t: PlacedTensor) -> bool:
    """Whether a tensor shares no memory any more with its base, or with its views, because one was reduced."""
    base = None if t.is_inference() else t._base
    return (t._is_reduced and t._has_views) or (type(base) is PlacedTensor and base._is_reduced)


def _written(prepared: Prepared, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments themselves, as an op that writes in place does."""
    found = [kwargs[name] if name in kwargs else args[at] for at, name in prepared.returns]
    return found[0] if len(found) == 1 else tuple(found)


def _with_dtensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on somebody else's DTensors, too, such as those of a loaded state dict."""
    grid = next(t._grid for t in flat_tensors((args, dict(kwargs))) if type(t) is PlacedTensor)
    back: dict[int, Any] = {}

    def ours(value: Any) -> Any:
        if isinstance(value, DTensor) and type(value) is not PlacedTensor:
            layout = None
            if value.device_mesh == grid.device_mesh:
                layout = layout_of(value.placements, value.shape, grid.ranks)
            # Another mesh, or parts that are not even: use all of it.
            if layout is None:
                return value.full_tensor()
            form = grid.form(layout, value.shape, value.stride(), value.dtype)
            made = place(value._local_tensor, form, grid)
            back[id(made)] = value
            return made
        if isinstance(value, (tuple, list)):
            return type(value)(ours(item) for item in value)
        return value

    written = flat_tensors(op_traits(func).written(args, kwargs))
    # A DTensor on this mesh is wrapped and written in place. On another mesh a redistributed copy would be
    # written instead.
    for t in written:
        if isinstance(t, DTensor) and type(t) is not PlacedTensor and t.device_mesh != grid.device_mesh:
            raise PlanError(f"{func} writes a DTensor of another mesh; redistribute it first.")
    out = run(func, [ours(value) for value in args], {name: ours(value) for name, value in kwargs.items()})
    # An op in place returns what it has written, which must be the caller's object.
    return back.get(id(out), out)
