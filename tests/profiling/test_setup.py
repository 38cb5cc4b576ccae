"""What a step was recorded with: in profiles and plans, and told where a model or a step is set up otherwise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan
from sacplan.core.setup import Setup
from sacplan.errors import SacplanWarning


def llama(**options: Any) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, **options)
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def tokens(batch: int = 2, seq: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def net(p: float = 0.0) -> torch.nn.Sequential:
    layer = [torch.nn.Linear(16, 16), torch.nn.Dropout(p), torch.nn.GELU()]
    return torch.nn.Sequential(torch.nn.Sequential(*layer), torch.nn.Linear(16, 16))


def setup_of(*args: Any, **kwargs: Any) -> Setup:
    return sacplan.profile(*args, **kwargs).fingerprint.setup


def test_of_a_transformers_model() -> None:
    fused = functools.partial(torch.optim.AdamW, fused=True)
    model = llama(attention_dropout=0.1, use_cache=False)
    found = setup_of(model, tokens(), optimizer=fused)
    assert str(found) == "cache off, dropout 0.1, sdpa attention, the model's own loss, AdamW(fused=True)"
    assert found.dropout == {"model.layers.*.self_attn": 0.1}
    assert setup_of(llama(use_cache=True), tokens()).use_cache


@pytest.mark.parametrize(("name", "caches"), [("Bert", None), ("GPTNeoX", True), ("T5", True), ("ViT", None)])
def test_only_models_that_make_a_cache_have_one(name: str, caches: bool | None) -> None:
    """All configurations but that of ViT say ``use_cache=True``; whether there is a cache, the outputs show."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    of_t5 = {
        "num_layers": 1,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 32,
        "d_kv": 16,
        "decoder_start_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**(of_t5 if name == "T5" else sizes), vocab_size=64)
    kind = {"Bert": "ForMaskedLM", "GPTNeoX": "ForCausalLM", "T5": "ForConditionalGeneration"}
    model = getattr(transformers, name + kind.get(name, "ForImageClassification"))(config)
    batch = {"pixel_values": torch.zeros(1, 3, 224, 224)} if name == "ViT" else tokens()
    assert Setup.of(model).use_cache is caches
    assert (getattr(model(**batch), "past_key_values", None) is not None) is bool(caches)


def test_modes_are_those_of_the_step() -> None:
    """A ``loss_fn`` may switch them, as those of trainers do."""

    def in_training(model: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = model.train()(batch).sum()
        return total

    x = torch.randn(4, 16)
    model = net(0.2).eval()
    assert str(setup_of(model, x)) == "eval mode, no dropout, the sum of the outputs, no optimizer"
    assert str(setup_of(model, x, in_training)) == "dropout 0.2, loss in_training, no optimizer"
    assert setup_of(model, x, in_training, trace="real", device="cpu").dropout == {"*.*": 0.2}
    assert not any(module.training for module in model.modules())
    model.train()
    model[0].eval()
    mixed = setup_of(model, x)
    assert (mixed.modules, mixed.in_eval, mixed.dropout) == ("mixed", ("*",), {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), "SGD"),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False), "SGD(momentum=0.9, foreach=False)"),
        (functools.partial(torch.optim.Adam, amsgrad=True), "Adam(amsgrad=True)"),
    ],
)  # fmt: skip
def test_optimizers(make: Any, words: str) -> None:
    model = net()
    x = torch.randn(4, 16)
    assert setup_of(model, x, optimizer=make).optimizer == words
    assert setup_of(model, x, optimizer=make(model.parameters())).optimizer == words


def test_autocast_around_the_profile() -> None:
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert setup_of(net(), x, device="cpu").autocast == "bfloat16"
    assert setup_of(net(), x, device="cpu").autocast is None


def test_files_hold_it(tmp_path: Path) -> None:
    profile = sacplan.profile(llama(attention_dropout=0.1), tokens(), optimizer=torch.optim.AdamW)
    plan = sacplan.policy("full", profile=profile)
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    setup = profile.fingerprint.setup
    assert setup.optimizer == "AdamW"
    assert sacplan.Profile.load(tmp_path / "profile.json").fingerprint.setup == setup
    assert sacplan.Plan.load(tmp_path / "plan.json").fingerprint.setup == setup


