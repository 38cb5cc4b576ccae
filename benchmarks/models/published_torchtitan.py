"""Published steps of torchtitan that combine kinds of parallelism, recorded from torchtitan's own code, unchanged.

To run them, ``pip install --no-deps torchtitan==0.1.0`` and what it imports: torchdata, tyro, tiktoken, tensorboard.
The release is the first one after the figures of December 2024.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.harness.results import GIB
from benchmarks.models.cases import Case
from benchmarks.models.published_language import BOTH, H100_96GB, titan_loss
from benchmarks.models.published_step import COMPILE, Point, Step, empty, foreach_adamw


def _llama(
    name: str, length: int, rows: int, dp: int, cp: int = 1, tp: int = 1, schedule: str = "",
    checkpointing: str = "full", **changes: Any,
) -> Step:  # fmt: skip
    """Return a step of a Llama on a mesh, by default one of Tables 2, 4, 5 and 6 of December 2024.

    With a ``schedule``, a rank has stages of a pipeline of eight, which split the rows into eight micro-batches.
    """
    pp = 8 if schedule else 1
    made = SimpleNamespace()  # the mesh, the parts of the model, the batch, and the schedule of a pipeline

    def build() -> Case:
        from torchtitan.models.llama3 import Transformer, llama3_configs

        made.shape = dataclasses.replace(llama3_configs[name], vocab_size=128256, max_seq_len=length)
        with torch.device("meta"):
            model = Transformer(made.shape)
        made.batch = empty(rows, length), empty(rows, length)
        made.parts = [model]
        # A rank's parts of the model are known when it is spread.
        held = nn.ModuleList() if schedule else model
        return Case(held, made.batch, scheduled if schedule else titan_loss, foreach_adamw)

    def scheduled(parts: Any, batch: Any) -> None:
        steps, (tokens, labels) = made.schedule, batch
        stages = steps._stages if hasattr(steps, "_stages") else [steps._stage]
        for stage, part in zip(stages, parts, strict=True):
            stage.submod = part
        target = {"target": labels, "losses": []} if stages[-1].is_last else {}
        steps.step(*(tokens,) if stages[0].is_first else (), **target, input_batch=tokens)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        from torchtitan.distributed import utils

        cut = None
        if cp > 1:
            angles, batch = [part.freqs_cis for part in made.parts], made.batch
            dims = [1, 1] + [0] * len(angles)
            cut = utils.create_context_parallel_ctx(
                made.mesh["cp"], [*batch, *angles], dims, {*batch}, "allgather"
            )
        with utils.get_train_context(made.dims.loss_parallel_enabled, False)(cut):
            yield

    def spread(model: Any) -> None:
        from torchtitan.config_manager import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3 import parallelize_llama

        dims = made.dims = ParallelDims(1, dp, cp, tp, pp, dp * cp * tp * pp, True)
        made.mesh = dims.build_mesh("cuda")
        config = JobConfig()
        config.activation_checkpoint.mode = checkpointing
        if not schedule:
            parallelize_llama(model, made.mesh, dims, config)
            return
        config.parallelism.pipeline_parallel_schedule = schedule
        config.parallelism.pipeline_parallel_microbatch_size = rows // pp
        config.training.local_batch_size = rows
        made.schedule, made.parts = _pipeline(made, config, (rows // pp, length // cp // tp))
        model.extend(made.parts)

    default: dict[str, Any] = {
        "missing": f"{_ALSO}, asynchronous tensor parallelism" if schedule else _ALSO,
        "points": BOTH,
    }
    asked, ranks = default | changes, dp * cp * tp * pp
    return Step(build=build, device=H100_96GB, spread=spread, ranks=ranks, around=around, **asked)


def _pipeline(made: SimpleNamespace, config: Any, sent: tuple[int, int]) -> tuple[Any, list[nn.Module]]:
    """Return a rank's schedule and its parts of the model; a stage is told the shape that the one before sends."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import parallelize_llama, pipeline_llama
    from torchtitan.models.llama3.infra import pipeline

    (model,), shape = made.parts, made.shape
    given = empty(*sent, shape.dim, dtype=torch.bfloat16).requires_grad_()
    plain: Any = pipeline.PipelineStage

    def stage(part: nn.Module, number: int, *args: Any, **kwargs: Any) -> Any:
        return plain(part, number, *args, input_args=(given,) if number else None, **kwargs)

    with mock.patch.object(pipeline, "PipelineStage", stage):
        given_to = model, made.mesh, made.dims, config, torch.device("cpu"), shape
        steps, parts, _, _ = pipeline_llama(*given_to, parallelize_llama, cross_entropy_loss)
    return steps, parts


_ALSO = f"{COMPILE}, float8"
_405b = functools.partial(_llama, "405B", tp=8, schedule="1F1B")
TORCHTITAN: dict[str, Step] = {
    "titan2412-8gpu-32768": _llama("8B", 32768, 1, 8),
    "titan2412-8gpu-65536-CP2": _llama("8B", 65536, 1, 4, cp=2),
    "titan2412-8gpu-131072-CP4": _llama("8B", 131072, 1, 2, cp=4),
    "titan2412-8gpu-262144-CP8": _llama("8B", 262144, 1, 1, cp=8),
    "titan2412-256gpu-70B-TP8": _llama("70B", 8192, 16, 32, tp=8),
    "titan2412-512gpu-405B-1F1B": _405b(8192, 32, 8),
    "titan2412-512gpu-405B-Interleaved1F1B": _405b(8192, 32, 8, schedule="Interleaved1F1B"),
    "titan2412-512gpu-405B-32768": _405b(32768, 8, 8),
    "titan2412-512gpu-405B-65536-CP2": _405b(65536, 8, 4, cp=2),
    "titan2412-512gpu-405B-131072-CP4": _405b(131072, 8, 2, cp=4),
    "titan2412-512gpu-405B-262144-CP8": _405b(262144, 8, 1, cp=8),
    "titan2570-graphsac": _llama(
        "8B", 8192, 1, 4, tp=2, checkpointing="none", assumed=True, missing="", samples=4096,
        points=(Point(part=("no AC",), unit=GIB, figure="reserved_expandable"),),
    ),
}  # fmt: skip
