"""Check a program that was read from a file: indices within their lists, events in an order that can happen.

The types of fields are checked before, by msgspec. What is checked here is what the code relies on without looking: a
file that was changed by hand must be an error, not a crash or a wrong plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch

from sacplan.core.elements import ROOT_SCOPE, Event
from sacplan.core.liveness import Fold
from sacplan.core.program import Program


def first_problem(program: Program) -> str | None:
    """Return the first thing that is wrong with a recorded program; None if nothing is."""
    # Indices first: each check behind follows them without looking.
    for look in (_index, _length, _figure, _order, _tensor, _arguments):
        problem = look(program)
        if problem:
            return problem
    return None


def _index(program: Program) -> str | None:
    """Find an index that refers to nothing."""
    n_storages, n_handles, n_ops = (
        len(program.storage_bytes),
        len(program.handle_storages),
        len(program.ops),
    )
    n_tensors, n_scopes = len(program.tensors), len(program.scopes)
    limits = [n_storages, n_storages, n_ops, n_handles, n_handles]  # by event
    limits += [len(program.instance_handles)] * 2 + [n_scopes] * 2 + [len(program.resizes)]
    ops, scopes = program.ops, program.scopes
    # Each field with the least index that it may hold (-1 where there may be none) and the number of what it refers to.
    storages: Iterable[int] = chain(
        program.initial,
        program.handle_storages,
        (s for s, _, _ in program.resizes),
        (tensor.storage for tensor in program.tensors),
        (s for op in ops for s in (*op.reads, *op.writes, *op.mutates)),
    )
    tensors = chain(program.handle_tensors, (t for op in ops for t in (*op.inputs, *op.outputs)))
    made_again = chain(program.handle_ops, (i for op in ops for i in (op.forward_of, op.recomputes)))
    places: tuple[tuple[str, Iterable[int], int, int], ...] = (
        ("storage", storages, 0, n_storages),
        ("storage", (op.replaces for op in ops), -1, n_storages),
        ("tensor", tensors, -1, n_tensors),
        ("handle", program.instance_handles, 0, n_handles),
        ("op", made_again, -1, n_ops),
        # ``end_op`` may be one past the last op.
        ("op", (at for scope in scopes for at in (scope.first_op, scope.end_op)), 0, n_ops + 1),
        ("module call", (op.scope for op in ops), -1, n_scopes),
        ("module call", program.backward_order, 0, n_scopes),
        ("storage", program.gradients, 0, n_storages),
        ("tensor", program.gradients.values(), 0, n_tensors),
        ("storage", program.frozen, 0, n_storages),
    )
    for what, indices, least, limit in places:
        if any(not least <= index < limit for index in indices):
            return f"it refers to a {what} that it does not have"
    # The types of fields keep codes and indices of events from being negative.
    if any(code >= len(limits) or arg >= limits[code] for code, arg in program.events):
        return "an event refers to something that it does not have"
    # A call comes after the one around it. With parents that come first, the way outwards always ends.
    if any(not ROOT_SCOPE <= scope.parent < i for i, scope in enumerate(scopes)):
        return "a module call is inside of itself"
    return None


def _length(program: Program) -> str | None:
    """Compare the lengths of lists that have one entry for the same thing."""
    n_handles = len(program.handle_storages)
    same = (
        len(program.storage_kinds) == len(program.storage_bytes)
        and len(program.handle_tensors) == len(program.handle_ops) == n_handles
        and all(len(tensor.shape) == len(tensor.stride) for tensor in program.tensors)
    )
    return None if same else "its lists do not have the same length"


def _figure(program: Program) -> str | None:
    """Find sums that a 64-bit counter cannot hold."""
    # Times are summed as nanoseconds. Not ``fsum``, which raises where a sum overflows. ``min`` keeps infinity
    # away from ``ceil``, which has no integer for it.
    sums = (
        sum(program.storage_bytes)
        + sum(before + after for _, before, after in program.resizes)
        + sum(op.workspace_bytes + op.state_bytes for op in program.ops)
        + sum(scope.input_bytes + scope.output_bytes for scope in program.scopes),
        sum(op.flops for op in program.ops),
        math.ceil(min(sum(op.time_ms for op in program.ops), 2.0**64)) * 10**6,
    )
    return None if max(sums) < 2**62 else "its sizes, operations or times are larger than any step's"


def _order(program: Program) -> str | None:
    """Find events that cannot come in the order in which they are."""
    # A recorded step runs its ops in their order, and its module calls nest.
    # The fold that gives the peak, so that a file whose counts of holders go below zero is found by the code that would
    # be wrong with it. ``once`` is for handles and instances, which begin and end once.
    fold = Fold(program)
    entered: list[int] = []
    ran, begun, once = 0, set(), set()
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP:
            if arg != ran:
                return "its ops do not run one after the other"
            ran += 1
        elif code == Event.ENTER:
            parent, scope = entered[-1] if entered else ROOT_SCOPE, program.scopes[arg]
            if arg in begun or scope.first_op != ran or scope.parent != parent:
                return "a module call does not begin where it says"
            begun.add(arg)
            entered.append(arg)
        elif code == Event.EXIT:
            if not entered or entered.pop() != arg or program.scopes[arg].end_op != ran:
                return "a module call does not end where it says"
        elif code in _ONCE:
            if (code, arg) in once:
                return "a tensor is saved, or taken back, twice"
            once.add((code, arg))
        # At each event, since a later allocation could hide it.
        if fold.live < 0:
            return "it frees more than there is"
    if ran != len(program.ops) or entered or len(begun) != len(program.scopes):
        return "an op or a module call is not in its events"
    # A storage of 0 bytes leaves the sum as it is, so the counts are looked at as well.
    return "it frees more than there is" if min(fold.holders.values(), default=0) < 0 else None


_ONCE = (Event.PACK, Event.RELEASE, Event.UNPACK, Event.DROP)


def _tensor(program: Program) -> str | None:
    """Find a tensor of a type that torch does not have."""
    return unknown_type(tensor.dtype for tensor in program.tensors)


def unknown_type(names: Iterable[str]) -> str | None:
    """Name a type that torch does not have, as ``first_problem`` says it; None if there are all."""
    for name in set(names):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            return f"it has tensors of type {name[:40]!r}"
    return None


def _arguments(program: Program) -> str | None:
    """Find an op whose arguments are no call."""
    for op in program.ops:
        # No JSON, JSON that is no pair, or lists within lists without end.
        try:
            args, kwargs = op.call
        except (RecursionError, TypeError, ValueError):
            return f"the arguments of {op.name[:80]} are not JSON"
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            return f"the arguments of {op.name[:80]} are not arguments"
        if not all(0 <= i < len(op.inputs) for i in _tensors_in([args, kwargs])):
            return f"the arguments of {op.name[:80]} refer to a tensor that it does not have"
    return None


def _tensors_in(value: object) -> Iterable[int]:
    if isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        # An object with this key alone is a tag of ``Op.call``. ``type``, since True is an integer to Python.
        if value.keys() == {"tensor"}:
            index = value["tensor"]
            yield index if type(index) is int else -1
        else:
            for item in value.values():
                yield from _tensors_in(item)
