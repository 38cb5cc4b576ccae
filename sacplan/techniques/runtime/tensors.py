"""Cheap reads from tensors: views, versions, aliases and checksums.

Private PyTorch API, tried on 2.13: the thread's set of excluded dispatch keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sacplan.torch_compat.fake_tensors import FakeTensor

View = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]
"""Size, strides, storage offset, dtype."""

_REAL = frozenset({torch.Tensor, torch.nn.Parameter})
_TYPE_OF_NUMBER = {int: np.int64, float: np.float64}
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ADINPLACEORVIEW = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_number_of_modes = torch._C._len_torch_dispatch_stack


def view_of(t: torch.Tensor) -> View:
    """Return how the tensor lies on its storage."""
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def version_of(t: torch.Tensor) -> int:
    """Return the version counter; 0 for an inference tensor, which has none."""
    return 0 if t.is_inference() else t._version


def history_free_aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases on the same storages and version counters, without history; unseen by modes for real tensors."""
    # Inside a dispatch mode, the key is off with which an alias shares the version counter (``detach`` in
    # ``torch/csrc/autograd/VariableTypeManual.cpp``).
    below = _is_excluded(_ADINPLACEORVIEW)
    if below:
        _set_excluded(_ADINPLACEORVIEW, False)
    try:
        # Without a mode nothing sees the op. A subclass needs its own dispatch, so it goes through the modes.
        if not _number_of_modes():
            return [t.detach() for t in tensors]
        return [_unseen_detach(t) if type(t) in _REAL else t.detach() for t in tensors]
    finally:
        if below:
            _set_excluded(_ADINPLACEORVIEW, True)


def _unseen_detach(t: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return t.detach()


TAKES_A_NUMBER = frozenset(
    getattr(torch.ops.aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
)
"""Elementwise ops for which C++ turns a Python number, given as the second argument, into a tensor of 8 bytes."""


def with_lent_number(args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments for a dispatch mode to pass on, with a number put into a tensor on numpy's memory.

    The mode gets the number as a Python number, while the tensor that C++ made of it is still alive in the caller.
    Passing on the number would make a second tensor, which the plain step does not have, perhaps at the step's peak.

    This is done only where the op treats a tensor without dimensions like a number: next to a float tensor with
    dimensions, neither decides the type of the result.
    """
    tensor, number = args[0], args[1]
    # Unchanged are, in order: no number (``type``, since a bool is an int, too); a subclass, another device, or a type
    # of result that the number could decide; modes below, which would see a tensor; a number too big for int64.
    if (
        type(number) not in _TYPE_OF_NUMBER
        or type(tensor) not in _REAL
        or not tensor.is_cpu
        or not tensor.ndim
        or not tensor.is_floating_point()
        or _number_of_modes()
        or not -(2**63) <= number < 2**63
    ):
        return args
    lent = torch.from_numpy(np.array(number, _TYPE_OF_NUMBER[type(number)]))
    return (tensor, lent, *args[2:])


def checksum(t: torch.Tensor) -> tuple[int, ...] | None:
    """Return a checksum of the bits, without a temporary of the tensor's size; None where nothing can be computed."""
    if isinstance(t, FakeTensor) or t.is_meta or not t.numel():
        return None  # there are no bits
    if t.numel() <= 2 and not t.is_floating_point():
        return None  # seeds and offsets, which attention kernels without dropout do not fill
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # to read the result would synchronize, which a capture forbids
    bits = torch.view_as_real(t) if t.is_complex() else t
    bits = bits.view(_INT_OF_SIZE[bits.element_size()])
    # On a CPU the result lies in numpy's memory: PyTorch allocates nothing, at what may be the peak of the step.
    out = torch.from_numpy(np.empty((), np.uint64)) if t.is_cpu else None
    found = torch.hash_tensor(bits, out=out)
    # Equal elements cancel out in the hash, so the checksum has the first element, too.
    return int(found.view(torch.int64)), int(bits[(0,) * bits.ndim])
