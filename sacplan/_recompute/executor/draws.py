"""Draws: which random numbers an op drew, so that it can draw them again.

PyTorch cannot read a generator's state and draw from it in one step, and another thread may draw from the same
generator (one that augments data, say) in between. So a draw has two ends: the state before the op, and a digest of the
state after it. Only where the op by itself leads from one to the other is it known what the op drew. Running again, it
must get there too, or that is an error. In the forward pass, while other threads are alive, the output of an op that
another draw got mixed up with is kept.

An op runs again on a generator of this module wherever it takes one, and leaves the program's generators alone.

Reading a CPU's state allocates. As much is held while an op runs, and given up before the state is read after it, so
that this is never the peak, and a predicted step needs no moment of its own for it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sacplan._device.kernels import active_device
from sacplan._torch.fake_tensors import FakeTensor
from sacplan._torch.ops import aten_names, draws_numbers, tensors_in
from sacplan._torch.private import GENERATOR_STATE_BYTES

RunWith = Callable[[Sequence[Any], Mapping[str, Any], torch.Generator], Any]
"""Runs an op with (args, kwargs) on a generator."""

_MOST_MOVES = 4096
_TRIES = 8
_STATE_WORDS = 624  # of the Mersenne Twister on a CPU: it counts its draws down within as many
# Ops whose number of draws on a CPU does not depend on the values that they read or draw. On CUDA that holds for all.
_STEADY = aten_names(
    "bernoulli bernoulli_ exponential exponential_ native_dropout rand_like uniform uniform_"
)

_moves: dict[Any, int] = {}  # of known draws: kind of call to how far it moves the generator
_own: dict[torch.device, torch.Generator] = {}
_own_lock = threading.Lock()
_mixed_up: set[torch.device] = (
    set()
)  # devices on which another thread was seen to draw in between: checks are exact


class Draw:
    """What one call of a random op draws. Made before the op runs; then ask ``is_pinned`` at once.

    Args:
        generator: that the op draws from.
    """

    __slots__ = ("_after", "_before", "_generator", "_kind", "_room")

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._before = generator.get_state()
        self._room: torch.Tensor | None = generator.get_state()
        self._after = 0
        self._kind: Any = None

    def is_pinned(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Call it after the op: whether the op may run again, as far as is known without doing so."""
        self._room = None
        end = self._generator.get_state()
        if isinstance(end, FakeTensor):
            return True
        self._after = _digest(end)
        if threading.active_count() == 1:
            return True
        moved = _moved(self._before, end)
        self._kind = _kind_of(func, args, kwargs, self._generator.device)
        expected = _moves.get(self._kind)
        if moved == expected and self._generator.device not in _mixed_up:
            return True
        run_with = _runner(func, self._generator.device.type)
        if run_with is None:
            return expected is None or moved == expected
        if func._schema.name.endswith("_"):
            args = (torch.empty_like(args[0]), *args[1:])
        if self._leads_to_end(run_with, args, kwargs)[0]:
            self._learn(moved)
            return True
        _mixed_up.add(self._generator.device)
        return False

    def again(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run the op on the numbers that it drew. Whether it drew the same number of them, and its output."""
        generator, before = self._generator, self._before
        if isinstance(before, FakeTensor):
            room = generator.get_state()
            out = func(*args, **kwargs)
            del room
            generator.get_state()
            return True, out
        run_with = _runner(func, generator.device.type)
        if run_with is not None:
            return self._leads_to_end(run_with, args, kwargs)
        out = None
        for _ in range(_TRIES):
            now = generator.get_state()
            generator.set_state(before)
            try:
                out = func(*args, **kwargs)
            finally:
                end = generator.get_state()
                generator.set_state(now)
            del now
            if _digest(end) == self._after:
                self._learn(_moved(before, end))
                return True, out
        return False, out

    def _leads_to_end(
        self, run_with: RunWith, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        device = self._generator.device
        with _own_lock:
            own = _own.get(device)
            if own is None:
                own = _own[device] = torch.Generator(device)
            own.set_state(self._before)
            room = own.get_state()
            out = run_with(args, kwargs, own)
            del room
            return _digest(own.get_state()) == self._after, out

    def _learn(self, moved: int) -> None:
        if self._kind is not None:
            if len(_moves) >= _MOST_MOVES:
                _moves.clear()
            _moves[self._kind] = moved


def draw_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
    """The draw of an op that is about to run; None if it draws nothing."""
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is None or tensor.is_meta or not draws_numbers(func, args, kwargs):
        return None
    if isinstance(tensor, FakeTensor):
        spec = active_device()
        return None if spec is not None and spec.kind != "cpu" else Draw(_FakeGenerator())
    values = (*args, *kwargs.values())
    generator = next((v for v in values if isinstance(v, torch.Generator)), None)
    if generator is None:
        cuda = torch.cuda.default_generators if tensor.is_cuda else ()
        generator = cuda[tensor.device.index] if cuda else torch.default_generator
    return Draw(generator)


class _FakeGenerator:
    """Its state takes as many bytes as that of a CPU's generator; it draws nothing."""

    def get_state(self) -> torch.Tensor:
        """A fake tensor."""
        return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)


