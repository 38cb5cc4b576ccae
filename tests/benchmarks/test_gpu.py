"""``benchmarks/gpu.py`` on the CPU, at tiny sizes: the code is the one that runs on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.models import gpu_models
from sacplan._profile.tracing import profile
from tests.support.slow import slow_after


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "gpu.json"
    status = gpu.main(["--smoke", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, data = run(tmp_path, "--names", "gpt2", "vit")
    assert status == 0
    assert [(r["model"], r["kind"]) for r in data["rows"]] == [
        ("gpt2", "bf16"), ("vit", "bf16"), ("gpt2", "autocast"), ("vit", "autocast"),
    ]  # fmt: skip
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


@pytest.mark.slow
def test_a_row_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(size: str) -> Any:
        raise ValueError("no such luck")

    monkeypatch.setitem(gpu_models.MODELS, "llama", broken)
    status, data = run(tmp_path, "--names", "llama", "lstm", "--kinds", "bf16")
    assert status == 1
    failed, fine = data["rows"]
    assert failed["error"] == "ValueError: no such luck"
    assert "broken" in failed["traceback"]
    assert fine["measured_peak_bytes"] > 0


@pytest.mark.slow
def test_without_transformers_its_rows_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.models.hf_models", raising=False)
    monkeypatch.delattr(sys.modules["benchmarks.models"], "hf_models", raising=False)
    status, data = run(tmp_path, "--names", "transformers/gpt2")
    assert status == 0
    assert "not installed" in data["rows"][0]["skipped"]


@pytest.mark.slow
def test_no_row_starts_when_the_time_is_over(tmp_path: Path) -> None:
    status, data = run(tmp_path, "--names", "gpt2", "--kinds", "bf16", "--seconds", "0")
    assert status == 0
    assert "no time left" in data["rows"][0]["skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit) as stop:
        gpu.main([])
    assert stop.value.code == 2


@pytest.mark.filterwarnings("ignore:.*(balanced).*:sacplan.errors.SacplanWarning")  # the routing of mixtral
@pytest.mark.parametrize("kind", gpu.KINDS)
@pytest.mark.parametrize("name", slow_after(1, gpu_models.MODELS))
def test_every_model_can_be_profiled_for_a_gpu(name: str, kind: str) -> None:
    model, batch, loss_fn = gpu_models.build(name, "smoke", "cpu", torch.bfloat16, kind == "autocast")
    seen = profile(model, batch, loss_fn, torch.optim.AdamW, device="h100")
    assert seen.peak_bytes > 0
    names = {op.name for op in seen.program.ops}
    expected = {"resnet50": "aten.convolution.default", "lstm": "aten._cudnn_rnn.default"}.get(name, "aten.")
    assert any(n.startswith(expected) for n in names)
    assert all(p.grad is None for p in model.parameters())
