"""``max_batch`` and ``throughput`` against planning for every batch size, one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.device.devices import resolve_device
from sacplan.questions.batch_sizes import CapacityPoint
from sacplan.questions.capacity import Capacity, max_batch, throughput
from tests.support.devices import memory_with_room
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

MIB = 2**20


def perceptron(layers: int = 2, width: int = 64) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    with torch.device("meta"):
        return nn.Sequential(*(block() for _ in range(layers)))


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.empty(n, 128, width, device="meta")


def language_model() -> LM:
    with torch.device("meta"):
        return LM(layers=1, dim=64, heads=2, vocab=128)


class Case:
    """A model, its batches and a budget; and what each batch size gives when planned for alone."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_batch: Callable[[int], Any],
        budget: int,
        solver: str = "greedy",
        **how: Any,
    ) -> None:
        self.make_model, self.make_batch, self.budget, self.how = make_model, make_batch, budget, how
        self.solver = solver

    @functools.cached_property
    def model(self) -> nn.Module:
        return self.make_model()

    @functools.cache  # noqa: B019  (a handful of cases, alive as long as the module)
    def profile(self, n: int) -> sacplan.Profile:
        return sacplan.profile(self.model, self.make_batch(n), device="h100", **self.how)

    @functools.cache  # noqa: B019
    def plan(self, n: int) -> sacplan.Plan | None:
        try:
            return sacplan.plan(self.profile(n), f"{self.budget}B", self.solver)
        except sacplan.InfeasibleBudget:
            return None

    def samples_per_s(self, n: int) -> float:
        plan = self.plan(n)
        return 0.0 if plan is None else n / (plan.planned_ms) * 1e3

    @functools.cache  # noqa: B019
    def find(self, function: Callable[..., sacplan.Capacity], **more: Any) -> Capacity:
        return function(
            self.model, self.make_batch, f"{self.budget}B", solver=self.solver, **self.how, **more
        )


CASES = {
    "perceptron": Case(perceptron, rows, 6 * MIB, "best"),
    "with Adam": Case(perceptron, rows, 7 * MIB, optimizer=torch.optim.Adam),
    "language model": Case(language_model, tokens, 2 * MIB, loss_fn=cross_entropy),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "perceptron" else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES],
)
def test_the_largest_batch_is_that_of_planning_for_every_size(name: str) -> None:
    case = CASES[name]
    found = case.find(max_batch)
    last = found.batch_size + 3
    feasible = [n for n in range(1, last) if case.plan(n) is not None]
    assert feasible == list(range(1, found.batch_size + 1))
    unplanned = [n for n in range(1, last) if case.profile(n).peak_bytes <= case.budget]
    assert found.unplanned_batch_size == max(unplanned) < found.batch_size == found.largest_batch_size
    assert found.plan == case.plan(found.batch_size)
    assert found.bounded_by == "memory"
    assert len(found.points) <= 12
    assert {found.batch_size, found.batch_size + 1} <= {p.batch_size for p in found.points}


