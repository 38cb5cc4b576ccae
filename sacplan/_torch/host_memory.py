"""Copies of tensors on the host: their memory, and how a recorder tells it from that of the device.

A step that is recorded on a CPU, or with fake tensors, has all its tensors in one place. So who takes memory on the
host says so, and the recorder asks.
"""

from __future__ import annotations

import threading

import torch


# By thread, so that what another thread allocates in the meantime does not count as the host's.
class _Making(threading.local):
    for_host = False


_making = _Making()


def is_for_host() -> bool:
    """Whether the memory that is taken now is on the host, and counts as such."""
    return _making.for_host


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Return memory on the host for a copy of a tensor: pinned for one on a GPU, so that copies can overlap."""
    _making.for_host = True
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
    finally:
        _making.for_host = False
