"""The figures of kernels by kind, in specs and in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec, known_devices, resolve_device
from sacplan.device.kernel_rates import speeds_of
from sacplan.errors import DeviceError


@pytest.mark.parametrize("name", [n for n in known_devices() if n != "cpu"])
def test_clocks_go_with_the_float32_peak(name: str) -> None:
    """Two FLOPs a cycle of each lane: 64 lanes on Volta, Turing and A100, else 128."""
    spec = resolve_device(name)
    lanes = 64 if spec.capability is not None and spec.capability <= (8, 0) else 128
    assert spec.flops["float32"] == pytest.approx(2 * lanes * spec.sm_count * spec.clock_ghz * 1e9, rel=0.012)


def test_a_spec_without_a_clock_has_that_of_the_table_or_of_its_peak() -> None:
    h100 = resolve_device("h100")
    assert replace(h100, clock_ghz=None).clock_ghz == 1.98
    other = replace(h100, name="mine", flops={"float32": 2 * 128 * h100.sm_count * 1.5e9}, clock_ghz=None)
    assert other.clock_ghz == pytest.approx(1.5)
    assert resolve_device("cpu").clock_ghz is None
    with pytest.raises(DeviceError, match="clock_ghz"):
        replace(h100, clock_ghz=0.0)


def test_shares_of_ones_own(tmp_path: Path) -> None:
    h100 = resolve_device("h100")
    spec = replace(h100, matrix_shares={"flash_attention": 0.8})
    spec.save(tmp_path / "gpu.json")
    assert DeviceSpec.load(tmp_path / "gpu.json") == spec
    before, after = speeds_of(h100), speeds_of(spec)
    assert after.pop("flash_attention").matrix_share == 0.8
    assert before.pop("flash_attention").matrix_share == 0.53
    assert before == after
    with pytest.raises(DeviceError, match="'norm', 'warp'; it may have the kinds convolution,"):
        CostModel(replace(h100, matrix_shares={"warp": 0.5, "norm": 0.5}))
    with pytest.raises(DeviceError, match="matrix_shares"):
        replace(h100, matrix_shares={"flash_attention": 0.0})