def test_points_are_what_planning_gives() -> None:
    case = CASES["perceptron"]
    found = case.find(max_batch)
    sizes = [p.batch_size for p in found.points]
    assert sizes == sorted(set(sizes))
    for p in found.points:
        plan = case.plan(p.batch_size)
        assert p.unplanned_peak_bytes == case.profile(p.batch_size).peak_bytes
        assert p.feasible == (plan is not None)
        if plan is None:
            assert p.step_ms is p.recompute_ms is p.samples_per_s is None
            assert p.peak_bytes is None or p.peak_bytes > case.budget
            assert p.floor_bytes <= sacplan.plan(case.profile(p.batch_size), "smallest").peak_bytes
        else:
            assert p.floor_bytes <= p.peak_bytes == plan.peak_bytes <= case.budget
            assert p.step_ms == plan.planned_ms
            assert p.samples_per_s == case.samples_per_s(p.batch_size)
    frame = found.to_frame()
    assert list(frame.index) == sizes
    assert ["batch_size", *frame.columns] == list(CapacityPoint.shown)
    assert f"Batch of {found.batch_size}:" in repr(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.batch_size = 1  # type: ignore[misc]


# --- throughput -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_fastest_is_that_of_all_sizes(name: str) -> None:
    case = CASES[name]
    found = case.find(throughput)
    rates = {n: case.samples_per_s(n) for n in range(1, found.largest_batch_size + 1)}
    assert found.samples_per_s == max(rates.values()) == rates[found.batch_size]
    assert found.samples_per_s == found.batch_size / found.step_ms * 1e3
    assert found.unplanned_batch_size <= found.batch_size <= found.largest_batch_size
    assert case.plan(found.largest_batch_size + 1) is None


def test_the_fastest_of_many_sizes() -> None:
    case = Case(lambda: perceptron(1), rows, 16 * MIB)
    found = case.find(throughput)
    assert len(found.points) < found.largest_batch_size / 2
    rates = [case.samples_per_s(n) for n in range(1, found.largest_batch_size + 1)]
    assert found.samples_per_s >= 0.999 * max(rates)


def test_recomputation_is_paid_for_where_a_larger_batch_is_worth_it() -> None:
    """Adam's step is paid for once a batch; and ops are so large that the GPU does not wait for the CPU."""
    wide = functools.partial(perceptron, width=1024), functools.partial(rows, width=1024)
    case = Case(*wide, 500 * MIB, optimizer=torch.optim.Adam)
    found = case.find(throughput)
    alone = case.samples_per_s(found.unplanned_batch_size)
    assert found.samples_per_s > alone
    assert found.plan.recompute_ms > 0


# --- bounds and odd models --------------------------------------------------------------------------------


def test_at_most() -> None:
    case = CASES["perceptron"]
    free = case.find(max_batch)
    for at_most in (1, 2, free.unplanned_batch_size, free.batch_size - 1):
        found = case.find(max_batch, at_most=at_most)
        assert (found.batch_size, found.bounded_by) == (at_most, "at_most")
        assert found.unplanned_batch_size == min(at_most, free.unplanned_batch_size)
        assert max(p.batch_size for p in found.points) == at_most
    found = case.find(max_batch, at_most=free.batch_size + 1)
    assert (found.batch_size, found.bounded_by) == (free.batch_size, "memory")
    assert case.find(throughput, at_most=3).batch_size <= 3


def test_one_sample_that_needs_a_plan() -> None:
    case = CASES["perceptron"]
    smallest = sacplan.plan(case.profile(1), "smallest").peak_bytes
    assert smallest < case.profile(1).peak_bytes
    found = max_batch(case.model, case.make_batch, f"{smallest}B")
    assert found.unplanned_batch_size == 0
    assert found.batch_size >= 1
    assert found.plan.recompute_ms > 0


def in_chunks(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """From 12 samples on in halves, without a graph for the first: memory falls there, then grows again."""
    if len(x) < 12:
        return self.inner(x)
    with torch.no_grad():
        self.inner(x[: len(x) // 2])
    return self.inner(x[len(x) // 2 :])


@pytest.mark.slow
def test_memory_that_falls_where_a_model_works_in_chunks() -> None:
    model = FromFunction(in_chunks, inner=perceptron())
    peaks = {n: sacplan.profile(model, rows(n)).peak_bytes for n in (11, 12)}
    assert peaks[12] < peaks[11]
    for mib in (3, 7):
        case = Case(lambda: model, rows, mib * MIB)
        found = case.find(max_batch)
        n = found.batch_size
        assert case.plan(n) is not None
        assert case.plan(n + 1) is None
        assert not any(p.feasible for p in found.points if p.batch_size > n)
        assert case.profile(found.unplanned_batch_size).peak_bytes <= case.budget
        assert case.profile(found.unplanned_batch_size + 1).peak_bytes > case.budget


def test_a_batch_in_any_form_and_untouched_generators() -> None:
    model = LM(layers=1, dim=32, vocab=50)
    calls: list[int] = []

    def batch(n: int) -> Callable[[], tuple[torch.Tensor]]:
        calls.append(n)
        return lambda: (torch.randint(0, 50, (n, 16)),)

    before = torch.get_rng_state()
    found = max_batch(model, batch, "2MiB")
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(calls) == [p.batch_size for p in found.points]
    assert calls[0] == 1


def test_a_real_trace() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    found = max_batch(model, lambda n: torch.randn(n, 32, 64), "2MiB", "cpu", trace="real")
    assert found.plan.peak_bytes <= 2 * MIB
    assert found.batch_size > found.unplanned_batch_size > 0


# --- budgets ----------------------------------------------------------------------------------------------


def test_a_budget_is_kept_as_it_is() -> None:
    spec = dataclasses.replace(resolve_device("h100"), memory_bytes=40 * MIB)
    found = max_batch(perceptron(1), rows, "36MiB", spec, at_most=1)
    assert found.budget_bytes == found.plan.budget_bytes == 36 * MIB
    assert not found.outside


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_without_a_budget(kind: str) -> None:
    """A GPU has all memory but what lies outside of the allocator, and a CPU 85 % of it."""
    gpu = dataclasses.replace(resolve_device("h100"), memory_bytes=memory_with_room(40 * MIB))
    spec = gpu if kind == "cuda" else dataclasses.replace(resolve_device("cpu"), memory_bytes=40 * MIB)
    found = max_batch(perceptron(1), rows, device=spec, at_most=1)
    assert found.budget_bytes == (40 if kind == "cuda" else 34) * MIB
    assert ("CUDA context" in repr(found)) == (kind == "cuda")


def test_a_batch_that_is_not_the_fastest_says_which_is() -> None:
    spec = dataclasses.replace(resolve_device("h100"), memory_bytes=40 * MIB, matmul_workspace_bytes=0)
    found = max_batch(perceptron(1), rows, "34MiB", spec, at_most=8)
    assert "fastest" not in repr(found)  # it is the answer itself
    one = found.points[0]
    answer = dataclasses.replace(found, batch_size=one.batch_size, samples_per_s=one.samples_per_s)
    best = found.to_frame()["samples_per_s"].idxmax()
    more = found.to_frame()["samples_per_s"].max() / one.samples_per_s - 1
    assert answer.fastest.batch_size == best != one.batch_size
    assert f"fastest of those looked at: {best}, {more:.1%} more samples/s; see sacplan.throughput" in repr(
        answer
    )


# --- errors -----------------------------------------------------------------------------------------------


def test_one_sample_does_not_fit() -> None:
    with pytest.raises(sacplan.InfeasibleBudget, match="not even a batch of one sample") as info:
        max_batch(perceptron(), rows, "512KiB")
    smallest = info.value.smallest_feasible_bytes
    assert info.value.budget_bytes == MIB // 2
    assert max_batch(perceptron(), rows, f"{smallest}B", at_most=1).plan.peak_bytes <= smallest


@pytest.mark.parametrize("function", [max_batch, throughput])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"make_batch": torch.zeros(2, 64)}, sacplan.errors.PlanError, "make_batch must be a function"),
        (
            {"make_batch": lambda n: rows(4)},
            sacplan.errors.PlanError,
            r"make_batch gave batches of the same shapes for sizes 1 and 8",
        ),
        ({"make_batch": lambda n: "text"}, sacplan.errors.TraceError, "holds no tensor"),
        ({"device": "h1000"}, sacplan.errors.DeviceError, "unknown device"),
        ({"budget": "200GiB"}, sacplan.errors.BudgetError, "more than h100 has"),
        ({"budget": "-1GiB"}, sacplan.errors.BudgetError, "must be positive"),
        ({"at_most": 0}, sacplan.errors.PlanError, "at_most=0"),
        ({"at_most": 2.5}, sacplan.errors.PlanError, "at_most=2.5"),
        ({"at_most": True}, sacplan.errors.PlanError, "at_most=True"),
        ({"solver": "simplex"}, sacplan.errors.PlanError, "unknown solver"),
        ({"trace": "dream"}, sacplan.errors.TraceError, "unknown trace"),
    ],
)
def test_bad_input(
    function: Callable[..., Any], change: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        function(perceptron(1), **{"make_batch": rows, "device": "h100"} | change)


def test_memory_that_does_not_depend_on_the_batch() -> None:
    def first(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch[:1]), batch[:1])

    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(sacplan.errors.PlanError, match=r"still fits.*at_most"):
        max_batch(model, lambda n: torch.empty(n, 4, device="meta"), loss_fn=first)


def test_a_real_step_out_of_memory_is_explained() -> None:
    class Hungry(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    with pytest.raises(sacplan.errors.TraceError, match=r"batch of 8 ran out of memory.*trace=\"fake\""):
        max_batch(Hungry(8, 8), lambda n: torch.randn(n, 8), "1MiB", "cpu", trace="real")
