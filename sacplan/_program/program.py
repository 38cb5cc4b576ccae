"""The recording of one training step, op by op: the plain value that everything else reads.

A recording keeps apart *why* a storage is alive: because Python or C++ code holds a tensor on it
(its natural life, ``ALLOC`` to ``FREE``) or because autograd keeps it for the backward pass (a
handle, ``PACK`` to ``RELEASE``). A plan changes only the second, so the step with any plan applied
can be replayed from here without the model (see ``_recompute/replay.py``).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from sacplan.errors import TraceError

SCHEMA_VERSION = 1

ROOT_SCOPE = -1

CallSite = tuple[str, int]
"""Op name and occurrence of it within one call of a unit."""


def times_of(sites: Collection[CallSite]) -> Mapping[CallSite, int]:
    """Discarded call sites and how often each is let go: what a mapping says, else once."""
    return sites if isinstance(sites, Mapping) else dict.fromkeys(sites, 1)


class StorageKind(IntEnum):
    """What a storage is for."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    ACTIVATION = 3
    TEMPORARY = 4
    OPTIMIZER_STATE = 5
    OTHER = 6


class Phase(IntEnum):
    """The part of a training step in which an op runs."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Event(IntEnum):
    """What the event stream is made of; each comes with one integer."""

    ALLOC = 0  # storage: first seen, not made by an op we saw
    FREE = 1  # storage: nobody but autograd holds it any more
    OP = 2  # op: allocates what it writes
    PACK = 3  # handle: autograd begins to keep a storage
    RELEASE = 4  # handle: autograd lets go
    UNPACK = 5  # instance: autograd asks for the tensor of a handle
    DROP = 6  # instance: what was handed out is gone
    ENTER = 7  # scope: the forward of a module begins
    EXIT = 8  # scope: it ends


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched op.

    Attributes:
        name: overload name, ``"aten.mm.default"``.
        phase: forward, backward or optimizer step.
        scope: the innermost module call it belongs to (index into ``Program.scopes``), or -1.
        time_ms: predicted or measured time.
        flops: floating-point operations (a multiply-add is two).
        workspace_bytes: what the kernel allocates inside and frees before it returns.
        reads: storages it takes, in argument order.
        writes: storages it allocates.
        mutates: storages it writes in place.
        recomputable: running it again gives the same values and has no other effect.
        state_bytes: generator state that a recipe of it keeps on the device.
        replaces: for an op that writes in place, the version of the storage that it overwrites: its first output
            takes over these bytes. It can run again only if that version is made again. -1: none.
    """

    name: str
    phase: Phase
    scope: int
    time_ms: float
    flops: int
    workspace_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    recomputable: bool
    state_bytes: int = 0
    replaces: int = -1


