"""Writes in place that versions of tensors do not show, as far as the units of a plan see them."""

from __future__ import annotations

import itertools

import torch

from sacplan.torch_compat.private import storage_key

last_writes: dict[int, int] = {}
"""By storage, a number that identifies its last write, as far as the modes of all units saw it.

Writes to running statistics, or through what ``.data`` returns, do not bump the version of a node's argument.
"""

_numbers_of_writes = itertools.count(1)


def note_write(storage: int) -> None:
    """Note that a storage is being written."""
    last_writes[storage] = next(_numbers_of_writes)


def last_write_to(storage: torch.UntypedStorage) -> int:
    """Return the number of the last write to a storage; 0 if there was none."""
    # Asked very often, and most steps have no write in place: then no key is computed.
    return last_writes.get(storage_key(storage), 0) if last_writes else 0
