"""What optimizers keep counts wherever they keep it, and the step that is recorded is the largest of theirs."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.record import largest_step
from tests.support.steps import mean_square, peaks_of_steps


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))


def batch() -> torch.Tensor:
    return torch.ones(8, 16)


def predicted(make: Any, trace: Any = "fake") -> int:
    return sacplan.profile(net(), batch(), mean_square, make, "cpu", trace=trace).peak_bytes


def peaks(make: Any, steps: int) -> list[int]:
    def build() -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
        model = net()
        return model, batch(), make(model.parameters())

    return peaks_of_steps(build, steps)


class _Own(torch.optim.Optimizer):
    """Base of the optimizers below: ``update`` is called for each parameter, with its gradient and its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p])

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


# --- where state is


@dataclass
class _Moments:
    first: torch.Tensor
    second: torch.Tensor


@dataclass(slots=True)
class _Slotted:
    first: torch.Tensor
    second: torch.Tensor


HOLDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, 1: b},
    "nested": lambda a, b: [({"a": deque([a])},), [[b]]],
    "dataclass": _Moments,
    "slots": _Slotted,
    "object": lambda a, b: SimpleNamespace(a=a, b=(b,)),
}


class _Holding(_Own):
    def __init__(self, params: Any, how: str, where: str) -> None:
        super().__init__(params)
        self.how, self.where = how, where
        self.kept: dict[int, Any] = {}

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        group = self.param_groups[0]
        place = {"state": state, "group": group.setdefault("kept", {}), "attribute": self.kept}[self.where]
        key = "kept" if self.where == "state" else id(p)
        if key not in place:
            first, second = torch.zeros_like(p), torch.zeros_like(p)
            place[key] = HOLDERS[self.how](first, second)
        for t in _tensors(place[key]):
            t.mul_(0.9).add_(grad)
            p.sub_(t, alpha=1e-3)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, _Slotted):
        return [value.first, value.second]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, deque)):
        value = vars(value).values()
    return [t for v in value for t in _tensors(v)]


@pytest.mark.parametrize(
    ("how", "where"), [*((how, "state") for how in HOLDERS), ("list", "group"), ("tuple", "attribute")]
)
def test_state_counts_wherever_it_is(how: str, where: str) -> None:
    make = functools.partial(_Holding, how=how, where=where)
    assert predicted(make) == peaks(make, 3)[-1]
    assert predicted(make, "real") == predicted(make)


def test_a_measured_step_has_the_state() -> None:
    make = functools.partial(_Holding, how="nested", where="state")
    model = net()
    plan = sacplan.plan(sacplan.profile(model, batch(), mean_square, make, "cpu"), "100%")
    seen = sacplan.verify(model, batch(), plan, mean_square, make, run="real")
    assert seen.peak_bytes == plan.peak_bytes


# --- steps that are not alike


class _Periodic(_Own):
    """Works more in every fifth step; ``count`` says how it counts."""

    def __init__(self, params: Any, count: str, rest: int = 0) -> None:
        super().__init__(params)
        self.count, self.rest, self.steps = count, rest, 0

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        first = p is self.param_groups[0]["params"][0]
        if self.count == "number":
            state["step"] = step = state.get("step", 0) + 1
        elif self.count == "tensor":
            counter = state.setdefault("step", torch.zeros(()))
            counter += 1
            step = int(counter.item())
        elif self.count == "group":
            self.param_groups[0]["step"] = step = self.param_groups[0].get("step", 0) + first
        elif self.count == "cycle":  # as Lookahead has it
            step = state["k"] = state.get("k", 0) + 1
            if step >= 5:
                step = state["k"] = 0
        else:
            self.steps = step = self.steps + first
        if step % 5 == self.rest:
            (grad.exp() * grad.sin()).add_(grad.cos())
        p.sub_(grad, alpha=1e-3)


COUNTS = [
    *(("number", rest) for rest in (0, 1, 4)),
    *((how, 0) for how in ("tensor", "group", "cycle", "attribute")),
]


@pytest.mark.parametrize(("count", "rest"), COUNTS)
def test_the_largest_of_periodic_steps(count: str, rest: int) -> None:
    make = functools.partial(_Periodic, count=count, rest=rest)
    seen = peaks(make, 8)
    assert predicted(make) == max(seen[1:]) > min(seen[1:])
    assert predicted(make, "real") == predicted(make)


class _Collecting(_Own):
    """Keeps the gradients of the last steps."""

    def __init__(self, params: Any, steps: int = 6) -> None:
        super().__init__(params)
        self.most = steps

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        last = state.setdefault("last", deque(maxlen=self.most))
        last.append(grad.clone())
        p.sub_(last[0], alpha=1e-3)


def test_state_that_grows_for_some_steps() -> None:
    seen = peaks(_Collecting, 10)
    assert predicted(_Collecting) == seen[-1] == max(seen) > seen[1]


def test_state_that_grows_for_ever_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_step, "_MOST_GROWTH", 8)
    with pytest.warns(sacplan.SacplanWarning, match="still keeps more after each of 8 steps"):
        predicted(functools.partial(_Collecting, steps=10_000))


class _Scheduled(_Periodic):
    """Knows how long it trains."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        super().update(p, grad, state)
        assert state["step"] < 100, "trained for too long"


def test_a_step_that_cannot_be_tried_is_said() -> None:
    make = functools.partial(_Scheduled, count="number")
    with pytest.warns(
        sacplan.SacplanWarning, match="cannot take step 1,008,000 .AssertionError: trained for too long"
    ):
        found = predicted(make)
    assert found == peaks(make, 2)[1]


def test_radam_begins_without_a_variance() -> None:
    make = functools.partial(torch.optim.RAdam, lr=1e-3, foreach=False)
    assert predicted(make) == max(peaks(make, 8)[1:])


class _Lookahead(torch.optim.Optimizer):
    """A wrapper with state of its own: slow weights, which the fast ones are set back to."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.AdamW(params)
        super().__init__(self.optimizer.param_groups, {})
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.k += 1
        if self.k % 5 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.add_((p - slow).mul(0.5).exp())
                p.copy_(slow)


def test_an_optimizer_around_another() -> None:
    seen = peaks(_Lookahead, 8)
    assert predicted(_Lookahead) == max(seen[1:])
    profile = sacplan.profile(net(), batch(), mean_square, _Lookahead, "cpu")
    behind = [op.phase for op in profile.recorded.ops[-3:]]
    assert len(set(behind)) == 1  # what the wrapper does is part of the optimizer's step
