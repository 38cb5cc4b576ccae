"""The command line with chunks: ``--technique``, and what is said about slices and gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import sacplan
from tests.support import commands

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn


class Words(nn.Module):
    def __init__(self, words=2048, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def loss_fn(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def make(n=2):
    tokens = torch.zeros(n, 64, dtype=torch.long)
    return {"model": Words(), "batch": tokens, "loss_fn": loss_fn, "make_batch": lambda n: tokens[:1].repeat(n, 1)}
"""

BOTH = "--technique recompute --technique chunk"
TARGET = "train.py:make --device cpu"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(line: str, code: int = 0) -> Any:
    result = commands.run(line)
    assert result.exit_code == code, result.output
    return result


def test_a_plan_may_use_chunks() -> None:
    alone = run(f"plan {TARGET} --budget 60%", code=3)
    assert "With techniques=('recompute', 'chunk') the budget holds" in alone.stderr
    facts = json.loads(run(f"plan {TARGET} --budget 60% {BOTH} --json -o plan.json").stdout)
    plan = sacplan.Plan.load("plan.json")
    (chunk,) = plan.chunks
    assert facts["techniques"] == ["recompute", "chunk"]
    assert facts["chunks"][0]["slices"] == chunk.slices
    assert (facts["gradients"], facts["added_ms"]) == ("close", plan.added_ms)
    shown = run("show plan.json").stdout
    assert "gradients close: those of parameters in head" in " ".join(shown.split())
    assert re.search(rf"in slices +.*{chunk.slices} slices", shown)
    seen = json.loads(run("verify train.py:make plan.json --json").stdout)
    assert seen["peak_bytes"] == plan.peak_bytes


def test_without_chunks_nothing_is_said_about_them() -> None:
    shown = run(f"plan {TARGET} --budget 100%").stdout
    assert "slices" not in shown
    assert "gradients bit-equal: " in " ".join(shown.split())


def test_surveys_with_chunks() -> None:
    rows = json.loads(run(f"frontier {TARGET} --technique chunk --points 2 --json").stdout)["rows"]
    assert any(row["added_ms"] for row in rows)
    found = json.loads(run(f"max-batch {TARGET} --budget 2MiB --at-most 2 {BOTH} --json").stdout)
    assert found["plan"]["chunks"]
    assert found["batch_size"] > found["unplanned_batch_size"]
    assert (
        "unknown technique 'slices'" in run(f"plan {TARGET} --budget 1GiB --technique slices", code=2).stderr
    )
