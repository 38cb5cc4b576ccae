"""4-bit weights of bitsandbytes under ``fully_shard``: what two real ranks compute with shards of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import sacplan
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
