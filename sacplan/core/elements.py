"""The elements of a program: kinds of storages, tensors, ops, module calls, events; and patches of them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from sacplan.core.files import Count, MaybeIndex, Milliseconds, Name

# The scope of ops outside of all module calls, and the parent of an outermost call.
ROOT_SCOPE = -1

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)

# A part of a dotted name that is a number and nothing else: a dot or an end is on either side.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(fqn: str) -> str:
    """Return the name of a module or a parameter with ``*`` for its places in lists: the same for equal layers.

    ``"layers.3.mlp"`` becomes ``"layers.*.mlp"``.
    """
    return _NUMBER.sub("*", fqn)


def names_module(pattern: str, fqn: str) -> bool:
    """Whether a pattern (``fnmatch``) matches a module; parts ``_orig_mod`` (from ``torch.compile``) are ignored."""
    return fnmatchcase(fqn, ".".join(part for part in pattern.split(".") if part != "_orig_mod"))


def by_pattern(values: Mapping[K, V], among: Mapping[K, V], pattern: Callable[[K], K]) -> dict[K, V]:
    """Return ``values`` by pattern where all entries of ``among`` with that pattern are equal, else by their keys."""
    alike: dict[K, set[V]] = defaultdict(set)
    for key, value in among.items():
        alike[pattern(key)].add(value)
    # A pattern stands for every entry of ``among`` that has it, not only for those that are in ``values``.
    return {pattern(key) if len(alike[pattern(key)]) == 1 else key: value for key, value in values.items()}


class CallSite(NamedTuple):
    """The place of an op in one call of a unit. Ops elsewhere in the call do not change it.

    Attributes:
        op: name with the overload, ``"aten.mm.default"``.
        occurrence: its position among the ops of that name in the same place, from 0.
        place: ``"attn"`` within the call of that module, ``"after attn"`` once it has returned to its caller,
            ``"attn (2)"`` in its second call; ``""`` before the first. See ``call_sites.py``.
    """

    op: Name
    occurrence: Count
    place: str = ""


# Files hold the numbers of these three enumerations, so a new member gets the next number.
class StorageKind(IntEnum):
    """The purpose of a storage."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    ACTIVATION = 3
    TEMPORARY = 4
    OPTIMIZER_STATE = 5
    OTHER = 6
    HOST = 7  # in the memory of the host, not of the device


