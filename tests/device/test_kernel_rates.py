"""The figures of kernels by kind, in specs and in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sacplan.device.devices import DeviceSpec, known_devices, resolve_device
from sacplan.device.kernel_rates import KernelRates
from sacplan.errors import DeviceError


@pytest.mark.parametrize("figures", [{"cast": 0.0}, {"cast": float("inf")}])
def test_what_no_device_has_is_refused(figures: dict[str, float]) -> None:
    with pytest.raises(DeviceError, match="KernelRates"):
        KernelRates(**figures)


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


def test_files_hold_rates(tmp_path: Path) -> None:
    spec = replace(resolve_device("h100"), rates=KernelRates(cast=0.5))
    path = tmp_path / "gpu.json"
    spec.save(path)
    assert DeviceSpec.load(path) == spec
    written = json.loads(path.read_text())
    written["spec"]["rates"] = {"warp": 0.25}
    path.write_text(json.dumps(written))
    with pytest.raises(DeviceError, match=r"gpu\.json .*unknown field `warp`.*rates"):
        DeviceSpec.load(path)
