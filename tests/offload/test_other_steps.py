"""Steps with a plan that offloads, of kinds that were not recorded: values are right, or there is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Offload, Site
from sacplan.techniques.offload.executor.parcels import Parcel
from sacplan.techniques.offload.sites import sites_of, tensors_of
from tests.support.steps import bit_equal, grads_of
from tests.zoo import language_models as models

Tensors = list[torch.Tensor]
Planned = tuple[models.LM, torch.Tensor, sacplan.Plan]


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
def planned() -> Planned:
    torch.manual_seed(0)
    model, batch = models.LM(layers=2, vocab=32), torch.randint(0, 32, (8, 32))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    plan = sacplan.plan(profile, "60%", techniques=("recompute", "offload"))
    assert len(plan.offloaded) >= 4
    return model, batch, plan


@pytest.mark.parametrize("run", [in_evaluation, without_gradients, accumulated, differentiated_twice])
def test_a_step_that_was_not_recorded(
    planned: Planned,
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


def test_compiled_models_are_refused(planned: Planned) -> None:
    model, batch, plan = planned
    with sacplan.apply(model, plan):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match="copies tensors to the host"):
            models.cross_entropy(compiled, batch)
    torch._dynamo.reset()


class WritesThroughData(nn.Sequential):
    """Writes to what the first layer has saved, where no version shows it."""

    spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self[0](x))
        out: torch.Tensor = self[1](h)
        if self.spoils:
            h.data.mul_(2.0)
        return self[2](out).square().mean()


def test_a_write_through_data_before_the_memory_is_let_go_of() -> None:
    torch.manual_seed(0)
    model, x = WritesThroughData(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    profile = sacplan.profile(model, x, device="cpu")
    program = profile.program
    by_name = {program.ops[op].name: (op, site) for op, site in sites_of(program, "").items()}
    op, sent = by_name["aten.sigmoid.default"]
    _, let_go = by_name["aten.pow.Tensor_Scalar"]
    place = tensors_of(program, op).index(program.ops[op].writes[0])
    decision = Offload(
        unit="",
        op=sent.op,
        occurrence=sent.occurrence,
        place=sent.place,
        tensor=place,
        let_go=Site("", *let_go),
    )
    plan = plan_with(profile, [decision])
    assert plan.host_bytes
    for model.spoils in (False, True):
        wanted = grads_of(model, x, lambda m, b: m(b))
        with sacplan.apply(model, plan):
            assert bit_equal(wanted, grads_of(model, x, lambda m, b: m(b)))
