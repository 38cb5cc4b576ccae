"""Experts over ranks, whose tokens are routed by a rule: against the allocator of two gloo ranks, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import sacplan
from sacplan.core.setup import Routing
from sacplan.torch_compat.local_tensors import local_part
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.support.steps import bit_equal, mean_square
from tests.zoo.experts import ExpertParallel, SpreadExperts, TitanMoE

pytestmark = [
    needs_gloo,
    pytest.mark.filterwarnings(
        "ignore:.*assumed .(balanced|worst|alike ranks).:sacplan.errors.SacplanWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:the fake step left fake tensors outside of the model, in a ExpertParallel"
    ),
]

RANKS, ROWS, DIM, EXPERTS = 2, 256, 16, 4
Way = Literal["by hand", "style"]


def model(way: Way, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    if way == "by hand":
        return nn.Sequential(SpreadExperts(EXPERTS, DIM), wide)
    routed = TitanMoE(EXPERTS, DIM, float_counts=device == "cpu")
    mesh = init_device_mesh(device, (RANKS,))
    parallelize_module(routed, mesh, {"experts": ExpertParallel()})
    return fully_shard(
        nn.Sequential(routed, wide), mesh=mesh, ignored_params=set(routed.experts.parameters())
    )


def rows(rank: int, routing: Routing, way: Way) -> torch.Tensor:
    """Rows that want the experts in turn, or all the first ones: one by hand, two with the style."""
    made = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank))
    k = 1 if way == "by hand" else 2
    wanted = (torch.arange(ROWS * k) if routing == "balanced" else torch.arange(k).repeat(ROWS)) % EXPERTS
    made[:, :EXPERTS] = 0.0
    return made.scatter_(1, wanted.view(ROWS, k), torch.tensor([20.0, 10.0][:k]).expand(ROWS, k))


def on_rank(rank: int, directory: str, routing: Routing, way: Way) -> None:
    with gloo(rank, RANKS, directory):
        plan, x = sacplan.Plan.load(Path(directory, f"{rank}.json")), rows(rank, routing, way)
        expected: list[torch.Tensor] = []
        for predicted in (plan.baseline_peak_bytes, plan.peak_bytes):
            spread = model(way)
            if expected:
                sacplan.apply(spread, plan)
            mean_square(spread, x).backward()
            found = [local_part(p.grad).clone() for p in spread.parameters() if p.grad is not None]
            assert not expected or bit_equal(found, expected)
            expected = found
            with patient_collectives():
                measured = RankMemory(spread, x, mean_square).peak_bytes()
            assert measured <= predicted, (rank, measured, predicted)
            # Where all tokens go to the first rank, the other one is taken to have balanced routing, which needs more.
            assert (measured == predicted) == (routing == "balanced" or rank == 0), (
                rank,
                measured,
                predicted,
            )


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["balanced", "worst"])
@pytest.mark.parametrize("way", get_args(Way))
def test_tokens_go_where_the_rule_sends_them(routing: Routing, way: Way, tmp_path: Path) -> None:
    peaks = []
    for rank in range(RANKS):
        with sacplan.ranks(RANKS, rank, "cpu"):
            profile = sacplan.profile(
                model(way), torch.empty(ROWS, DIM, device="meta"), mean_square, OPTIMIZER, routing=routing
            )
            plan = sacplan.plan(profile, "85%", "greedy")
        assert any("assumed (alike ranks)" in sentence for sentence in profile.assumptions)
        assert plan.units
        plan.save(tmp_path / f"{rank}.json")
        peaks.append(profile.peak_bytes)
    assert (peaks[0] > peaks[1]) == (routing == "worst")  # the first rank has the expert that all want
    run_ranks(on_rank, (str(tmp_path), routing, way), RANKS)


def test_routers_count_integers_on_a_gpu() -> None:
    with sacplan.ranks(RANKS, 0, "h100"):
        batch = torch.empty(ROWS, DIM, device="meta")
        profile = sacplan.profile(model("style", "cuda"), batch, mean_square, OPTIMIZER)
    counted = [op for op in profile.program.ops if op.name == "aten.histc.default"]
    assert [profile.program.tensors[t].dtype for op in counted for t in op.inputs] == ["int64"]
    with pytest.raises(RuntimeError, match="not implemented for"):
        sacplan.profile(
            TitanMoE(EXPERTS, DIM, float_counts=False), batch, mean_square, OPTIMIZER, device="cpu"
        )
