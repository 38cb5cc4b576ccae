"""What several tests of offloading look at."""

from __future__ import annotations

import weakref

import pytest
import torch

from sacplan.techniques.offload.executor.parcels import Parcel


@pytest.fixture
def parcels(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Parcel]]:
    """All parcels that are made."""
    made: list[weakref.ref[Parcel]] = []
    begin = Parcel.__init__

    def noted(self: Parcel, tensor: torch.Tensor) -> None:
        begin(self, tensor)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Parcel, "__init__", noted)
    return made
