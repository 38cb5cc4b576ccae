"""A recorded step as a graph of values: classes of equal ops, what flows between them, what is alive when.

It is built in one pass over the events, and has what the integer program needs:

- *Classes.* Equal layers have equal ops at the same sites (``_Sites``); these are one class and get one strategy. So a
  model of 32 layers is as large a problem as one of 2. The price is that layers cannot differ.
- *Values.* The outputs of classes. A view needs no choice of its own: its value *follows* that of its base. Tensors
  that do not depend on parameters, such as the batch, have no value: every rank has all of them.
- *Flows.* A value and the users of it in one phase. Redistributions happen on flows.
- *Holds.* A storage and the moments between which it is alive, cut like the value that was written to it last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from sacplan._program.calls import Opaque, call_with, dtype_of
from sacplan._program.elements import pattern_of
from sacplan._program.liveness import Fold
from sacplan._program.program import ROOT_SCOPE, Event, Op, Phase, Program, Tensor
from sacplan._ranks.shards import Parameter
from sacplan._shard.optimizer import together
from sacplan._torch.calls import Call
from sacplan._torch.ops import op_named

GRADIENT = -1
"""In place of a phase: the flow of a gradient to the layout of its parameter."""


_SHAPED_LIKE = frozenset(
    f"aten.{name}.default"
    for name in (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    )
)
"""Ops that read only the shape and dtype of a tensor. The result gets its layout."""


class PlacedCall:
    """A recorded call of an op, with tensors on the meta device.

    Attributes:
        name: of the op, with the overload.
        inputs, outputs: the tensors in arguments, those returned.
        placed: by input, whether it depends on parameters. Every rank has all of the others.
    """

    def __init__(self, op: Op, program: Program, placed: tuple[bool, ...]) -> None:
        self.name = op.name
        self.placed = placed
        self._arguments = op.arguments
        self.inputs = tuple(meta_tensor(program.tensors[t]) for t in op.inputs)
        self.outputs = tuple(meta_tensor(program.tensors[t]) for t in op.outputs)

    @cached_property
    def call(self) -> Call | None:
        """The call; None if this process has no such op, or the recording does not hold one of its arguments."""
        return self.on(self.inputs, self.outputs)

    def on(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Call | None:
        """Return the same call of other tensors; None as for ``call``."""
        func = op_named(self.name)
        if func is None:
            return None
        try:
            args, kwargs = call_with(self._arguments, inputs)
        except Opaque:
            return None
        return Call(func, args, kwargs, _returned(Call(func, args, kwargs), outputs))


def _returned(call: Call, outputs: Sequence[Any]) -> list[Any]:
    """Return the results of an op: its outputs, and None where it was asked for none (``output_mask``)."""
    mask = call.arguments.get("output_mask")
    # Such as ``convolution_backward``, which always returns three results; a recording has the tensors among
    # them.
    if mask is None or len(outputs) != sum(mask):
        return list(outputs)
    left = iter(outputs)
    return [next(left) if wanted else None for wanted in mask]


def meta_tensor(tensor: Tensor) -> torch.Tensor:
    """Return a meta tensor like a recorded one."""
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype_of(tensor), device="meta")


@dataclass(eq=False, slots=True)
class OpClass:
    """Ops, or parameters, that get one strategy: those at the same place of equal layers.

    Attributes:
        index: among the classes.
        name: of the op, or the pattern of the parameter's name.
        unit: pattern of the innermost module; of a parameter, of the one that has it.
        phase: in which the ops run.
        follows: whether the ops run by the layouts of their inputs: a plan cannot ask in the backward pass, nor outside
            of all modules.
        call: that of the first; None of parameters.
        shapes: of the outputs; of the parameter.
        dtypes: of the same.
        ops: of the program.
        parameters: of the model.
        inputs: for each op, the value of each tensor argument; None where every rank has all of it.
    """

    index: int
    name: str
    unit: str
    phase: int
    follows: bool
    call: PlacedCall | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    ops: list[int] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    inputs: list[tuple[int | None, ...]] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a class of parameters: its strategies are their layouts."""
        return self.call is None

    @property
    def count(self) -> int:
        """The number of ops or parameters."""
        return len(self.ops) + len(self.parameters)

    def __repr__(self) -> str:
        """Return the unit and the op, or the parameters."""
        return self.name if self.is_parameter else f"{self.unit}:{self.name}"


