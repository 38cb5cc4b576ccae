"""A stretch of ops that is put off, and then runs in slices.

What a deferred op returns has sizes and no storage (``Lazy``). What is needed after the stretch has a buffer from the
start, an ordinary tensor that the loop fills; views of it are ordinary too. The loop cuts the inputs, runs the ops on
the slices, and puts what they give into the buffers. Where a factor does not flow through the ops, or something asks
for a tensor too early, the ops run whole instead: slower, never wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from sacplan._chunk.flow import Conflict, Flow, axis_of, flow_from
from sacplan._factors.axes import Axis, FactorAxis, put, resized_arguments, take
from sacplan._factors.rule import Kind, Rule, rule_of
from sacplan._torch.ops import is_alias, op_traits, tensors_in
from sacplan._torch.private import modes_off, storage_key
from sacplan.errors import RecipeError

_VIEWS = frozenset((torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default))
"""Which a slice may have no strides for."""


class Lazy(torch.Tensor):
    """What a deferred op returns: sizes, no storage. Read by an op that is not deferred, it is computed."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_deferred = True
    _stretch: Stretch
    _value: int
    _real: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, stretch: Stretch, value: int) -> Lazy:
        made: Lazy = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
            requires_grad=False,
        )
        made._stretch, made._value, made._real = stretch, value, None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*whole(args), **whole(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Lazy({tuple(self.shape)}, {self.dtype})"

    def compute(self) -> torch.Tensor:
        """The tensor, as an ordinary one.

        Raises:
            RecipeError: its stretch is over.
        """
        if self._real is None:
            self._stretch.run_whole()
        if self._real is None:
            raise RecipeError(
                f"a tensor of shape {tuple(self.shape)} was computed in slices and is gone, since nothing read it in "
                "the step that was planned for. Make the profile of a step that reads it, or remove the plan."
            )
        return self._real


def whole(value: Any) -> Any:
    """Arguments with ordinary tensors for lazy ones."""
    return mapped(lambda t: t.compute() if isinstance(t, Lazy) else t, value)


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Nested tuples, lists and dicts with other tensors in them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(change, item) for item in value)
    if isinstance(value, list):
        return [mapped(change, item) for item in value]
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class _Ref:
    """Stands for a tensor in the arguments of a deferred op."""

    value: int


