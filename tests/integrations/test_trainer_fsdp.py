"""Trainer with ``fsdp=`` on two gloo ranks: the plan of a rank, whose peak is predicted, and the same bits.

Accelerate shards on accelerators only: on a CPU it leaves ``fsdp=`` and ``accelerate launch --use_fsdp`` out without a
word (``AcceleratorState.__init__`` has no ``MULTI_CPU`` among what it shards). So the test calls gloo's ranks those of
GPUs; all else is Accelerate's own code, with its choice of modules to shard.
"""

from __future__ import annotations

import json
import os
import socket
import sys
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

from tests.support.processes import needs_gloo, run_python, run_ranks  # noqa: E402
from tests.support.trainers import examples, llama, short_run  # noqa: E402
from tests.support.trainers import trainer as trainer_in  # noqa: E402

pytestmark = [
    needs_gloo,
    pytest.mark.slow,
]

RANKS, STEPS = 2, 4
NOT_COUNTED = 2048
"""Bytes of what the Trainer holds beside a step: the batch that its loader has ready, and losses."""


def make(directory: str, **options: Any) -> Any:
    """A trainer; all start from the same weights."""
    return trainer_in(directory, layers=2, max_steps=STEPS, **options)


def make_sharded(directory: str, **options: Any) -> Any:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    arguments = transformers.TrainingArguments(
        **short_run(directory, max_steps=STEPS, **{"fsdp": True} | options)
    )
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = llama(layers=2, attention_dropout=0.1)
    return transformers.Trainer(model, arguments, train_dataset=examples(32), eval_dataset=examples(8))


def train(trainer: Any) -> list[torch.Tensor]:
    """Losses of the steps, and the weights after, of all ranks."""
    transformers.set_seed(3 + dist.get_rank())
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert len(losses) == STEPS
    return [torch.tensor(losses), *(p.full_tensor().detach() for p in trainer.model.parameters())]


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bfloat16": {"bf16": True},
    "two micro-batches": {"gradient_accumulation_steps": 2},
    "gathered from forward to backward": {"fsdp_config": {"reshard_after_forward": False}},
    "said to the launcher": {"fsdp": None, "bf16": True},
}
LAUNCH = (
    "accelerate.commands.launch --num_processes 2 --use_fsdp --fsdp_version 2 "
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --main_process_port"
)


def on_rank(rank: int, directory: str, port: int, settings: tuple[str, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    check(directory, settings)


def check(directory: str, settings: tuple[str, ...]) -> None:
    from torch.distributed.fsdp import FSDPModule

    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", sacplan.SacplanWarning)
    try:
        for name in settings:
            options = SETTINGS[name]
            plain = make_sharded(directory, **options)
            profile = profile_trainer(plain, device="cpu")
            assert profile.peak_bytes == json.loads(Path(directory, "alone.json").read_text())[name], name
            plan = sacplan.plan(profile, "80%", solver="greedy")
            expected = train(plain)
            assert isinstance(plain.model.model.layers[0], FSDPModule)
            trainer = make_sharded(directory, **options)
            # Its budget holds but for what is not counted.
            callback = PlanCallback(structs.replace(plan, budget_bytes=None), watch_steps=STEPS)
            trainer.add_callback(callback)
            with patient_collectives():
                assert bit_equal(train(trainer), expected), name
            # The first step has no state. In one of the others a thread of gloo may let go of a buffer too late.
            more = min(callback.peaks_bytes[1:]) - plan.peak_bytes
            assert 0 <= more <= NOT_COUNTED, (name, more)

        if "as it is" not in settings:
            return
        trainer = make_sharded(directory)
        trainer.add_callback(PlanCallback(sacplan.Plan.load(f"{directory}/one_device.json")))
        with pytest.raises(sacplan.errors.PlanError, match=r"not one of a rank.*sacplan\.ranks\(2\)"):
            train(trainer)
        for setting, value, said in (
            ("activation_checkpointing", True, "sacplan chooses what to recompute"),
            ("fsdp_version", 1, r'fsdp_config=\{"version": 2\}'),
        ):
            trainer = make_sharded(directory)
            setattr(trainer.accelerator.state.fsdp_plugin, setting, value)
            with pytest.raises(sacplan.errors.TraceError, match=said):
                profile_trainer(trainer, device="cpu")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(_: int, directory: str, settings: tuple[str, ...]) -> None:
    """What one process says of a rank, whose others are not there."""
    from sacplan.integrations.transformers import profile_trainer

    peaks = {}
    with sacplan.ranks(RANKS, device="cpu"):
        for name in settings:
            trainer = make(directory, **SETTINGS[name] | {"fsdp": True})
            peaks[name] = profile_trainer(trainer).peak_bytes
    Path(directory, "alone.json").write_text(json.dumps(peaks))


@pytest.mark.parametrize("launched", [False, True], ids=["torchrun", "accelerate launch"])
def test_the_plan_of_a_rank_in_a_sharded_trainer(launched: bool, tmp_path: Path) -> None:
    from sacplan.integrations.transformers import profile_trainer

    settings = tuple(name for name in SETTINGS if (name != "as it is") == launched)
    one_device = sacplan.plan(profile_trainer(make(str(tmp_path)), device="cpu"), "70%", solver="greedy")
    one_device.save(tmp_path / "one_device.json")
    run_ranks(alone, (str(tmp_path), settings), 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    if launched:
        ran = run_python("-m", *LAUNCH.split(), str(port), "-m", __name__, str(tmp_path), *settings)
        assert ran.returncode == 0, ran.stderr
    else:
        run_ranks(on_rank, (str(tmp_path), port, settings), RANKS)


if __name__ == "__main__":
    check(sys.argv[1], tuple(sys.argv[2:]))
