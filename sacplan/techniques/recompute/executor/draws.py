"""Draws: which random numbers an op drew, so that it can draw them again.

PyTorch cannot read a generator's state and draw from it in one step, and another thread (one that augments data, say)
may draw from the same generator in between. So a draw records the state before the op and a digest of the state after
it. An op that does not lead from the first state to the second when it runs again is an error.

Reading a CPU's state allocates 5 KB. As much is held while an op runs for the first time, and freed before the state
after the op is read. So that read never makes the peak, and a predicted step needs no event for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.device.kernels import active_device
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.ops import draws_numbers, tensors_in
from sacplan.torch_compat.private import GENERATOR_STATE_BYTES


class Draw:
    """The numbers that one call of a random op draws. Make it before the op runs, and call ``end`` right after.

    Args:
        generator: the one that the op draws from.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._before = generator.get_state()
        self._room: torch.Tensor | None = generator.get_state()
        self._after = 0

    def end(self) -> None:
        """Note the state after the op."""
        self._room = None
        self._after = _digest(self._generator.get_state())

    def again(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run the op again from the state before it. Return whether it led to the same state again, and its output.

        The generator is left in the state in which it was found.
        """
        now = self._generator.get_state()
        self._generator.set_state(self._before)
        try:
            out = func(*args, **kwargs)
            return _digest(self._generator.get_state()) == self._after, out
        finally:
            self._generator.set_state(now)


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

    def set_state(self, state: torch.Tensor) -> None:
        """Do nothing."""


def _digest(state: torch.Tensor) -> int:
    if isinstance(state, FakeTensor):
        return 0  # it has no bytes, and a fake step is run for its memory, not for its numbers
    # Read through the pointer: a dispatch mode of the program would see an op.
    return hash(ctypes.string_at(state.data_ptr(), state.numel()))
