"""``accumulation_steps``: the step that adds to gradients of earlier micro-batches is the one that is planned."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import sacplan
from benchmarks.harness.steps import run_peaks
from sacplan.core.program import StorageKind
from sacplan.record.state import preserved_state
from sacplan.testing import assert_step_fits
from tests.support.chunks import loss_in_slices
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

ADAMW = torch.optim.AdamW


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LM(layers=3, dim=32, heads=2, vocab=64, dropout=0.1)


BATCH = tokens(4, 32, 64)
MODEL = functools.cache(model_of)
record = functools.partial(sacplan.profile, loss_fn=cross_entropy, optimizer=ADAMW)


@functools.cache
def accumulated(device: str) -> sacplan.Profile:
    return record(MODEL(), BATCH, device=device, accumulation_steps=2)


def peaks_of_a_loop(model: nn.Module, batch: Any, steps: int) -> list[int]:
    """The most that the CPU's allocator holds in each micro-step of three updates, the model included."""
    with preserved_state(model, None):
        return run_peaks(
            model, map(torch.clone, itertools.repeat(batch)), 3 * steps, ADAMW, cross_entropy, (), steps
        )


@pytest.mark.parametrize("steps", [1, 3])
def test_the_recorded_step_is_the_worst_of_a_real_loop(steps: int) -> None:
    """Also in the first update, whose optimizer has no state yet, and when gradients were just dropped."""
    model = MODEL()
    seen = peaks_of_a_loop(model, BATCH, steps)
    profile = record(model, BATCH, device="cpu", accumulation_steps=steps)
    assert max(seen) == pytest.approx(profile.peak_bytes, abs=64)
    assert seen.index(max(seen)) >= steps  # not in the first update


@pytest.mark.slow
def test_a_plan_without_accumulation_would_be_over_its_budget() -> None:
    model = MODEL()
    one, several = (record(model, BATCH, device="cpu", accumulation_steps=n) for n in (1, 4))
    plan = sacplan.plan(one, "80%", "greedy")
    with sacplan.apply(model, plan), pytest.warns(sacplan.SacplanWarning, match="accumulation_steps"):
        assert max(peaks_of_a_loop(model, BATCH, 4)) > plan.budget_bytes
    plan = sacplan.plan(several, plan.budget_bytes / 2**30, "greedy")
    with sacplan.apply(model, plan):
        assert max(peaks_of_a_loop(model, BATCH, 4)) <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_predicted_is_fake_is_measured(share: float, device: str) -> None:
    model = MODEL()
    profile = accumulated(device)
    smallest = sacplan.plan(profile, "smallest", "greedy").peak_bytes
    budget = smallest + int(share * (profile.peak_bytes - smallest))
    plan = sacplan.plan(profile, f"{budget}B", "greedy")
    assert plan.discarded
    seen = sacplan.verify(model, BATCH, plan, cross_entropy, ADAMW)
    assert seen.peak_bytes == plan.peak_bytes
    assert not seen.differences
    if device == "cpu":
        real = sacplan.verify(model, BATCH, plan, cross_entropy, ADAMW, run="real")
        assert real.peak_bytes == plan.peak_bytes


def test_a_real_trace_records_the_same_and_puts_everything_back() -> None:
    model = model_of()
    cross_entropy(model, BATCH).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    fake, real = (
        record(model, BATCH, device="cpu", trace=how, accumulation_steps=2) for how in ("fake", "real")
    )
    assert [op.name for op in fake.program.ops] == [op.name for op in real.program.ops]
    assert fake.peak_bytes == real.peak_bytes
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))


def test_more_micro_batches_change_nothing_but_the_setup() -> None:
    two, nine = (record(MODEL(), BATCH, device="h100", accumulation_steps=n) for n in (2, 9))
    assert two.recorded == nine.recorded
    assert "gradients of 9 micro-batches" in str(nine.fingerprint.setup)
    there = [s for s in two.recorded.initial if two.recorded.storage_kinds[s] == StorageKind.GRADIENT]
    assert len(there) == len(list(MODEL().parameters()))