def _filled(get: Callable[[int], Any], value: Any) -> Any:
    if type(value) is _Ref:
        return get(value.value)
    if type(value) in (tuple, list):
        return [_filled(get, item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class _DeferredOp:
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Local(threading.local):
    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=False)


_local = _Local()


class Stretch:
    """Ops in the order in which they were deferred.

    Args:
        dim, outer, inner: what is sliced of the first output of the last op, see ``Axis``.
        slices: how many.

    Attributes:
        is_over: the ops have run.
    """

    def __init__(self, dim: int, outer: int, inner: int, slices: int) -> None:
        self.is_over = False
        self._asked = dim, outer, inner, slices
        self._fake = _local.mode
        self._ops: list[_DeferredOp] = []
        self._producer: list[int] = []  # by value
        self._like: list[torch.Tensor] = []  # by value, a fake tensor
        self._lazy: dict[int, weakref.ref[Lazy]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._value_of_input: dict[int, int] = {}
        self._bound: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffers and views of them to values
        self._buffers: list[list[Any]] = []  # [buffer, value]
        self._storages: set[int] = set()  # of inputs and buffers
        self._viewed: set[int] = set()  # values that views were made of

    # --- deferring ---

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer that is not filled yet, or a view of one."""
        return not self.is_over and tensor in self._bound

    def uses_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether the loop will read or fill the storage of an ordinary tensor."""
        return not self.is_over and storage_key(tensor.untyped_storage()) in self._storages

    def may_defer(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the loop could run a call as the step would."""
        if not isinstance(func, torch._ops.OpOverload):
            return False
        traits = op_traits(func)
        written = traits.written(args, kwargs)
        if not written:
            return True
        if not traits.in_place or len(written) != 1:
            return False
        value = self._known(args[0])
        # Only all of what an op of the stretch made may be overwritten: views of it would see the new values.
        return (
            value is not None
            and value not in self._viewed
            and not is_alias(str(self._ops[self._producer[value]].func))
        )

    def _known(self, tensor: torch.Tensor) -> int | None:
        """The value of a tensor that the loop makes."""
        if isinstance(tensor, Lazy):
            return tensor._value if tensor._stretch is self else None
        found: int | None = self._bound.get(tensor)
        return found

    def _value(self, tensor: torch.Tensor) -> int:
        known = self._known(tensor)
        if known is None:
            if isinstance(tensor, Lazy):
                tensor = tensor.compute()
            known = self._value_of_input.get(id(tensor))
        if known is None:
            known = self._new_value(self._described(tensor), -1)
            self._inputs[known] = tensor
            self._value_of_input[id(tensor)] = known
            self._storages.add(storage_key(tensor.untyped_storage()))
        return known

    def _described(self, tensor: torch.Tensor) -> torch.Tensor:
        with modes_off(), self._fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def _new_value(self, like: torch.Tensor, producer: int) -> int:
        self._like.append(like)
        self._producer.append(producer)
        return len(self._like) - 1

    def defer(self, func: Any, args: Any, kwargs: Any, kept: Sequence[int] = ()) -> Any:
        """Put off a call for which ``may_defer``.

        Args:
            func, args, kwargs: the call.
            kept: which of the tensors that it returns are needed after the stretch.

        Returns:
            What stands for its results. A view of a buffer is made at once.
        """
        refs, named = mapped(lambda t: _Ref(self._value(t)), (tuple(args), dict(kwargs)))
        inputs = tuple(ref.value for ref in _refs((refs, named)))
        with modes_off(), self._fake:
            like = func(*_filled(self._like.__getitem__, refs), **self._filled_names(named))
        if is_alias(str(func)):
            self._viewed.update(inputs)
        index = len(self._ops)
        if op_traits(func).in_place:
            result = args[0]
            values = [self._new_value(self._like[inputs[0]], index)]
            self._rebind(result, values[0])
        else:
            made = list(tensors_in(like))
            values = [self._new_value(t, index) for t in made]
            if is_alias(str(func)) and any(
                t in self._bound for t in tensors_in((args, kwargs)) if type(t) is not Lazy
            ):
                result = func(*args, **kwargs)
                for t, value in zip(tensors_in(result), values, strict=True):
                    self._bound[t] = value
            else:
                given = iter([self._stand_in(value, i in kept) for i, value in enumerate(values)])
                result = mapped(lambda _: next(given), like)
        self._ops.append(_DeferredOp(func, refs, named, inputs, tuple(values)))
        return result

    def _filled_names(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _filled(self._like.__getitem__, value) for name, value in named.items()}

    def _stand_in(self, value: int, kept: bool) -> torch.Tensor:
        like = self._like[value]
        if not kept:
            lazy = Lazy(like, self, value)
            self._lazy[value] = weakref.ref(lazy)
            return lazy
        buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        self._bound[buffer] = value
        self._buffers.append([buffer, value])
        self._storages.add(storage_key(buffer.untyped_storage()))
        return buffer

    def _rebind(self, tensor: torch.Tensor, value: int) -> None:
        """A tensor has been overwritten."""
        if isinstance(tensor, Lazy):
            self._lazy[value] = self._lazy.pop(tensor._value)
            tensor._value = value
            return
        self._bound[tensor] = value
        for entry in self._buffers:
            if entry[0] is tensor:
                entry[1] = value

    # --- running ---

    def run(
        self, ranges: Callable[[Sequence[tuple[int, int]]], Iterable[tuple[int, int]]] | None = None
    ) -> bool:
        """Run the loop; whole, if it cannot be sliced as asked.

        Args:
            ranges: chooses among the slices (start, stop), for planning.

        Returns:
            Whether it ran in slices.
        """
        found = self._loop()
        if found is None:
            self.run_whole()
            return False
        loop, size = found
        length = -(-size // min(self._asked[3], size))
        slices = [(start, min(size, start + length)) for start in range(0, size, length)]
        for start, stop in slices if ranges is None else ranges(slices):
            loop.run(start, stop, first=start == 0, share=(stop - start) / size)
        del loop
        self._end()
        return True

    def _end(self) -> None:
        self.is_over = True
        self._inputs.clear()
        self._value_of_input.clear()
        self._buffers.clear()
        self._ops.clear()
        self._like.clear()
        self._bound = WeakIdKeyDictionary()

    def run_whole(self) -> None:
        """Run the ops as they are."""
        if self.is_over:
            return
        last: dict[int, int] = {}
        for i, op in enumerate(self._ops):
            last.update(dict.fromkeys((*op.inputs, *op.outputs), i))
        values: dict[int, torch.Tensor] = {}
        wanted = {value: buffer for buffer, value in self._buffers}

        def get(value: int) -> torch.Tensor:
            return values[value] if value in values else self._inputs[value]

        self.is_over = True  # what runs now may look at what was asked for
        for i, op in enumerate(self._ops):
            out = op.func(*_filled(get, op.args), **{k: _filled(get, v) for k, v in op.kwargs.items()})
            for value, t in zip(op.outputs, tensors_in(out), strict=True):
                values[value] = t
                if value in wanted:
                    wanted[value].copy_(t)
                ref = self._lazy.get(value)
                lazy = ref() if ref is not None else None
                if lazy is not None:
                    lazy._real = t
                del t
            del out, lazy
            for value in (*op.inputs, *op.outputs):
                if last[value] == i:
                    values.pop(value, None)
        self._end()

    def _loop(self) -> tuple[_Loop, int] | None:
        """The loop along the axis that was asked for, or one like it where sizes differ; None if there is none."""
        dim, outer, inner, _ = self._asked
        graph = _Graph(self)
        seed = self._ops[-1].outputs[0]
        shape = self._like[seed].shape
        if dim >= len(shape) or any(rule is None for rule in graph.rules):
            return None
        for axis in _axes_like(Axis(dim, outer, 0, inner), int(shape[dim]), graph.rules):
            try:
                flow = flow_from(graph, seed, axis, 0, len(self._ops) - 1)
            except Conflict:
                continue
            if all(i in flow.within for i, needed in enumerate(graph.needed) if needed):
                return _Loop(self, graph, flow), axis.size
        return None


def _refs(value: Any) -> Iterator[_Ref]:
    if type(value) is _Ref:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


def _axes_like(asked: Axis, size: int, rules: Sequence[Rule | None]) -> Iterator[Axis]:
    """The axis that was asked for, and others within the same dimension, such as with another batch size."""
    dim, outer, _, inner = asked
    rest, remainder = divmod(size, outer * inner)
    seen = set()
    if not remainder and rest > 1:
        seen.add((outer, rest, inner))
        yield Axis(dim, outer, rest, inner)
    for rule in rules:
        for dims in (*rule.inputs, *rule.outputs) if rule is not None else ():
            for factors in dims:
                sizes = [rule.sizes[f] for f in factors] if rule is not None else []
                before, after = 1, 1
                for n in sizes:
                    after *= n
                if after != size or len(sizes) < 2:
                    continue
                for n in sizes:
                    after //= n
                    split = before, n, after
                    before *= n
                    if n > 1 and split not in seen and (after == 1) == (inner == 1):
                        seen.add(split)
                        yield Axis(dim, *split)


class _Graph:
    """The ops of a stretch, as a factor flows through them."""

    def __init__(self, stretch: Stretch) -> None:
        ops, like = stretch._ops, stretch._like
        self.producer = self.computed_by = stretch._producer
        self.inputs = [op.inputs for op in ops]
        self.outputs = [op.outputs for op in ops]
        self._computes = [not is_alias(str(op.func)) for op in ops]
        kept = {value for _, value in stretch._buffers}
        self.readers_of: dict[int, list[int]] = {}
        self.needed = [False] * len(ops)
        for i in range(len(ops) - 1, -1, -1):
            outputs = self.outputs[i]
            self.needed[i] = self._computes[i] or any(v in kept or v in self.readers_of for v in outputs)
            if self.needed[i]:
                for value in dict.fromkeys(self.inputs[i]):
                    self.readers_of.setdefault(value, []).insert(0, i)
        self.rules: list[Rule | None] = [
            rule_of(
                op.func,
                _filled(like.__getitem__, op.args),
                {name: _filled(like.__getitem__, v) for name, v in op.kwargs.items()},
                [like[value] for value in op.outputs],
            )
            if needed
            else _NO_RULE
            for op, needed in zip(ops, self.needed, strict=True)
        ]

    def readers(self, value: int, end: int) -> Sequence[int]:
        """See ``Ops``."""
        return [op for op in self.readers_of.get(value, ()) if op <= end]

    def may_write(self, op: int) -> bool:
        """See ``Ops``: checked when it was deferred."""
        return True


_NO_RULE = Rule((), (), (), ())


@dataclass(frozen=True, slots=True)
class _Step:
    """One op of the loop, on registers.

    Attributes:
        cuts: (register, input, axis) of slices to take first.
        outputs: registers.
        puts: (output, buffer, axis or kind).
    """

    op: _DeferredOp
    rule: Rule
    within: FactorAxis
    inputs: tuple[int, ...]
    cuts: tuple[tuple[int, int, Axis], ...]
    outputs: tuple[int, ...]
    puts: tuple[tuple[int, torch.Tensor, Axis | Kind], ...]


class _Loop:
    """The ops of a stretch on one slice after the other."""

    def __init__(self, stretch: Stretch, graph: _Graph, flow: Flow) -> None:
        self._inputs = stretch._inputs
        registers: dict[Any, int] = {}
        wholes: dict[int, int] = {}
        uses: dict[int, int] = {}
        steps: list[_Step] = []
        buffers = {value: buffer for buffer, value in stretch._buffers}
        for i in sorted(flow.within):
            op, rule, within = stretch._ops[i], graph.rules[i], flow.within[i]
            assert rule is not None
            inputs, cuts = [], []
            for value, dims in zip(op.inputs, rule.inputs, strict=True):
                key: Any = value
                if value in self._inputs:
                    axis = axis_of(dims, rule.sizes, within)
                    key = value, axis
                    if key not in registers and axis is not None:
                        cuts.append((len(registers), value, axis))
                    if axis is None:
                        wholes[registers.get(key, len(registers))] = value
                inputs.append(registers.setdefault(key, len(registers)))
            outputs = [registers.setdefault(value, len(registers)) for value in op.outputs]
            puts = []
            for position, value in enumerate(op.outputs):
                if value in buffers:
                    how = flow.axes[value] if value in flow.axes else flow.partial[value]
                    puts.append((position, buffers[value], how))
            uses.update(dict.fromkeys((*inputs, *outputs), len(steps)))
            steps.append(_Step(op, rule, within, tuple(inputs), tuple(cuts), tuple(outputs), tuple(puts)))
        self._wholes = wholes
        self._steps = steps
        self._ends: list[list[int]] = [[] for _ in steps]
        for register, last in uses.items():
            if register not in wholes:
                self._ends[last].append(register)

    def run(self, start: int, stop: int, *, first: bool, share: float) -> None:
        """One slice; ``share``: of the whole."""
        held: dict[int, torch.Tensor] = {r: self._inputs[value] for r, value in self._wholes.items()}
        for step, ends in zip(self._steps, self._ends, strict=True):
            for register, value, axis in step.cuts:
                held[register] = take(self._inputs[value], axis, start, stop)
            out = _call(step, held, stop - start)
            results = list(tensors_in(out))
            del out
            for position, buffer, how in step.puts:
                if isinstance(how, Axis):
                    put(buffer, how, start, stop, results[position])
                else:
                    _add_part(buffer, results[position], how, first, share)
            held.update(zip(step.outputs, results, strict=True))
            del results
            for register in ends:
                del held[register]


def _call(step: _Step, held: Mapping[int, torch.Tensor], length: int) -> Any:
    op = step.op
    registers = iter(step.inputs)
    args = resized_arguments(step.rule, op.args, step.within, length)

    def get(_: int) -> torch.Tensor:
        return held[next(registers)]

    args = [_filled(get, arg) for arg in args]
    if op.func in _VIEWS:
        out = args[0].reshape(args[1])
        return _as_a_row_of_many(out) if length == 1 else out
    return op.func(*args, **{name: _filled(get, value) for name, value in op.kwargs.items()})


def _as_a_row_of_many(t: torch.Tensor) -> torch.Tensor:
    """The same tensor; if it is an image [1, C, H, W] alone, with the first stride that it would have beside others.

    A view leaves another one there. Kernels choose a memory format by it, and the ops that were recorded for all rows
    hold for the format of all rows only: ``native_group_norm`` would refuse its input.
    """
    if t.dim() < 4 or t.shape[0] != 1 or not t.numel():
        return t
    shape, stride = t.shape, t.stride()
    row = 1 + sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True))
    return t if stride[0] == row else t.as_strided(shape, (row, *stride[1:]))


def _add_part(buffer: torch.Tensor, part: torch.Tensor, kind: Kind, first: bool, share: float) -> None:
    """Put together what slices give."""
    if kind is Kind.MEAN:
        part = part * share
    if first:
        buffer.copy_(part)
    elif kind in (Kind.SUM, Kind.MEAN):
        buffer.add_(part)
    elif kind is Kind.MAX:
        buffer.copy_(torch.maximum(buffer, part))
    elif kind is Kind.MIN:
        buffer.copy_(torch.minimum(buffer, part))
