"""What all tests run under: one thread, and the same random examples every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # threads that wait for one another on a busy machine cost minutes

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def no_cublas_workspaces() -> Iterator[None]:
    """The tests of a file plan for a GPU without the workspaces of cuBLAS.

    Two of 32 MiB are most of what a small model takes on an H100, and no plan makes them smaller; so tests of budgets
    ask for this: ``pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        yield
