"""A step as a program: its storages, tensors, ops and module calls, and the events in the order they happened.

A program keeps apart *why* a storage is alive: because Python or C++ code holds a tensor on it (``ALLOC`` to ``FREE``)
or because autograd keeps it for the backward pass (a handle, ``PACK`` to ``RELEASE``). Recomputation changes only the
second, so the step with any plan can be derived from the program of the step without one.

Every choice is a rewrite: a :class:`Patch` puts other events in the place of some, adds ops and storages, resizes
storages. ``program.with_(patch)`` is a program again. Ops, storages and handles keep their indices through a rewrite;
what is added comes after them. So "op 17" is op 17 in every rewriting, and the events alone say what runs when. What a
program costs is a fold over its events (``liveness.py``), which knows nothing of techniques.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from sacplan.core.call_sites import CallSites, OpSequence, described
from sacplan.core.elements import (
    ROOT_SCOPE,
    CallSite,
    Event,
    Events,
    Op,
    Patch,
    Phase,
    Scope,
    StorageKind,
    Tensor,
    is_inside,
)
from sacplan.core.liveness import Footprint, Liveness, footprint_of
from sacplan.core.recording import Recording
from sacplan.torch_compat.ops import is_computation
from sacplan.torch_compat.triton_kernels import TRITON_KERNEL_NAME

T = TypeVar("T")

__all__ = [
    "ROOT_SCOPE",
    "CallSite",
    "Event",
    "Events",
    "Op",
    "Patch",
    "Phase",
    "Program",
    "Scope",
    "StorageKind",
    "Tensor",
    "is_inside",
]


class Program(Recording, frozen=True, dict=True, weakref=True, forbid_unknown_fields=True):
    """One step; its fields are those of ``Recording``.

    A recorded program has its ops in the order in which they ran. In a rewritten one, added ops come after all others
    (``renumbered`` puts them in order).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone, without cached properties and results of ``derived`` functions."""
        return _program, tuple(getattr(self, name) for name in self.__struct_fields__)

    # --- rewriting -----------------------------------------------------------------------------------

    def with_(self, patch: Patch) -> Program:
        """Return the program with a rewrite applied. It shares the fields that the patch leaves alone."""
        # Stretches of events between two changed positions are copied as they are. A position beyond the last event
        # stands for the end of the step.
        events: list[tuple[int, int]] = []
        done = 0
        for position in sorted(patch.events):
            events += self.events[done:position]
            events += patch.events[position]
            done = position + 1
        events += self.events[done:]
        storages = {handle: storage for handle, (storage, _) in patch.changed_handles.items()}
        tensors = {handle: tensor for handle, (_, tensor) in patch.changed_handles.items()}
        unknown = (-1,) * len(patch.handle_storages)  # a handle that a rewrite adds is on no recorded tensor
        return msgspec.structs.replace(
            self,
            events=tuple(events),
            ops=_changed(self.ops, patch.changed_ops) + patch.ops,
            storage_bytes=_changed(self.storage_bytes, patch.resized) + patch.storage_bytes,
            storage_kinds=_changed(self.storage_kinds, patch.changed_kinds) + patch.storage_kinds,
            initial=self.initial + patch.initial,
            tensors=_changed(self.tensors, patch.changed_tensors) + patch.tensors,
            handle_storages=_changed(self.handle_storages, storages) + patch.handle_storages,
            handle_tensors=_changed(self.handle_tensors, tensors) + unknown,
            handle_ops=self.handle_ops + (patch.handle_ops or unknown),
            instance_handles=self.instance_handles + patch.instance_handles,
            parameter_bytes={**self.parameter_bytes, **patch.parameter_bytes},
            # In proportion, where a rewrite changes the size of the storage.
            resizes=tuple(
                (s, *(n * patch.resized.get(s, whole) // whole for n in n_bytes))
                for s, *n_bytes in self.resizes
                for whole in (self.storage_bytes[s] or 1,)
            ),
        )

    def renumbered(self) -> Program:
        """Return the same step with its ops in the order in which they run.

        Ops that no longer run are left out, and so are handles that autograd no longer takes.
        """
        # References to ops that were left out become -1.
        order = [arg for code, arg in self.events if code == Event.OP]
        place = {op: i for i, op in enumerate(order)} | {-1: -1}
        ops = tuple(
            msgspec.structs.replace(
                op, forward_of=place.get(op.forward_of, -1), recomputes=place.get(op.recomputes, -1)
            )
            if op.forward_of >= 0 or op.recomputes >= 0
            else op
            for op in map(self.ops.__getitem__, order)
        )
        # The ops of a module call are now those between its events, wherever a rewrite has moved them.
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        # Handles and instances whose events are gone lose their numbers; the others keep their order.
        taken = sorted({arg for code, arg in self.events if code == Event.PACK})
        handles = {handle: i for i, handle in enumerate(taken)}
        unpacked = sorted({arg for code, arg in self.events if code == Event.UNPACK})
        instances = {instance: i for i, instance in enumerate(unpacked)}
        events: list[tuple[int, int]] = []
        ran = 0
        for code, arg in self.events:
            if code == Event.OP:
                events.append((code, ran))
                ran += 1
                continue
            if code == Event.ENTER:
                first[arg] = ran
            elif code == Event.EXIT:
                end[arg] = ran
            elif code in (Event.PACK, Event.RELEASE):
                arg = handles[arg]
            elif code in (Event.UNPACK, Event.DROP):
                arg = instances[arg]
            events.append((code, arg))
        return msgspec.structs.replace(
            self,
            ops=ops,
            events=tuple(events),
            handle_storages=tuple(map(self.handle_storages.__getitem__, handles)),
            handle_tensors=tuple(map(self.handle_tensors.__getitem__, handles)),
            handle_ops=tuple(place.get(self.handle_ops[handle], -1) for handle in handles),
            instance_handles=tuple(handles[self.instance_handles[i]] for i in instances),
            scopes=tuple(
                msgspec.structs.replace(scope, first_op=first[i], end_op=end[i])
                for i, scope in enumerate(self.scopes)
            ),
        )

    # --- what follows from it ------------------------------------------------------------------------

    @cached_property
    def liveness(self) -> Liveness:
        """From when to when each thing of the program lives."""
        return Liveness(self)

    @cached_property
    def footprint(self) -> Footprint:
        """The peak of the step, and the ops that run a second time."""
        return footprint_of(self)

    @cached_property
    def left_out(self) -> frozenset[int]:
        """Ops that a rewrite took out of the events; none in a recorded program."""
        ran = {arg for code, arg in self.events if code == Event.OP}
        # An op runs at most once (a second run is an op of its own), so equal counts mean that all ran.
        return frozenset() if len(ran) == len(self.ops) else frozenset(range(len(self.ops))) - ran

    @cached_property
    def overwritten(self) -> Mapping[int, int]:
        """Storages that an in-place write replaces, and the op that made each (see ``Op.replaces``)."""
        return {op.replaces: self.writer[op.replaces] for op in self.ops if op.replaces >= 0}

    @cached_property
    def readers(self) -> Mapping[int, frozenset[int]]:
        """By storage, the ops of the forward pass that read it."""
        found: dict[int, set[int]] = defaultdict(set)
        for i, op in enumerate(self.ops):
            if op.phase == Phase.FORWARD:
                for s in op.reads:
                    found[s].add(i)
        return {s: frozenset(readers) for s, readers in found.items()}

    @cached_property
    def calls(self) -> dict[str, tuple[int, ...]]:
        """By module name, its calls in the order of execution, without those inside of a call of the same module."""
        by_fqn: dict[str, list[int]] = defaultdict(list)
        for i, scope in enumerate(self.scopes):
            if scope.fqn not in (self.scopes[j].fqn for j in self.ancestors(i)):
                by_fqn[scope.fqn].append(i)
        return {fqn: tuple(scopes) for fqn, scopes in by_fqn.items()}

    def ancestors(self, scope: int) -> Iterator[int]:
        """Yield the scopes around a scope, innermost first, without the scope itself."""
        scope = self.scopes[scope].parent if scope != ROOT_SCOPE else ROOT_SCOPE
        while scope != ROOT_SCOPE:
            yield scope
            scope = self.scopes[scope].parent

    @cached_property
    def outermost_modules(self) -> tuple[str, ...]:
        """The modules that no other module calls: the model itself, or parts of it that a loss function calls."""
        return tuple(dict.fromkeys(scope.fqn for scope in self.scopes if scope.parent == ROOT_SCOPE))

    def outermost_module(self, scope: int) -> str | None:
        """Return the module of the outermost call around a scope, or of itself; None outside of all."""
        return None if scope == ROOT_SCOPE else self.scopes[(scope, *self.ancestors(scope))[-1]].fqn

    def common_scope(self, scopes: Iterable[int]) -> int:
        """Return the innermost module call that contains all of these, or is one of them; -1 if there is none."""
        # An op outside of all calls has an empty path, so that nothing is common.
        paths = [{scope, *self.ancestors(scope)} - {ROOT_SCOPE} for scope in scopes]
        # Parents come first, so the innermost common call has the highest index.
        return max(set.intersection(*paths), default=ROOT_SCOPE) if paths else ROOT_SCOPE

    def ops_in(self, scope: int) -> range:
        """Return the ops that ran in one module call."""
        return range(self.scopes[scope].first_op, self.scopes[scope].end_op)

    def sites(self, scope: int) -> Mapping[int, CallSite]:
        """Return the call sites of the forward ops of one module call, by op. Cached, since every plan needs them."""
        if scope not in self._sites:
            seen: dict[tuple[str, str], int] = defaultdict(int)
            found: dict[int, CallSite] = {}
            for i, places, _ in self._places(scope):
                name, place = self.ops[i].name, places.place
                found[i] = CallSite(name, seen[place, name], place)
                seen[place, name] += 1
            self._sites[scope] = found
        return self._sites[scope]

    @cached_property
    def _sites(self) -> dict[int, dict[int, CallSite]]:
        """Call sites by module call, as far as they were asked for."""
        return {}

    def sequence(self, scope: int) -> OpSequence:
        """Return the forward ops of one module call that compute something, place by place."""
        found: list[tuple[str, str, list[str]]] = []
        for i, places, computes in self._places(scope):
            op = self.ops[i]
            if not computes:
                continue
            if not found or found[-1][1] != places.place:
                found.append((places.caller, places.place, []))  # the op before was in another place
            found[-1][2].append(described(op.name, [len(self.tensors[t].shape) for t in op.inputs]))
        return tuple((caller, place, tuple(ops)) for caller, place, ops in found)

    def _places(self, scope: int) -> Iterator[tuple[int, CallSites, bool]]:
        """Yield each forward op of one module call, its place, and whether it computes something.

        The place is that of one ``CallSites``, which moves on with the ops: read it before the next op. Only ops that
        compute something move it, so a view has the place of the op before it.
        """
        # Names relative to the unit, so that equal layers have equal call sites.
        unit = self.scopes[scope].fqn
        prefix = len(unit) + 1 if unit else 0
        # The calls around an op, up to ``scope``. Calls of modules whose names do not begin with the unit's (a shared
        # module from elsewhere in the model) are passed over: they have no name relative to the unit.
        around: dict[int, tuple[tuple[Hashable, str], ...]] = {scope: (), ROOT_SCOPE: ()}

        def calls(inner: int) -> tuple[tuple[Hashable, str], ...]:
            if inner not in around:
                outer, fqn = calls(self.scopes[inner].parent), self.scopes[inner].fqn
                around[inner] = (*outer, (inner, fqn[prefix:])) if is_inside(fqn, unit) else outer
            return around[inner]

        places = CallSites()
        for i in self.ops_in(scope):
            op = self.ops[i]
            # The range of a call still has the ops that a rewrite has left out.
            if op.phase == Phase.FORWARD and i not in self.left_out:
                # Launches of Triton kernels move no place: a step with a plan does not show them.
                computes = is_computation(op.name) and op.name != TRITON_KERNEL_NAME
                if computes:
                    places.at(calls(op.scope))
                yield i, places, computes

    def call_sites(self, fqn: str) -> dict[CallSite, tuple[int, ...]]:
        """Return, by call site, the forward ops of a module: one op of each call that has the site."""
        found: dict[CallSite, list[int]] = defaultdict(list)
        for scope in self.calls.get(fqn, ()):
            for i, site in self.sites(scope).items():
                found[site].append(i)
        return {site: tuple(ops) for site, ops in found.items()}

    def outermost_calls(self, but_of: Collection[str]) -> dict[int, int]:
        """Return, by scope, the outermost call of none of these modules, around the scope or itself; -1 if none is."""
        found = {ROOT_SCOPE: ROOT_SCOPE}
        for i, scope in enumerate(self.scopes):  # parents come first
            outer = found[scope.parent]
            found[i] = i if outer == ROOT_SCOPE and scope.fqn not in but_of else outer
        return found

    def depends(self, later: Collection[int], earlier: Collection[int]) -> bool:
        """Whether one of the ops ``later`` reads, directly or through others, an output of one of ``earlier``."""
        # One pass in the order of execution: what follows from ``earlier`` is marked, until one of ``later`` reads it.
        marked: set[int] = set()
        # ``min`` and ``max`` need an element.
        if not later or not earlier:
            return False
        for i in range(min(earlier), max(later) + 1):
            op = self.ops[i]
            reads = not marked.isdisjoint(op.reads)
            if reads and i in later:
                return True
            if reads or i in earlier:
                # A write in place hands values on just as an output does.
                marked.update(op.writes, op.mutates)
        return False

    @cached_property
    def forward_ms(self) -> float:
        """Time of the forward pass, loss included."""
        return sum(op.time_ms for op in self._run() if op.phase == Phase.FORWARD)

    @cached_property
    def step_ms(self) -> float:
        """Time of all ops of the step."""
        return sum(op.time_ms for op in self._run())

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return sum(op.flops for op in self._run())

    def _run(self) -> Iterator[Op]:
        """Yield the ops that run: a rewrite may leave some out."""
        return (self.ops[arg] for code, arg in self.events if code == Event.OP)


def _changed(things: tuple[T, ...], by: Mapping[int, T]) -> tuple[T, ...]:
    """Return a tuple with some of its entries replaced."""
    # Most patches leave most fields alone: programs share these.
    if not by:
        return things
    found = list(things)
    for index, thing in by.items():
        found[index] = thing
    return tuple(found)


def _program(*fields: Any) -> Program:
    return Program(*fields)
