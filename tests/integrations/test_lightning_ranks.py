"""Several plans in Lightning under DDP: each of two ranks takes the plan for its own batch, and keeps every bit."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import sacplan
from tests.support.lightning import Llama, quiet_trainer
from tests.support.processes import needs_gloo, run_ranks
from tests.support.steps import bit_equal
from tests.support.trainers import VOCAB

pytestmark = needs_gloo
SHORT, LONG = 8, 96
LENGTHS = [SHORT, LONG, LONG, SHORT, LONG, LONG, SHORT, SHORT]


def batches(lengths: list[int]) -> Any:
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCAB, (4, n), generator=drawn) for n in lengths]
    data = [{"input_ids": row, "labels": row} for row in rows]
    return torch.utils.data.DataLoader(data, batch_size=None)


def on_rank(rank: int, folder: str, port: int) -> None:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from sacplan.integrations.lightning import PlanCallback

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    plans = [f"{folder}/{n}.json" for n in (SHORT, LONG)]
    weights: list[list[torch.Tensor]] = []
    flops: list[int] = []
    for given in (None, plans):
        # The counter is a mode of its own under which attention runs otherwise, so it has runs of its own.
        for counter in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            module = Llama()
            strategy = DDPStrategy(process_group_backend="gloo")
            callbacks = () if given is None else (PlanCallback(given),)
            made = quiet_trainer(
                *callbacks, strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()], max_epochs=1
            )
            with counter:
                made.fit(module, batches(LENGTHS))
            assert made.global_step == len(LENGTHS) // 2
            if isinstance(counter, FlopCounterMode):
                flops.append(counter.get_total_flops())
            else:
                weights.append([p.detach().clone() for p in module.parameters()])
    assert bit_equal(*weights)
    # The second plan recomputes in each long batch of this rank, the first in none.
    assert set(module.seen) == {SHORT, LONG}
    assert flops[1] - flops[0] == module.seen.count(LONG) * sacplan.Plan.load(plans[1]).recompute_flops > 0


@pytest.mark.slow
def test_each_rank_takes_the_plan_for_its_batch(tmp_path: Path) -> None:
    from sacplan.integrations.lightning import profile_trainer

    for n in (SHORT, LONG):
        profile = profile_trainer(quiet_trainer(), Llama(), batches([n]), device="cpu")
        plan = sacplan.plan(profile, "100%" if n == SHORT else "85%", "greedy")
        assert bool(plan.decisions) is (n == LONG)
        plan.save(tmp_path / f"{n}.json")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(on_rank, (str(tmp_path), port), 2)
