"""The figures of a GPU's allocator: against a fold of the same events, and on steps worked out by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks import random_programs
from sacplan.core.liveness import Fold
from sacplan.core.program import Event, Phase, Program
from sacplan.device.caching_allocator import MIB, CachingAllocator
from sacplan.device.device_memory import device_memory, peaks_on
from tests.support.slow import slow_after
from tests.support.steps import total


def mlp(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


@functools.cache
def profiled(rows: int = 1024, optimizer: Any = None, device: str = "a100-80gb") -> sacplan.Profile:
    return sacplan.profile(mlp(), torch.randn(rows, 512), total, optimizer, device)


def peak_of_later_steps(program: Program) -> int:
    """The fold's peak from the second step on.

    The workspaces are there from the beginning. The loss, and whatever else is neither freed nor a gradient, is there
    twice in the forward pass: the one of the step before is still in its variable.
    """
    on_tensors = {tensor.storage for tensor in program.tensors}
    workspaces = {arg for code, arg in program.events if code == Event.ALLOC and arg not in on_tensors}
    ended = Fold(program)
    for code, arg in program.events:
        ended.step(code, arg)
    gradients = {program.tensors[t].storage for t in program.gradients.values()}
    left = {s for s, n in ended.holders.items() if n} - {*program.initial, *workspaces, *gradients}
    old = sum(program.storage_bytes[s] for s in left)
    fold = Fold(program, initial=(*program.initial, *workspaces))
    peak = fold.live
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP:
            if program.ops[arg].phase != Phase.FORWARD:
                old = 0
            peak = max(peak, fold.noted + old)
    return peak


@pytest.mark.parametrize("seed", slow_after(2, range(0, 60, 10)))
def test_blocks_of_expandable_segments_add_up_to_the_tensors(seed: int) -> None:
    """With expandable segments every remainder is split off. So what is allocated is what is alive, to the byte."""
    program = random_programs.make_program(seed)
    try:
        profile = sacplan.profile(
            program.net, program.batch(0), program.loss, torch.optim.AdamW, device="a100-80gb"
        )
    except RuntimeError as error:  # autograd's own rules: the program is not one that trains
        pytest.skip(str(error)[:60])
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("recompute", "chunk"))
    for step in (profile.program, profile.with_plan(plan)):
        assert device_memory(step).expandable_steps.max_memory_allocated == peak_of_later_steps(step)


def test_whole_blocks_count_as_allocated() -> None:
    even, odd = profiled(1024), profiled(5800)
    # All sizes are multiples of 512 bytes, and of 1 MiB or far under it: nothing is left over.
    assert even.device_memory().steps.max_memory_allocated == peak_of_later_steps(even.program)
    peaks = odd.device_memory().steps
    assert peak_of_later_steps(odd.program) < peaks.max_memory_allocated <= peaks.max_memory_reserved
    assert peaks.max_memory_reserved % (2 * MIB) == 0


def test_the_optimizers_state_comes_in_the_first_step() -> None:
    profile = profiled(8192, lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    memory = profile.device_memory()
    state = sum(
        n_bytes
        for n_bytes, kind in zip(profile.program.storage_bytes, profile.program.storage_kinds, strict=True)
        if kind.name == "OPTIMIZER_STATE"
    )
    # The peak is in the backward pass, before the first step has a state.
    first, later = memory.first_step.max_memory_allocated, memory.steps.max_memory_allocated
    assert first < later <= first + state
    without = profiled(64).device_memory()
    assert without.first_step == without.steps


class Renewing(torch.optim.Optimizer):
    """An optimizer that makes its state anew in each step, as Adafactor does with some of it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
            p.sub_(state["mean"])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Renewing])
def test_steps_go_on_until_one_reserves_nothing(optimizer: Any) -> None:
    profile = profiled(1024, optimizer)
    allocator = CachingAllocator()
    first, steps = peaks_on(allocator, profile.program)
    assert first.max_memory_reserved <= steps.max_memory_reserved == allocator.reserved_bytes
    # What is left on the allocator is the model, the state, the batch, the workspaces and the gradients.
    gradients = {profile.program.tensors[t].storage for t in profile.program.gradients.values()}
    fold = Fold(profile.program)
    for code, arg in profile.program.events:
        fold.step(code, arg)
    assert allocator.allocated_bytes == fold.live
    assert all(fold.holders[s] for s in gradients)


def test_a_plan_has_the_figures_and_a_cpu_has_none(tmp_path: Any) -> None:
    model = nn.Sequential(*(mlp() for _ in range(4)))
    profile = sacplan.profile(model, torch.randn(4096, 512), lambda m, x: m(x).sum(), device="a100-80gb")
    plan = sacplan.plan(profile, "smallest")
    assert plan.device_memory == profile.device_memory(plan)
    assert plan.device_memory.steps.max_memory_reserved < profile.device_memory().steps.max_memory_reserved
    assert "reserved" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert sacplan.Plan.load(tmp_path / "plan.json") == plan
    here = profiled(64, device="cpu")
    assert here.device_memory() is None
    assert sacplan.plan(here, "smallest").device_memory is None


def test_buffers_of_fully_shard_have_pools_of_their_own() -> None:
    """The buffer of an all-gather cannot take over a block of computation, nor the other way round."""
    model = nn.Sequential(*(mlp(1024) for _ in range(3)))
    ranks = sacplan.FSDP2(2, ["*", ""])
    profile = sacplan.profile(model, torch.randn(64, 1024), total, device="h100", ranks=ranks)
    program = profile.program
    # What is gathered is copied into a buffer, the last tensor that the op is given.
    gathers = [op for op in program.ops if op.name == "fsdp.all_gather_copy_in.default"]
    allocator = CachingAllocator()
    peaks_on(allocator, program)
    elsewhere = sum(segment.nbytes for segment in allocator.segments if segment.first.pool[0] != 0)
    assert gathers
    assert elsewhere >= max(program.storage_bytes[op.reads[-1]] for op in gathers)


@pytest.mark.parametrize(
    ("options", "on_device"),
    [({}, False), ({"foreach": False}, False), ({"fused": True}, True)],
)
def test_counters_of_steps_are_on_the_host(options: dict[str, bool], on_device: bool) -> None:
    """As torch.optim makes them: 512 bytes on a GPU for each parameter only where a kernel or a graph reads them."""
    profile = profiled(64, lambda parameters: torch.optim.AdamW(parameters, **options))
    program = profile.program
    state = [s for s in program.initial if program.storage_kinds[s].name == "OPTIMIZER_STATE"]
    moments = 2 * sum(
        program.storage_bytes[s] for s in program.initial if program.storage_kinds[s].name == "PARAMETER"
    )
    assert sum(program.storage_bytes[s] for s in state) == moments + 512 * 4 * on_device
