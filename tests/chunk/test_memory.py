"""What a chunked step takes: a fake step, which runs the same loop, against the allocator's events."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from tests.support.chunks import allocations, loss_in_slices
from tests.support.steps import assert_predicted
from tests.support.steps import mean_square as loss
from tests.zoo.language_models import LM, tokens
from tests.zoo.layers import FromFunction

VOCAB = 3001


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[:, :-1].reshape(-1, VOCAB), x[:, 1:].flatten())


@pytest.fixture
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=1, dim=32, heads=2, vocab=VOCAB, dropout=0.0)


def test_what_begins_the_backward_pass_is_there_until_its_end() -> None:
    """The gradient of the loss is a number as the loss is, and the loop does not make it."""
    torch.manual_seed(0)
    body = FromFunction(lambda self, x: x + self.up(x).sin().exp().tanh().sum(-1, True), up=nn.Linear(8, 512))
    model, x = nn.Sequential(nn.Linear(8, 8), body, nn.Linear(8, 8)), torch.randn(6, 4, 8)

    profile = sacplan.profile(model, x, loss, device="cpu")
    plan = plan_with(profile, [Chunk("2", "rest", 2, 1)])
    program = profile.with_plan(plan)
    loops = [i for i, op in enumerate(program.ops) if op.name == "aten.addmm.out"]
    assert program.footprint.peak_op != min(loops)
    assert sacplan.verify(model, x, plan, loss).peak_bytes == plan.peak_bytes


def test_half_precision_gradients_are_added_in_float32_without_a_temporary_of_their_size(model: LM) -> None:
    batch, weight_bytes = tokens(2, 64, VOCAB), VOCAB * 32 * 2
    model.bfloat16()
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    wide = plan_with(profile, [Chunk("head", "rest", 16, 1)])
    assert profile.with_plan(wide).flops == profile.program.flops
    with sacplan.apply(model, wide):
        sizes, _ = allocations(lambda: loss_fn(model, batch).backward())
    # Gradients of the embedding and of the head, and the sum in float32.
    assert (sizes.count(weight_bytes), sizes.count(2 * weight_bytes)) == (2, 1)
    assert_predicted(model, batch, wide, loss_fn)


@pytest.mark.parametrize("reads", [False, True])
def test_a_loss_that_is_read_before_the_backward_pass_is_computed_there(reads: bool) -> None:
    """Numbers that code reads take a loop of their own: the plan of a step that logs its loss is made for that one."""
    model, batch = LM(2, 32, 2, VOCAB, dropout=0.0).bfloat16(), tokens(4, 96, VOCAB)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).pow(2).mean()
        if reads:
            loss.item()
        return loss

    profile = sacplan.profile(model, batch, loss_fn, device="cpu", trace="real")
    plan = loss_in_slices(profile, 64)
    handle = sacplan.apply(model, plan)
    step = Step(model, batch, loss_fn, None)
    measured_step(step, [batch])
    seen = measured_step(step, [batch]).peak_bytes
    handle.remove()
    assert seen == plan.peak_bytes


def weighted_bce(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Its backward formula computes a part from the targets alone, whole, and frees it again."""
    targets = F.one_hot(x, VOCAB).float()
    return F.binary_cross_entropy_with_logits(model(x), targets, pos_weight=torch.full((VOCAB,), 3.0))


def test_a_formula_that_is_sliced_in_part(model: LM) -> None:
    batch = tokens(2, 64, VOCAB)
    profile = sacplan.profile(model, batch, weighted_bce, device="cpu")
    plan = loss_in_slices(profile, 4)
    assert_predicted(model, batch, plan, weighted_bce)