def _bytes(state: torch.Tensor) -> bytes:
    """Read without an op, which a dispatch mode of the program would see."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(state: torch.Tensor) -> int:
    return hash(_bytes(state))


def _moved(before: torch.Tensor, after: torch.Tensor) -> int:
    """How many numbers were drawn between two states: on CUDA all, on a CPU without full rounds of the generator."""
    first, last = _bytes(before), _bytes(after)
    if len(first) == GENERATOR_STATE_BYTES:
        return (_left(first) - _left(last)) % _STATE_WORDS
    return hash((first[:8], last[:8])) if first[:8] != last[:8] else _offset(last) - _offset(first)


def _left(state: bytes) -> int:
    """Of a CPU's generator (``CPUGeneratorImplState``): how many numbers are left in this round."""
    return int(struct.unpack_from("<i", state, 8)[0])


def _offset(state: bytes) -> int:
    """Of a GPU's generator, whose state is a seed and an offset."""
    return int(struct.unpack_from("<q", state, 8)[0])


def _kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """Calls of one kind draw equally many numbers; None if that depends on values."""
    if device.type == "cpu" and func._schema.name not in _STEADY:
        return None
    values = (*args, *kwargs.values())
    shapes = tuple((t.shape, t.stride(), t.dtype) for t in tensors_in(values))
    return func, device, shapes, tuple(v for v in values if isinstance(v, (int, float, torch.dtype)))


@functools.cache
def _runner(func: Any, device_type: str) -> RunWith | None:
    """How to run the op on a generator of one's own; None if it cannot take one."""
    aten = torch.ops.aten
    if func is aten.native_dropout.default and device_type == "cpu":
        return _native_dropout
    for i, argument in enumerate(func._schema.arguments):
        if "Generator" in str(argument.type):
            return functools.partial(_run, func, i, argument.name)
    other = _TAKING_GENERATORS.get(func._overloadname) if func._schema.name in _LIKE else None
    if other is not None and other in func._overloadpacket.overloads():
        return functools.partial(_run, getattr(func._overloadpacket, other), -1, "generator")
    return None


_LIKE = aten_names("rand_like randn_like randint_like")
_TAKING_GENERATORS = {
    "default": "generator",
    "Tensor": "Tensor_generator",
    "low_dtype": "low_generator_dtype",
}


def _run(
    func: Any, position: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], own: torch.Generator
) -> Any:
    if 0 <= position < len(args):
        return func(*args[:position], own, *args[position + 1 :], **kwargs)
    return func(*args, **{**kwargs, name: own})


def _native_dropout(args: Sequence[Any], kwargs: Mapping[str, Any], own: torch.Generator) -> Any:
    """As its kernel on a CPU has it."""
    names = ("input", "p", "train")
    x, p, train = (*args, *(kwargs[name] for name in names[len(args) :]))
    if not x.numel() or train is False:
        return torch.ops.aten.native_dropout.default(x, p, train)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=own)
    return x.mul(mask).mul_(1 / (1 - p) if p != 1 else 0.0), mask
