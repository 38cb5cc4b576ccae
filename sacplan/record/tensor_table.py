"""The tensors that ops take and return: pairs of a storage and a layout on it, each with a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sacplan.core.program import Tensor
from sacplan.record.seen_ops import SeenOp
from sacplan.torch_compat.private import storage_key

_StridedLayout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # the last is the offset in the storage


class TensorTable:
    """Numbers tensors in the order in which they are first met.

    Layouts have numbers of their own: a step has few of them, and an op that is looked up (``seen_ops.py``) brings
    those of its tensors along.

    Attributes:
        offsets: storage key of an unpacked tensor to the place in the recorded storage where it begins; absent where
            that is 0. The tensor that an unpack hook returns begins its own storage, the one that was packed may not.
    """

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        self._layouts: dict[_StridedLayout, int] = {}
        self._tensors: dict[tuple[int, int], int] = {}  # (storage, layout) to tensor

    def indices(
        self, tensors: Sequence[torch.Tensor], storages: Sequence[int], seen: SeenOp | None
    ) -> tuple[int, ...]:
        """Number tensors on these storages; ``seen`` remembers the layouts if the op was looked up."""
        # Not those of ``seen`` while unpacked tensors are alive: equal ones may lie at different places of storages.
        if seen is None or self.offsets:
            layouts: Iterable[int] = map(self._layout_of, tensors)
        else:
            if seen.layouts is None:
                seen.layouts = tuple(map(self._layout_of, tensors))
            layouts = seen.layouts
        known = self._tensors
        return tuple(known.setdefault(view, len(known)) for view in zip(storages, layouts, strict=True))

    def index(self, tensor: torch.Tensor, storage: int) -> int:
        """Number one tensor on a storage."""
        return self._tensors.setdefault((storage, self._layout_of(tensor)), len(self._tensors))

    def _layout_of(self, t: torch.Tensor) -> int:
        offset = int(t.storage_offset())
        if self.offsets:
            offset += self.offsets.get(storage_key(t.untyped_storage()), 0)
        layout = (t.dtype, t.shape, t.stride(), offset)
        return self._layouts.setdefault(layout, len(self._layouts))

    def table(self, same: Sequence[int]) -> tuple[Tensor, ...]:
        """Return all tensors as plain values; ``same`` tells by storage which one takes its place."""
        layouts = list(map(_layout_value, self._layouts))
        return tuple(Tensor(same[storage], *layouts[layout]) for storage, layout in self._tensors)


def _layout_value(layout: _StridedLayout) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    dtype, shape, stride, offset = layout
    return str(dtype).removeprefix("torch."), tuple(shape), tuple(stride), offset
