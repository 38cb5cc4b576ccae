"""Plans with chunks for one of two ranks: predicted against a fake step, and applied on two gloo ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.zoo.language_models import LM, cross_entropy, tokens

RANKS = 2
Wrap = Callable[[LM], nn.Module]


def replicated(model: LM) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: LM) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for module in (model.head, *model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


BOTH = ("recompute", "chunk")
VOCAB = 1001
WRAPS: dict[str, tuple[Wrap, sacplan.DDP | sacplan.FSDP2]] = {
    "replicated": (replicated, sacplan.DDP(RANKS)),
    "sharded": (sharded, sacplan.FSDP2(RANKS, ["layers.*", "head"])),
}


def batch() -> torch.Tensor:
    return tokens(2, 48, VOCAB)


def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB, dropout=0.0)


@functools.cache
def profile_of(name: str) -> sacplan.Profile:
    """The step of one rank."""
    return sacplan.profile(
        model(), batch(), cross_entropy, torch.optim.AdamW, device="cpu", ranks=WRAPS[name][1]
    )


@functools.cache
def smallest(name: str) -> sacplan.Plan:
    """The smallest plan of one rank; without chunks it would be larger."""
    profile = profile_of(name)
    plan = sacplan.plan(profile, "smallest", techniques=BOTH)
    assert plan.chunks
    assert plan.peak_bytes < sacplan.plan(profile, "smallest").peak_bytes
    return plan


def with_loss_in_slices_alone(name: str) -> sacplan.Plan:
    """Recomputes all layers, and has no slices in the middle of the model, whose rows of products round otherwise."""
    full = sacplan.policy("full", profile=profile_of(name), layers="layers.*")
    return plan_with(profile_of(name), [Chunk("head", "rest", 8, 1), *full.decisions])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPS)
def test_a_fake_step_of_one_rank(name: str) -> None:
    plan = smallest(name)
    seen = sacplan.verify(model(), batch(), plan, cross_entropy, torch.optim.AdamW)
    assert seen.peak_bytes == plan.peak_bytes
    assert not seen.differences


def gradients(name: str, batch: torch.Tensor, plan: sacplan.Plan | None) -> dict[str, torch.Tensor]:
    """Loss and gradients of the second of two steps; each parameter's gradient was there once in it."""
    own = model()
    if plan is not None:
        sacplan.apply(own, plan)
    called = WRAPS[name][0](own)
    named = dict(own.named_parameters())
    fired: list[str] = []
    if not any(hasattr(p, "to_local") for p in named.values()):
        for fqn, p in named.items():
            p.register_post_accumulate_grad_hook(lambda _, fqn=fqn: fired.append(fqn))
    for _ in range(2):
        own.zero_grad()
        fired.clear()
        loss = cross_entropy(called, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    assert not fired or sorted(fired) == sorted(named)
    found: dict[str, Any] = {"loss": loss.detach() + 0}
    for fqn, p in named.items():
        assert p.grad is not None
        found[fqn] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    if plan is not None:
        assert own.head.forward.tally.loops == 1  # type: ignore[union-attr]
    return found


def on_rank(rank: int, directory: str, plans: dict[str, sacplan.Plan]) -> None:
    with gloo(rank, RANKS, directory):
        torch.manual_seed(10 + rank)
        own = batch()
        for name, plan in plans.items():
            expected = gradients(name, own, None)
            got = gradients(name, own, copy.deepcopy(plan))
            for fqn, value in expected.items():
                if fqn == "loss" or fqn.startswith("head."):
                    assert (got[fqn] - value).norm() <= 2e-6 * value.norm(), f"{name}: {fqn}"
                else:
                    assert torch.equal(got[fqn], value), f"{name}: {fqn}"


@pytest.mark.slow
@needs_gloo
def test_gradients_on_two_ranks(tmp_path: Path) -> None:
    plans = {name: with_loss_in_slices_alone(name) for name in WRAPS}
    run_ranks(on_rank, (str(tmp_path), plans), RANKS)
