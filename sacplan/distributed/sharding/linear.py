"""Ops that are linear in an argument: where that is partial, a sum over ranks, their outputs are partial, too.

The tables in ``linear_ops.json`` name, for each op, the arguments that may be partial together while all others are
replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from msgspec import Struct

from sacplan.torch_compat.calls import Call

Together: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of the arguments that may be summands together, in each of several ways."""


class _Ops(Struct):
    """Ops of which these arguments may be summands together."""

    together: Together
    ops: tuple[str, ...]


class _Tables(Struct):
    """Ops that are linear. Each element that those of ``moves`` return is one of an argument, or of several lists."""

    moves: tuple[_Ops, ...]
    linear: tuple[_Ops, ...]


_TABLES = msgspec.json.decode(Path(__file__).with_name("linear_ops.json").read_bytes(), type=_Tables)
_MOVES = {op: each.together for each in _TABLES.moves for op in each.ops}  # they pass maxima and minima, too
_LINEAR = {op: each.together for each in _TABLES.linear for op in each.ops}

# Arguments that must be zero: else each rank would add the same once more.
_ZERO = {"constant_pad_nd": "value", "masked_fill": "value"}


@functools.cache
def _names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """Return the names under which a table may have an op; one that writes in place has that of its twin."""
    name = str(func._schema.name).partition("::")[2]
    # Dunder names, such as ``__and__``, are no writes in place.
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return (f"{plain}.{func._overloadname}", plain)


def _together(func: torch._ops.OpOverload, call: Call) -> tuple[Together, bool]:
    """Return the arguments that may be partial together, and whether they may be maxima as well."""
    # Nothing is known about custom ops. An ``out=`` argument would be written by each rank with its summand.
    if func.namespace not in ("aten", "prims") or any(a.is_out for a in func._schema.arguments):
        return (), False
    for name in _names(func):
        if name in _MOVES:
            return _MOVES[name], True
        if name in _LINEAR:
            zero = _ZERO.get(name)
            return (_LINEAR[name] if zero is None or call[zero] == 0 else ()), False
    return (), False


def may_be_partial(t: torch.Tensor) -> bool:
    """Whether a tensor may be one summand on each rank."""
    return t.is_floating_point() or t.is_complex()


def passed_on(func: torch._ops.OpOverload, call: Call) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield the positions of tensor arguments that may be partial together, and whether also as maxima.

    Casts to a type of less precision are left out: a sum is rounded once, not every summand.
    """
    together, moves = _together(func, call)
    for names in together:
        found = frozenset(i for i, (name, _) in enumerate(call.named_inputs) if name in names)
        given = {name for name in names if call.arguments.get(name) is not None}
        if not given or given != {call.named_inputs[i][0] for i in found}:
            continue  # a number cannot be a summand
        summands = [call.inputs[i] for i in found]
        # Only floats have summands. ``promote_types`` gives back the output's type if that can hold every
        # summand.
        if all(map(may_be_partial, (*summands, *call.outputs))) and all(
            torch.promote_types(t.dtype, o.dtype) == o.dtype for t in summands for o in call.outputs
        ):
            yield found, moves
