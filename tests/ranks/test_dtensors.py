"""Models that PyTorch has spread by tensor parallelism: plans on gloo ranks, against each rank's allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from tests.support.processes import gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.support.steps import bit_equal
from tests.zoo.parallel import (
    Sequences,
    language_loss,
    llama,
    mean_square,
    parallel_llama,
    parallel_sequences,
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)

RANKS = 4


def loss_in_parts(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def in_parts() -> AbstractContextManager[None]:
    """Around forward and backward, as torch asks: logits stay cut over the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


@dataclass(frozen=True)
class Case:
    """A model, how it is spread over a mesh, and what it is planned for."""

    make: Callable[[], nn.Module]
    spread: Callable[[nn.Module, Any], None]
    loss_fn: Callable[..., torch.Tensor]
    budgets: tuple[str, ...]
    mesh: tuple[int, ...] = (RANKS,)
    units: bool = False  # fully_shard on each layer and the model, on the first axis
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def batch(self) -> torch.Tensor:
        if self.loss_fn is mean_square:
            return torch.randn(4, 256, 64)
        return torch.randint(256, (8, 128))


CASES = {
    "llama": Case(llama, parallel_llama, language_loss, ("85%", "70%", "60%")),
    "sequences": Case(Sequences, parallel_sequences, mean_square, ("75%",), (2,)),
    "loss": Case(
        llama, lambda m, mesh: parallel_llama(m, mesh, head=True), loss_in_parts, ("70%",), around=in_parts
    ),
    "two axes": Case(llama, parallel_llama, language_loss, ("80%",), (2, 2), True),
}


def spread(case: Case, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = case.make()
    case.spread(model, mesh if mesh.ndim == 1 else mesh["tp"])
    return model


def fully_shard_units(model: nn.Module, case: Case, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    if case.units:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def gradients(model: nn.Module, case: Case, batch: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss = case.loss_fn(model, batch)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = [getattr(t, "_local_tensor", t).clone() for t in found]
    model.zero_grad(set_to_none=True)
    return values


def check_peak(model: nn.Module, case: Case, batch: torch.Tensor, predicted: int, what: str) -> None:
    with patient_collectives():
        measured = RankMemory(model, batch, case.loss_fn).peak_bytes()
    assert measured == pytest.approx(predicted, rel=0.01), (
        f"{what}: predicted {predicted}, measured {measured}"
    )


def check(name: str, directory: Path) -> None:
    case = CASES[name]
    mesh = dist.device_mesh.init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "tp")[-len(case.mesh) :])
    batch = case.batch()
    model = spread(case, mesh)
    fully_shard_units(model, case, mesh)
    profile = sacplan.profile(model, batch, case.loss_fn, OPTIMIZER, "cpu")
    if dist.get_rank() == 0:
        for budget in case.budgets:
            plan = sacplan.plan(profile, budget)
            assert plan.units, name
            assert sacplan.verify(model, batch, plan, case.loss_fn, OPTIMIZER).peak_bytes == plan.peak_bytes
            plan.save(directory / f"{name}-{budget}.json")
    dist.barrier()
    expected = gradients(model, case, batch)
    check_peak(model, case, batch, profile.peak_bytes, f"{name}, no plan")
    for budget in case.budgets:
        plan = sacplan.Plan.load(directory / f"{name}-{budget}.json")
        model = spread(case, mesh)
        with sacplan.apply(model, plan) as handle:
            fully_shard_units(model, case, mesh)
            found = gradients(model, case, batch)
            assert bit_equal(found, expected), f"{name}, {budget}"
            check_peak(model, case, batch, plan.peak_bytes, f"{name}, {budget}")
            assert not handle.differences


def on_rank(rank: int, ranks: int, names: Sequence[str], directory: str) -> None:
    with gloo(rank, ranks, directory):
        for name in names:
            with CASES[name].around():
                check(name, Path(directory))


@pytest.mark.slow
def test_a_parallel_step_takes_what_was_planned(tmp_path: Path) -> None:
    run_ranks(on_rank, (2, ("sequences",), str(tmp_path)), 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_more_parallel_steps(tmp_path: Path) -> None:
    run_ranks(on_rank, (RANKS, ("llama", "loss", "two axes"), str(tmp_path)), RANKS)
