"""``benchmarks/gpu.py`` on the CPU, at tiny sizes: the code is the one that runs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "gpu.json"
    status = gpu.main(["--smoke", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


@pytest.mark.exhaustive  # of the benchmark alone
@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, data = run(tmp_path, "--names", "vit")
    assert status == 0
    assert [(r["model"], r["kind"]) for r in data["rows"]] == [("vit", "bf16"), ("vit", "autocast")]
    for row in data["rows"]:
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.03)
        assert set(row["predicted_ms"]) == {"datasheet", "calibrated", "benchmark"}
        assert all(ms > 0 for ms in row["predicted_ms"].values())
        assert row["deterministic"]
        assert len(row["plans"]) == 2
        for plan in row["plans"]:
            assert plan["bit_equal"]
            assert plan["predicted_peak_bytes"] <= plan["budget_bytes"]
            assert plan["predicted_peak_bytes"] == pytest.approx(plan["measured_peak_bytes"], rel=0.03)
    assert data["torch"] == torch.__version__
    assert len(data["attention"]) == len(gpu.ATTENTION)
    assert "vit" in capsys.readouterr().out
