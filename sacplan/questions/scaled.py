"""A recorded step at any size, computed from recordings at two sizes: a batch of 40 without tracing it.

For most models, a step runs the same ops at any size of the batch or the sequence, and each dimension of its tensors is
linear in that size. So every number of the program at size n lies on a line through the two recordings:

    x(n) = x(first) + (x(second) - x(first)) * (n - first) / (second - first)

This is applied to the dimensions of tensors and to the integers among the arguments of ops. Strides and bytes follow
from the dimensions if they do so in both recordings. The result equals a recording at that size
(``tests/questions/test_fit.py``). Only times and the workspaces of kernels, which need not be linear, are approximate.
Workspaces of reductions, which stop growing, are computed for the size.

If the two recordings differ in anything but sizes, ``sized`` returns None. If both happen to run the same ops and a
third size would not, this is not noticed.

The program at a size takes as long to build as the step has ops. To look for the largest size, ``Peaks`` is cheaper:
the bytes alive at each op as a polynomial in the size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sacplan.core.decisions import Decision
from sacplan.core.derived import derived
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.liveness import bytes_at_ops
from sacplan.core.program import Event, Op, Program, Tensor
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernel_workspaces import ACCUMULATOR_BYTES, reduction_workspace_bytes
from sacplan.errors import PlanError
from sacplan.profiling.profile import Profile
from sacplan.questions.batch_sizes import check_batches_differ

# Whole integers only: no digits of a name, of a float or of a quoted text.
_INTEGER = re.compile(r"(?<![\w.\"])-?\d+(?![\w.\"])")


@dataclass(frozen=True)
class Sized:
    """A step at any size.

    Attributes:
        sizes: The two sizes at which it was recorded.
        profiles: The two recordings.
    """

    sizes: tuple[int, int]
    profiles: tuple[Profile, Profile]

    @derived
    def at(self, n: int) -> Profile:
        """Return the step at a size: the recording if there is one, otherwise a computed one, which is kept."""
        return self.profiles[self.sizes.index(n)] if n in self.sizes else self.computed(n)

    @cached_property
    def whole_each(self) -> int:
        """All dimensions are whole numbers at sizes that differ from the first by a multiple of this."""
        (first, second), (a, b) = self.sizes, (one.recorded.tensors for one in self.profiles)
        slopes = {j - i for x, y in zip(a, b, strict=True) for i, j in zip(x.shape, y.shape, strict=True)}
        return abs(second - first) // math.gcd(second - first, *slopes)

    def computed(self, n: int) -> Profile:
        """Return the step at a size, computed and not kept."""
        a, b = (one.recorded for one in self.profiles)
        line = self._line(n)
        tensors = tuple(_tensor(x, y, line) for x, y in zip(a.tensors, b.tensors, strict=True))
        program = msgspec.structs.replace(
            a,
            tensors=tensors,
            storage_bytes=_sizes(a, b, tensors, line, self.profiles[0].spec),
            ops=tuple(
                _op(x, y, line, tensors, self.profiles[0].spec) for x, y in zip(a.ops, b.ops, strict=True)
            ),
        )
        fingerprint = _fingerprint(self.profiles[0].fingerprint, self.profiles[1].fingerprint, line)
        return dataclasses.replace(self.profiles[0], recorded=program, fingerprint=fingerprint, source=None)

    def _line(self, n: int) -> Callable[[float, float], float]:
        (first, second), exact = self.sizes, (n - self.sizes[0])
        return lambda x, y: x + (y - x) * exact / (second - first)

    @derived
    def peaks(self, decisions: tuple[Decision, ...], degree: int) -> Peaks:
        """Return the bytes at each op, with a plan, as polynomials in the size. The result is kept.

        Args:
            decisions: The decisions of the plan.
            degree: 1 if memory is linear in the size, as in the batch; 2 if attention scores may be kept, whose two
                dimensions both grow with the sequence.

        Raises:
            PlanError: The plan rewrites the step to different ops at another size.
        """
        # A polynomial of this degree goes through degree + 1 points. The third size is computed, not recorded.
        at = (*self.sizes, 2 * max(self.sizes))[: degree + 1]
        programs = [self.at(n).with_plan(decisions) for n in at]
        if len({len(program.ops) for program in programs}) > 1:
            raise PlanError("the plan rewrites the step otherwise at another size.")
        moments, spec = [bytes_at_ops(program) for program in programs], self.profiles[0].spec
        reductions = {i: op for i, op in enumerate(programs[0].ops) if _is_reduction(op, spec)}
        for program, found in zip(programs, moments, strict=True):
            for i in reductions:
                found[i] -= program.ops[i].workspace_bytes

        def inside(n: int) -> Iterator[tuple[int, int]]:
            line, (a, b) = self._line(n), programs[:2]
            for i, op in reductions.items():
                x = _tensor(a.tensors[op.inputs[0]], b.tensors[b.ops[i].inputs[0]], line)
                yield i, _reduction_bytes(op, x, spec)

        # Solved for the coefficients: a row of powers for each size, and the bytes at all ops on the right.
        points = np.stack([found.astype(np.float64) for found in moments])
        powers = np.vander(np.array(at, dtype=np.float64))
        return Peaks(np.linalg.solve(powers, points).astype(np.float64), inside)


_MULTIPLE = 128
"""Lengths are recorded at multiples of this if possible: kernels pad others, which would bend the line."""


_BENT = 0.001
"""Largest share of a peak by which a computed step may miss the recorded one: kernels may pad lengths."""

_KEPT = 64
"""Most lines that are kept, so that their ends are not computed again for each shape on them."""


@dataclass(frozen=True)
class SizedStep:
    """A step on batches of any shape: samples, and one size or several, such as height and width.

    The numbers of a program are linear in each entry of the shape while the others stay the same: height x width
    patches, or samples x tokens rows. So the step is recorded at two values of each, in all combinations, and computed
    along one entry after the other. A shape is recorded itself if the recordings do not run the same ops; if the peak
    of one more recording is not the computed one, as with convolutions on a CPU, which choose their kernels by the
    size; or if a dimension on its line is a fraction, as where a convolution halves an odd height.

    Attributes:
        record: Records the step on a batch of so many samples of these sizes.
        shapes: The shapes to ask about, or some of them with the smallest and largest value of each size. All values
            are taken to be multiples of the common divisor of these.
    """

    record: Callable[..., Profile]
    shapes: Iterable[Sequence[int]]
    _recorded: dict[tuple[int, ...], Profile] = field(default_factory=dict)
    _alone: set[tuple[int, int]] = field(default_factory=set)  # index and size where other ops run

    def recorded(self, *shape: int) -> Profile:
        """Return the recording of the step at a shape. Recordings are kept."""
        if shape not in self._recorded:
            self._recorded[shape] = self.record(*shape)
        return self._recorded[shape]

    def at(self, *shape: int) -> Profile:
        """Return the step at a shape: the recording if there is one, otherwise a computed one."""
        # Recorded already, or with a size of 1, whose dimensions broadcast.
        if shape in self._recorded or min(shape[1:]) < 2:
            return self.recorded(*shape)
        # ``_values`` comes before ``_alone``, which it fills. Batches that are not recorded are computed from two that
        # are, so the same ops have to run on both.
        batches = shape[:1] if shape[0] in (1, *self._values[0]) else self._values[0]
        runs_other_ops = not self._alone.isdisjoint(enumerate(shape))
        if runs_other_ops or not self._runs_alike(batches) or not self._is_straight:
            return self.recorded(*shape)
        return self._along(shape, len(shape) - 1) or self.recorded(*shape)

    @cached_property
    def _values(self) -> list[tuple[int, ...]]:
        """For each entry of a shape, the recorded values: two, or one if there is no other."""
        sizes = [sorted(set(values)) for values in zip(*self.shapes, strict=True)]
        most = sizes[0][-1]
        found = [(max(2, most), max(2, most) + 2), *map(_two, sizes[1:])]
        firsts = (most, *(values[0] for values in found[1:]))
        for i, values in enumerate(found[1:], 1):
            pair = [(*firsts[:i], n, *firsts[i + 1 :]) for n in values]
            # The longest sequence alone may run other ops: if a table of positions is sliced at its full length, which
            # is where samples are cut, torch records an alias of the table in place of a slice.
            if values[0] == sizes[i][-1] and not self._same_ops(*pair):
                found[i] = _two(sizes[i][:-1])
                self._alone.add((i, values[0]))
        return found

    @derived
    def _runs_alike(self, batches: tuple[int, ...]) -> bool:
        """Whether the same ops run at all recorded sizes, on each of these numbers of samples."""
        return self._same_ops(*itertools.product(batches, *self._values[1:]))

    @cached_property
    def _is_straight(self) -> bool:
        """Whether the largest computed shape has nearly the peak of its recording; True if none is computed."""
        for shape in sorted(map(tuple, self.shapes), key=math.prod, reverse=True):
            corner = all(map(operator.contains, self._values, shape))
            computed = None if corner or shape[0] == 1 else self._along(shape, len(shape) - 1)
            if computed is not None:
                return abs(computed.peak_bytes / self.recorded(*shape).peak_bytes - 1) <= _BENT
        return True

    def _same_ops(self, first: tuple[int, ...], *others: tuple[int, ...]) -> bool:
        one = self.recorded(*first)
        return all(_same_ops((first, other), (one, self.recorded(*other))) for other in others)

    def _along(self, shape: tuple[int, ...], i: int) -> Profile | None:
        """Return the step at a shape whose entries after the i-th are recorded values; None if no line leads there."""
        if i < 0:
            return self.recorded(*shape)
        first = self._values[i][0]
        if shape[i] in self._values[i] or (i == 0 and shape[0] == 1):
            return self._along(shape, i - 1)
        line = self._lines((*shape[:i], first, *shape[i + 1 :]), i)
        return None if line is None or (shape[i] - first) % line.whole_each else line.computed(shape[i])

    @cached_property
    def _lines(self) -> Callable[[tuple[int, ...], int], Sized | None]:
        return functools.lru_cache(_KEPT)(self._line)

    def _line(self, shape: tuple[int, ...], i: int) -> Sized | None:
        """Return the line of steps along the i-th entry; None if it has one recorded value, or an end has no line."""
        ends = [self._along((*shape[:i], n, *shape[i + 1 :]), i - 1) for n in self._values[i]]
        if len(ends) < 2 or ends[0] is None or ends[1] is None:
            return None
        return Sized((self._values[i][0], self._values[i][1]), (ends[0], ends[1]))


def _two(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes to record, given sorted ones: the longest and about half of it, or the only one."""
    longest, unit = sizes[-1], math.gcd(*sizes)
    if longest >= 2 * math.lcm(unit, _MULTIPLE):
        unit = math.lcm(unit, _MULTIPLE)
    first = longest // unit * unit
    return (longest,) if len(sizes) < 2 else (first, max(2, first // 2 // unit * unit))


@dataclass(frozen=True, slots=True)
class Peaks:
    """The bytes that are alive at each op, as polynomials in the size, without the rounding of the allocator.

    Attributes:
        coefficients: Powers x ops, the highest power first.
        inside: Yields the workspace bytes of reductions at a size, by op.
    """

    coefficients: npt.NDArray[np.float64]
    inside: Callable[[int], Iterable[tuple[int, int]]]

    def at(self, n: int) -> int:
        """Return the peak at a size: the maximum over all ops."""
        # Horner's rule, for all ops at once.
        value = np.zeros(self.coefficients.shape[1])
        for row in self.coefficients:
            value = value * n + row
        for op, n_bytes in self.inside(n):
            value[op] += n_bytes
        return round(float(value.max()))


def sized(sizes: tuple[int, int], profiles: tuple[Profile, Profile]) -> Sized | None:
    """Return the step at any size; None if the two recordings differ in more than sizes.

    Raises:
        PlanError: The batches of the two recordings are the same.
    """
    return Sized(sizes, profiles) if _same_ops(sizes, profiles) else None


def _same_ops(sizes: tuple[object, object], profiles: tuple[Profile, Profile]) -> bool:
    check_batches_differ(sizes, (profiles[0].fingerprint, profiles[1].fingerprint))
    a, b = (_shape(one.recorded) for one in profiles)
    return a == b


def _shape(program: Program) -> Sequence[object]:
    """Return everything about a program that must be equal at both sizes."""
    return (
        _in_any_order(program.events),
        program.initial,
        program.storage_kinds,
        program.handle_storages,
        program.handle_tensors,
        program.handle_ops,
        program.instance_handles,
        program.gradients,
        program.resizes,  # in proportion to a storage's size only where that is the same
        [(t.storage, t.dtype, len(t.shape)) for t in program.tensors],
        [(op.name, op.scope, op.reads, op.writes, op.mutates, op.inputs, op.outputs) for op in program.ops],
        # Integers among the arguments may be sizes, so only what is around them has to agree.
        [_INTEGER.sub("0", op.arguments) for op in program.ops],
        [scope.fqn for scope in program.scopes],
    )


def _fingerprint(x: Fingerprint, y: Fingerprint, line: Callable[[float, float], float]) -> Fingerprint:
    def between(one: Any, other: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(between, one, other))
        return round(line(one, other)) if isinstance(one, int) else one

    calls = (
        msgspec.structs.replace(one, tensors=between(one.tensors, other.tensors))
        for one, other in zip(x.calls, y.calls, strict=True)
    )
    return msgspec.structs.replace(x, batch=between(x.batch, y.batch), calls=tuple(calls))


def _in_any_order(events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the events with each run of ``FREE`` sorted.

    Autocast frees all its copies of weights at once, in the order of a hash table of their addresses.
    """
    found: list[tuple[int, int]] = []
    for is_free, run in itertools.groupby(events, lambda event: event[0] == Event.FREE):
        same_kind = list(run)
        found += sorted(same_kind) if is_free else same_kind
    return found


def _tensor(x: Tensor, y: Tensor, line: Callable[[float, float], float]) -> Tensor:
    if x == y:
        return x
    shape = tuple(round(line(i, j)) for i, j in zip(x.shape, y.shape, strict=True))
    # Strides of a dense tensor are products of dimensions, which need not be linear in the size. So they are made from
    # the new shape, if both tensors are dense in the same order. Otherwise each stride is taken to be linear.
    orders = [sorted(range(len(t.shape)), key=lambda d, t=t: (-t.stride[d], d)) for t in (x, y)]  # type: ignore[misc]
    if orders[0] == orders[1] and all(_dense(t.shape, orders[0]) == t.stride for t in (x, y)):
        stride = _dense(shape, orders[0])
    else:
        stride = tuple(round(line(i, j)) for i, j in zip(x.stride, y.stride, strict=True))
    return msgspec.structs.replace(x, shape=shape, stride=stride, offset=round(line(x.offset, y.offset)))


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have this order in memory, the outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _sizes(
    a: Program, b: Program, tensors: Sequence[Tensor], line: Callable[[float, float], float], spec: DeviceSpec
) -> tuple[int, ...]:
    """Return the bytes of the storages.

    A storage that has the rounded size of its largest tensor in both recordings is taken to have it at any size.
    Interpolating the rounded bytes would be wrong by up to a block, so only other storages are interpolated.
    """
    whole = [program.largest_tensors for program in (a, b)]
    found = []
    for s, (x, y) in enumerate(zip(a.storage_bytes, b.storage_bytes, strict=True)):
        # Equal in both recordings, such as a parameter: its bytes do not depend on the size.
        if x == y and whole[0][s][0] == whole[1][s][0]:
            found.append(x)
            continue
        t = whole[0][s][1]
        if (
            t >= 0
            and t == whole[1][s][1]
            and all(spec.round_up(each[s][0]) == size for each, size in zip(whole, (x, y), strict=True))
        ):
            found.append(spec.round_up(tensors[t].n_bytes))
        else:
            found.append(spec.round_up(max(0, round(line(x, y)))))
    return tuple(found)


def _op(
    x: Op, y: Op, line: Callable[[float, float], float], tensors: Sequence[Tensor], spec: DeviceSpec
) -> Op:
    workspace_bytes = max(0, round(line(x.workspace_bytes, y.workspace_bytes)))
    if _is_reduction(x, spec):
        workspace_bytes = _reduction_bytes(x, tensors[x.inputs[0]], spec)
    elif x == y:
        return x
    arguments = x.arguments
    if arguments != y.arguments:
        # Both texts have their integers at the same places: ``_shape`` has compared all else.
        others = iter(_INTEGER.findall(y.arguments))
        arguments = _INTEGER.sub(lambda m: str(round(line(int(m[0]), int(next(others))))), arguments)
    return msgspec.structs.replace(
        x,
        arguments=arguments,
        # Outside of the two recorded sizes a line may go below zero.
        time_ms=max(0.0, line(x.time_ms, y.time_ms)),
        flops=max(0, round(line(x.flops, y.flops))),
        workspace_bytes=workspace_bytes,
    )


def _is_reduction(op: Op, spec: DeviceSpec) -> bool:
    """Whether an op is a reduction on a GPU whose input is known, which is not so in a loop over slices."""
    if spec.kind != "cuda" or not op.name.startswith("aten.") or not op.inputs or op.inputs[0] < 0:
        return False
    return op.name.split(".")[1] in ACCUMULATOR_BYTES


def _reduction_bytes(op: Op, x: Tensor, spec: DeviceSpec) -> int:
    return _reduced(op.name.split(".")[1], op.arguments, x.shape, x.stride, x.dtype, spec)


@functools.lru_cache(4096)  # the layers of a model are alike
def _reduced(
    name: str, arguments: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, spec: DeviceSpec
) -> int:
    (_, *positional), kwargs = json.loads(arguments)
    dims = next((given for given in positional if isinstance(given, list)), kwargs.get("dim"))
    x = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return reduction_workspace_bytes(name, x, dims, spec)
