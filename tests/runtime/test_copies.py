"""Copies and replicas of a planned module compute with their own weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import sacplan
from sacplan.techniques.recompute.executor.recipes import PlannedForward
from sacplan.techniques.runtime.stand_ins import take_off
from tests.support.threads import at_once
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


def replicas(model: nn.Sequential, factor: float) -> nn.Module:
    """What ``torch.nn.parallel.replicate`` makes for a device, with weights that tell it from the original."""
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        assert child is not None
        inner = replicas(child, factor)  # type: ignore[arg-type]
        replica._modules[name] = inner
    for name, p in model._parameters.items():
        if p is not None:
            setattr(replica, name, p * factor)
    return replica


def test_replicas_on_threads_use_their_own_weights_and_the_plan() -> None:
    model, x, handle = planned()
    plain = copy.deepcopy(model)
    for part in plain:
        take_off(part, part.forward)
    for _ in range(3):
        gradients = []
        for m in (model, plain):
            m.zero_grad()
            copies = [replicas(m, factor) for factor in (1.0, 2.0, 3.0)]
            assert all(isinstance(c[0].forward, PlannedForward) is (m is model) for c in copies)
            outs = _on_threads(copies, x)
            for factor, out in zip((1.0, 2.0, 3.0), outs, strict=True):
                wanted = copy.deepcopy(plain)
                with torch.no_grad():
                    for p in wanted.parameters():
                        p.mul_(factor)
                assert torch.equal(out, wanted(x))
            sum(out.pow(2).mean() for out in outs).backward()
            gradients.append([p.grad for p in m.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    handle.remove()
    assert model[0].__dict__.keys() == FeedForward(DIM).__dict__.keys()


def _on_threads(modules: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return at_once(*[partial(module, x) for module in modules])
