"""Rates by kind of kernel from a clock that is a cost model itself: what it was made with must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan.device import calibrate
from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernel_rates import FIGURES
from sacplan.device.op_kernels import Call
from sacplan.device.probes import Probe, measured_rates, probes

META = torch.device("meta")
NBYTES = 2**28
H100 = resolve_device("h100")


class FakeClock(TorchDispatchMode):
    """Takes the time of a function from the ops that it calls, by the cost model of a device."""

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__()
        self._model, self._ms = CostModel(spec), 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._ms += self._model.cost(Call(func, args, kwargs or {}, out))[1]
        return out

    def __call__(self, call: Callable[[], object], *_: Any, **__: Any) -> float:
        self._ms = 0.0
        with self:
            call()
        return self._ms * 1e-3


def other_rates() -> DeviceSpec:
    """Return an H100 on which every figure is a tenth off."""
    rates = H100.rates
    figures = {
        name: value * (0.9 if i % 2 else 1.1)
        for i, (name, value) in enumerate(msgspec.structs.asdict(rates).items())
    }
    return replace(H100, rates=msgspec.structs.replace(rates, **figures))


def test_rates_come_out_as_the_clock_was_made() -> None:
    true = other_rates()
    rates, measured = measured_rates(H100, META, NBYTES, FakeClock(true))
    assert set(measured) == set(FIGURES)
    for name in FIGURES:
        assert getattr(rates, name) == pytest.approx(getattr(true.rates, name), rel=1e-6), name


@pytest.mark.parametrize("name", ["a100-80gb", "rtx-4090", "t4", "mi300x"])
def test_predictions_for_probes_are_what_was_measured(name: str) -> None:
    """Whatever bounds the kernels of a device."""
    spec = resolve_device(name)
    rates = msgspec.structs.replace(spec.rates, cast=0.5, gather_rate=0.3, strided_rate=1.0)
    slower = replace(spec, rates=rates)
    rates, _ = measured_rates(spec, META, NBYTES, FakeClock(slower))
    found = CostModel(replace(spec, rates=rates))
    for probe in probes(META, NBYTES):
        out = probe.run()
        want = CostModel(slower).cost(Call(probe.func, probe.args, probe.kwargs, out))[1]
        assert found.cost(Call(probe.func, probe.args, probe.kwargs, out))[1] == pytest.approx(want, rel=1e-6)


def test_ops_that_do_not_run_leave_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Probe) -> Any:
        if self.figure in ("convolution", "sort"):
            raise RuntimeError("no such kernel")
        return self.func(*self.args, **self.kwargs)

    monkeypatch.setattr(Probe, "run", run)
    rates, measured = measured_rates(H100, META, NBYTES, FakeClock(other_rates()))
    assert set(FIGURES) - set(measured) == {"convolution", "sort"}
    assert (rates.convolution, rates.sort) == (H100.rates.convolution, H100.rates.sort)


def test_calibrate_takes_them_and_files_hold_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part of ``calibrate`` that only a GPU runs, with the clock replaced."""
    true = other_rates()
    monkeypatch.setattr(calibrate, "_seconds", FakeClock(true))
    spec = calibrate._with_rates(H100, META, NBYTES)
    assert spec.rates.cast == pytest.approx(true.rates.cast)
    assert "not measured" not in spec.source
    spec.save(tmp_path / "gpu.json")
    assert DeviceSpec.load(tmp_path / "gpu.json") == spec
