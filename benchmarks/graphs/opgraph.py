"""A training step as a graph of ops with one tensor each, and the ``sacplan`` recording that it stands for.

    plan = sacplan.plan(profile_of(graph), f"{graph.store_all_peak * 6 // 10}B")

``profile_of(graph)`` is the ``Profile`` to plan for (``as_recording`` alone: its recording): the same ops, times and
bytes, one module call per layer and per half of a layer, and a tensor goes as soon as it is dead. So its replayed peak
without a plan is ``OpGraph.store_all_peak``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sacplan.core.fingerprint import Fingerprint
from sacplan.core.program import ROOT_SCOPE, Event, Op, Phase, Program, Scope, StorageKind
from sacplan.device.devices import resolve_device
from sacplan.profiling.profile import Profile


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """One tensor of the forward pass and the op that makes it.

    Attributes:
        name: of the op, without its layer.
        nbytes: size of the tensor.
        time_ms: time of the op.
        reads: forward ops whose tensors it takes.
        module: innermost module call, ``"layers.0.attn"``; "" outside any layer.
    """

    name: str
    nbytes: int
    time_ms: float
    reads: tuple[int, ...]
    module: str = ""


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """One op of the backward pass.

    Attributes:
        name, nbytes, time_ms, module: see ``ForwardOp``; the tensor is a gradient.
        saved: forward ops whose tensors it takes.
        reads: backward ops whose gradients it takes.
    """

    name: str
    nbytes: int
    time_ms: float
    saved: tuple[int, ...]
    reads: tuple[int, ...]
    module: str = ""


@dataclass(frozen=True)
class OpGraph:
    """A training step as ops with one tensor each, in the order in which they run; no parameters, no optimizer.

    Attributes:
        name: for tables.
        forward, backward: the ops.
    """

    name: str
    forward: tuple[ForwardOp, ...]
    backward: tuple[BackwardOp, ...]

    @cached_property
    def ops(self) -> tuple[ForwardOp | BackwardOp, ...]:
        """Both passes, in order."""
        return (*self.forward, *self.backward)

    @cached_property
    def saved(self) -> frozenset[int]:
        """The forward ops whose tensors the backward pass reads."""
        return frozenset(i for op in self.backward for i in op.saved)

    @property
    def forward_ms(self) -> float:
        """Time of the forward pass."""
        return sum(op.time_ms for op in self.forward)

    @property
    def step_ms(self) -> float:
        """Time of both passes."""
        return self.forward_ms + sum(op.time_ms for op in self.backward)

    @cached_property
    def joint_reads(self) -> tuple[tuple[int, ...], ...]:
        """The ops whose tensors each op takes, over both passes: backward op ``j`` is number ``len(forward) + j``."""
        first = len(self.forward)
        return (
            *(op.reads for op in self.forward),
            *((*(first + p for p in op.reads), *op.saved) for op in self.backward),
        )

    @cached_property
    def store_all_peak(self) -> int:
        """Peak in bytes if everything is kept until nobody reads it any more."""
        nbytes = [op.nbytes for op in self.ops]
        last_use = list(range(len(nbytes)))
        for at, reads in enumerate(self.joint_reads):
            for tensor in reads:
                last_use[tensor] = at
        dying: dict[int, list[int]] = defaultdict(list)
        for tensor, at in enumerate(last_use):
            dying[at].append(tensor)
        live = peak = 0
        for at, size in enumerate(nbytes):
            live += size
            peak = max(peak, live)
            live -= sum(nbytes[tensor] for tensor in dying[at])
        return peak


@dataclass(slots=True)
class Builder:
    """Builds a graph op by op; each call returns the index of its tensor within its pass."""

    name: str
    module: str = ""
    _forward: list[ForwardOp] = field(default_factory=list)
    _backward: list[BackwardOp] = field(default_factory=list)

    def forward(self, name: str, nbytes: int, time_ms: float, reads: Iterable[int] = ()) -> int:
        """Add a forward op in the current ``module``."""
        self._forward.append(ForwardOp(name, nbytes, time_ms, tuple(reads), self.module))
        return len(self._forward) - 1

    def backward(
        self, name: str, nbytes: int, time_ms: float, saved: Iterable[int], reads: Iterable[int] = ()
    ) -> int:
        """Add a backward op in the current ``module``, with the forward tensors and the gradients that it takes."""
        self._backward.append(BackwardOp(name, nbytes, time_ms, tuple(saved), tuple(reads), self.module))
        return len(self._backward) - 1

    def graph(self) -> OpGraph:
        """Return the graph."""
        return OpGraph(self.name, tuple(self._forward), tuple(self._backward))


# --- recordings --------------------------------------------------------------------------------


def profile_of(graph: OpGraph) -> Profile:
    """Make a ``Profile`` of a graph, for ``sacplan.plan``."""
    spec = resolve_device("h100")
    return Profile(
        recorded=as_recording(graph),
        fingerprint=Fingerprint(graph.name, (), ()),
        spec=spec.without_workspaces(),
        trace="fake",
        runtime="cost-model",
    )


def as_recording(graph: OpGraph) -> Program:
    """Make a recorded step of a graph: storage ``i`` and op ``i`` are number ``i`` of both passes together.

    Each backward op has a handle of its own for each tensor that it takes, as an autograd node has. Autograd takes it
    (``PACK``) in a module call that the backward op belongs to, after the first op there that reads the tensor. So a
    layer's input, which its first op saves, is packed inside the layer. FLOPs are 0: the graph does not know them.
    """
    return _Writer(graph).program()


class _Writer:
    """Writes the events of a graph's step: the forward pass with its module calls, then the backward pass."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.events: list[tuple[int, int]] = []
        self.scopes: list[tuple[str, int, int]] = []  # fqn, parent, first op
        self.ends: dict[int, int] = {}
        self.stack: list[int] = []
        self.op_scopes: list[int] = []
        self.handles: dict[tuple[int, int], int] = {}  # (backward op, forward op)
        self.handle_storages: list[int] = []
        self.handle_ops: list[int] = []
        self.packed_at = self._packed_at()

    def _packed_at(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by forward op, the (backward op, forward op) whose handles autograd takes there."""
        readers: list[list[int]] = [[] for _ in self.graph.forward]
        for i, op in enumerate(self.graph.forward):
            for tensor in op.reads:
                readers[tensor].append(i)
        found = defaultdict(list)
        for j, reader in enumerate(self.graph.backward):
            for i in reader.saved:
                touching = [k for k in readers[i] if self.graph.forward[k].module == reader.module]
                found[touching[0] if touching else i].append((j, i))
        return found

    def program(self) -> Program:
        graph = self.graph
        self._enter("", 0)
        dying = _last_reads([op.reads for op in graph.forward])
        for i, op in enumerate(graph.forward):
            self._move_to(op.module, i)
            self.op_scopes.append(self.stack[-1])
            self.events.append((Event.OP, i))
            for key in self.packed_at.get(i, ()):
                self.handles[key] = len(self.handle_storages)
                self.events.append((Event.PACK, len(self.handle_storages)))
                self.handle_storages.append(key[1])
                self.handle_ops.append(i)
            self.events.extend((Event.FREE, tensor) for tensor in dying[i])
        while self.stack:
            self._exit(len(graph.forward))
        instance_handles, backward_order = self._backward()
        return Program(
            storage_bytes=tuple(op.nbytes for op in graph.ops),
            storage_kinds=tuple(
                StorageKind.ACTIVATION if i in graph.saved else StorageKind.TEMPORARY
                for i in range(len(graph.ops))
            ),
            initial=(),
            tensors=(),
            ops=self._ops(),
            scopes=self._scopes(),
            events=tuple((int(code), arg) for code, arg in self.events),
            handle_storages=tuple(self.handle_storages),
            handle_tensors=(-1,) * len(self.handle_storages),
            handle_ops=tuple(self.handle_ops),
            instance_handles=instance_handles,
            backward_order=backward_order,
        )

    def _backward(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        graph, first = self.graph, len(self.graph.forward)
        dying = _last_reads([op.reads for op in graph.backward])
        calls: dict[str, int] = {fqn: scope for scope, (fqn, _, _) in enumerate(self.scopes)}  # the last call
        instances: list[int] = []
        order: dict[int, None] = {}
        for j, op in enumerate(graph.backward):
            scope = calls.get(op.module, 0)  # the root's call, where the module ran no forward op
            self.op_scopes.append(scope)
            # The backward pass of a call begins with its first op, after those of the calls around it.
            chain = []
            while scope != ROOT_SCOPE and scope not in order:
                chain.append(scope)
                scope = self.scopes[scope][1]
            order.update(dict.fromkeys(reversed(chain)))
            here = range(len(instances), len(instances) + len(op.saved))
            instances.extend(self.handles[j, i] for i in op.saved)
            self.events.extend((Event.UNPACK, instance) for instance in here)
            self.events.append((Event.OP, first + j))
            for instance in here:
                self.events.append((Event.DROP, instance))
                self.events.append((Event.RELEASE, instances[instance]))
            self.events.extend((Event.FREE, first + tensor) for tensor in dying[j])
        return tuple(instances), tuple(order)

    def _enter(self, fqn: str, op: int) -> None:
        parent = self.stack[-1] if self.stack else ROOT_SCOPE
        self.stack.append(len(self.scopes))
        self.scopes.append((fqn, parent, op))
        self.events.append((Event.ENTER, self.stack[-1]))

    def _exit(self, op: int) -> None:
        scope = self.stack.pop()
        self.ends[scope] = op
        self.events.append((Event.EXIT, scope))

    def _move_to(self, module: str, op: int) -> None:
        """Leave and enter module calls until ``module`` is the innermost one."""
        wanted = ["", *_callers(module)]
        while [self.scopes[s][0] for s in self.stack] != wanted[: len(self.stack)]:
            self._exit(op)
        for fqn in wanted[len(self.stack) :]:
            self._enter(fqn, op)

    def _ops(self) -> tuple[Op, ...]:
        last_forward = len(self.graph.forward) - 1
        return tuple(
            Op(
                name=op.name,
                phase=Phase.FORWARD if i <= last_forward else Phase.BACKWARD,
                scope=scope,
                time_ms=op.time_ms,
                flops=0,
                workspace_bytes=0,
                reads=reads,
                writes=(i,),
                mutates=(),
                recomputable=i <= last_forward,
            )
            for i, (op, scope, reads) in enumerate(
                zip(self.graph.ops, self.op_scopes, self.graph.joint_reads, strict=True)
            )
        )

    def _scopes(self) -> tuple[Scope, ...]:
        found = []
        ops = self.graph.forward
        for scope, (fqn, parent, start) in enumerate(self.scopes):
            end = self.ends[scope]
            inputs = {t for op in ops[start:end] for t in op.reads if t < start}
            outputs = {t for op in ops[end:] for t in op.reads if start <= t < end}
            found.append(
                Scope(
                    fqn=fqn,
                    parent=parent,
                    first_op=start,
                    end_op=end,
                    input_bytes=sum(ops[t].nbytes for t in inputs),
                    output_bytes=sum(ops[t].nbytes for t in outputs),
                )
            )
        return tuple(found)


def _last_reads(reads: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return, by op of one pass, the tensors that nobody in this pass reads after it."""
    last = list(range(len(reads)))
    for at, tensors in enumerate(reads):
        for tensor in tensors:
            last[tensor] = at
    dying: list[list[int]] = [[] for _ in reads]
    for tensor, at in enumerate(last):
        dying[at].append(tensor)
    return dying


def _callers(module: str) -> list[str]:
    """Return the modules whose calls are around an op, outermost first. ``layers`` is a list, which nobody calls."""
    parts = module.split(".") if module else []
    return [
        ".".join(parts[: n + 1])
        for n in range(len(parts))
        if n + 1 == len(parts) or not parts[n + 1].isdigit()
    ]
