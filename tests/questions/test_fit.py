"""``sacplan.fit``: one verdict; sizes that were never traced are what a trace says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sacplan
from sacplan.core.budget import format_bytes, parse_budget
from sacplan.core.program import Program
from sacplan.device import device_memory
from sacplan.device.devices import resolve_device
from sacplan.profiling.optimizer_names import BY_NAME
from sacplan.questions.largest import largest
from sacplan.questions.scaled import sized
from sacplan.techniques.chunk import rest
from tests.support.devices import left_of, memory_with_room
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import Then


@cache
def recording(
    batch: int, seq: int, device: str, dim: int = 64, heads: int = 4, vocab: int = 128
) -> sacplan.Profile:
    model = LM(layers=2, dim=dim, heads=heads, vocab=vocab, dropout=0.0)
    return sacplan.profile(model, tokens(batch, seq, vocab), cross_entropy, device=device)


# --- a step at a size that was not recorded


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("shape", [(64, 4, 128), (72, 3, 131)], ids=["even", "odd"])
def test_a_step_at_another_batch_is_the_one_that_a_trace_records(
    device: str, shape: tuple[int, int, int]
) -> None:
    at = {n: recording(n, 50, device, *shape) for n in (2, 4, 7, 16)}
    found = sized((2, 4), (at[2], at[4]))
    assert found is not None
    for n in (7, 16):
        made = found.at(n)
        assert made.recorded.tensors == at[n].recorded.tensors
        assert [op.arguments for op in made.recorded.ops] == [op.arguments for op in at[n].recorded.ops]
        assert made.peak_bytes == at[n].peak_bytes


def test_a_step_at_another_length_is_the_one_that_a_trace_records() -> None:
    at = {n: recording(2, n, "h100") for n in (128, 256, 640)}
    found = sized((128, 256), (at[128], at[256]))
    assert found.at(640).recorded.storage_bytes == at[640].recorded.storage_bytes
    assert found.at(640).peak_bytes == at[640].peak_bytes
    plan = sacplan.plan(at[640], "smallest")
    assert found.at(640).footprint(plan).peak_bytes == plan.peak_bytes


def test_steps_with_other_ops_have_no_size_between_them() -> None:
    def model() -> nn.Module:
        return Then(lambda x: x.relu() if len(x) > 4 else x)

    profiles = tuple(sacplan.profile(model(), torch.randn(n, 8), device="cpu") for n in (2, 8))
    assert sized((2, 8), profiles) is None  # type: ignore[arg-type]
    found = sacplan.fit(model(), lambda n: torch.randn(n, 8), "cpu", batch=4, optimizer="sgd")
    assert found.rows[0].largest_batch is None
    assert "max_batch" in " ".join(found.computed)


@given(edge=st.integers(0, 10**6), limit=st.integers(1, 10**6), power=st.sampled_from([0.5, 1.0, 2.0]))
def test_the_largest_size_is_the_last_that_fits(edge: int, limit: int, power: float) -> None:
    """Whatever curve peaks lie on: one that bends sends the line through two sizes the wrong way."""
    looked: dict[int, float] = {}
    budget = float(edge + 0.5) ** power

    def look(n: int) -> None:
        assert n not in looked  # each size is looked at once
        looked[n] = float(n) ** power - budget

    assert largest(looked, look, limit, lambda excess: excess <= 0, float) == min(edge, limit)
    assert len(looked) <= 60


# --- the verdict


@cache
def fitted(budget: str | None, optimizer: Any = "adamw", seq: int | None = None, **options: Any) -> Any:
    """The answer, one for all tests that ask the same."""
    model = LM(layers=2, vocab=1024, dropout=0.0)
    batches = (lambda n: tokens(n, 64, 1024)) if seq is None else (lambda n, s: tokens(n, s, 1024))
    return sacplan.fit(model, batches, "cpu", cross_entropy, optimizer, budget, seq=seq, **options)


@cache
def profiled(optimizer: str) -> sacplan.Profile:
    """The step of ``fitted("...", batch=8)``, with everything that planning has worked out from it."""
    model = LM(layers=2, vocab=1024, dropout=0.0)
    return sacplan.profile(model, tokens(8, 64, 1024), cross_entropy, BY_NAME[optimizer].make, "cpu")


@pytest.mark.parametrize("budget", slow_after(1, ["10MiB", "6MiB", "8MiB"]))
def test_rows_are_what_profile_and_plan_say(budget: str) -> None:
    found = fitted(budget, batch=8, sizes=False)
    assert any(row.fits for row in found.rows)
    for row in found.rows:
        profile = profiled(row.optimizer)
        if row.way == "as it is":
            assert row.peak_bytes == profile.peak_bytes
            assert row.step_ms == pytest.approx(profile.step_ms)
        elif row.fits:
            plan = sacplan.plan(profile, budget, techniques=row.techniques)
            assert row.peak_bytes == plan.peak_bytes
            assert row.recompute_ms == pytest.approx(plan.recompute_ms)
            assert row.added_ms == pytest.approx(plan.added_ms)
            assert row.step_ms == pytest.approx(plan.planned_ms)
        elif row.way == "plan":
            assert row.peak_bytes == sacplan.plan(profile, "smallest", "greedy").peak_bytes
        assert row.fits == (row.peak_bytes <= parse_budget(budget, 0))


def test_rows_on_a_gpu_without_a_budget_are_what_plan_says() -> None:
    """There, a row fits if what the allocator reserves does; the limit of the peak follows from that."""
    memory = memory_with_room(250 * 2**20)
    spec = replace(resolve_device("h100"), memory_bytes=memory, matmul_workspace_bytes=0)
    found = on_gpu(None, "sgd", 16, spec)
    profile = sacplan.profile(wide(), tokens(16, 256, 4096), cross_entropy, torch.optim.SGD, spec)
    planned = [row for row in found.rows if row.fits and row.way != "as it is"]
    assert planned
    for row in planned:
        plan = sacplan.plan(profile, techniques=row.techniques)
        assert (row.peak_bytes, row.reserved_bytes) == (plan.peak_bytes, plan.device_memory.reserved_bytes())
        assert row.recompute_ms == pytest.approx(plan.recompute_ms)
        assert row.reserved_bytes <= left_of(memory)


def test_no_program_is_played_or_rehearsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is asked once about each step with an optimizer and a plan, and so is each loss in slices."""
    played: list[Any] = []
    rehearsed: list[Any] = []
    play, rehearse = device_memory.peaks_on, rest._rehearsed

    def peaks_on(allocator: Any, program: Program) -> Any:
        played.append((type(allocator), program.events, program.storage_bytes))
        return play(allocator, program)

    def rehearsal(span: Any, device: Any) -> Any:
        rehearsed.append((span.program.events, span.program.storage_bytes, span.chunk))
        return rehearse(span, device)

    monkeypatch.setattr(device_memory, "peaks_on", peaks_on)
    monkeypatch.setattr(rest, "_rehearsed", rehearsal)
    memory = memory_with_room(250 * 2**20)
    spec = replace(resolve_device("h100"), memory_bytes=memory, matmul_workspace_bytes=0)
    found = on_gpu(None, "adamw", 16, spec)
    assert any(row.reserved_bytes for row in found.rows)
    assert played
    assert rehearsed
    assert len(set(played)) == len(played)
    assert len(set(rehearsed)) == len(rehearsed)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["6MiB", "20MiB", "100MiB"])
