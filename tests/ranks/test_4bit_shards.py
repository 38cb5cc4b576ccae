"""4-bit weights of bitsandbytes under ``fully_shard``: what two real ranks compute with shards of them."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist

import sacplan
from sacplan.profiling.remarks import types_of_shards
from tests.ranks.test_fully_shard import in_4_bits, scales_bytes
from tests.support.processes import gloo, run_ranks
from tests.support.ranks import RankMemory, fully_sharded, optimizer_of, patient_collectives
from tests.support.steps import bit_equal, mean_square

STORAGES = (torch.uint8, torch.bfloat16)


UNITS = ["", "layers.0", "layers.1", "layers.2"]


def on_rank(rank: int, peaks: dict[torch.dtype, int], directory: str) -> None:
    with gloo(rank, 2, directory):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for storage in STORAGES:
            torch.manual_seed(0)
            whole = in_4_bits(storage)()
            sharded = fully_sharded(copy.deepcopy(whole), mesh, UNITS)
            batch = torch.randn(32, 48)  # the same on both ranks, so that the mean of gradients is each one
            found = []
            for model in (whole, sharded):
                for _ in range(2):
                    model.zero_grad()
                    loss = mean_square(model, batch)
                    loss.backward()
                grads = [p.grad for p in model.parameters() if p.requires_grad]
                found.append([loss.detach(), *(getattr(g, "full_tensor", lambda g=g: g)() for g in grads)])
            assert bit_equal(*found), storage
            with patient_collectives():
                measured = RankMemory(sharded, batch, mean_square).peak_bytes(scales_bytes(whole))
            assert rank or measured == peaks[storage]  # the first has the largest shards
            packed = sharded.layers[0][0].base.weight
            assert packed.dtype == storage
            assert packed._local_tensor.numel() * 2 == whole.layers[0][0].base.weight.numel()


def with_accelerate(rank: int, directory: str, port: int) -> None:
    """Shard as Accelerate does, and compare with the peak that ``fit`` has for it."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with gloo(rank, 2, directory):
        accelerator = Accelerator(cpu=True)
        # Accelerate takes no plugin without a GPU.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Sequential"],  # the layers
            cpu_ram_efficient_loading=False,
        )
        for storage in STORAGES:
            torch.manual_seed(0)
            model = in_4_bits(storage)()
            batch = torch.randn(32, 48)
            ignored = {p for p in model.parameters() if not p.is_floating_point()}
            assert bool(ignored) == (storage == torch.uint8)
            if rank == 0:  # the one with the largest shards
                ranks = sacplan.FSDP2(2, ["layers.*", ""], ignored_params=ignored)
                profile = sacplan.profile(model, batch, mean_square, optimizer_of, "cpu", ranks=ranks)
            held = scales_bytes(model)
            sharded = fsdp2_prepare_model(accelerator, model)
            whole = not hasattr(sharded.layers[0][0].base.weight, "full_tensor")
            assert whole == (storage == torch.uint8)
            with patient_collectives():
                measured = RankMemory(sharded, batch, mean_square).peak_bytes(held)
            if rank == 0:
                assert measured == profile.peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_accelerate_leaves_bytes_whole(tmp_path: object) -> None:
    """The peak of a rank is that of ``ignored_params``, and that of shards if weights are stored as floats."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(with_accelerate, (str(tmp_path), port), 2)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_shards_give_the_same_bits(tmp_path: object) -> None:
    """Bytes and floats alike: bitsandbytes makes its weight again of what a unit has gathered. So does a recording."""
    pytest.importorskip("bitsandbytes")
    peaks = {}
    for storage in STORAGES:
        with sacplan.ranks(2, device="cpu"):
            sharded = fully_sharded(
                in_4_bits(storage)(), dist.device_mesh.init_device_mesh("cpu", (2,)), UNITS
            )
            profile = sacplan.profile(sharded, torch.randn(32, 48), mean_square, optimizer_of)
        peaks[storage] = profile.peak_bytes
    run_ranks(on_rank, (peaks, str(tmp_path)), 2)


def test_it_is_said_that_accelerate_leaves_bytes_whole() -> None:
    """And each rank then holds all of them."""
    pytest.importorskip("bitsandbytes")
    said = {}
    for storage in STORAGES:
        parameters = in_4_bits(storage)().named_parameters()
        entries = [
            (name, tuple(p.shape), f"{'' if p.requires_grad else 'frozen '}{p.dtype}")
            for name, p in parameters
        ]
        said[storage] = types_of_shards(entries, 8, in_4_bits=True)
    assert len(said[torch.uint8]) == 1
    assert "Accelerate leaves them out, and each rank then holds all 3.38 KiB" in said[torch.uint8][0]
    assert "bnb_4bit_quant_storage=torch.bfloat16" in said[torch.uint8][0]
    assert said[torch.bfloat16] == ()  # they are no weights that a trainer turns into float32