def test_apply_warns_of_a_cache_and_the_step_does_take_more() -> None:
    """The plan discards keys and values; in the cache of an output that the loop holds they are alive."""

    def held(model: Any, batch: Any) -> torch.Tensor:
        output = model(**batch)
        output.loss.output = output
        loss: torch.Tensor = output.loss
        return loss

    batch = tokens(4, 64)
    profile = sacplan.profile(llama(use_cache=False), batch, held, device="cpu")
    plan = sacplan.policy("full", profile=profile)
    with pytest.warns(SacplanWarning, match=r"cache: off in the plan, on here.*use_cache = False") as seen:
        sacplan.apply(llama(use_cache=True), plan).remove()
    assert seen[0].filename == __file__
    with pytest.warns(SacplanWarning, match="key-value cache"):
        found = sacplan.verify(llama(use_cache=True), batch, plan, held)
    keys_and_values = 2 * 2 * 4 * 64 * 32 * 4  # of 2 layers: batch, tokens, width, bytes
    assert found.peak_bytes == plan.peak_bytes + keys_and_values
    assert [(d.what, d.planned, d.here) for d in found.setup_differences] == [
        ("key-value cache", "off", "on")
    ]
    assert "set up otherwise: key-value cache: off in the plan, on here" in repr(found)


def test_apply_warns_of_another_attention() -> None:
    plan = sacplan.policy("none", profile=sacplan.profile(llama(), tokens()))
    with pytest.warns(SacplanWarning, match=r"attention: sdpa in the plan, eager here"):
        sacplan.apply(llama(attn_implementation="eager"), plan).remove()


def test_apply_warns_of_dropout_that_was_not_recorded() -> None:
    """``from_pretrained`` gives models in eval mode: what is profiled then has no masks."""
    x = torch.randn(64, 16)
    plan = sacplan.policy("none", profile=sacplan.profile(net(0.2).eval(), x, device="cpu"))
    with pytest.warns(SacplanWarning, match=r"dropout: none in the plan, 0\.2 here.*model\.train\(\)"):
        sacplan.apply(net(0.2), plan).remove()
    with pytest.warns(SacplanWarning, match=r"dropout"):
        assert sacplan.verify(net(0.2), x, plan).peak_bytes > plan.peak_bytes


@pytest.mark.parametrize(
    ("planned", "here"),
    [
        (lambda: llama(use_cache=True), lambda: llama(use_cache=False)),
        (lambda: llama(attention_dropout=0.1), lambda: llama(attention_dropout=0.2)),
        (lambda: llama(attention_dropout=0.1), lambda: llama(attention_dropout=0.1).eval()),
        (lambda: llama(attention_dropout=0.1), lambda: llama(attention_dropout=0.0)),
    ],
)
def test_apply_is_silent_where_a_step_takes_no_more(planned: Any, here: Any) -> None:
    """Warnings are errors in these tests."""
    plan = sacplan.policy("none", profile=sacplan.profile(planned(), tokens()))
    sacplan.apply(here(), plan).remove()


def test_a_plan_for_inference_says_nothing_of_a_model_that_is_about_to_be_in_eval_mode() -> None:
    plan = sacplan.plan(sacplan.profile(net(0.2).eval(), torch.randn(4, 16), mode="inference"), "100%")
    sacplan.apply(net(0.2), plan).remove()


@pytest.mark.parametrize(
    ("run", "made", "given", "words"),
    [
        ("fake", torch.optim.AdamW, None, "AdamW in the plan, none here"),
        ("real", torch.optim.SGD, torch.optim.AdamW, "SGD in the plan, AdamW here"),
    ],
)
def test_verify_warns_of_another_optimizer(run: Any, made: Any, given: Any, words: str) -> None:
    model, x = net(), torch.randn(4, 16)
    plan = sacplan.policy("none", profile=sacplan.profile(model, x, optimizer=made, device="cpu"))
    with pytest.warns(SacplanWarning, match=f"optimizer: {words}"):
        found = sacplan.verify(model, x, plan, optimizer=given, run=run)
    assert [d.what for d in found.setup_differences] == ["optimizer"]
    assert not sacplan.verify(model, x, plan, optimizer=made, run=run).setup_differences


def test_verify_tells_another_loss() -> None:
    def squares(model: Any, batch: Any) -> torch.Tensor:
        total: torch.Tensor = model(batch).square().sum()
        return total

    model, x = net(), torch.randn(4, 16)
    plan = sacplan.policy("none", profile=sacplan.profile(model, x, squares, device="cpu"))
    with pytest.warns(SacplanWarning, match="loss: squares in the plan, the sum of the outputs here"):
        sacplan.verify(model, x, plan)
    found = sacplan.verify(model, x, plan, lambda model, batch: model(batch).square().sum())
    assert [str(d) for d in found.setup_differences] == [
        "loss: squares in the plan, <lambda> here"
    ]  # it may be the same
