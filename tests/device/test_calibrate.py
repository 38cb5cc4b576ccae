"""A roofline that was measured here: sane figures, and specs that everything else accepts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import sacplan
from sacplan.device.calibrate import calibrate
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernels import fake_device
from sacplan.errors import DeviceError


@pytest.fixture(scope="module")
def spec() -> DeviceSpec:
    return calibrate("cpu", matmul_size=64, copy_bytes=2**16)


@pytest.mark.slow
def test_figures_are_sane(spec: DeviceSpec) -> None:
    assert spec.name == "cpu"
    assert spec.kind == "cpu"
    assert {"float32", "bfloat16"} <= spec.flops.keys() <= {"float32", "bfloat16", "float16"}
    figures = (*spec.flops.values(), spec.bandwidth_bytes_per_s, spec.kernel_launch_us)
    assert all(value > 0 and math.isfinite(value) for value in figures)
    assert spec.compute_efficiency == spec.bandwidth_efficiency == 1.0
    assert "measured" in spec.source
    assert spec.memory_bytes == resolve_device("cpu").memory_bytes


def test_a_profile_and_a_file_take_it(spec: DeviceSpec, tmp_path: Path) -> None:
    spec.save(tmp_path / "cpu.json")
    loaded = DeviceSpec.load(tmp_path / "cpu.json")
    assert loaded == spec
    model, batch = nn.Linear(8, 8), torch.randn(2, 8)
    profile = sacplan.profile(model, batch, device=loaded)
    assert profile.step_ms > 0
    assert profile.peak_bytes == sacplan.profile(model, batch, device="cpu").peak_bytes


@pytest.mark.slow
def test_it_measures_under_a_fake_mode_and_changes_nothing() -> None:
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    with fake_device("h100"):
        assert calibrate("cpu", matmul_size=8, copy_bytes=64).flops["float32"] > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h100"}, "must be 'cuda' or 'cpu'"),
        ({"device": "cpu", "matmul_size": 0}, "matmul_size is 0; it must be from 1 to 1,048,576"),
        ({"device": "cpu", "copy_bytes": 0}, "copy_bytes is 0; it must be from 4"),
        ({"device": "no such thing"}, "unknown device"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        calibrate(**arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_gpu_here() -> None:
    with pytest.raises(DeviceError, match="is_available"):
        calibrate()