def test_the_largest_batches_are_those_of_max_batch(budget: str) -> None:
    found = fitted(budget, optimizer="sgd")
    rows = {row.way: row for row in found.rows}
    # Where no plan is needed, only the ways with most techniques are asked for their sizes.
    planned = rows["plan"] if rows["plan"].largest_batch is not None else found.competing[-1]
    model = LM(layers=2, vocab=1024, dropout=0.0)
    looked = sacplan.max_batch(
        model,
        lambda n: tokens(n, 64, 1024),
        budget,
        "cpu",
        loss_fn=cross_entropy,
        optimizer=torch.optim.SGD,
        solver="greedy",
        techniques=planned.techniques,
    )
    assert rows["as it is"].largest_batch == looked.unplanned_batch_size
    assert planned.largest_batch is not None
    assert looked.unplanned_batch_size < planned.largest_batch <= looked.largest_batch_size


@pytest.mark.slow
def test_the_longest_sequence_is_the_last_that_fits() -> None:
    found = fitted("20MiB", optimizer="sgd", seq=128)
    longest = found.rows[0].longest_seq
    assert longest % 128 == 0
    model = LM(layers=2, vocab=1024, dropout=0.0)
    peaks = [
        sacplan.profile(model, tokens(1, n, 1024), cross_entropy, torch.optim.SGD, "cpu").peak_bytes
        for n in (longest, longest + 128)
    ]
    assert peaks[0] <= 20 * 2**20 < peaks[1]
    assert fitted("20MiB", optimizer="sgd", seq=128, longest=256).rows[0].longest_seq == min(longest, 256)


