"""What all tests run under: one thread, and the same random examples every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from sacplan._device.devices import DeviceSpec
from sacplan._rewrites import library_workspaces

torch.set_num_threads(1)  # threads that wait for one another on a busy machine cost minutes

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def no_cublas_workspaces() -> Iterator[None]:
    """A module's tests plan for a GPU without the workspaces of cuBLAS, unless the device says how large they are.

    Two workspaces of 32 MiB are most of what a small model takes on an H100, and no plan makes them smaller; so
    tests of budgets ask for this: ``pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")``.
    """

    def only_if_given(spec: DeviceSpec, version: tuple[int, int] | None = None) -> int:
        return spec.matmul_workspace_bytes or 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_workspaces, "library_workspace_bytes", only_if_given)
        yield
