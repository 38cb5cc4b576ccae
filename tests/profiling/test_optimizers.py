"""An optimizer that is put into a recorded step gives the step that is recorded with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.profiling.optimizer_names import BY_NAME
from sacplan.profiling.optimizers import (
    recorded_step,
    with_optimizer,
    with_other_optimizer,
    without_optimizer,
)
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, cross_entropy, tokens

DEVICES = ("h100", "rtx-4090", "cpu")
CANDIDATES = tuple(BY_NAME[name] for name in ("adamw", "adamw-fused", "adamw-8bit", "sgd"))


def wide(optimizer: Any, device: str = "h100", **ranks: Any) -> sacplan.Profile:
    """Parameters, and hardly anything else: the optimizer's step is the peak."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU()))
    model = nn.Sequential(*layers, nn.Linear(256, 256).requires_grad_(False), nn.LayerNorm(256))
    return sacplan.profile(model, torch.randn(2, 256), optimizer=optimizer, device=device, **ranks)


def language_step(optimizer: Any = None, device: str = "rtx-4090") -> sacplan.Profile:
    """The logits are the peak."""
    model = LM(layers=2, vocab=4096, dropout=0.0)
    return sacplan.profile(model, tokens(4, 64, 4096), cross_entropy, optimizer, device)


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


@pytest.mark.parametrize("ranks", [sacplan.FSDP2(2), sacplan.DDP(2)], ids=str)
@pytest.mark.parametrize("name", ["adamw-fused", "sgd"])
def test_so_does_one_on_shards_or_replicas(name: str, ranks: Any) -> None:
    recorded = wide(BY_NAME[name].make, ranks=ranks)
    replaced = with_other_optimizer(wide(torch.optim.AdamW, ranks=ranks), BY_NAME[name].make)
    assert replaced.peak_bytes == recorded.peak_bytes
    assert replaced.baseline.end_bytes == recorded.baseline.end_bytes
    assert replaced.step_ms == pytest.approx(recorded.step_ms, rel=1e-9)
    assert replaced.fingerprint == recorded.fingerprint


def test_optimizers_differ_where_their_step_is_the_peak() -> None:
    """The test above would pass if all optimizers were alike."""
    peaks = [wide(one.make).peak_bytes for one in CANDIDATES]
    assert len(set(peaks)) == len(CANDIDATES)


def test_the_8bit_state_has_the_bytes_of_bitsandbytes() -> None:
    """2 bytes an element, and 2 scales of 4 bytes for each block of 256; small ones in float32 (``init_state``)."""
    model = nn.Linear(256, 100)  # 25,600 elements and a bias of 100
    step = recorded_step(
        sacplan.profile(model, torch.randn(1, 256), device="cpu"), BY_NAME["adamw-8bit"].make
    )
    states, scales, tables, small = 2 * 25600, 2 * 4 * 100, 2 * 4 * 256, 2 * 4 * 100
    assert step.state_bytes == states + scales + tables + small
