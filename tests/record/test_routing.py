"""Routing of a mixture of experts in a fake step: balanced, or all tokens to the same experts, as real steps route."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.budget import format_bytes
from sacplan.profiling.tracing import StepRequest, trace_step
from tests.support.steps import mean_square
from tests.zoo.experts import MoE

pytestmark = pytest.mark.filterwarnings("ignore:.*assumed .(balanced|worst).:sacplan.errors.SacplanWarning")

X = torch.randn(64, 16)


class Padded(nn.Module):
    """Experts in one batched product: each has as many rows as the one with the most."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(16, experts)
        self.weight = nn.Parameter(torch.randn(experts, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        rows = [torch.where(chosen == i)[0] for i in range(len(self.weight))]
        most = max(map(len, rows))
        inputs = torch.stack([nn.functional.pad(x[r], (0, 0, 0, most - len(r))) for r in rows])
        made = torch.bmm(inputs, self.weight).tanh()
        out = torch.zeros_like(x)
        for one, r in zip(made, rows, strict=True):
            out = out.index_add(0, r, one[: len(r)])
        return out * weights.sum(-1, keepdim=True)


def profile_of(
    model: nn.Module, batch: Any = X, loss_fn: Any = mean_square, **options: Any
) -> sacplan.Profile:
    return sacplan.profile(model, batch, loss_fn, device="cpu", **options)


def undecided(model: nn.Module) -> nn.Module:
    """Let every router prefer the first experts, whatever the token, so that all tokens take these."""
    for name, p in model.named_parameters():
        if name.endswith("router.bias"):
            p.data = torch.arange(len(p), 0.0, -1.0)
        elif "router" in name or "gate.weight" in name:
            p.data.zero_()
    return model


@pytest.mark.parametrize("ranks", [sacplan.FSDP2(4), sacplan.DDP(4)], ids=["FSDP2", "DDP"])
def test_a_rank_routes_as_one_device_does(ranks: Any) -> None:
    alone = profile_of(Padded(), X).rules
    assert "balanced" in str(alone)
    assert profile_of(Padded(), X, ranks=ranks).rules == alone


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("kind", [MoE, Padded])
def test_the_worst_is_what_a_real_step_takes_that_routes_so(kind: Any, top_k: int) -> None:
    model = undecided(kind(experts=4, top_k=top_k))
    balanced, worst = profile_of(model), profile_of(model, routing="worst")
    assert worst.peak_bytes == profile_of(model, trace="real").peak_bytes
    # Experts that run one by one keep the same rows together, whoever gets them.
    assert (
        worst.peak_bytes > balanced.peak_bytes if kind is Padded else worst.peak_bytes >= balanced.peak_bytes
    )
    assert "worst routing" in str(worst.fingerprint.setup)
    assert any("assumed (worst)" in sentence for sentence in worst.assumptions)


def test_mixtral_in_its_worst_case() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4, "use_cache": False,
    }  # fmt: skip
    config = transformers.MixtralConfig(**sizes, experts_implementation="eager")
    model = undecided(transformers.MixtralForCausalLM(config).train())
    ids = torch.randint(0, 64, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    record = functools.partial(profile_of, model, batch, None)
    worst = trace_step(StepRequest(model, batch, None, None, "cpu", "cost-model", "fake", routing="worst"))
    assert worst.peak_bytes == record(trace="real").peak_bytes
    # Experts that no token comes to do nothing here, and have no gradients either: balanced routing takes more.
    assert worst.peak_bytes < record().peak_bytes == record(routing="worst").peak_bytes


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
def test_a_plan_for_the_worst_holds_there_and_verify_takes_it_up() -> None:
    model = undecided(nn.Sequential(Padded(), Padded(), Padded()))
    worst = profile_of(model, routing="worst")
    plan = sacplan.plan(worst, "smallest", "greedy")
    assert plan.peak_bytes < worst.peak_bytes
    assert sacplan.verify(model, X, plan, mean_square).peak_bytes == plan.peak_bytes
    assert sacplan.verify(model, X, plan, mean_square, run="real").peak_bytes == plan.peak_bytes


def test_fit_says_what_the_worst_costs_beside_the_balanced_one() -> None:
    model = Padded()
    options: Any = {"loss_fn": mean_square, "optimizer": None, "batch": 64, "sizes": False}
    found = sacplan.fit(model, lambda n: torch.randn(n, 16), "cpu", **options)
    (said,) = found.remarks
    worst = sacplan.fit(model, lambda n: torch.randn(n, 16), "cpu", routing="worst", **options)
    assert worst.rows[0].peak_bytes > found.rows[0].peak_bytes
    assert format_bytes(worst.rows[0].peak_bytes) in said
    assert said.startswith("Routing is taken to be balanced.")
    assert not worst.remarks


def test_fit_says_what_the_worst_costs_on_a_rank() -> None:
    model = Padded()
    options: Any = {"loss_fn": mean_square, "optimizer": None, "batch": 64, "sizes": False}
    found = sacplan.fit(model, lambda n: torch.randn(n, 16), "cpu", devices=2, **options)
    (said,) = found.remarks
    worst = profile_of(model, torch.randn(64, 16), routing="worst", ranks=sacplan.FSDP2(2))
    assert f"a rank of FSDP2 needs {format_bytes(worst.peak_bytes)}, " in said


@pytest.mark.parametrize("options", [{"routing": "fair"}, {"routing": "worst", "trace": "real"}], ids=str)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(sacplan.errors.TraceError, match="routing"):
        profile_of(MoE(), **options)
