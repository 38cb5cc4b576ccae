"""A budget in bytes for torch.compile holds, and a larger one recomputes no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import sacplan
from sacplan.errors import BudgetError, PlanError
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from tests.support.steps import grads_of
from tests.support.steps import mean_square as loss_fn
from tests.zoo.layers import MLP, Residual, Stack

X = torch.randn(512, 32)


def perceptrons() -> nn.Module:
    return Stack(Residual(MLP(32)) for _ in range(4))


def profile_under(
    budget: str, calls: int = 1, modules: str = ""
) -> tuple[sacplan.Profile, sacplan.CompiledGraph]:
    with sacplan.compile_budget(budget, calls=calls) as held:
        how: dict[str, Any] = {"modules": [modules], "backend": "inductor"}
        found = sacplan.profile(perceptrons(), X, loss_fn, device="cpu", compile=how)
    assert config.custom_partitioner_fn is None
    return found, held.graphs[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_graph_whose_sizes_are_symbols_is_split_like_others() -> None:
    """Lowering a split must not fix the sizes for those that are lowered next."""
    first, second = (
        Stack(m for _ in range(5) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()))
        for _ in range(2)
    )
    pyramid = Stack([first, nn.MaxPool2d(2), second])
    how: dict[str, Any] = {"modules": ["layers.0", "layers.2"], "backend": "inductor"}
    with sacplan.compile_budget("90%") as held:
        sacplan.profile(pyramid, torch.randn(4, 8, 32, 32), loss_fn, device="cpu", compile=how)
    assert len(held.graphs) == 2
    for graph in held.graphs:
        assert graph.needs_bytes <= graph.budget_bytes < graph.default_bytes


@pytest.mark.slow
def test_other_calls_of_a_graph_count_by_what_they_save() -> None:
    _, one = profile_under("1TiB", 1, "layers.*")
    _, three = profile_under("1TiB", 3, "layers.*")
    # The input of the layer, and that of its activation function and of its second linear layer.
    assert three.needs_bytes - one.needs_bytes == 2 * 4 * (512 * 32 + 2 * 512 * 128)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_budget_that_no_partition_holds_is_infeasible() -> None:
    with pytest.raises(sacplan.InfeasibleBudget, match="compiled graph") as error:
        profile_under("1%")
    _, graph = profile_under(f"{error.value.smallest_feasible_bytes}B")
    assert graph.needs_bytes == error.value.smallest_feasible_bytes
    assert config.custom_partitioner_fn is None


def test_what_is_no_budget_is_refused_before_anything_is_set() -> None:
    with pytest.raises(BudgetError, match="much"):
        sacplan.compile_budget("much")
    with pytest.raises(PlanError, match="calls is 0"):
        sacplan.compile_budget("1GiB", calls=0)
    assert config.custom_partitioner_fn is None


@pytest.mark.slow
def test_a_really_compiled_step_holds_the_budget_by_its_allocator() -> None:
    torch.compiler.reset()
    model = perceptrons()
    step = Step(model, X, loss_fn, None)
    with sacplan.compile_budget("75%") as held, config.patch(force_disable_caches=True):
        model.compile()
        for _ in range(2):
            step.accumulate()
            model.zero_grad(set_to_none=True)
    (graph,) = held.graphs
    assert measured_step(step, X).peak_bytes <= graph.budget_bytes < graph.default_bytes


@pytest.mark.slow
def test_what_is_dropped_is_the_same_in_both_passes() -> None:
    """PyTorch's own budget draws random numbers anew in the backward pass: pytorch#190758."""
    model, x = (
        Stack(Residual(nn.Linear(64, 64), nn.GELU(), nn.Dropout()) for _ in range(2)),
        torch.randn(2048, 64),
    )
    expected = grads_of(model, x, loss_fn)
    torch.compiler.reset()
    with (
        sacplan.compile_budget("92%") as held,
        config.patch(force_disable_caches=True, fallback_random=True),
    ):
        found = grads_of(model, x, torch.compile(loss_fn))
    assert held.graphs[0].recompute_ms
    torch.testing.assert_close(found, expected)