class StrategyValue(NamedTuple):
    """A tensor, the same in each of the equal layers.

    Attributes:
        producer: the class that computes it.
        output: of that, which.
        parent: the value that it follows; -1 if it is an output itself.
        call: by which it follows.
        result: of that call, which.
    """

    producer: int
    output: int
    parent: int = -1
    call: int = -1
    result: int = 0


class User(NamedTuple):
    """An argument of the ops of a class; of parameters, their gradient."""

    user: int
    position: int


class ValueUse(NamedTuple):
    """A flow: a value and those who use it in one phase. It is moved at most once to each layout that they want."""

    value: int
    phase: int
    users: frozenset[User]


class Hold(NamedTuple):
    """Bytes alive from one moment until before another.

    Attributes:
        value: they are cut as this one is; None if every rank has them all.
        n_bytes: of the unsharded tensor.
        start, end: moments, positions among the ops of the step.
    """

    value: int | None
    n_bytes: int
    start: int
    end: int


class GradientMove(NamedTuple):
    """A gradient that gets the layout of its parameter. If it has another one before, both are alive then.

    Attributes:
        value: the gradient.
        home: the parameter.
        moment: when.
    """

    value: int
    home: int
    moment: int


class StrategyGraph:
    """The graph of a recorded step, see above.

    Args:
        program: of the whole model on one device.
        parameters: of the model.

    Attributes:
        classes, values, calls: see their types; ``StrategyValue.call`` indexes calls.
        flows: how often each is in the step.
        holds: the storages that are alive, and when.
        gradient_moves: the gradients that get the layouts of their parameters.
        homes: by storage of a parameter, its class.
        optimizer_ms: by class of parameters, the time of the optimizer for all of them.
        order: the ops as they run; a moment is a position in it.
        moments: how many there are.
        class_of: by op, its class, if it has one.
        call_of: by op that depends on parameters, which of ``calls`` it is.
        at: by class and values of its arguments, the moments at which such ops run.
        rest_ms: of ops that depend on no parameter.
    """

    def __init__(self, program: Program, parameters: Sequence[Parameter]) -> None:
        self.program = program
        self.parameters = tuple(parameters)
        self.classes: list[OpClass] = []
        self.values: list[StrategyValue] = []
        self.calls: list[PlacedCall] = []
        self.homes: dict[int, int] = {}
        self.optimizer_ms: dict[int, float] = defaultdict(float)
        self.rest_ms = 0.0
        self.at: dict[tuple[int, tuple[int | None, ...]], list[int]] = defaultdict(list)
        self.class_of: dict[int, int] = {}
        self.call_of: dict[int, int] = {}
        self._class_of: dict[Hashable, int] = {}
        self._value_of: dict[StrategyValue, int] = {}
        self._call_of: dict[Hashable, int] = {}
        self._tensor_value: dict[int, int] = {}  # tensors of the program
        # By storage, in order: from which moment on it has which value.
        self._storage_value: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._uses: dict[tuple[int, int], set[User]] = defaultdict(set)
        self.gradient_moves: list[GradientMove] = []
        # By storage of a gradient or of the optimizer, that of the parameter.
        self._owner: dict[int, int] = {}
        self._add_parameters()
        self.order = [arg for code, arg in program.events if code == Event.OP]
        self.moments = len(self.order)
        self._add_ops()
        self._add_gradients()
        self.flows = self._flows()
        self.holds = tuple(self._holds())

    # --- classes and values --------------------------------------------------------------------------

    def _class(self, key: Hashable, **fields: Any) -> OpClass:
        if key not in self._class_of:
            self._class_of[key] = len(self.classes)
            self.classes.append(OpClass(len(self.classes), **fields))
        return self.classes[self._class_of[key]]

    def _value(self, value: StrategyValue) -> int:
        if value not in self._value_of:
            self._value_of[value] = len(self.values)
            self.values.append(value)
        return self._value_of[value]

    def _call(self, op: Op, inputs: tuple[int | None, ...]) -> int:
        tensors = self.program.tensors
        # Calls are equal if all that a strategy depends on is equal.
        key = (
            op.name,
            op.arguments,
            tuple((tensors[t].shape, tensors[t].stride, tensors[t].dtype) for t in (*op.inputs, *op.outputs)),
            placed := tuple(v is not None for v in inputs),
        )
        if key not in self._call_of:
            self._call_of[key] = len(self.calls)
            self.calls.append(PlacedCall(op, self.program, placed))
        return self._call_of[key]

    def _add_parameters(self) -> None:
        for p in self.parameters:
            name = pattern_of(p.name)
            dtype: torch.dtype = getattr(torch, p.dtype.rpartition(".")[2])
            found = self._class(
                ("parameter", name, p.shape, p.dtype, p.trainable),
                name=name,
                unit=name.rpartition(".")[0],
                phase=int(Phase.FORWARD),
                follows=False,
                call=None,
                shapes=(p.shape,),
                dtypes=(dtype,),
            )
            # Equal parameters of repeated layers are one class. Their value is alive from before the step
            # (moment -1).
            found.parameters.append(p)
            self.homes[p.storage] = found.index
            self._storage_value[p.storage].append((-1, self._value(StrategyValue(found.index, 0))))

    def home(self, storage: int) -> int:
        """Return the value of a parameter."""
        return self._value(StrategyValue(self.homes[storage], 0))

    def value_of(self, tensor: int) -> int | None:
        """Return the value of a tensor as it is so far; None if every rank has all of it."""
        if tensor not in self._tensor_value:
            found = self.program.tensors[tensor]
            home = self.homes.get(found.storage)
            # Not a parameter: plain so far. A tensor of another shape on its storage is a view of the
            # parameter that was made before the step, whose layout is not known.
            if home is None or self.classes[home].shapes[0] != found.shape:
                return None
            self._tensor_value[tensor] = self.home(found.storage)
        return self._tensor_value[tensor]

    def _add_ops(self) -> None:
        program, moment = self.program, -1
        sites = _Sites(program)
        optimizer: list[tuple[int, Op]] = []
        for code, arg in program.events:
            if code in (Event.ENTER, Event.EXIT):
                sites.step(code, arg)
            if code != Event.OP:
                continue
            moment += 1
            op = program.ops[arg]
            if op.phase == Phase.OPTIMIZER:
                # Paired at the end, when the storages of all gradients are known.
                optimizer.append((moment, op))
                continue
            inputs = tuple(map(self.value_of, op.inputs))
            # Of plain tensors alone: every rank does it in full, whatever is chosen.
            if all(v is None for v in inputs):
                self.rest_ms += op.time_ms
            elif self._follows(op, inputs):
                self._add_follower(arg, op, inputs, moment)
            else:
                self._add_op(arg, op, inputs, moment, sites.of(arg))
        self._pair_optimizer(optimizer)

    @staticmethod
    def _follows(op: Op, inputs: Sequence[int | None]) -> bool:
        """Whether the output of an op takes the layout of its argument: a view, or a tensor made in its shape."""
        # Of two placed inputs it could follow either, so this would be a choice.
        placed = {v for v in inputs if v is not None}
        return len(placed) == 1 and (op.name in _SHAPED_LIKE or not (op.writes or op.mutates))

    def _add_follower(self, arg: int, op: Op, inputs: tuple[int | None, ...], moment: int) -> None:
        # ``_follows`` has checked that there is exactly one.
        parent = next(v for v in inputs if v is not None)
        self.call_of[arg] = call = self._call(op, inputs)
        self.rest_ms += op.time_ms  # none of a view's
        for i, t in enumerate(op.outputs):
            if t not in self._tensor_value:  # else a view of a view that is there already, or the same again
                base = self.values[parent]
                self._define(t, StrategyValue(base.producer, base.output, parent, call, i), op, moment)

    def _add_op(self, arg: int, op: Op, inputs: tuple[int | None, ...], moment: int, site: Hashable) -> None:
        self.call_of[arg] = call = self._call(op, inputs)
        outputs = self.calls[call].outputs
        # Places are found by module and op of the forward pass.
        follows = op.phase != Phase.FORWARD or op.scope == ROOT_SCOPE
        unit = pattern_of(self.program.scopes[op.scope].fqn) if op.scope != ROOT_SCOPE else ""
        found = self._class(
            # Equal layers, equal site in them, equal call: one strategy for all.
            (unit, site, op.phase, call, follows),
            name=op.name,
            unit=unit,
            phase=int(op.phase),
            follows=follows,
            call=self.calls[call],
            shapes=tuple(tuple(t.shape) for t in outputs),
            dtypes=tuple(t.dtype for t in outputs),
        )
        self.class_of[arg] = found.index
        found.ops.append(arg)
        found.inputs.append(inputs)
        self.at[found.index, inputs].append(moment)
        for i, v in enumerate(inputs):
            if v is not None:
                self._uses[op.inputs[i], int(op.phase)].add(User(found.index, i))
        for i, t in enumerate(op.outputs):
            self._define(t, StrategyValue(found.index, i), op, moment)

    def _define(self, tensor: int, value: StrategyValue, op: Op, moment: int) -> None:
        self._tensor_value[tensor] = index = self._value(value)
        storage = self.program.tensors[tensor].storage
        # A view writes nothing: its storage keeps the layout of what is on it. Parameters keep theirs always.
        if (storage in op.writes or storage in op.mutates) and storage not in self.homes:
            known = self._storage_value[storage]
            # Of several outputs of one op on one storage the first counts.
            if not known or known[-1][0] < moment:
                known.append((moment, index))

    @cached_property
    def weights(self) -> frozenset[int]:
        """The values that depend on parameters alone."""
        classes = {c.index for c in self.classes if c.is_parameter}
        for c in self.classes:
            inputs = [v for row in c.inputs for v in row]
            made = all(v is not None and self.values[v].producer in classes for v in inputs)
            if c.phase == Phase.FORWARD and made:
                classes.add(c.index)
        return frozenset(v for v, value in enumerate(self.values) if value.producer in classes)

    def is_hidden(self, flow: ValueUse) -> bool:
        """Whether the collectives of a flow may run beside computation.

        Parameters are prefetched, and gradients reduced in the background. The first gather and the last reduction have
        no computation to hide behind, unless the flow stands for layers that repeat: then most of it is hidden.
        """
        if flow.phase != GRADIENT and flow.value not in self.weights:
            return False
        return self.flows[flow] > 1 or flow not in self._exposed

    @cached_property
    def _exposed(self) -> frozenset[ValueUse]:
        """The flows of the parameters that are gathered first, and of the gradients that are reduced last."""
        # Reversed, so that of several entries of a class the first one stays.
        first = {c: moments[0] for (c, _), moments in reversed(self.at.items())}
        used = {
            flow: min(first[u.user] for u in flow.users)
            for flow in self.flows
            if flow.phase == Phase.FORWARD and flow.value in self.weights
        }
        home = {move.value: move.moment for move in self.gradient_moves}
        reduced = {flow: home.get(flow.value, -1) for flow in self.flows if flow.phase == GRADIENT}
        found = {flow for flow, moment in used.items() if moment == min(used.values())}
        return frozenset(
            found | {flow for flow, moment in reduced.items() if moment == max(reduced.values())}
        )

    # --- gradients and the optimizer -----------------------------------------------------------------

    def _add_gradients(self) -> None:
        """Add the flow of each gradient to its parameter, at the moment at which it was last written."""
        program = self.program
        last: dict[int, int] = {}
        moment = -1
        for code, arg in program.events:
            moment += code == Event.OP
            if code == Event.OP and program.ops[arg].phase == Phase.BACKWARD:
                last.update((program.tensors[t].storage, moment) for t in program.ops[arg].outputs)
        for parameter, tensor in program.gradients.items():
            value, storage = self.value_of(tensor), program.tensors[tensor].storage
            home = self.homes.get(parameter)
            # The parameter is not one of the model's, the gradient depends on no parameter (such as of a
            # sum), or it lies on a parameter.
            if home is None or value is None or storage in self.homes:
                continue
            self._uses[tensor, GRADIENT].add(User(home, 0))
            moment = last.get(storage, -1)
            self._storage_value[storage].append((moment, self.home(parameter)))
            if moment >= 0:
                self.gradient_moves.append(GradientMove(value, self.home(parameter), moment))

    def _pair_optimizer(self, ops: Sequence[tuple[int, Op]]) -> None:
        """Give state and temporaries of the optimizer the layout of the parameter that they are read with.

        It is given lists, one item of each parameter, or the tensors of one parameter.
        """
        tensors, shape_of = self.program.tensors, {p.storage: p.shape for p in self.parameters}
        owner = {p.storage: p.storage for p in self.parameters}
        owner.update((tensors[t].storage, p) for p, t in self.program.gradients.items())
        groups: list[tuple[Op, list[list[int]]]] = [(op, list(together(op))) for _, op in ops]
        # Twice: an op may take two states before either has met the gradient that tells whose they are.
        for _ in range(2):
            for _, found in groups:
                for group in found:
                    known = next((owner[s] for t in group if (s := tensors[t].storage) in owner), None)
                    if known is not None:
                        same = (t for t in group if math.prod(tensors[t].shape) == math.prod(shape_of[known]))
                        for t in same:
                            owner.setdefault(tensors[t].storage, known)
        self._owner = owner
        for op, found in groups:
            parts: dict[int, int] = defaultdict(int)
            for group in found:
                if owners := [owner[s] for t in group if (s := tensors[t].storage) in owner]:
                    parts[self.homes[owners[0]]] += math.prod(shape_of[owners[0]])
            # One op for all parameters (``foreach``): its time is shared by elements.
            total = sum(parts.values())
            for home, n in parts.items():
                self.optimizer_ms[home] += op.time_ms * n / total
            # Such as an op on step counts alone.
            if not total:
                self.rest_ms += op.time_ms

    # --- flows ---------------------------------------------------------------------------------------

    def _flows(self) -> Mapping[ValueUse, int]:
        found: Counter[ValueUse] = Counter()
        for (tensor, phase), users in self._uses.items():
            value = self._tensor_value[tensor]
            found[ValueUse(value, phase, frozenset(users))] += 1
        return found

    # --- memory --------------------------------------------------------------------------------------

    def _holds(self) -> Iterator[Hold]:
        program = self.program
        for storage, start, end in alive(program):
            n_bytes = program.storage_bytes[storage]
            # State and temporaries of the optimizer, which no op of the graph has written.
            if storage in self._owner and storage not in self._storage_value:
                yield Hold(self.home(self._owner[storage]), n_bytes, start, end)
                continue
            known = self._storage_value.get(storage, [])
            # A storage is cut as the value that was written to it last, so a hold is split where that
            # changes.
            changes = [start, *(moment for moment, _ in known if start < moment < end), end]
            for a, b in itertools.pairwise(changes):
                before = [v for moment, v in known if moment <= a]
                yield Hold(before[-1] if before else None, n_bytes, a, b)
        moment = -1
        for code, arg in program.events:
            if code == Event.OP:
                moment += 1
                if inside := program.inside_bytes[arg]:
                    yield Hold(self._inside(program.ops[arg]), inside, moment, moment + 1)

    def _inside(self, op: Op) -> int | None:
        """Return the value that memory inside of an op is cut like: the version it overwrites, or its first output."""
        # Written in place: the recording has a new version of the storage, and what is inside is alive beside
        # the old one.
        if op.replaces >= 0:
            replaced = self._storage_value.get(op.replaces)
            return replaced[-1][1] if replaced else None
        return self._tensor_value.get(op.outputs[0]) if op.outputs else None


