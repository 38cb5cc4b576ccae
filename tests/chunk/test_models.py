"""Models of ``transformers`` whose head and loss run in slices, against the plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.techniques.chunk.executor.install import InstalledChunks
from tests.support.chunks import close, step
from tests.support.steps import assert_predicted

transformers = pytest.importorskip("transformers")

VOCAB = 300
_BASE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}

# Class, configuration, unit, and the parameters of the unit with those that are tied to them.
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "llama, with an adapter on its head": (
        "LlamaForCausalLM",
        {**_BASE, "num_key_value_heads": 1},
        "base_model.model.lm_head",
        ("base_model.model.lm_head",),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        "lm_head",
        ("shared", "lm_head"),
    ),
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def made(name: str) -> nn.Module:
    kind, config, unit, _ = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(vocab_size=VOCAB, use_cache=False, **_SPECIAL, **config))
    if unit.startswith("base_model"):
        peft = pytest.importorskip("peft")
        adapter = {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.0, "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **adapter))
    return model


def batch_of(batch: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(5, VOCAB, (batch, length))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 7 == 0, -100)}


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_inside_of_the_model(name: str) -> None:
    model, batch = made(name), batch_of()
    plain = step(model, batch, own_loss)
    _, _, unit, near = MODELS[name]
    plan = plan_with(sacplan.profile(model, batch, own_loss, device="cpu"), [Chunk(unit, "rest", 4, 1)])
    assert_predicted(model, batch, plan, own_loss)
    with sacplan.apply(model, plan) as handle:
        got = step(model, batch, own_loss)
        assert not handle.differences
        assert model.get_submodule(unit).forward.tally.loops == 1
    close(got, plain, near=near)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_outputs_that_are_held_until_the_next_step() -> None:
    """As in training loops: the model's output, and its logits, are alive while the next step runs."""
    name = "llama, with an adapter on its head"
    model, batch = made(name), batch_of()
    expected = model(**batch).logits.detach()
    InstalledChunks(model, [Chunk(MODELS[name][2], "rest", 4, 1)])
    out = None
    for _ in range(3):
        out = model(**batch)
        out.loss.backward()
    assert torch.equal(out.logits.detach() + 0, expected)  # type: ignore[union-attr]