def test_the_verdict_says_whether_it_fits_and_by_how_much_not() -> None:
    fits = fitted("1GiB", sizes=False)
    assert fits.fits
    assert "fits. It needs" in fits.sentence
    assert f"of the budget of {format_bytes(2**30)}." in fits.sentence
    assert fits.recommended == fits.rows[0]
    assert fits.code == ""
    never = fitted("200KiB", "sgd", batch=64)
    assert never.recommended is None
    assert "does not fit. It needs" in never.sentence
    assert never.smallest.peak_bytes == min(row.peak_bytes for row in never.rows)
    assert all(row.largest_batch == 0 for row in never.rows)
    assert "h100" in never.larger_devices


def test_a_remedy_that_cannot_be_compiled_says_so() -> None:
    found = fitted("8MiB", batch=8, sizes=False)
    assert any(row.fits and "chunk" in row.techniques for row in found.rows)
    assert any(said.startswith("torch.compile cannot keep slices") for said in found.advice)
    assert not any("torch.compile" in said for said in fitted("1GiB", sizes=False).advice)


def test_a_plan_that_changes_nothing_says_so() -> None:
    found = fitted("1GiB", sizes=False)
    for row in found.rows:
        (like,) = [
            each
            for each in found.rows
            if (each.optimizer, each.way) == (row.optimizer, row.same_as or row.way)
        ]
        assert (row.same_as is not None) == (row.way != "as it is")
        assert (row.peak_bytes, row.step_ms) == (like.peak_bytes, like.step_ms)
        # No plan is needed, so no other row is worth a line.
        assert (f"  {row.name}: " in str(found)) == (row is found.rows[0])
    needed = next(row for row in fitted("8MiB", batch=8, sizes=False).rows if row.way == "plan")
    assert needed.same_as is None


def test_the_larger_devices_are_a_few_gpus() -> None:
    never = fitted("200KiB", batch=64, sizes=False)
    memory = [resolve_device(name).memory_bytes for name in never.larger_devices]
    assert memory == sorted(memory)
    assert "cpu" not in never.larger_devices
    (advice,) = [sentence for sentence in never.advice if sentence.startswith("GPUs that hold")]
    assert advice.count(",") == 2
    assert advice.endswith(f" and {len(memory) - 3} larger ones.")


@pytest.mark.slow
def test_what_is_recommended_holds_the_budget_in_a_step_that_is_run() -> None:
    found = fitted("8MiB", optimizer=torch.optim.SGD, batch=16)
    best = found.recommended
    assert not found.fits
    assert "does not fit as it is" in found.sentence
    model, batch = LM(layers=2, vocab=1024, dropout=0.0), tokens(16, 64, 1024)
    techniques = ("recompute",) if best.way == "plan" else ("recompute", "chunk")
    profile = sacplan.profile(model, batch, cross_entropy, torch.optim.SGD, "cpu")
    plan = sacplan.plan(profile, "8MiB", techniques=techniques)
    seen = sacplan.verify(model, batch, plan, cross_entropy, torch.optim.SGD)
    assert seen.peak_bytes <= 8 * 2**20
    if best.way != "chunked loss":
        assert seen.peak_bytes == best.peak_bytes


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(sacplan.errors.PlanError, match="Did you mean 'adamw-8bit'"):
        fitted("1GiB", optimizer="adamw-9bit")
    with pytest.raises(sacplan.errors.PlanError, match="batch"):
        fitted("1GiB", batch=0)


@pytest.mark.parametrize(
    ("make_batch", "said"),
    [
        (lambda n, seq: tokens(2, seq, 1024), r"sizes 2 and 4: \(2, 64\)"),
        (lambda n, seq: tokens(n, 32, 1024), r"sizes 64 and 128: \(1, 32\)"),
    ],
    ids=["batch", "seq"],
)
def test_a_batch_that_does_not_follow_the_size_is_refused(make_batch: Any, said: str) -> None:
    model = LM(layers=1, vocab=1024, dropout=0.0)
    with pytest.raises(
        sacplan.errors.PlanError, match=f"same shapes for {said}.*of the size that it is asked for"
    ):
        sacplan.fit(model, make_batch, "cpu", cross_entropy, "sgd", "1GiB", seq=64)


