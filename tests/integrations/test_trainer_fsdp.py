"""Trainer with ``fsdp=`` on two gloo ranks: the plan of a rank, whose peak is predicted, and the same run.

Accelerate shards on accelerators only: on a CPU it leaves ``fsdp=`` out without a word. So the test puts the plugin
that the Trainer has made where Accelerate looks for it; all else is its own code, with its choice of modules to shard.
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

import sacplan
from tests.support.ranks import patient_collectives
from tests.support.steps import bit_equal

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", minversion="1.6")

from tests.support.processes import run_ranks  # noqa: E402
from tests.support.trainers import trainer as trainer_in  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
    pytest.mark.slow,
]

RANKS = 2
UNITS = ["model.layers.*", "model.embed_tokens", ""]


def make(directory: str, **options: Any) -> Any:
    """A trainer; all start from the same weights."""
    return trainer_in(directory, layers=3, **options)


def make_sharded(directory: str, **config: Any) -> Any:
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    trainer = make(directory, fsdp=True, fsdp_config=config)
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True
    return trainer


def train(trainer: Any) -> list[torch.Tensor]:
    """Losses of the steps, and the weights after, of all ranks."""
    transformers.set_seed(3 + dist.get_rank())
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert len(losses) == 3
    return [torch.tensor(losses), *(p.full_tensor().detach() for p in trainer.model.parameters())]


def on_rank(rank: int, directory: str, port: int) -> None:
    from torch.distributed.fsdp import FSDPModule

    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", sacplan.SacplanWarning)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    plan = structs.replace(sacplan.Plan.load(f"{directory}/plan.json"), budget_bytes=None)
    try:
        plain = make_sharded(directory)
        with pytest.raises(sacplan.TraceError, match=r"without fsdp=.*FSDP2\(8"):
            profile_trainer(plain, device="cpu")
        expected = train(plain)
        assert isinstance(plain.model.model.layers[0], FSDPModule)

        trainer = make_sharded(directory)
        callback = PlanCallback(plan)
        trainer.add_callback(callback)
        with patient_collectives():
            assert bit_equal(train(trainer), expected)
        # The norm and the head, which Accelerate shards together, are gathered later than the rest of the model. That
        # is less.
        assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, rel=0.02)

        trainer = make_sharded(directory)
        sacplan.apply(trainer.model, plan)
        assert bit_equal(train(trainer), expected)

        for name, said in (
            ("one_device", r"not one of a rank.*FSDP2\(2.*'model.layers.0'"),
            ("one_unit", r"unit '' contains 'model\.embed_tokens'.*units of FSDP2 that you plan with"),
        ):
            trainer = make_sharded(directory)
            trainer.add_callback(PlanCallback(sacplan.Plan.load(f"{directory}/{name}.json")))
            with pytest.raises(sacplan.PlanError, match=said):
                train(trainer)
        trainer = make_sharded(directory, activation_checkpointing=True)
        trainer.add_callback(PlanCallback(plan))
        with pytest.raises(sacplan.SacplanError, match="CheckpointWrapper"):
            train(trainer)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_plan_of_a_rank_in_a_sharded_trainer(tmp_path: Path) -> None:
    from sacplan.integrations.transformers import profile_trainer

    profile = profile_trainer(make(str(tmp_path)), device="cpu")
    plan = sacplan.plan(profile, "80%", ranks=sacplan.FSDP2(RANKS, UNITS), solver="greedy")
    assert plan.units
    plan.save(tmp_path / "plan.json")
    sacplan.plan(profile, "70%", solver="greedy").save(tmp_path / "one_device.json")
    whole = sacplan.plan(profile, "60%", ranks=sacplan.FSDP2(RANKS, [""]), solver="greedy")
    assert list(whole.units) == [""]
    whole.save(tmp_path / "one_unit.json")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(on_rank, (str(tmp_path), port), RANKS)
