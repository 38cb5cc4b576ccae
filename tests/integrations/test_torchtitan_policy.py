"""A memory policy for torchtitan's graph_trainer, whose passes carry it out. Skipped where it is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from tests.support.chunks import allocations

pytest.importorskip("triton", reason="torchtitan needs Triton")
graph_trainer = pytest.importorskip(
    "torchtitan.experiments.graph_trainer.memory_policy",
    reason="torchtitan is not installed",
    exc_type=ImportError,
)

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = (torch.randint(0, 256, (4, 256)), torch.randint(0, 256, (4, 256)))


def traced(policy: Any = None) -> tuple[Any, Any]:
    """Trace a step of a small Llama, tagged by a policy, with what it says to run again; return what runs it."""
    from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.selective_activation_remat import (
        selective_activation_remat_pass,
    )
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    annotate_module_fqns(model)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    found = minimal_fx_tracer(step, module=model)(*BATCH)
    if policy is not None:
        graph_trainer.MEMORY_POLICY_REGISTRY["tried"] = policy
        config = SimpleNamespace(
            compile=SimpleNamespace(memory_policy="tried"),
            parallelism=SimpleNamespace(fsdp_reshard_after_forward="default", pipeline_parallel_degree=1),
        )
        found.gm = selective_activation_remat_pass(
            graph_trainer.tag_with_memory_policy_pass(found.gm, config=config)
        )
    given = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), *BATCH))
    return run_traced(found, module=model), given


def measured(run: Any, given: int) -> tuple[int, int]:
    """Return the peak by allocation events, and the FLOPs."""
    run(*BATCH)
    with FlopCounterMode(display=False) as counted:
        run(*BATCH)
    kept: list[Any] = []
    return given + allocations(lambda: kept.append(run(*BATCH)))[1], counted.get_total_flops()


def test_the_peak_is_predicted_held_and_cheaper_than_with_torchtitans_full_policy() -> None:
    """Of torchtitan's policies, this is the one that knows the attention of a CPU."""
    from sacplan.integrations.torchtitan import memory_policy

    run, given = traced()
    expected, (unplanned, _) = run(*BATCH), measured(run, given)
    full, full_flops = measured(*traced(graph_trainer.MEMORY_POLICY_REGISTRY["full"]))
    flops = []
    for budget in (unplanned, 4 * unplanned // 5, 101 * full // 100):
        policy = memory_policy(f"{budget}B")
        run, given = traced(policy)
        assert all(map(torch.equal, run(*BATCH), expected))
        peak, found = measured(run, given)
        (graph,) = policy.graphs  # type: ignore[attr-defined]
        assert peak == graph.needs_bytes <= budget
        assert graph.default_bytes == unplanned
        flops.append(found)
    assert flops[0] <= flops[1] < flops[2] <= full_flops


def test_a_budget_that_nothing_holds_is_an_error() -> None:
    from sacplan.integrations.torchtitan import memory_policy

    with pytest.raises(sacplan.InfeasibleBudget, match="the smallest of"):
        traced(memory_policy("20MiB"))
