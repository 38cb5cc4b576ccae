"""What recipes read from a tensor, at the price of an attribute where that is possible.

Private PyTorch API, tried on 2.13: keysets of tensors, and the thread's set of excluded dispatch keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from sacplan._torch.ops import is_ordinary_tensor
from sacplan._torch.private import FakeTensor

View = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]
"""Size, strides, storage offset, dtype."""

_REAL = frozenset({torch.Tensor, torch.nn.Parameter})
_SAMPLE_BYTES = 64
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ADINPLACEORVIEW = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_number_of_modes = torch._C._len_torch_dispatch_stack
_keys_of = torch._C._dispatch_keys

_ordinary: dict[tuple[type, int], bool] = {}


def view_of(t: torch.Tensor) -> View:
    """How the tensor lies on its storage."""
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def version_of(t: torch.Tensor) -> int:
    """The version counter; inference tensors have none."""
    return 0 if t.is_inference() else t._version


def is_ordinary(t: torch.Tensor) -> bool:
    """Whether size, strides and storage say all about it; remembered, since type and dispatch keys decide."""
    key = (type(t), _keys_of(t).raw_repr())
    found = _ordinary.get(key)
    if found is None:
        found = _ordinary[key] = is_ordinary_tensor(t)
    return found


def history_free_aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same storages and version counters without autograd's history; no mode sees real ones."""
    # Inside of a dispatch mode the key is off that makes an alias share the version counter.
    below = _is_excluded(_ADINPLACEORVIEW)
    if below:
        _set_excluded(_ADINPLACEORVIEW, False)
    try:
        if not _number_of_modes():
            return [t.detach() for t in tensors]
        return [_unseen_detach(t) if type(t) in _REAL else t.detach() for t in tensors]
    finally:
        if below:
            _set_excluded(_ADINPLACEORVIEW, True)


def _unseen_detach(t: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return t.detach()


def sample(t: torch.Tensor) -> bytes | None:
    """A few bytes from the middle of a CPU's tensor, for a comparison later; None where they cannot be read at once.

    It tells that something wrote to most of the tensor, not to a part. Reading a GPU's memory would wait for it.
    """
    if not t.is_cpu or type(t) not in _REAL or not t.is_contiguous():
        return None
    nbytes = t.nbytes
    return ctypes.string_at(t.data_ptr() + nbytes // 2, min(_SAMPLE_BYTES, nbytes - nbytes // 2))


def checksum(t: torch.Tensor) -> tuple[int, ...] | None:
    """Of the bits, without a temporary of the tensor's size. None where nothing can be computed."""
    if isinstance(t, FakeTensor) or t.is_meta or not t.numel():
        return None
    if t.numel() <= 2 and not t.is_floating_point():
        return None  # seeds and offsets, which attention kernels without dropout do not fill
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    bits = torch.view_as_real(t) if t.is_complex() else t
    bits = bits.view(_INT_OF_SIZE[bits.element_size()])
    # Equal elements cancel out in the hash, so one of them is looked at.
    return int(torch.hash_tensor(bits).view(torch.int64)), int(bits[(0,) * bits.ndim])
