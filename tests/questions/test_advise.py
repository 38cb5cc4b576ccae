"""``sacplan.advise``: the parts of the peak, and remedies whose savings are those of real recordings."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.profiling.optimizer_table import CANDIDATES
from sacplan.profiling.optimizers import recorded_step, with_optimizer, without_optimizer
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, cross_entropy, tokens

DEVICES = ("h100", "rtx-4090", "cpu")


def wide(optimizer: Any, device: str = "h100") -> sacplan.Profile:
    """Parameters, and hardly anything else: the optimizer's step is the peak."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU()))
    model = nn.Sequential(*layers, nn.Linear(256, 256).requires_grad_(False), nn.LayerNorm(256))
    return sacplan.profile(model, torch.randn(2, 256), optimizer=optimizer, device=device)


def language_step(optimizer: Any = None, device: str = "rtx-4090") -> sacplan.Profile:
    """The logits are the peak."""
    model = LM(layers=2, vocab=4096, dropout=0.0)
    return sacplan.profile(model, tokens(4, 64, 4096), cross_entropy, optimizer, device)


language = functools.cache(language_step)


# --- ground truth: the recording of the whole step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", slow_after(1, [wide, language_step]))
@pytest.mark.parametrize("one", CANDIDATES, ids=lambda one: one.name)
def test_an_optimizer_that_is_put_in_gives_the_step_recorded_with_it(
    make: Any, one: Any, device: str
) -> None:
    recorded = make(one.make, device)
    bare = make(None, device)
    step = recorded_step(bare, one.make)
    adam = make(torch.optim.AdamW, device)
    for replaced in (with_optimizer(bare, step), with_optimizer(without_optimizer(adam), step)):
        assert replaced.peak_bytes == recorded.peak_bytes
        assert replaced.baseline.end_bytes == recorded.baseline.end_bytes
        assert replaced.step_ms == pytest.approx(recorded.step_ms, rel=1e-9)
    assert without_optimizer(recorded).peak_bytes == bare.peak_bytes


def test_optimizers_differ_where_their_step_is_the_peak() -> None:
    """The test above would pass if all optimizers were alike."""
    peaks = [wide(one.make).peak_bytes for one in CANDIDATES]
    assert len(set(peaks)) == len(CANDIDATES)


def test_the_8bit_state_has_the_bytes_of_bitsandbytes() -> None:
    """2 bytes an element, and 2 scales of 4 bytes for each block of 256; small ones in float32 (``init_state``)."""
    model = nn.Linear(256, 100)  # 25,600 elements and a bias of 100
    step = recorded_step(sacplan.profile(model, torch.randn(1, 256), device="cpu"), CANDIDATES[2].make)
    states, scales, tables, small = 2 * 25600, 2 * 4 * 100, 2 * 4 * 256, 2 * 4 * 100
    assert step.state_bytes == states + scales + tables + small


@pytest.mark.parametrize("name", ["adamw-fused", "sgd"])
def test_an_optimizer_saves_what_another_recording_says(name: str) -> None:
    advice = sacplan.advise(wide(torch.optim.AdamW))
    remedy = next(r for r in advice.remedies if r.name == name)
    make = {"adamw-fused": functools.partial(torch.optim.AdamW, fused=True), "sgd": torch.optim.SGD}[name]
    assert remedy.peak_bytes == wide(make).peak_bytes
    assert remedy.saves_bytes == advice.peak_bytes - remedy.peak_bytes > 0
    assert "--optimizer " + name == remedy.option


def test_a_chunked_loss_and_recomputation_save_what_their_plans_say() -> None:
    profile = language()
    found = {remedy.name: remedy for remedy in sacplan.advise(profile).remedies}
    assert set(found) == {"chunked-loss", "recompute"}
    for remedy in found.values():
        plan = eval(remedy.code, {"sacplan": sacplan, "profile": profile})  # what a person would paste
        assert plan.peak_bytes == remedy.peak_bytes == profile.peak_bytes - remedy.saves_bytes


def test_nothing_is_offered_that_saves_nothing() -> None:
    """Where the optimizer's step is the peak, neither slices nor recomputation help."""
    profile = wide(torch.optim.AdamW)
    assert {r.kind for r in sacplan.advise(profile).remedies} == {"optimizer"}
    fused = wide(functools.partial(torch.optim.AdamW, fused=True))
    names = {r.name for r in sacplan.advise(fused).remedies}
    assert "adamw" not in names
    assert "adamw-fused" not in names
    sgd = sacplan.advise(wide(torch.optim.SGD))
    assert not [r for r in sgd.remedies if r.kind == "optimizer" and r.name.startswith("adamw")]


