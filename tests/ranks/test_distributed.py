"""A plan on a model that is sharded or replicated: two gloo ranks on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from tests.support.plans import discarding
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.zoo.language_models import TokenModel
from tests.zoo.language_models import cross_entropy as loss_fn
from tests.zoo.layers import FeedForward

pytestmark = needs_gloo

DIM, VOCAB, RANKS = 16, 32, 2


def sharded(model: TokenModel) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicated(model: TokenModel) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def plan_for(model: TokenModel, tokens: torch.Tensor) -> sacplan.Plan:
    """Both layers recompute everything, matmuls with their sharded weights included."""
    profile = sacplan.profile(model, tokens, loss_fn=loss_fn, device="cpu")
    program = profile.program
    units = {
        fqn: [s for op, s in program.sites(program.calls[fqn][0]).items() if program.ops[op].recomputable]
        for fqn in ("layers.0", "layers.1")
    }
    assert all("aten.addmm.default" in {site.op for site in sites} for sites in units.values())
    return discarding(sacplan.plan(profile, budget="100%"), units, profile)


def run(
    base: TokenModel, plan: sacplan.Plan | None, order: str, wrap: Any, tokens: torch.Tensor, compile: bool
) -> Any:
    """Two steps: the losses, the gradients of this rank, the keys, and the FLOPs of a third step."""
    from torch.utils.flop_counter import FlopCounterMode

    torch._dynamo.reset()
    model = copy.deepcopy(base)
    if plan is not None and order == "plan first":
        sacplan.apply(model, plan)
    wrapped = wrap(model)
    if plan is not None and order == "plan last":
        sacplan.apply(model, plan)
    called = torch.compile(wrapped, backend="aot_eager") if compile else wrapped
    torch.manual_seed(5 + dist.get_rank())
    values = []
    for _ in range(2):
        model.zero_grad()
        loss = loss_fn(called, tokens)
        loss.backward()
        values.append(loss.detach())
    for p in model.parameters():
        assert p.grad is not None
        values.append(p.grad.to_local().clone() if hasattr(p.grad, "to_local") else p.grad.clone())
    counter = FlopCounterMode(display=False)
    if not compile:
        with counter:
            loss_fn(called, tokens).backward()
    return (
        values,
        (list(wrapped.state_dict()), [n for n, _ in wrapped.named_parameters()]),
        counter.get_total_flops(),
    )


def on_rank(rank: int, directory: str) -> None:
    with gloo(rank, RANKS, directory):
        torch.manual_seed(0)
        base = TokenModel((FeedForward(DIM) for _ in range(2)), DIM, VOCAB)
        tokens = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(rank))
        plan = plan_for(base, tokens)
        for wrap in (sharded, replicated):
            for compile in (False, True):
                expected, keys, flops = run(base, None, "", wrap, tokens, compile)
                for order in ("plan first", "plan last"):
                    found, keys_found, flops_found = run(base, plan, order, wrap, tokens, compile)
                    what = f"{wrap.__name__}, {order}, {compile=}"
                    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), what
                    assert keys_found == keys, what
                    assert compile or flops_found > flops, what
        with pytest.raises(sacplan.errors.PlanError, match=r"\.module"):
            sacplan.apply(replicated(copy.deepcopy(base)), plan)


@pytest.mark.slow
def test_sharded_and_replicated_models_take_a_plan(tmp_path: Path) -> None:
    """Losses and gradients are the same bits as without it, the keys stay, and work is done twice."""
    run_ranks(on_rank, (str(tmp_path),), RANKS)
