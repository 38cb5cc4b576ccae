"""Published steps of torchtitan that combine kinds of parallelism, recorded from torchtitan's own code, unchanged.

To run them, ``pip install --no-deps torchtitan==0.1.0`` and what it imports: torchdata, tyro, tiktoken, tensorboard.
The release is the first one after the figures of December 2024. What is left out of its code is checkpointing, for
which there is a plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness.results import GIB
from benchmarks.models.published_language import (
    AS_DEFAULT,
    AS_EXPANDABLE,
    BOTH,
    FITTED,
    H100_96GB,
    SEGMENTS,
    titan_loss,
)
from benchmarks.models.published_step import COMPILE, Built, Point, Step, empty, foreach_adamw, full_policy


def _llama(name: str, length: int, rows: int, dp: int, cp: int = 1, tp: int = 1, **changes: Any) -> Step:
    """Return a step of a Llama on a mesh, by default one of Tables 2 and 4 of December 2024."""
    made: dict[str, Any] = {}  # the model, the batch, and the mesh

    def build() -> Built:
        from torchtitan.models.llama3 import Transformer, llama3_configs

        shape = dataclasses.replace(llama3_configs[name], vocab_size=128256, max_seq_len=length)
        with torch.device("meta"):
            made["model"] = Transformer(shape)
        made["batch"] = empty(rows, length), empty(rows, length)
        return Built(model=made["model"], batch=made["batch"], loss_fn=titan_loss, optimizer=foreach_adamw)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        from torchtitan.distributed import ParallelDims, utils

        dims = made["dims"] = ParallelDims(1, dp, cp, tp, 1, dp * cp * tp, True)
        made["mesh"], cut = dims.build_mesh("cuda"), None
        if cp > 1:
            axis, batch, rope = made["mesh"]["cp"], made["batch"], made["model"].freqs_cis
            cut = utils.create_context_parallel_ctx(axis, [*batch, rope], [1, 1, 0], {*batch}, "allgather")
        with utils.get_train_context(dims.loss_parallel_enabled, False)(cut):
            yield

    def spread(model: Any) -> None:
        from torchtitan.config_manager import JobConfig
        from torchtitan.models.llama3 import parallelize_llama

        config = JobConfig()
        config.activation_checkpoint.mode = "none"
        parallelize_llama(model, made["mesh"], made["dims"], config)

    default: dict[str, Any] = {
        "plan": full_policy,
        "missing": _ALSO,
        "points": BOTH,
        "unknown": AS_EXPANDABLE,
    }
    asked = default | changes
    return Step(build=build, device=H100_96GB, spread=spread, ranks=dp * cp * tp, around=around, **asked)


_ALSO = f"{COMPILE}, float8"
TORCHTITAN: dict[str, Step] = {
    "titan2412-8gpu-32768": _llama("8B", 32768, 1, 8),
    "titan2412-8gpu-65536-CP2": _llama("8B", 65536, 1, 4, cp=2),
    "titan2412-8gpu-131072-CP4": _llama("8B", 131072, 1, 2, cp=4),
    "titan2412-8gpu-262144-CP8": _llama("8B", 262144, 1, 1, cp=8),
    "titan2412-256gpu-70B-TP8": _llama("70B", 8192, 16, 32, tp=8, unknown=AS_DEFAULT),
    "titan2570-graphsac": _llama(
        "8B", 8192, 1, 4, tp=2, plan=None, assumed=True, missing="", samples=4096, other_card=FITTED,
        points=(Point(part=("no AC",), unit=GIB, figure="reserved_expandable"),),
        unknown=f"{SEGMENTS}; sequence and batch, of which it is said that they are the default, are 8192 and 1",
    ),
}  # fmt: skip