def test_chunks_and_rotor_plan_it_too() -> None:
    """The model is called once in the recorded step, which both need."""
    profile = accumulated("cpu")
    chunked = loss_in_slices(profile, 4)
    assert chunked.chunks
    for plan in (chunked, sacplan.plan(profile, "85%", "rotor")):
        assert sacplan.verify(MODEL(), BATCH, plan, cross_entropy, ADAMW).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    "policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["", "mixed"]
)
@pytest.mark.parametrize("units", [None, ["layers.*", ""]], ids=["ddp", "fsdp"])
def test_on_ranks_it_is_the_second_pass_of_a_step_of_two(policy: Any, units: Any) -> None:
    """Steps with two backward passes are compared with real ranks in tests/ranks."""
    if units is None and policy is not None:
        pytest.skip("a policy belongs to fully_shard")

    def both(model: nn.Module, batches: Any) -> torch.Tensor:
        cross_entropy(model, batches[0]).backward()
        return cross_entropy(model, batches[1])

    ranks = sacplan.DDP(4) if units is None else sacplan.FSDP2(4, units, mp_policy=policy)
    found = record(MODEL(), BATCH, device="h100", accumulation_steps=2, ranks=ranks)
    like = sacplan.profile(MODEL(), (BATCH, BATCH), both, ADAMW, device="h100", ranks=ranks)
    assert found.peak_bytes == like.peak_bytes


def test_the_allocator_plays_both_micro_steps() -> None:
    profile = accumulated("h100")
    one, two = record(MODEL(), BATCH, device="h100").device_memory(), profile.device_memory()
    # Blocks are larger than tensors by what rounding adds, never smaller.
    assert profile.peak_bytes <= two.steps.max_memory_allocated <= 1.01 * profile.peak_bytes
    assert one.steps.max_memory_reserved <= two.steps.max_memory_reserved


@pytest.mark.slow
def test_it_is_said_where_a_step_accumulates_and_the_plan_does_not() -> None:
    plan = sacplan.plan(record(MODEL(), BATCH, device="cpu"), "100%")
    with pytest.warns(
        sacplan.SacplanWarning, match="accumulation: one batch in the plan, 3 micro-batches here"
    ):
        seen = sacplan.verify(MODEL(), BATCH, plan, cross_entropy, ADAMW, accumulation_steps=3)
    assert seen.peak_bytes > plan.peak_bytes
    several = sacplan.plan(record(MODEL(), BATCH, device="cpu", accumulation_steps=2), "100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sacplan.verify(MODEL(), BATCH, several, cross_entropy, ADAMW, accumulation_steps=8)


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "4"])
def test_a_number_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(sacplan.errors.TraceError, match="accumulation_steps"):
        record(MODEL(), BATCH, device="cpu", accumulation_steps=steps)


def test_inference_accumulates_nothing() -> None:
    with pytest.raises(sacplan.errors.TraceError, match="makes no gradients"):
        sacplan.profile(MODEL(), BATCH, device="cpu", mode="inference", accumulation_steps=2)


def test_a_parameter_without_a_gradient_has_none_before_the_step_either() -> None:
    half = FromFunction(
        lambda self, x: self.used(x).square().mean(), used=nn.Linear(8, 8), unused=nn.Linear(8, 8)
    )
    model, x = half, torch.randn(4, 8)
    plan = sacplan.plan(
        sacplan.profile(model, x, device="cpu", optimizer=ADAMW, accumulation_steps=2), "100%"
    )
    assert sacplan.verify(model, x, plan, None, ADAMW, run="real").peak_bytes == plan.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_fit_and_the_largest_batches_count_the_gradients() -> None:
    model = MODEL()

    def make(n: int) -> torch.Tensor:
        return tokens(n, 32, 64)

    options: Any = {"loss_fn": cross_entropy, "optimizer": ADAMW}
    found = sacplan.fit(model, make, "cpu", batch=4, accumulation_steps=3, sizes=False, **options)
    assert found.rows[0].peak_bytes == record(model, make(4), device="cpu", accumulation_steps=3).peak_bytes
    assert "batch 4 x 3 accumulated" in found.sentence
    one = sacplan.fit(model, make, "cpu", batch=4, sizes=False, **options)
    assert found.rows[0].step_ms > 2 * one.rows[0].step_ms

    budget = f"{one.rows[0].peak_bytes // 2}B"  # about one sample
    few = sacplan.max_batch(model, make, budget, "cpu", solver="greedy", accumulation_steps=4, **options)
    assert few.plan.fingerprint.setup.accumulation_steps == 4
    larger = sacplan.profile(model, make(few.batch_size + 1), device="cpu", **options)
    assert (
        sacplan.plan(larger, budget, "greedy").peak_bytes < one.rows[0].peak_bytes // 2
    )  # without accumulation


@pytest.mark.slow
def test_a_step_that_has_to_fit_counts_them_too() -> None:
    peak = record(MODEL(), BATCH, device="cpu").peak_bytes
    check: Any = functools.partial(
        assert_step_fits,
        MODEL(),
        BATCH,
        "cpu",
        f"{peak}B",
        loss_fn=cross_entropy,
        optimizer=ADAMW,
    )
    check()
    with pytest.raises(AssertionError, match="gradients of 2 micro-batches"):
        check(accumulation_steps=2)
