"""A stage of a pipeline with its schedule, recorded in ``sacplan.ranks``: against the allocator of two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory
from tests.support.steps import bit_equal

pytestmark = needs_gloo

DIM, ROWS, MICRO = 64, 256, 4
OUTPUT = 4 * DIM * ROWS // MICRO
"""Bytes of what a stage sends for a micro-batch."""


def layers() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(2))
    return nn.Sequential(*parts)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, DIM, generator=made), torch.randn(ROWS, DIM, generator=made)


def scheduled(rank: int, schedule: str) -> Callable[[nn.Module, Any], None]:
    """What a stage does in a step: the schedule runs the backward passes, too."""
    from torch.distributed import pipelining

    def run(model: Any, given: Any) -> None:
        # The stages of a loop are a rank's, and the rank's behind all ranks.
        is_looped = "Interleaved" in schedule
        parts, numbers = (list(model), (rank, rank + 2)) if is_looped else ([model], (rank,))
        last, shape = 2 * len(parts) - 1, (ROWS // MICRO, DIM)
        stages = [
            pipelining.PipelineStage(
                part, n, last + 1, torch.device("cpu"),
                input_args=(torch.empty(shape, requires_grad=True),) if n else None,
                output_args=torch.empty(shape, requires_grad=True) if n and schedule == "ScheduleGPipe" else None,
            )
            for n, part in zip(numbers, parts, strict=True)
        ]  # fmt: skip
        of_rank: Any = stages if is_looped else stages[0]
        steps = getattr(pipelining, schedule)(of_rank, MICRO, loss_fn=nn.functional.mse_loss)
        asked = {"target": given[1], "losses": []} if last in numbers else {}
        steps.step(*given[:1] if 0 in numbers else (), **asked)

    return run


class Stage(RankMemory):
    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_fn(self.model, self.batch)
        self.optimizer.step()


def on_rank(rank: int, directory: str, schedule: str) -> None:
    with gloo(rank, 2, directory):
        plan = sacplan.Plan.load(Path(directory, f"{rank}.json"))
        step, expected = scheduled(rank, schedule), None
        for predicted in (plan.baseline_peak_bytes, plan.peak_bytes):
            model = layers()
            if expected is not None:
                sacplan.apply(model, plan)
            step(model, batch())
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert expected is None or bit_equal(gradients, expected)
            expected = gradients
            measured = Stage(model, batch(), step).peak_bytes()
            # In 1F1B what is sent beside something that is received may be held for longer.
            more = (0, OUTPUT) if schedule == "Schedule1F1B" else (0,)
            assert measured - predicted in more, (rank, measured, predicted)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_stages_are_the_real_ones(schedule: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        with sacplan.ranks(2, rank=rank, device="cpu"):
            profile = sacplan.profile(layers(), batch(), scheduled(rank, schedule), OPTIMIZER)
            plan = sacplan.plan(profile, "smallest", "greedy")
        assert plan.units
        plan.save(tmp_path / f"{rank}.json")
    run_ranks(on_rank, (str(tmp_path), schedule), 2)


def test_a_stage_that_does_not_know_its_shapes() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def asks(model: nn.Module, given: Any) -> None:
        stage = PipelineStage(model, 1, 2, torch.device("cpu"))
        ScheduleGPipe(stage, MICRO, loss_fn=nn.functional.mse_loss).step(target=given[1])

    with (
        sacplan.ranks(2, rank=1, device="cpu"),
        pytest.raises(sacplan.errors.TraceError, match=r"asks stage 0 .* input_args="),
    ):
        sacplan.profile(layers(), batch(), asks)
