"""Copies of a planned module compute with their own weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from sacplan.techniques.recompute.executor.recipes import PlannedForward
from tests.zoo.layers import FeedForward

DIM = 8


class WithState(FeedForward):
    """Has a state of its own for ``copy`` and ``pickle``."""

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"made": True}


def planned(block: type[FeedForward] = FeedForward) -> tuple[nn.Sequential, torch.Tensor, sacplan.Handle]:
    torch.manual_seed(0)
    model = nn.Sequential(*(block(DIM, dropout=0.0) for _ in range(2)))
    x = torch.randn(4, DIM)
    profile = sacplan.profile(model, x, lambda m, b: m(b).pow(2).mean(), device="cpu")
    plan = sacplan.policy("full", profile=profile, layers="*")
    assert set(plan.discarded) == {"0", "1"}
    return model, x, sacplan.apply(model, plan)


def with_own_weights(block: nn.Module) -> nn.Module:
    """The block, with three times the weights of those that it shares."""
    block.__dict__["_modules"] = {n: copy.deepcopy(m) for n, m in block._modules.items()}
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(3)
    return block


def without_plan(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(block).forward(block, x)


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.forward(x)], ids=["call", "forward"])
@pytest.mark.parametrize("block", [FeedForward, WithState])
def test_a_shallow_copy_has_no_plan(
    block: type[FeedForward], call: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    model, x, handle = planned(block)
    other = with_own_weights(copy.copy(model[0]))
    assert torch.equal(call(other, x), without_plan(other, x))
    assert not torch.equal(call(other, x), call(model[0], x))
    again = with_own_weights(copy.copy(copy.copy(model[0])))
    assert torch.equal(call(again, x), without_plan(again, x))
    handle.remove()
    assert set(copy.copy(model[0]).__dict__) <= {*model[0].__dict__, "made"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("block", [FeedForward, WithState])
def test_a_deep_copy_has_a_plan_of_its_own(
    block: type[FeedForward], copied: Callable[[nn.Module], nn.Sequential]
) -> None:
    model, x, handle = planned(block)
    twin = copied(copied(model))
    for part in twin:
        assert isinstance(part.forward, PlannedForward)
        assert part.forward.module is part
    handle.remove()
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(3)
    plain = copy.deepcopy(model)
    plain.load_state_dict(twin.state_dict())
    assert torch.equal(twin(x), plain(x))


def test_data_parallel_is_refused() -> None:
    """Where it replicates, which it does on several GPUs."""
    model, _, handle = planned()
    with pytest.raises(sacplan.errors.PlanError, match=r"replicates module '0'.*DistributedDataParallel"):
        model[0]._replicate_for_data_parallel()
    handle.remove()
    assert model[0].__dict__.keys() == FeedForward(DIM).__dict__.keys()