class _Sites:
    """Gives each op a name for its site that is the same in equal layers.

    In the forward pass that is the module that runs, what it called last, and how many such ops have run since; in the
    backward pass, the site of the op whose gradient is computed.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._last: dict[int, int] = {}  # by module call, the call in it that ended last
        self._seen: Counter[Hashable] = Counter()
        self._known: dict[int, Hashable] = {}

    def step(self, code: int, scope: int) -> None:
        """Note that the forward of a module begins or ends."""
        # A site is named by what the module called last: that is the same in equal layers, where a count over
        # the whole step is not.
        if code == Event.EXIT:
            self._last[self._program.scopes[scope].parent] = scope

    def of(self, index: int) -> Hashable:
        """Return the site of an op that runs now."""
        op, scopes = self._program.ops[index], self._program.scopes
        fqn = scopes[op.scope].fqn if op.scope != ROOT_SCOPE else ""
        # A backward op has the site of its forward op, and a number among those of its name.
        if op.forward_of in self._known:
            here: Hashable = (op.forward_of, op.phase, op.name)
            site = (self._known[op.forward_of], op.name, self._seen[here])
        else:
            last = self._last.get(op.scope, -1) if op.phase == Phase.FORWARD else -1
            here = (op.scope, last, fqn, op.phase, op.name)
            after = pattern_of(scopes[last].fqn) if last >= 0 else ""
            site = (after, op.name, self._seen[here])
        self._seen[here] += 1
        self._known[index] = site
        return site


def alive(program: Program) -> Iterator[tuple[int, int, int]]:
    """Yield storages with the moments from which and before which each is alive. One may be alive several times."""
    fold, moment = Fold(program), -1
    since: dict[int, int] = dict.fromkeys(program.initial, 0)
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP:
            moment += 1
            for s in program.ops[arg].writes:
                since.setdefault(s, moment)
        elif code not in (Event.ENTER, Event.EXIT):
            s = program.storage_of(code, arg)
            # Held still, or from now on: then it is alive from the next op on.
            if fold.holders[s]:
                since.setdefault(s, moment + 1)
            # A storage that was made and let go of between two ops was never alive at a moment.
            elif since[s] <= moment:
                yield s, since.pop(s), moment + 1
            else:
                del since[s]
    for s, start in since.items():
        if start <= moment:
            yield s, start, moment + 1
