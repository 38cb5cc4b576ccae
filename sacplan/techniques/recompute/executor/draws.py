"""Draws: which random numbers an op drew, so that it can draw them again.

PyTorch cannot read a generator's state and draw from it in one step, and another thread (one that augments data, say)
may draw from the same generator in between. So a draw records the state before the op and a digest of the state after
it. The op's numbers are known only if the op by itself leads from the first state to the second.

- In the forward pass, with other threads alive, an op that got mixed up with another draw keeps its output.
- Running again, an op that does not reach the second state is an error.

An op runs again on a generator of this module wherever it takes one, and leaves the program's generators alone.

Reading a CPU's state allocates 5 KB. As much is held while an op runs, and freed before the state is read after it.
So the read never makes the peak, and a predicted step needs no moment of its own for it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sacplan.device.kernels import active_device
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.ops import aten_names, draws_numbers, tensors_in
from sacplan.torch_compat.private import GENERATOR_STATE_BYTES

RunWith = Callable[[Sequence[Any], Mapping[str, Any], torch.Generator], Any]
"""Runs an op with (args, kwargs) on a generator."""

_MOST_MOVES = 4096
_TRIES = 512  # while two threads take turns, each draw of one is mixed up with the other's: hundreds in a row
_STATE_WORDS = 624  # of the Mersenne Twister on a CPU: it counts its draws down within as many
# Ops whose number of draws on a CPU does not depend on the values that they read or draw. On CUDA that holds for all.
_STEADY = aten_names(
    "bernoulli bernoulli_ exponential exponential_ native_dropout rand_like uniform uniform_"
)

_moves: dict[Any, int] = {}  # of known draws: kind of call to how far it moves the generator
_own: dict[torch.device, torch.Generator] = {}
_own_lock = threading.Lock()
# Devices on which another thread was seen to draw in between. A distance proves nothing there any more, so the last
# check decides.
_mixed_up: set[torch.device] = set()


class Draw:
    """The numbers that one call of a random op draws. Make it before the op runs, and ask ``is_pinned`` right after.

    Args:
        generator: that the op draws from.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._before = generator.get_state()
        self._room: torch.Tensor | None = generator.get_state()
        self._after = 0
        self._kind: Any = None

    def is_pinned(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the op alone led from the state before it to the state now, so that it may run again.

        The checks go from cheap to expensive; the last one runs the op.
        """
        self._room = None
        end = self._generator.get_state()
        if isinstance(end, FakeTensor):
            return True  # a fake step draws nothing
        self._after = _digest(end)
        if threading.active_count() == 1:
            return True  # nobody else can have drawn
        moved = _moved(self._before, end)
        self._kind = _kind_of(func, args, kwargs, self._generator.device)
        expected = _moves.get(self._kind)
        if moved == expected and self._generator.device not in _mixed_up:
            return True  # exactly as far as a call of this kind moves it
        run_with = _runner(func)
        if run_with is None and (self._kind is None or expected is not None):
            # It takes no generator, so running it to find out draws from the program's: once, if its distance can be
            # learned. If it cannot, the draw is given the benefit of the doubt: ``again`` compares, and raises.
            return expected is None or moved == expected
        if func._schema.name.endswith("_"):
            args = (torch.empty_like(args[0]), *args[1:])  # the trial must not write the program's tensor
        if self._leads_to_end(func, args, kwargs)[0]:
            self._learn(moved)
            return True
        _mixed_up.add(self._generator.device)
        return False

    def again(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run the op on the numbers that it drew. Return whether it reached the same state, and its output.

        An op that takes no generator runs on the program's own, whose state is put back.
        """
        if isinstance(self._before, FakeTensor):
            room = self._generator.get_state()
            out = func(*args, **kwargs)
            del room
            self._generator.get_state()
            return True, out
        return self._leads_to_end(func, args, kwargs)

    def _on_the_programs_own(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Run the op on the program's generator. Another thread may draw in between, so that is tried again."""
        generator, before, out = self._generator, self._before, None
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

    def _leads_to_end(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run the op from the state before it. Return whether that reaches the state after it, and the output."""
        run_with = _runner(func)
        if run_with is None:
            return self._on_the_programs_own(func, args, kwargs)
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
    """Return the draw of an op that is about to run; None if it draws nothing."""
    tensor = next(iter(tensors_in((args, kwargs))), None)
    if tensor is None or tensor.is_meta or not draws_numbers(func, args, kwargs):
        return None
    if isinstance(tensor, FakeTensor):
        spec = active_device()
        # On a CPU the state takes memory that the fake step has to show; on a GPU it lies on the host, which is
        # not counted.
        return None if spec is not None and spec.kind != "cpu" else Draw(_FakeGenerator())
    values = (*args, *kwargs.values())
    generator = next((v for v in values if isinstance(v, torch.Generator)), None)
    if generator is None:
        cuda = torch.cuda.default_generators if tensor.is_cuda else ()
        generator = cuda[tensor.device.index] if cuda else torch.default_generator
    return Draw(generator)


class _FakeGenerator:
    """A generator for fake steps: its state takes as many bytes as a CPU generator's, and it draws nothing."""

    def get_state(self) -> torch.Tensor:
        """Return a fake tensor of the state's size."""
        return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)


def _bytes(state: torch.Tensor) -> bytes:
    """Return the bytes of a state. No op reads them, since a dispatch mode of the program would see it."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(state: torch.Tensor) -> int:
    return hash(_bytes(state))


def _moved(before: torch.Tensor, after: torch.Tensor) -> int:
    """Return how far a generator moved between two states: on a CPU, modulo a full round of the generator."""
    first, last = _bytes(before), _bytes(after)
    if len(first) == GENERATOR_STATE_BYTES:
        return (_left(first) - _left(last)) % _STATE_WORDS
    # With another seed there is no distance. The hash stands for one that no known call has.
    return hash((first[:8], last[:8])) if first[:8] != last[:8] else _offset(last) - _offset(first)


def _left(state: bytes) -> int:
    """Return how many numbers a CPU's generator has left in this round.

    The count is behind the seed in its state (``aten/src/ATen/CPUGeneratorImpl.cpp``).
    """
    return int(struct.unpack_from("<i", state, 8)[0])


def _offset(state: bytes) -> int:
    """Return the offset of a GPU's generator.

    Its state is a seed and an offset of 8 bytes each (``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp``).
    """
    return int(struct.unpack_from("<q", state, 8)[0])


def _kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """Return a key for calls that draw equally many numbers; None if that number depends on values."""
    if device.type == "cpu" and func._schema.name not in _STEADY:
        return None
    values = (*args, *kwargs.values())
    shapes = tuple((t.shape, t.stride(), t.dtype) for t in tensors_in(values))
    return func, device, shapes, tuple(v for v in values if isinstance(v, (int, float, torch.dtype)))


@functools.cache
def _runner(func: Any) -> RunWith | None:
    """Return how to run the op on a generator of one's own; None if it cannot take one."""
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
