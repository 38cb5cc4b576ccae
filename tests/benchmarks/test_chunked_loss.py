"""``benchmarks/chunked_loss.py`` at a tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import chunked_loss

SIZE = chunked_loss.Size(tokens=128, width=16, vocabulary=2000)


def test_variants_agree_with_the_plain_loss_and_take_less() -> None:
    rows = {r["variant"]: r for r in chunked_loss.compared(SIZE, chunked_loss.VARIANTS, rounds=2)}
    assert rows["plain"]["error"] == 0
    assert rows["plain"]["ratio"] == 1
    logits = 4 * SIZE.tokens * SIZE.vocabulary
    assert rows["plain"]["peak_bytes"] > 3 * logits
    assert "GPU" in rows["liger"]["absent"]
    assert 0 < rows["chunked/16"]["error"] < 1e-5
    assert rows["chunked/16"]["peak_bytes"] < 1.5 * logits
    for name in ("linear_cross_entropy", "linear_cross_entropy/16"):
        if hasattr(F, "linear_cross_entropy"):
            assert 0 < rows[name]["error"] < 1e-5
            assert rows[name]["peak_bytes"] < logits
        else:
            assert "2.13" in rows[name]["absent"]


def test_a_wrong_variant_is_seen() -> None:
    def wrong(model: chunked_loss.Model, batch: chunked_loss.Batch) -> chunked_loss.LossFn:
        return lambda model, batch: 2 * chunked_loss.plain_loss(model, batch)

    variants = {"plain": chunked_loss.plain, "twice": wrong}
    _, row = chunked_loss.compared(SIZE, variants, rounds=1, dtype=torch.float64)
    assert row["error"] == pytest.approx(1)


def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_loss.SIZES, "small", SIZE)
    path = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["chunked_loss", "--rounds", "1", "--variants", "plain", "--json", str(path)]
    )
    chunked_loss.main()
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["date"]
    assert [row["variant"] for row in found["rows"]] == ["plain"]