@pytest.mark.slow
def test_a_saving_is_of_the_maximum() -> None:
    """With a plan that has brought the peak to the optimizer's step, more recomputation saves nothing."""
    profile = language(torch.optim.AdamW, "h100")
    plan = sacplan.plan(profile, "smallest", techniques=("recompute", "chunk"))
    advice = sacplan.advise(profile, plan)
    assert advice.peak_bytes == plan.peak_bytes
    assert not {"recompute", "chunked-loss"} & {r.name for r in advice.remedies}


# --- words


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_the_parts_are_the_peak(optimizer: Any) -> None:
    for profile in (language(optimizer), wide(optimizer)):
        for plan in (None, sacplan.plan(profile, "smallest")):
            advice = sacplan.advise(profile, plan)
            assert sum(part.n_bytes for part in advice.alive) == advice.peak_bytes
            assert advice.sentences[0] == advice.cause
            assert len(advice.sentences) == len(advice.remedies) + 1


def test_parts_have_the_names_that_people_use() -> None:
    profile = language(torch.optim.AdamW)
    advice = sacplan.advise(profile)
    parts = {part.what: part.n_bytes for part in advice.alive}
    logits = 4 * 64 * 4096 * 4
    assert parts["one copy of the logits"] == logits
    parameters = sum(p.numel() for p in LM(layers=2, vocab=4096).parameters())
    assert parts["parameters"] == pytest.approx(4 * parameters, rel=0.02)
    assert parts["AdamW's state"] == pytest.approx(8 * parameters, rel=0.02)
    assert "saved activations of 2 layers (layers)" in parts
    assert advice.phase == "backward"
    assert "one copy of the logits 4.00 MiB" in str(advice)


def test_the_optimizers_step_is_named() -> None:
    advice = sacplan.advise(wide(torch.optim.AdamW))
    assert advice.phase == "optimizer"
    assert "AdamW's temporaries" in {part.what for part in advice.alive}
    other = sacplan.advise(wide(functools.partial(torch.optim.RMSprop, centered=True)))
    assert "the optimizer's state" in {part.what for part in other.alive}


# --- configurations of transformers


def gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128, **options)
    return transformers.GPT2LMHeadModel._from_config(config).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "other"),
    [
        ({"use_cache": True}, "use_cache", {"use_cache": False}),
        (
            {"use_cache": False, "attn_implementation": "eager"},
            "sdpa",
            {"use_cache": False, "attn_implementation": "sdpa"},
        ),
    ],
)
def test_a_configuration_saves_what_a_model_with_the_other_one_saves(
    options: dict[str, Any], name: str, other: dict[str, Any]
) -> None:
    ids = tokens(4, 256)
    batch = {"input_ids": ids, "labels": ids}
    model = gpt2(**options)
    config = model.config.to_dict()
    advice = sacplan.advise(sacplan.profile(model, batch), None, model, batch)
    assert model.config.to_dict() == config
    remedy = next(r for r in advice.remedies if r.name == name)
    assert remedy.peak_bytes == sacplan.profile(gpt2(**other), batch).peak_bytes
    without = sacplan.advise(sacplan.profile(gpt2(**other), batch), None, gpt2(**other), batch)
    assert not [r for r in without.remedies if r.kind == "model"]


# --- what is refused


def test_a_plan_of_another_profile_is_refused() -> None:
    with pytest.raises(sacplan.errors.PlanMismatch):
        sacplan.advise(language(), sacplan.policy("none", profile=wide(None)))


def test_what_is_no_model_and_no_batch() -> None:
    for model, batch, said in ((3, 4, "model must be an nn.Module, not int"), (LM(), 4, "holds no tensor")):
        with pytest.raises(sacplan.errors.TraceError, match=said):
            sacplan.advise(language(), None, model, batch)


def test_advice_on_inference_and_on_ranks_has_no_remedy_that_was_not_tried() -> None:
    model = LM(layers=2)
    inference = sacplan.profile(model, tokens(), mode="inference")
    assert sacplan.advise(inference).remedies == ()
    spread = sacplan.profile(model, tokens(), cross_entropy, torch.optim.AdamW, ranks=sacplan.DDP(2))
    advice = sacplan.advise(spread)
    assert {r.kind for r in advice.remedies} <= {"recompute"}
    assert sum(part.n_bytes for part in advice.alive) == spread.peak_bytes


def test_a_chunked_loss_beside_a_plan_is_in_its_place() -> None:
    profile = language()
    plan = sacplan.plan(profile, "95%")
    found = {remedy.name: remedy for remedy in sacplan.advise(profile, plan).remedies}["chunked-loss"]
    assert "in place of this plan" in found.sentence
    alone = eval(found.code, {"sacplan": sacplan, "profile": profile})
    assert alone.peak_bytes == found.peak_bytes == plan.peak_bytes - found.saves_bytes