def test_no_length_fits_under_a_longest_shorter_than_the_unit() -> None:
    """Lengths are looked at in multiples of 128, and none is within 100: 0 is not "no limit"."""
    assert fitted("1GiB", optimizer="sgd", seq=128, longest=100).rows[0].longest_seq == 0


def test_where_there_is_one_length_none_is_the_longest() -> None:
    row = fitted("1GiB", optimizer="sgd", seq=1, longest=1).rows[0]
    assert row.fits
    assert row.longest_seq is None


# --- memory of the host


def wide(layers: int = 1) -> LM:
    with torch.device("meta"):
        return LM(layers=layers, dim=256, vocab=4096, dropout=0.0)


GPU = "h100 without workspaces"


@cache
def on_gpu(
    budget: str | None,
    optimizer: str,
    batch: int,
    device: Any = GPU,
    host_budget: str | None = None,
    layers: int = 1,
) -> sacplan.Verdict:
    how: dict[str, Any] = {"batch": batch, "sizes": False, "host_budget": host_budget}
    return sacplan.fit(
        wide(layers), lambda n: tokens(n, 256, 4096), device, cross_entropy, optimizer, budget, **how
    )


@cache
def profiled_on_gpu(optimizer: str, batch: int, layers: int = 1) -> sacplan.Profile:
    """The step of ``on_gpu(..., optimizer, batch, layers)``, with everything that planning has worked out from it."""
    make = BY_NAME[optimizer].make
    return sacplan.profile(wide(layers), tokens(batch, 256, 4096), cross_entropy, make, GPU)


def on_host(found: sacplan.Verdict) -> list[sacplan.FitRow]:
    return [row for row in found.rows if row.host_bytes]


def test_what_fits_on_the_device_takes_nothing_of_the_host() -> None:
    found = on_gpu("2GiB", "sgd", 16)
    assert found.fits
    assert not on_host(found)


@pytest.mark.parametrize(
    ("budget", "optimizer", "batch", "layers"),
    slow_after(1, [("100MiB", "sgd", 16, 3), ("27MiB", "adamw", 2, 1)]),
    ids=["nothing else fits", "state on the host"],
)
def test_rows_on_the_host_are_what_profile_and_plan_say(
    budget: str, optimizer: str, batch: int, layers: int
) -> None:
    rows = [row for row in on_host(on_gpu(budget, optimizer, batch, layers=layers)) if row.fits]
    assert rows
    for row in rows:
        profile = profiled_on_gpu(row.optimizer, batch, layers)
        plan = sacplan.plan(profile, budget, techniques=row.techniques)
        assert row.peak_bytes == plan.peak_bytes
        assert row.host_bytes == plan.host_bytes + profile.optimizer_host_bytes
        if profile.optimizer_host_bytes:
            assert row.step_ms is None  # copies between host and device are not predicted
        else:
            assert row.step_ms == pytest.approx(plan.planned_ms)


def test_what_is_on_the_host_is_in_the_verdict_and_its_code() -> None:
    found = on_gpu("100MiB", "sgd", 16, layers=3)
    assert found.recommended is not None
    assert "on the host" in found.sentence
    assert "techniques=('recompute', 'chunk', 'offload')" in found.code
    paged = on_gpu("27MiB", "adamw", 2)
    assert {row.optimizer for row in on_host(paged)} == {"paged-adamw-8bit", "adamw-offload"}
    assert "bitsandbytes.optim.PagedAdamW8bit(params)" in paged.code
    assert any("Times are not predicted" in sentence for sentence in paged.computed)


@pytest.mark.slow
def test_frozen_weights_that_do_not_fit_leave_the_device() -> None:
    model = wide(layers=3)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    assert sum(p.nbytes for p in model.parameters()) > 14 * 2**20
    make = lambda n: tokens(n, 256, 4096)  # noqa: E731
    found = sacplan.fit(model, make, GPU, cross_entropy, "sgd", "14MiB", batch=1, sizes=False)
    (row,) = (row for row in found.rows if row.fits)
    profile = sacplan.profile(model, tokens(1, 256, 4096), cross_entropy, BY_NAME["sgd"].make, GPU)
    plan = sacplan.plan(profile, "14MiB", techniques=row.techniques)
    assert plan.offloaded_weights
    assert (row.peak_bytes, row.host_bytes) == (plan.peak_bytes, plan.host_bytes)


