"""A loop with Accelerate: profiled and planned after ``prepare``, the same run in the predicted memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.integrations._watch import PeakWatch
from tests.support.slow import slow_after
from tests.support.steps import bit_equal
from tests.zoo import language_models as models

accelerate = pytest.importorskip("accelerate")

ROWS, TOKENS, VOCAB = 4, 32, 64


@pytest.fixture(autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    """Accelerate keeps what the first ``Accelerator`` of a process was told."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return models.cross_entropy(model, batch)


def accumulated(model: nn.Module, micro_batches: Any) -> torch.Tensor:
    (loss_fn(model, micro_batches[0]) / 2).backward()
    return loss_fn(model, micro_batches[1]) / 2


class Run:
    """A model, an optimizer and batches as ``prepare`` gives them; all runs start from the same weights."""

    def __init__(self, precision: str = "no", micro_batches: int = 1) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=micro_batches
        )
        torch.manual_seed(0)
        model = models.LM(layers=2, dim=32, heads=4, vocab=VOCAB)
        rows = torch.randint(0, VOCAB, (6 * ROWS, TOKENS))
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            torch.utils.data.DataLoader(rows, batch_size=ROWS),
        )

    @property
    def inner(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def profile(self) -> sacplan.Profile:
        first, second, *_ = self.batches
        if self.accelerator.gradient_accumulation_steps == 1:
            return sacplan.profile(self.inner, first, loss_fn, self.optimizer, device="cpu")
        return sacplan.profile(self.inner, (first, second), accumulated, self.optimizer, device="cpu")

    def train(self, watch: PeakWatch | None = None) -> list[torch.Tensor]:
        """Losses, and the weights after."""
        torch.manual_seed(3)
        losses = []
        steps = self.accelerator.gradient_accumulation_steps
        for i, batch in enumerate(self.batches):
            if watch is not None and i % steps == 0:
                watch.begin(self.inner, [self.optimizer])
            with self.accelerator.accumulate(self.model):
                loss = loss_fn(self.model, batch)
                self.accelerator.backward(loss)
                losses.append(loss.detach())
                self.optimizer.step()
                self.optimizer.zero_grad()
            del loss
            if watch is not None and i % steps == steps - 1:
                watch.end()
        return [*losses, *(p.detach() for p in self.inner.parameters())]


@pytest.mark.parametrize(("precision", "micro_batches"), slow_after(2, [("no", 1), ("bf16", 2), ("bf16", 1)]))
def test_a_planned_run_is_the_same_run_in_the_predicted_memory(precision: str, micro_batches: int) -> None:
    expected = Run(precision, micro_batches).train()
    run = Run(precision, micro_batches)
    profile = run.profile()
    plan = sacplan.plan(profile, "75%", solver="greedy")
    assert plan.units
    sacplan.apply(run.inner, plan)
    watch = PeakWatch(plan, steps=2, tolerance=0.05, hint="")
    assert bit_equal(run.train(watch), expected)
    assert watch.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)
