"""``apply`` works on the instance, leaves every name as it was, and is undone by ``remove``."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import sacplan
from tests.support.plans import discarding
from tests.support.steps import bit_equal, grads_of
from tests.zoo.language_models import LM, cross_entropy, tokens


def made() -> tuple[LM, torch.Tensor]:
    torch.manual_seed(0)
    return LM(layers=2, dim=16, heads=2, vocab=32), tokens(2, 16, 32)


@pytest.fixture
def model() -> LM:
    return made()[0]


@pytest.fixture
def batch() -> torch.Tensor:
    return made()[1]


@pytest.fixture(scope="module")
def plan() -> sacplan.Plan:
    return sacplan.policy("full", profile=sacplan.profile(*made(), cross_entropy, device="cpu"))


def test_a_handle_names_its_units(model: LM, batch: torch.Tensor, plan: sacplan.Plan) -> None:
    with sacplan.apply(model, plan) as handle:
        assert repr(handle) == "Handle(2 units: layers.0-1)"
    layer = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    whole = sacplan.profile(layer, torch.randn(64, 8), lambda m, x: m(x).square().mean(), device="cpu")
    with sacplan.apply(layer, sacplan.plan(whole, "smallest")) as handle:
        assert handle.units == ("",)
        assert repr(handle) == "Handle(1 unit: the model)"


def outside(model: nn.Module) -> list[object]:
    """Everything about a model that other code looks at."""
    return [
        [n for n, _ in model.named_modules()],
        [type(m) for m in model.modules()],
        [(n, id(p)) for n, p in model.named_parameters()],
        [n for n, _ in model.named_buffers()],
        list(model.state_dict()),
        repr(model),
        inspect.signature(model.forward),
        [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in model.modules()],
    ]


def recomputes(model: nn.Module, batch: torch.Tensor) -> bool:
    """Whether a step takes more floating-point operations than the forward and backward of a plain one."""
    from torch.utils.flop_counter import FlopCounterMode

    plain = copy.deepcopy(model)
    for m in plain.modules():
        m.__dict__.pop("forward", None)
    counts = []
    for m in (model, plain):
        with FlopCounterMode(display=False) as count:
            cross_entropy(m, batch).backward()
        counts.append(count.get_total_flops())
    return counts[0] > counts[1]


def test_names_and_classes_stay_as_they_were(model: LM, plan: sacplan.Plan) -> None:
    before = outside(model)
    handle = sacplan.apply(model, plan)
    assert outside(model) == before
    assert handle.units == ("layers.0", "layers.1")
    handle.remove()
    assert outside(model) == before
    assert all("forward" not in vars(m) for m in model.modules())


def test_remove_gives_the_plain_step_back(model: LM, batch: torch.Tensor, plan: sacplan.Plan) -> None:
    expected = grads_of(model, batch, cross_entropy)
    with sacplan.apply(model, plan) as handle:
        assert recomputes(model, batch)
        assert bit_equal(grads_of(model, batch, cross_entropy), expected)
    assert not recomputes(model, batch)
    handle.remove()  # once more does nothing
    sacplan.apply(model, plan).remove()
    assert bit_equal(grads_of(model, batch, cross_entropy), expected)


def test_removing_before_the_backward_pass(model: LM, batch: torch.Tensor, plan: sacplan.Plan) -> None:
    expected = grads_of(model, batch, cross_entropy)
    handle = sacplan.apply(model, plan)
    torch.manual_seed(0)
    loss = cross_entropy(model, batch)
    handle.remove()
    model.zero_grad()
    loss.backward()
    assert bit_equal([loss, *(p.grad for p in model.parameters())], expected)


def test_a_forward_that_somebody_else_replaced(model: LM, batch: torch.Tensor, plan: sacplan.Plan) -> None:
    layer = model.layers[0]
    original, calls = layer.forward, []

    def theirs(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(x)

    layer.forward = theirs  # type: ignore[method-assign]
    expected = grads_of(model, batch, cross_entropy)
    handle = sacplan.apply(model, plan)
    assert bit_equal(grads_of(model, batch, cross_entropy), expected)
    assert len(calls) == 2
    handle.remove()
    assert layer.forward is theirs


def test_a_forward_that_is_replaced_afterwards_stops_the_removal(model: LM, plan: sacplan.Plan) -> None:
    handle = sacplan.apply(model, plan)
    planned = model.layers[1].forward
    model.layers[1].forward = lambda x: planned(x)  # type: ignore[method-assign]
    with pytest.raises(sacplan.errors.PlanError, match=r"layers\.1.*replaced"):
        handle.remove()
    assert "forward" in vars(model.layers[0])  # all or nothing
    model.layers[1].forward = planned  # type: ignore[method-assign]
    handle.remove()
    assert all("forward" not in vars(m) for m in model.modules())


def test_what_cannot_be_applied(model: LM, plan: sacplan.Plan) -> None:
    sites = plan.discarded["layers.0"]
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"layers\.7"):
        sacplan.apply(model, discarding(plan, {"layers.7": sites}))
    with pytest.raises(sacplan.errors.PlanMismatch):
        sacplan.apply(LM(layers=3, dim=16, heads=2, vocab=32), plan)
    with pytest.raises(sacplan.errors.PlanError, match=r"nn\.Module"):
        sacplan.apply(torch.sin, plan)  # type: ignore[arg-type]
    assert all("forward" not in vars(m) for m in model.modules())
    handle = sacplan.apply(model, plan)
    with pytest.raises(sacplan.errors.PlanError, match="already"):
        sacplan.apply(model, plan)
    handle.remove()


def test_an_empty_plan_touches_nothing(model: LM, plan: sacplan.Plan) -> None:
    handle = sacplan.apply(model, discarding(plan, {}))
    assert handle.units == ()
    assert all("forward" not in vars(m) for m in model.modules())


def test_units_that_discard_nothing_keep_their_forward(model: LM, plan: sacplan.Plan) -> None:
    handle = sacplan.apply(model, discarding(plan, plan.discarded | {"layers.0": ()}))
    assert handle.units == ("layers.1",)
    assert "forward" not in vars(model.layers[0])
    assert "forward" in vars(model.layers[1])
