"""Fixtures of the tests of sharded steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import RANKS


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Eight ranks of which this process is the first. torch's fake process group sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()
