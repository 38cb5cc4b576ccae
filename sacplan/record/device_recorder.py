"""Make a recorder for a device: with its cost model, its kernels' workspaces and its allocator."""

from __future__ import annotations

import functools
from typing import Any

from sacplan.device.cost import fused_ms
from sacplan.device.devices import DeviceSpec
from sacplan.device.host_step import rank_step_ms
from sacplan.device.workspace import formula_bytes, workspace_bytes
from sacplan.record.fake_data import DataRules
from sacplan.record.recorder import NUMBER_BYTES, Recorder
from sacplan.record.saved_tensors import SavedMode
from sacplan.torch_compat.private import GENERATOR_STATE_BYTES


def device_recorder(
    spec: DeviceSpec, cost: Any, saved: SavedMode, rules: DataRules | None = None
) -> Recorder:
    """Return a recorder of a step on a device. ``cost``, ``saved`` and ``rules`` are the recorder's arguments."""
    return Recorder(
        cost=cost,
        workspace=functools.partial(workspace_bytes, spec),
        formula=functools.partial(formula_bytes, spec),
        kernel_ms=functools.partial(fused_ms, spec),
        host_ms=rank_step_ms,
        round_bytes=spec.allocation_round_bytes,
        saved=saved,
        state_bytes=GENERATOR_STATE_BYTES if spec.kind == "cpu" else 0,
        number_bytes=NUMBER_BYTES if spec.kind == "cpu" else 0,
        host_bytes=spec.host_bytes,
        on_gpu=spec.kind == "cuda",
        rules=rules,
    )
