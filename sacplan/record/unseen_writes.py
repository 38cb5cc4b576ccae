"""Find writes in place that no op shows, by the version counters of tensors.

A custom ``autograd.Function`` may write to a tensor in a kernel of its own, and says so with ``ctx.mark_dirty``.
PyTorch then counts one more write, whether or not an op has shown it already (``_mark_dirty`` in
``torch/csrc/autograd/python_function.cpp``). What the last op wrote to the storage may be gone, so running that op
again might not bring the values back. The executor keeps such a tensor (``SlotTable.slot_of``), and so must the
program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class _Written(NamedTuple):
    """The last op that wrote a storage, and the version that its tensors have since."""

    op: int
    version: int


class UnseenWrites:
    """By storage, the version that its tensors should have, as far as the ops of the forward pass tell."""

    def __init__(self) -> None:
        self._written: dict[int, _Written] = {}

    def restart(self) -> None:
        """Begin a new record."""
        self._written.clear()

    def lost(self, tensors: Iterable[torch.Tensor], storages: Iterable[int]) -> list[int]:
        """Return the ops whose outputs are among these tensors, and were written since by anything but an op."""
        found = []
        for t, storage in zip(tensors, storages, strict=True):
            written = self._written.get(storage)
            # An inference tensor has no version.
            if written is not None and not t.is_inference() and t._version != written.version:
                del self._written[storage]  # told once
                found.append(written.op)
        return found

    def wrote(
        self, op: int, tensors: Sequence[torch.Tensor], storages: Sequence[int], *, in_place: bool
    ) -> None:
        """Note what an op has made or written in place."""
        for t, storage in zip(tensors, storages, strict=True):
            if not t.is_inference():
                # Inside a dispatch mode PyTorch has not counted the write yet; it does when the op returns.
                self._written[storage] = _Written(op, t._version + in_place)
