"""Plans on a mesh, on four gloo ranks: ``apply`` lets PyTorch spread the model, and the step takes what was planned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from sacplan.errors import PlanMismatch
from sacplan.planning.meshes import way
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.zoo.parallel import SplitLM, llama

pytestmark = [
    needs_gloo,
    pytest.mark.slow,
]

RANKS = 4


def split_lm() -> nn.Module:
    return SplitLM(layers=2, dim=32, vocab=64)


def tied_llama() -> nn.Module:
    model: Any = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def normed_llama() -> nn.Module:
    """Queries and keys have norms that all heads share: each rank has a summand of their gradients."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, vocab_size=128, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: Any = model(batch)
    return nn.functional.cross_entropy(getattr(out, "logits", out).flatten(0, 1), batch.flatten())


@dataclass(frozen=True)
class Case:
    """A model, a mesh, how it is spread, the share of a rank's peak that the plan has to keep, who chooses the way."""

    make: Callable[[], nn.Module]
    mesh: dict[str, int]
    name: str
    budget: str = "90%"
    vocab: int = 64
    shape: tuple[int, int] = (16, 32)
    searched: bool = False

    def batch(self) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randint(self.vocab, self.shape)


CASES = {
    "fsdp": Case(split_lm, {"dp": 4}, "fsdp"),
    "ddp": Case(split_lm, {"dp": 4}, "ddp"),
    "megatron": Case(split_lm, {"tp": 4}, "megatron"),
    "fsdp + megatron": Case(split_lm, {"dp": 2, "tp": 2}, "fsdp + megatron"),
    "sequence": Case(split_lm, {"tp": 4}, "sequence"),
    "sequence of llama": Case(llama, {"dp": 2, "tp": 2}, "fsdp + sequence", "85%", 256, (8, 64), True),
    "sequence of tied": Case(tied_llama, {"dp": 2, "tp": 2}, "fsdp + sequence", "85%", 256, (8, 64)),
    "sequence of norms": Case(normed_llama, {"dp": 2, "tp": 2}, "fsdp + sequence", "90%", 128, (8, 32)),
    "replicas of shards": Case(split_lm, {"replicate": 2, "shard": 2}, "fsdp"),
    "llama": Case(llama, {"dp": 2, "tp": 2}, "fsdp + megatron", "85%", 256, (8, 64)),
    "tied": Case(tied_llama, {"dp": 2, "tp": 2}, "fsdp + megatron", "85%", 256, (8, 64)),
    "norms": Case(normed_llama, {"dp": 2, "tp": 2}, "fsdp + megatron", "90%", 128, (8, 32)),
}


def check(case: Case, files: Sequence[Path]) -> None:
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()
    whole = copy.deepcopy(model)
    token_loss(whole, batch).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for plan in map(sacplan.Plan.load, files):
        spread = copy.deepcopy(model)
        handle = sacplan.apply(spread, plan)
        data = plan.ranks.sharding.data.size
        part = batch.chunk(data)[dist.get_rank() // (RANKS // data)].clone()
        token_loss(spread, part).backward()
        for name, p in spread.named_parameters():
            found: Any = p.grad
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        assert not handle.differences
        spread.zero_grad(set_to_none=True)
        # The buckets of DDP are there between steps.
        held_bytes = sum(p.nbytes for p in spread.parameters()) if plan.ranks.run_by == "DDP" else 0
        with patient_collectives():
            measured = RankMemory(spread, part, token_loss).peak_bytes(held_bytes)
        assert measured == plan.peak_bytes, f"{case.name}: {measured - plan.peak_bytes:+} bytes"


def on_rank(rank: int, names: Sequence[str], directory: str) -> None:
    with gloo(rank, RANKS, directory):
        for name in names:
            check(CASES[name], [Path(directory, f"{name} {i}.json") for i in range(2)])
        differing(CASES[names[0]], [Path(directory, f"{names[0]} {i}.json") for i in range(2)])


def differing(case: Case, files: Sequence[Path]) -> None:
    """Ranks that would wait for each other, or train a mixture of models, say so."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    with pytest.raises(PlanMismatch, match="ranks differ in the plan: 1 from rank 0"):
        sacplan.apply(case.make(), sacplan.Plan.load(files[rank == 1]))
    torch.manual_seed(rank)
    with pytest.raises(PlanMismatch, match="ranks differ in the values of parameters: 1, 2, 3 from rank 0"):
        sacplan.apply(case.make(), sacplan.Plan.load(files[0]))


@pytest.mark.parametrize(
    "names",
    [
        ("fsdp + megatron", "ddp"),
        pytest.param(("fsdp", "megatron", "replicas of shards"), marks=pytest.mark.exhaustive),
        ("sequence of llama",),
        pytest.param(("sequence", "sequence of tied", "sequence of norms"), marks=pytest.mark.exhaustive),
        pytest.param(("llama", "tied", "norms"), marks=pytest.mark.exhaustive),
    ],
    ids=" and ".join,
)
def test_pytorch_runs_what_was_planned(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        case = CASES[name]
        profile = sacplan.profile(case.make(), case.batch(), token_loss, OPTIMIZER, "cpu")
        unplanned = sacplan.policy(case.name, profile=profile, mesh=case.mesh)
        if case.searched:
            plan = sacplan.plan(profile, case.budget, mesh=case.mesh)
            assert plan.provenance.options["sharding"] == case.name
        else:
            plan = sacplan.plan(way(profile, case.mesh, case.name).profile, case.budget)
        assert plan.peak_bytes <= plan.budget_bytes < unplanned.peak_bytes
        seen = sacplan.verify(case.make(), case.batch(), plan, token_loss, OPTIMIZER)
        assert seen.peak_bytes == plan.peak_bytes
        for i, each in enumerate((unplanned, plan)):
            each.save(tmp_path / f"{name} {i}.json")
    run_ranks(on_rank, (names, str(tmp_path)), RANKS)


def test_writes_on_views_of_local_parts() -> None:
    """GPT-2's blocks write in place on views, and its embedding gives them the local part of a DTensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, **ids)
        )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    step: Any = ({"input_ids": tokens, "labels": tokens}, None, torch.optim.AdamW)
    plan = sacplan.plan(sacplan.profile(model, *step, device="cpu"), "85%", mesh={"tp": 2})
    assert plan.units
    batch, loss, optimizer = step
    assert sacplan.verify(model, batch, plan, loss, optimizer).peak_bytes == plan.peak_bytes