def test_an_optimizer_that_the_host_cannot_hold_is_named() -> None:
    found = on_gpu("27MiB", "adamw", 2, replace(resolve_device(GPU), host_memory_bytes=32 * 2**20))
    assert {row.optimizer for row in on_host(found)} == {"paged-adamw-8bit"}
    assert any("adamw-offload would take 44.00 MiB of the host's memory" in each for each in found.computed)


def test_a_host_that_is_too_small_for_the_optimizer() -> None:
    """``plan`` refuses it, and no row with it fits, though the device has room."""
    found = on_gpu("2GiB", "adamw-offload", 16, host_budget="40MiB")
    row = found.rows[0]
    assert (row.fits, row.over_bytes, row.over_host_bytes) == (False, 0, row.host_bytes - 40 * 2**20)
    assert "44.00 MiB on the host, 4.00 MiB over the host's 40.00 MiB)" in found.sentence
    assert found.recommended.optimizer != "adamw-offload"
    profile = profiled_on_gpu("adamw-offload", 16)
    with pytest.raises(sacplan.errors.PlanError, match=r"takes 44\.00 MiB of the host"):
        sacplan.plan(profile, "2GiB", host_budget="40MiB")


@pytest.mark.slow
def test_a_host_that_is_too_small_for_the_shards() -> None:
    """With ``CPUOffloadPolicy`` shards, gradients and the optimizer are there."""
    found = on_gpu("45MiB", "adamw", 4, f"2x{GPU}", host_budget="1MiB")
    row = next(row for row in found.rows if row.spread == "FSDP2, CPU offload")
    assert not row.fits
    assert row.over_host_bytes == row.host_bytes - 2**20


@pytest.mark.parametrize(
    "techniques", [("recompute",), pytest.param(("recompute", "chunk"), marks=pytest.mark.slow)]
)
def test_the_peak_at_any_size_is_that_of_the_program_there(techniques: tuple[str, ...]) -> None:
    """With sums over all rows, which take more inside as the batch grows, until they have enough blocks."""
    at = {n: recording(n, 50, "h100", 64, 4, 128) for n in (2, 4)}
    found = sized((2, 4), (at[2], at[4]))
    plan = sacplan.plan(at[4], "smallest", techniques=techniques)
    peaks = found.peaks(plan.decisions, 1)
    for n in (8, 64):
        exact = found.at(n)
        margin = len(exact.program.storage_bytes) * 512
        assert abs(peaks.at(n) - exact.footprint(plan.decisions).peak_bytes) <= margin


def test_where_only_weights_on_the_host_fit() -> None:
    """With the optimizer that the row names, ``profile`` and ``plan`` say the same."""
    found = on_gpu("20MiB", "adamw", 2, layers=2)
    (row,) = (row for row in found.rows if row.fits)
    assert (row.optimizer, row.way) == ("adamw-offload-gradients", "plan + chunked loss + offload")
    profile = profiled_on_gpu(row.optimizer, 2, 2)
    plan = sacplan.plan(profile, "20MiB", techniques=row.techniques)
    assert any(one.trained for one in plan.offloaded_weights)
    assert (row.peak_bytes, row.step_ms) == (plan.peak_bytes, plan.planned_ms)
    assert row.host_bytes == plan.host_bytes + profile.optimizer_host_bytes
    assert "offload_gradients=True" in found.code


def test_memory_of_the_host_may_be_what_is_missing() -> None:
    """Where weights have to leave and the host has no room for them, a sentence says what may help."""
    assert not any("host_budget" in sentence for sentence in on_gpu("20MiB", "adamw", 2, layers=2).computed)
    optimizer_bytes = profiled_on_gpu("adamw-offload-gradients", 2, 2).optimizer_host_bytes
    found = on_gpu("20MiB", "adamw", 2, layers=2, host_budget=f"{optimizer_bytes + 2**20}B")
    assert found.recommended is None
    assert any("host_budget" in sentence for sentence in found.computed)
