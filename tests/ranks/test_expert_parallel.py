"""Experts over ranks, whose tokens are routed by a rule: against the allocator of two gloo ranks, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.setup import Routing
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.support.steps import bit_equal, mean_square
from tests.zoo.experts import SpreadExperts

pytestmark = [
    needs_gloo,
    pytest.mark.filterwarnings(
        "ignore:.*assumed .(balanced|worst|alike ranks).:sacplan.errors.SacplanWarning"
    ),
]

RANKS, ROWS, DIM, EXPERTS = 2, 256, 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    return nn.Sequential(SpreadExperts(EXPERTS, DIM), wide)


def rows(rank: int, routing: Routing) -> torch.Tensor:
    """Rows that want the experts in turn, or all the first one."""
    made = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank))
    wanted = torch.arange(ROWS) % EXPERTS if routing == "balanced" else torch.zeros(ROWS, dtype=torch.int64)
    made[:, :EXPERTS] = 20.0 * nn.functional.one_hot(wanted, EXPERTS)
    return made


def on_rank(rank: int, directory: str, routing: Routing) -> None:
    with gloo(rank, RANKS, directory):
        plan, x = sacplan.Plan.load(Path(directory, f"{rank}.json")), rows(rank, routing)
        expected: list[torch.Tensor] = []
        for predicted in (plan.baseline_peak_bytes, plan.peak_bytes):
            spread = model()
            if expected:
                sacplan.apply(spread, plan)
            mean_square(spread, x).backward()
            found = [p.grad.clone() for p in spread.parameters() if p.grad is not None]
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
def test_tokens_go_where_the_rule_sends_them(routing: Routing, tmp_path: Path) -> None:
    peaks = []
    for rank in range(RANKS):
        with sacplan.ranks(RANKS, rank, "cpu"):
            profile = sacplan.profile(
                model(), torch.empty(ROWS, DIM, device="meta"), mean_square, OPTIMIZER, routing=routing
            )
            plan = sacplan.plan(profile, "85%", "greedy")
        assert any("assumed (alike ranks)" in sentence for sentence in profile.assumptions)
        assert plan.units
        plan.save(tmp_path / f"{rank}.json")
        peaks.append(profile.peak_bytes)
    assert (peaks[0] > peaks[1]) == (routing == "worst")  # the first rank has the expert that all want
    run_ranks(on_rank, (str(tmp_path), routing), RANKS)