class Phase(IntEnum):
    """The part of a step in which an op runs."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Event(IntEnum):
    """The kinds of events; each event has one of them and one index."""

    ALLOC = 0  # storage: first seen, not made by an op we saw
    FREE = 1  # storage: nobody but autograd holds it any more
    OP = 2  # op: allocates what it writes
    PACK = 3  # handle: autograd begins to keep a storage
    RELEASE = 4  # handle: autograd releases it
    UNPACK = 5  # instance: autograd asks for the tensor of a handle
    DROP = 6  # instance: the tensor that it was given is gone
    ENTER = 7  # scope: the forward of a module begins
    EXIT = 8  # scope: it ends
    RESIZE = 9  # resize: a storage gets another size, whoever holds it


Events = tuple[tuple[Count, Count], ...]
"""Pairs (``Event``, index)."""


def is_inside(fqn: str, module: str) -> bool:
    """Whether a name is strictly inside of a module, by path component; ``""`` contains all others."""
    return fqn.startswith(module + ".") if module else fqn != ""


def outermost(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are inside of none of the others."""
    among = tuple(names)
    return tuple(name for name in among if not any(is_inside(name, other) for other in among))


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A view of a storage.

    Attributes:
        storage: index into ``Program.storage_bytes``.
        dtype: for example ``"float32"``.
        shape, stride, offset: in elements.
    """

    storage: Count
    dtype: Name
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count

    @property
    def n_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


class Op(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One dispatched op.

    Attributes:
        name: overload name, ``"aten.mm.default"``.
        phase: forward, backward or optimizer step.
        scope: the innermost module call it belongs to (index into ``Program.scopes``), or -1.
        time_ms: predicted or measured time.
        flops: floating-point operations (a multiply-add is two).
        workspace_bytes: what the kernel allocates inside and frees before it returns.
        reads: storages whose values it needs, in argument order.
        writes: storages it allocates.
        mutates: storages it writes in place.
        recomputable: running it again gives the same values and has no other effect.
        state_bytes: size of the generator state that is kept on the device if a random op is to run again.
        replaces: for an op that writes in place, the version of the storage that it overwrites, whose bytes its first
            output takes over. The op can run again only if that version is made again. -1: none.
        inputs, outputs: tensors, in the order in which they stand in the arguments and results.
        arguments: the call as JSON, ``[args, kwargs]``; see ``call``.
        forward_of: of an op of the backward pass, the forward op whose gradient it computes (of a custom
            ``autograd.Function``, its first op), as autograd's sequence numbers tell it; -1 where there is none.
        recomputes: the op that this one runs again; -1 for an op of the recorded step.
        runs: how many ops of a loop over slices this op stands for; its time and FLOPs are their sums.
    """

    name: Name
    phase: Phase
    scope: MaybeIndex
    time_ms: Milliseconds
    flops: Count
    workspace_bytes: Count
    reads: tuple[Count, ...]
    writes: tuple[Count, ...]
    mutates: tuple[Count, ...]
    recomputable: bool
    state_bytes: Count = 0
    replaces: MaybeIndex = -1
    inputs: tuple[MaybeIndex, ...] = ()
    outputs: tuple[MaybeIndex, ...] = ()
    arguments: str = "[[],{}]"
    forward_of: MaybeIndex = -1
    recomputes: MaybeIndex = -1
    runs: Count = 1

    @property
    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments.

        A tensor is ``{"tensor": i}``, the ``i``-th of ``inputs``. Types and devices are ``{"dtype": "float32"}``,
        ``{"device": "cpu"}`` and the like. Anything else is the name of its class: ``{"object": "torch.Generator"}``.
        """
        args, kwargs = json.loads(self.arguments)
        return args, kwargs


class Scope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call of a module's forward.

    Attributes:
        fqn: the module's name in ``named_modules()`` ("" for the model itself).
        parent: scope of the calling module, or -1.
        first_op, end_op: the ops that ran in it are ``ops[first_op:end_op]``.
        input_bytes, output_bytes: tensors that went in and came out.
    """

    fqn: str
    parent: MaybeIndex
    first_op: Count
    end_op: Count
    input_bytes: Count
    output_bytes: Count


class Patch(msgspec.Struct, frozen=True):
    """A rewrite of some events of a program.

    New ops, storages and handles have the indices after those of the program, in the order in which they stand here.

    Attributes:
        events: by position, the events that replace the event at that position. Those at ``len(program.events)`` come
            at the end.
        ops: new ops.
        changed_ops: by index, ops that take the place of others.
        storage_bytes, storage_kinds: of new storages.
        initial: new storages that are alive when the step begins.
        tensors: new tensors.
        handle_storages, handle_ops: of new handles; ops may be left out.
        instance_handles: of new instances.
        changed_handles: by index, the storage and the tensor that a handle of the program is on instead.
        changed_tensors: by index, tensors that take the place of others.
        changed_kinds: storages of the program that get another kind.
        resized: storages of the program that get another size.
        parameter_bytes: modules whose parameters get another size.
    """

    events: Mapping[int, Events] = {}
    ops: tuple[Op, ...] = ()
    changed_ops: Mapping[int, Op] = {}
    storage_bytes: tuple[int, ...] = ()
    storage_kinds: tuple[StorageKind, ...] = ()
    initial: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    handle_storages: tuple[int, ...] = ()
    handle_ops: tuple[int, ...] = ()
    instance_handles: tuple[int, ...] = ()
    changed_handles: Mapping[int, tuple[int, int]] = {}
    changed_tensors: Mapping[int, Tensor] = {}
    changed_kinds: Mapping[int, StorageKind] = {}
    resized: Mapping[int, int] = {}
    parameter_bytes: Mapping[str, int] = {}