@dataclass(frozen=True, slots=True)
class Scope:
    """One call of a module's forward.

    Attributes:
        fqn: the module's name in ``named_modules()`` ("" for the model itself).
        parent: scope of the calling module, or -1.
        first_op, end_op: the ops that ran in it are ``ops[first_op:end_op]``.
        input_bytes, output_bytes: tensors that went in and came out.
    """

    fqn: str
    parent: int
    first_op: int
    end_op: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Program:
    """One step: its storages, ops, module calls, and the stream of events in the order they happened.

    Attributes:
        storage_bytes: size of each storage as the device's allocator rounds it.
        storage_kinds: what each is for.
        initial: storages alive when the step began.
        ops, scopes: see ``Op`` and ``Scope``.
        events: pairs (``Event``, index), in order.
        handle_storages: for each handle, the storage that autograd keeps.
        instance_handles: for each unpacked instance, its handle.
        backward_order: scopes in the order in which their backward began.
        leaf_fqns: modules without children.
        parameter_bytes: module to the bytes of its parameters, those of its children included.
    """

    storage_bytes: tuple[int, ...]
    storage_kinds: tuple[StorageKind, ...]
    initial: tuple[int, ...]
    ops: tuple[Op, ...]
    scopes: tuple[Scope, ...]
    events: tuple[tuple[int, int], ...]
    handle_storages: tuple[int, ...]
    instance_handles: tuple[int, ...]
    backward_order: tuple[int, ...]
    leaf_fqns: frozenset[str] = field(default_factory=frozenset)
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def writer(self) -> dict[int, int]:
        """The op that made each storage (storages that no op made are absent)."""
        return {s: i for i, op in enumerate(self.ops) for s in op.writes}

    @cached_property
    def inside_bytes(self) -> tuple[int, ...]:
        """By op, what is alive while it runs beside its arguments and outputs: workspace, less what it overwrites."""
        return tuple(
            op.workspace_bytes - (self.storage_bytes[op.replaces] if op.replaces >= 0 else 0)
            for op in self.ops
        )

    @cached_property
    def overwritten(self) -> Mapping[int, int]:
        """Storages that an in-place write replaces, and the op that made each (see ``Op.replaces``)."""
        return {op.replaces: self.writer[op.replaces] for op in self.ops if op.replaces >= 0}

    @cached_property
    def readers_of_overwritten(self) -> Mapping[int, frozenset[int]]:
        """By storage that an in-place write replaces, the ops of the forward pass that read it."""
        found: dict[int, set[int]] = {s: set() for s in self.overwritten}
        for i, op in enumerate(self.ops):
            if op.phase == Phase.FORWARD:
                for s in op.reads:
                    if s in found:
                        found[s].add(i)
        return {s: frozenset(readers) for s, readers in found.items()}

    @cached_property
    def calls(self) -> dict[str, tuple[int, ...]]:
        """Scopes by module name, in the order of execution; a call inside a call of the same module is left out."""
        by_fqn: dict[str, list[int]] = defaultdict(list)
        for i, scope in enumerate(self.scopes):
            if scope.fqn not in (self.scopes[j].fqn for j in self.ancestors(i)):
                by_fqn[scope.fqn].append(i)
        return {fqn: tuple(scopes) for fqn, scopes in by_fqn.items()}

    def ancestors(self, scope: int) -> Iterator[int]:
        """The scopes around one, innermost first, itself not included."""
        scope = self.scopes[scope].parent if scope != ROOT_SCOPE else ROOT_SCOPE
        while scope != ROOT_SCOPE:
            yield scope
            scope = self.scopes[scope].parent

    def common_scope(self, scopes: Iterable[int]) -> int:
        """The innermost module call that all these are in or are, or -1."""
        common: list[int] | None = None
        for scope in scopes:
            path = [scope, *self.ancestors(scope)][::-1] if scope != ROOT_SCOPE else []
            if common is None:
                common = path
            else:
                same = 0
                while same < min(len(common), len(path)) and common[same] == path[same]:
                    same += 1
                common = common[:same]
        return common[-1] if common else ROOT_SCOPE

    def sites(self, scope: int) -> dict[int, CallSite]:
        """Op index to call site (op name, occurrence within this call), for the ops of one module call."""
        seen: dict[str, int] = defaultdict(int)
        found: dict[int, CallSite] = {}
        s = self.scopes[scope]
        for i in range(s.first_op, s.end_op):
            name = self.ops[i].name
            found[i] = (name, seen[name])
            seen[name] += 1
        return found

    @cached_property
    def handle_scopes(self) -> tuple[int, ...]:
        """For each handle, the innermost module call in which autograd took it."""
        found = [ROOT_SCOPE] * len(self.handle_storages)
        stack = [ROOT_SCOPE]
        for code, arg in self.events:
            if code == Event.ENTER:
                stack.append(arg)
            elif code == Event.EXIT:
                stack.pop()
            elif code == Event.PACK:
                found[arg] = stack[-1]
        return tuple(found)

    @cached_property
    def outlives_forward(self) -> frozenset[int]:
        """Storages that something other than autograd still holds when the backward pass begins."""
        alive = set(self.initial)
        for code, arg in self.events:
            if code == Event.OP:
                if self.ops[arg].phase != Phase.FORWARD:
                    break
                alive.update(self.ops[arg].writes)
            elif code == Event.ALLOC:
                alive.add(arg)
            elif code == Event.FREE:
                alive.discard(arg)
        return frozenset(alive)

    @property
    def forward_ms(self) -> float:
        """Time of the forward pass, loss included."""
        return sum(op.time_ms for op in self.ops if op.phase == Phase.FORWARD)

    @property
    def step_ms(self) -> float:
        """Time of all ops of the step."""
        return sum(op.time_ms for op in self.ops)

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return sum(op.flops for op in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; ``from_dict`` reads them back."""
        names = sorted({op.name for op in self.ops})
        index = {name: i for i, name in enumerate(names)}
        return {
            "storage_bytes": self.storage_bytes,
            "storage_kinds": [int(k) for k in self.storage_kinds],
            "initial": self.initial,
            "op_names": names,
            "ops": [
                [
                    index[o.name],
                    int(o.phase),
                    o.scope,
                    o.time_ms,
                    o.flops,
                    o.workspace_bytes,
                    o.reads,
                    o.writes,
                    o.mutates,
                    int(o.recomputable),
                    o.state_bytes,
                    o.replaces,
                ]
                for o in self.ops
            ],
            "scopes": [
                [s.fqn, s.parent, s.first_op, s.end_op, s.input_bytes, s.output_bytes] for s in self.scopes
            ],
            "events": [x for event in self.events for x in event],
            "handle_storages": self.handle_storages,
            "instance_handles": self.instance_handles,
            "backward_order": self.backward_order,
            "leaf_fqns": sorted(self.leaf_fqns),
            "parameter_bytes": dict(self.parameter_bytes),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Program:
        """The inverse of ``to_dict``."""
        names = data["op_names"]
        flat = data["events"]
        return cls(
            storage_bytes=tuple(data["storage_bytes"]),
            storage_kinds=tuple(StorageKind(k) for k in data["storage_kinds"]),
            initial=tuple(data["initial"]),
            ops=tuple(
                Op(names[n], Phase(p), sc, t, f, w, tuple(r), tuple(wr), tuple(m), bool(rc), *rest)
                for n, p, sc, t, f, w, r, wr, m, rc, *rest in data["ops"]
            ),
            scopes=tuple(Scope(*s) for s in data["scopes"]),
            events=tuple(zip(flat[::2], flat[1::2], strict=True)),
            handle_storages=tuple(data["handle_storages"]),
            instance_handles=tuple(data["instance_handles"]),
            backward_order=tuple(data["backward_order"]),
            leaf_fqns=frozenset(data["leaf_fqns"]),
            parameter_bytes=data["parameter_bytes"],
        )


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        json.dump(data, file)


def read_json(path: str | Path, what: str, schema_version: int) -> dict[str, Any]:
    """Read what ``write_json`` wrote; ``TraceError`` where it is something else or of another version."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
    except (ValueError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not a sacplan {what}: {error}. Make it again with `.save()`.") from error
    if not isinstance(data, dict) or data.get("what") != what:
        found = data.get("what") if isinstance(data, dict) else type(data).__name__
        raise TraceError(f"{path} holds {found!r}, not a sacplan {what}.")
    if data.get("schema_version") != schema_version:
        raise TraceError(
            f"{path} has schema_version {data.get('schema_version')!r}; this sacplan reads {schema_version}. "
            f"Make the {what} again with this version."
        )
    return data
