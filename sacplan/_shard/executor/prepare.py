"""Prepares calls: how one runs on a rank is worked out once for all calls like it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._shard.choose import CallSharding, choose
from sacplan._shard.executor.grid import Grid, PlacedForm
from sacplan._shard.placements import REPLICATED, Placements, WantedPlacements
from sacplan._shard.places import CallPattern
from sacplan._shard.strategies import AxisStrategy, LocalCall, local_call
from sacplan._torch.calls import Call, flat_tensors
from sacplan._torch.fake_tensors import FAKE_TENSORS_CANNOT, FakeTensorMode
from sacplan._torch.ops import RESHAPES, changes_shape, draws_numbers, is_alias
from sacplan._torch.private import modes_off
from sacplan.errors import PlanError


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a call runs on a rank.

    Attributes:
        moves: the inputs that are redistributed: position and the layout that they get.
        call: the call on local tensors.
        resizes: whether sizes among the arguments become those of parts.
        outputs: the form of each tensor returned; None where it depends on data.
        returns: the arguments that are returned themselves, because they were written: position and name.
        writes: whether it writes arguments; ops on lists return none of them.
        is_view: the outputs are views of the first input.
        reshapes: it is a view that is made by ``reshape``, as parts may lie in memory otherwise than the whole.
        strides: those that the first input must have in memory, if that matters.
        draws: axes on which ranks draw different random numbers; None where it draws none.
    """

    moves: tuple[tuple[int, Placements], ...]
    call: LocalCall
    resizes: bool
    outputs: tuple[PlacedForm, ...] | None
    returns: tuple[tuple[int, str], ...]
    writes: bool
    is_view: bool
    reshapes: bool
    strides: tuple[int, ...] | None
    draws: tuple[int, ...] | None


def prepare(
    grid: Grid,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forms: Sequence[PlacedForm],
    place: CallPattern | None,
) -> Prepared:
    """Return how a call runs on a rank.

    Args:
        grid: the ranks.
        func, args, kwargs: the call.
        forms: of its tensor arguments; plain ones are replicated.
        place: the layouts that are asked for at this call.

    Raises:
        PlanError: it cannot run with its inputs where they are.
    """
    # The wrapper's shape is fixed when it is made.
    if changes_shape(func):
        raise PlanError(
            f"{func} changes the shape of a tensor in place, which a sharded one cannot; use a new tensor."
        )
    device = next(flat_tensors((args, kwargs))).device
    whole_args, whole_kwargs, outputs = _as_whole(func, args, kwargs, forms)
    call = Call(func, whole_args, whole_kwargs, outputs)
    # The same steps as in ``rank/local_runs.py``, which asks ``choose`` and ``local_call`` as well: the plan
    # and the run cannot differ in how an op runs.
    have = [form.layout for form in forms]
    # Without shapes there is nothing to choose by: every rank runs it on unsharded inputs.
    if outputs is _UNKNOWN:
        chosen = _all_replicated(grid, call)
    else:
        asked: Sequence[WantedPlacements | None] | None = None if place is None else place.asked(len(forms))
        if _leaves(device, args, kwargs):
            asked = [grid.replicated] * len(forms)
        chosen = choose(call, have, grid.mesh, asked, [form.weight for form in forms])
    local = local_call(call, chosen.strategies, grid.mesh)
    cut = [axis for axis, s in enumerate(chosen.strategies) if s.cut is not None]
    made = None
    if outputs is not _UNKNOWN:
        # An op without tensors makes no weight.
        weight = bool(forms) and all(form.weight for form in forms)
        made = tuple(
            grid.form(layout, t.shape, t.stride(), t.dtype, weight)
            for layout, t in zip(chosen.outputs, call.outputs, strict=True)
        )
    view = is_alias(str(func))
    return Prepared(
        moves=tuple((i, to) for i, (at, to) in enumerate(zip(have, chosen.inputs, strict=True)) if at != to),
        call=local,
        resizes=bool(cut) and local.rule is not None and bool(local.rule.resized or local.rule.replaced),
        outputs=made,
        returns=_returned(func),
        writes=bool(call.written),
        is_view=view,
        reshapes=func._schema.name in RESHAPES,
        strides=forms[0].stride if func._schema.name == "aten::as_strided" else None,
        draws=tuple(cut) if draws_numbers(func, args, kwargs) else None,
    )


_UNKNOWN = object()


_MOST_CALLS = 1 << 14
_whole_calls: dict[Any, tuple[Any, Any, Any]] = {}
"""Results of ``_faked`` by call, shared by all models: running an op on fake tensors is slow."""


def _as_whole(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[PlacedForm]
) -> tuple[Any, Any, Any]:
    """Return a call on fake unsharded tensors: arguments and results; ``_UNKNOWN`` if only data says these."""
    tensors = [(form.shape, form.stride, form.dtype) for form in forms]
    devices = [t.device for t in flat_tensors((args, kwargs))]
    # Not under ``grid``: what an op returns does not depend on the ranks.
    key = (func, *tensors, *devices, _without_tensors(args), _without_tensors(tuple(kwargs.items())))
    found = _whole_calls.get(key)
    if found is None:
        if len(_whole_calls) >= _MOST_CALLS:
            _whole_calls.clear()
        found = _whole_calls[key] = _faked(func, args, kwargs, iter(forms))
    return found


def _without_tensors(value: Any) -> Any:
    # Tensors are in the key by shape, stride, dtype and device. The type of other values counts, since 1, 1.0
    # and True are equal.
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, (tuple, list)):
        return tuple(_without_tensors(item) for item in value)
    return type(value), value


def _faked(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], forms: Iterator[PlacedForm]
) -> tuple[Any, Any, Any]:
    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            form = next(forms)
            return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=value.device)
        if isinstance(value, (tuple, list)):
            return type(value)(fake(item) for item in value)
        return value

    # This runs in the middle of a user's op, perhaps under a mode that records or counts: none of it is the
    # step's.
    with modes_off(), FakeTensorMode(allow_non_fake_inputs=True):
        whole_args = tuple(fake(value) for value in args)
        whole_kwargs = {name: fake(value) for name, value in kwargs.items()}
        returns = func._schema.returns
        # It returns numbers, such as ``item``: these need the data.
        if returns and not any("Tensor" in str(r.type) for r in returns):
            return whole_args, whole_kwargs, _UNKNOWN
        try:
            return whole_args, whole_kwargs, func(*whole_args, **whole_kwargs)
        except FAKE_TENSORS_CANNOT:
            return whole_args, whole_kwargs, _UNKNOWN


def _all_replicated(grid: Grid, call: Call) -> CallSharding:
    whole = AxisStrategy((REPLICATED,) * len(call.inputs), (REPLICATED,) * 0)
    return CallSharding((whole,) * len(grid.ranks), (grid.replicated,) * len(call.inputs), ())


def _leaves(device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call copies to another device, on which ranks do not reach each other."""
    to = kwargs.get("device")
    return (to is not None and torch.device(to).type != device.type) or any(
        t.device.type != device.type and t.dim() > 0 for t in flat_tensors((args, kwargs))
    )


def _returned(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that the op writes and returns, in the order of its results."""
    by_alias = {
        frozenset(a.alias_info.before_set): (at, a.name)
        for at, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    }
    found = [
        by_alias.get(frozenset(r.alias_info.before_set))
        for r in func._schema.returns
        if r.alias_info is not None and r.alias_info.is_write
    ]
    return tuple(argument for argument in found if argument is not None)
