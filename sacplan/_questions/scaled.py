"""A recorded step at another size, from recordings at two: what a batch of 40 takes, without tracing it.

A step runs the same ops whatever the batch or the sequence is, and each dimension of its tensors is a line in the size.
So a recording at two sizes gives the program at any other: shapes, bytes, and the numbers among the arguments. It
equals a recording at that size (``tests/questions/test_fit.py``). What is only near: times, and what kernels allocate
inside.

Where two recordings did not run the same ops, there is no such program: ``sized`` returns None.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sacplan._device.devices import DeviceSpec
from sacplan._profile.profile import Decided, Profile
from sacplan._program.liveness import bytes_at_ops
from sacplan._program.program import Op, Program, Tensor
from sacplan.errors import PlanError

_INTEGER = re.compile(r"(?<![\w.\"])-?\d+(?![\w.\"])")


@dataclass(frozen=True, slots=True)
class Sized:
    """The step at any size.

    Attributes:
        sizes: at which it was recorded, two of them.
        profiles: of the recordings.
    """

    sizes: tuple[int, int]
    profiles: tuple[Profile, Profile]
    _made: dict[int, Profile] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, n: int) -> Profile:
        """The step at a size; the recording itself where there is one."""
        if n in self.sizes:
            return self.profiles[self.sizes.index(n)]
        if n not in self._made:
            self._made[n] = self._computed(n)
        return self._made[n]

    def _computed(self, n: int) -> Profile:
        a, b = (one.recorded for one in self.profiles)
        line = self._line(n)
        tensors = tuple(_tensor(x, y, line) for x, y in zip(a.tensors, b.tensors, strict=True))
        program = msgspec.structs.replace(
            a,
            tensors=tensors,
            storage_bytes=_sizes(a, b, tensors, line, self.profiles[0].spec),
            ops=tuple(_op(x, y, line) for x, y in zip(a.ops, b.ops, strict=True)),
        )
        return dataclasses.replace(self.profiles[0], recorded=program)

    def _line(self, n: int) -> Callable[[float, float], float]:
        (first, second), exact = self.sizes, (n - self.sizes[0])
        return lambda x, y: x + (y - x) * exact / (second - first)

    def peaks(self, decided: Decided, degree: int = 2) -> Peaks:
        """The peak with a plan, as a polynomial in the size: of degree 1 for batches, of 2 where scores are kept."""
        at = (*self.sizes, 2 * max(self.sizes))[: degree + 1]
        moments = [bytes_at_ops(self.at(n).with_plan(decided)) for n in at]
        if len({len(found) for found in moments}) > 1:
            raise PlanError("the plan rewrites the step otherwise at another size.")
        points = np.stack([found.astype(np.float64) for found in moments])
        return Peaks(np.linalg.solve(np.vander(np.array(at, dtype=np.float64)), points).astype(np.float64))


@dataclass(frozen=True, slots=True)
class Peaks:
    """By op, the bytes alive while it runs, as a polynomial in the size.

    Attributes:
        coefficients: of the highest power first, one row for each.
    """

    coefficients: npt.NDArray[np.float64]

    def at(self, n: int) -> int:
        """The peak at a size."""
        value = np.zeros(self.coefficients.shape[1])
        for row in self.coefficients:
            value = value * n + row
        return round(float(value.max()))


def sized(sizes: tuple[int, int], profiles: tuple[Profile, Profile]) -> Sized | None:
    """The step at any size; None if the two recordings differ in more than sizes.

    Raises:
        PlanError: their batches do not differ.
    """
    batch, other = (one.fingerprint.batch for one in profiles)
    if batch == other:
        shapes = ", ".join(str(shape) for _, shape, _ in batch)
        raise PlanError(
            f"make_batch gave batches of the same shapes for sizes {sizes[0]} and {sizes[1]}: {shapes}. It must make a "
            "batch of the size that it is asked for, for example lambda n, seq: torch.zeros(n, seq, dtype=torch.long)."
        )
    a, b = (one.recorded for one in profiles)
    return Sized(sizes, profiles) if _shape(a) == _shape(b) else None


def _shape(program: Program) -> Sequence[object]:
    """What may not differ."""
    return (
        program.events,
        program.initial,
        program.storage_kinds,
        program.handle_storages,
        program.handle_tensors,
        program.handle_ops,
        program.instance_handles,
        program.gradients,
        [(t.storage, t.dtype, len(t.shape)) for t in program.tensors],
        [(op.name, op.scope, op.reads, op.writes, op.mutates, op.inputs, op.outputs) for op in program.ops],
        [_INTEGER.sub("0", op.arguments) for op in program.ops],
        [scope.fqn for scope in program.scopes],
    )


def _tensor(x: Tensor, y: Tensor, line: Callable[[float, float], float]) -> Tensor:
    if x == y:
        return x
    shape = tuple(round(line(i, j)) for i, j in zip(x.shape, y.shape, strict=True))
    orders = [sorted(range(len(t.shape)), key=lambda d, t=t: (-t.stride[d], d)) for t in (x, y)]  # type: ignore[misc]
    if orders[0] == orders[1] and all(_dense(t.shape, orders[0]) == t.stride for t in (x, y)):
        stride = _dense(shape, orders[0])
    else:
        stride = tuple(round(line(i, j)) for i, j in zip(x.stride, y.stride, strict=True))
    return msgspec.structs.replace(x, shape=shape, stride=stride, offset=round(line(x.offset, y.offset)))


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without holes whose dimensions have this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _sizes(
    a: Program, b: Program, tensors: Sequence[Tensor], line: Callable[[float, float], float], spec: DeviceSpec
) -> tuple[int, ...]:
    """Bytes of the storages: those of the tensors on them, as the allocator rounds them."""
    whole = [_largest_on(program.tensors, len(a.storage_bytes)) for program in (a, b)]
    found = []
    for s, (x, y) in enumerate(zip(a.storage_bytes, b.storage_bytes, strict=True)):
        if x == y and whole[0][s][0] == whole[1][s][0]:
            found.append(x)
            continue
        t = whole[0][s][1]
        if (
            t >= 0
            and t == whole[1][s][1]
            and all(spec.round_up(each[s][0]) == size for each, size in zip(whole, (x, y), strict=True))
        ):
            found.append(spec.round_up(_bytes(tensors[t])))
        else:
            found.append(spec.round_up(max(0, round(line(x, y)))))
    return tuple(found)


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize  # type: ignore[no-any-return]


def _largest_on(tensors: Sequence[Tensor], n_storages: int) -> list[tuple[int, int]]:
    """By storage, the bytes of its largest tensor without holes, and which that is."""
    found = [(0, -1)] * n_storages
    for i, tensor in enumerate(tensors):
        size = _bytes(tensor) if 0 not in tensor.stride else 0
        if size > found[tensor.storage][0]:
            found[tensor.storage] = size, i
    return found


def _op(x: Op, y: Op, line: Callable[[float, float], float]) -> Op:
    if x == y:
        return x
    arguments = x.arguments
    if arguments != y.arguments:
        others = iter(_INTEGER.findall(y.arguments))
        arguments = _INTEGER.sub(lambda m: str(round(line(int(m[0]), int(next(others))))), arguments)
    return msgspec.structs.replace(
        x,
        arguments=arguments,
        time_ms=max(0.0, line(x.time_ms, y.time_ms)),
        flops=max(0, round(line(x.flops, y.flops))),
        workspace_bytes=max(0, round(line(x.workspace_bytes, y.workspace_bytes))),
    )
