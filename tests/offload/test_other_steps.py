"""Steps with a plan that offloads, of kinds that were not recorded: same values as without it, and no copy is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import sacplan
from sacplan.techniques.offload.executor.parcels import Parcel
from tests.support.steps import bit_equal, grads_of
from tests.zoo import language_models as models

Tensors = list[torch.Tensor]


def in_evaluation(model: models.LM, batch: torch.Tensor) -> Tensors:
    model.eval()
    found = grads_of(model, batch, models.cross_entropy)
    model.train()
    return found


def without_gradients(model: models.LM, batch: torch.Tensor) -> Tensors:
    with torch.no_grad():
        return [models.cross_entropy(model, batch)]


def accumulated(model: models.LM, batch: torch.Tensor) -> Tensors:
    for one in (batch, batch.flip(0)):
        models.cross_entropy(model, one).backward()
    return gradients(model)


def differentiated_twice(model: models.LM, batch: torch.Tensor) -> Tensors:
    loss = models.cross_entropy(model, batch)
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.stack([grad.square().sum() for grad in first]).sum().backward()
    return gradients(model)


def gradients(model: models.LM) -> Tensors:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture(scope="module")
def planned() -> tuple[models.LM, torch.Tensor, sacplan.Plan]:
    torch.manual_seed(0)
    model, batch = models.LM(layers=2, vocab=32), torch.randint(0, 32, (8, 32))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    plan = sacplan.plan(profile, "60%", techniques=("recompute", "offload"))
    assert len(plan.offloaded) >= 4
    return model, batch, plan


@pytest.mark.parametrize("run", [in_evaluation, without_gradients, accumulated, differentiated_twice])
def test_a_step_that_was_not_recorded(
    planned: tuple[models.LM, torch.Tensor, sacplan.Plan],
    run: Callable[[models.LM, torch.Tensor], Tensors],
    parcels: list[weakref.ref[Parcel]],
) -> None:
    model, batch, plan = planned
    torch.manual_seed(3)
    plain = run(model, batch)
    assert not parcels
    with sacplan.apply(model, plan):
        torch.manual_seed(3)
        assert bit_equal(plain, run(model, batch))
        gc.collect()
        assert not any(ref() for ref in parcels)
    assert bool(parcels) == (run is not without_gradients)
