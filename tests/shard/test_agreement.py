"""Digests of what ranks are given; ``tests/shard/test_spread.py`` has them compared on ranks."""

from __future__ import annotations

import pytest
import torch

from sacplan._shard.executor.agreement import _bytes_of


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(12).view(3, 4).t(),
        torch.randn(3, 1).expand(3, 1000),
        torch.randn(700, 1000).t()[::2],
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
    ],
    ids=["transposed", "expanded", "every second row", "scalar", "conjugated", "empty"],
)
def test_every_value_of_a_tensor_is_in_its_digest(t: torch.Tensor) -> None:
    seen = b"".join(_bytes_of(t))
    assert b"".join(_bytes_of(t.clone())) == seen or t.stride(-1) == 0
    for at in (0, -1) if t.numel() else ():
        other = t.clone()
        other[(at,) * t.dim()] += 1
        assert b"".join(_bytes_of(other)) != seen
