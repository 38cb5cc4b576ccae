"""Memory of a factory that is filled in slices: ``out = empty_like(x); out[..., 0::2] = a; out[..., 1::2] = b``.

A kernel that no dispatch mode sees may fill what a factory returns, so the factory alone must not run again. But where
copies have written every element before anything reads one, nothing of such a kernel is left, and factory and copies
may run again together (``in_place_versions.py``).
"""

from __future__ import annotations

from math import prod

import msgspec

from sacplan.core.program import Program, Tensor
from sacplan.torch_compat.ops import EMPTY

_COPY = "aten.copy_.default"
"""The op that counts as filling. One with a constant does not: a kernel may add to zeros unseen."""


def only_filled(program: Program) -> Program:
    """Return the program in which factories of empty memory may run again only where copies fill it."""
    ops = tuple(
        msgspec.structs.replace(op, recomputable=False)
        if op.recomputable and op.name in EMPTY and not _is_filled(program, program.tensors[op.outputs[0]])
        else op
        for op in program.ops
    )
    return msgspec.structs.replace(program, ops=ops)


def _is_filled(program: Program, whole: Tensor) -> bool:
    """Whether copies write all of a tensor before any op reads of it."""
    boxes = []
    for i in sorted(program.readers.get(whole.storage, ())):
        op = program.ops[i]
        if op.outputs and not op.writes and not op.mutates:
            continue  # a view
        if op.name != _COPY or op.mutates != (whole.storage,):
            return False
        box = _box(program.tensors[op.inputs[0]], whole)
        if box is not None:
            boxes.append(box)
        if _cover(boxes, whole.shape):
            return True
    return False


def _box(part: Tensor, whole: Tensor) -> tuple[range, ...] | None:
    """Return the indices that ``part`` has in each dimension of a contiguous ``whole``; None if it is no slice."""
    if whole.offset or whole.stride != tuple(prod(whole.shape[d + 1 :]) for d in range(len(whole.shape))):
        return None
    found, offset = [], part.offset
    # The first element, as an index in each dimension.
    for stride in whole.stride:
        start, offset = divmod(offset, stride)
        found.append(range(start, start + 1))
    # Each dimension of the slice steps along one dimension of the whole.
    for own, stride in zip(part.shape, part.stride, strict=True):
        if own == 1:
            continue
        d = next((d for d, of_whole in enumerate(whole.stride) if of_whole <= stride), None)
        if d is None or stride % whole.stride[d] or len(found[d]) > 1:
            return None
        step = stride // whole.stride[d]
        found[d] = range(found[d].start, found[d].start + own * step, step)
        if found[d][-1] >= whole.shape[d]:
            return None
    return tuple(found)


def _cover(boxes: list[tuple[range, ...]], shape: tuple[int, ...]) -> bool:
    """Whether boxes that are full in all dimensions but one have all indices of that one."""
    for d in range(len(shape)):
        alike = [box for box in boxes if all(len(box[e]) == shape[e] for e in range(len(shape)) if e != d)]
        if len({index for box in alike for index in box[d]}) == shape[d]:
            return True
    return False
