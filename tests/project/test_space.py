"""The page "Will it fit?": what it asks, and what it shows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
APP = ROOT / "space" / "app.py"
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 256, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> types.ModuleType:
    pytest.importorskip("gradio", reason="the page needs gradio: pip install gradio")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("space_app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["space_app"] = module
    spec.loader.exec_module(module)
    return module


def test_a_question_is_a_command_line(app: types.ModuleType, tmp_path: Path) -> None:
    asked = app.Question(
        "Qwen/Qwen3-8B", device="l4", batch=2, seq=512, lora_rank=8, in_4bit=True, fetch=True
    )
    assert asked.target(tmp_path) == "hf:Qwen/Qwen3-8B"
    assert asked.options() == [
        *("--device", "l4", "--batch", "2", "--dtype", "bfloat16", "--optimizer", "adamw", "--seq", "512"),
        *("--lora", "r=8", "--load-in-4bit", "--fetch"),
    ]
    for name in ("/etc/passwd", "../config.json", "train.py:make", "a b", ""):
        with pytest.raises(app.Failed, match="Name a model"):
            app.Question(name).target(tmp_path)


def test_every_suggestion_is_known(app: types.ModuleType) -> None:
    from sacplan import devices
    from sacplan.integrations.hf import architectures
    from sacplan.profiling.optimizer_table import candidate_named

    assert all(architectures.find(name) for name in app.MODELS)
    assert all(name == "none" or candidate_named(name).name == name for name in app.OPTIMIZERS)
    assert set(app.DEVICES) <= set(devices().index)


@pytest.mark.slow
def test_a_configuration_is_answered_with_a_picture_and_code(app: types.ModuleType, tmp_path: Path) -> None:
    """On a CPU nothing is reserved, so a budget would be needed; on a GPU with 80 GB a small model fits as it is."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    first, last = app.answers(app.Question("", str(path), batch=4, seq=128))
    assert "It fits." in first[0]
    assert first[2] == app.NOTHING
    assert last[0] == first[0]
    assert last[2]["value"].axes
    assert "hf:config.json" in last[3]["value"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("no/such-model", {}, "nothing is downloaded unasked"),
        ("gpt2", {"seq": 4096}, "Tokens: 4096: gpt2 has positions for 1024 tokens"),
        ("gpt2", {"device": "h1000"}, "h1000"),
    ],
)
def test_errors_are_sentences(app: types.ModuleType, name: str, more: dict[str, Any], said: str) -> None:
    shown = list(app.answers(app.Question(name, **more)))
    assert len(shown) == 1
    assert said in shown[0][0]
    assert "Traceback" not in shown[0][0]
