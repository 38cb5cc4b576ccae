"""One thread, and no cuBLAS workspaces, for tests with small models.

Threads that wait for one another on a busy machine cost minutes; and two workspaces of 32 MiB would be most of
what a small model takes on an H100, so that no budget could be met. Tests of the workspaces, and those on a GPU,
use ``counted_workspaces``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sacplan._device.devices import DeviceSpec
from sacplan._rewrites import library_workspaces as libraries

torch.set_num_threads(1)

_library_workspace_bytes = libraries.library_workspace_bytes


def _only_if_given(spec: DeviceSpec, version: tuple[int, int] | None = None) -> int:
    return spec.matmul_workspace_bytes or 0


@pytest.fixture(autouse=True, scope="session")
def _uncounted_workspaces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "library_workspace_bytes", _only_if_given)
        yield


@pytest.fixture
def counted_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of the tests: a device's cuBLAS workspaces count."""
    monkeypatch.setattr(libraries, "library_workspace_bytes", _library_workspace_bytes)
