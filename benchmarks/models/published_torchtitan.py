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
from torch import nn

from benchmarks.harness.results import GIB
from benchmarks.models.published_language import EITHER, FITTED, H100_96GB, SEGMENTS
from benchmarks.models.published_step import COMPILE, Built, Point, Step, empty, foreach_adamw, full_policy


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Run the lines of torchtitan's ``train.py``."""
    from torchtitan.components.loss import cross_entropy_loss

    inputs, labels = batch
    pred = model(inputs)
    loss: torch.Tensor = cross_entropy_loss(pred, labels)
    del pred
    return loss


@dataclasses.dataclass
class Llama:
    """A Llama of torchtitan on a mesh.

    Attributes:
        name: a key of ``llama3_configs``.
        length, sequences: the batch of the ranks that share one.
        shards, contexts, tensors: ranks by axis of the mesh.
    """

    name: str
    length: int
    sequences: int
    shards: int
    contexts: int = 1
    tensors: int = 1

    def build(self) -> Built:
        """Make the model."""
        from torchtitan.models.llama3 import Transformer, llama3_configs

        shape = dataclasses.replace(llama3_configs[self.name], vocab_size=128256, max_seq_len=self.length)
        with torch.device("meta"):
            self._model = Transformer(shape)
        self._batch = empty(self.sequences, self.length), empty(self.sequences, self.length)
        return Built(model=self._model, batch=self._batch, loss_fn=_loss, optimizer=foreach_adamw)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Make the mesh, and enter the contexts that ``train.py`` enters."""
        from torchtitan.distributed import ParallelDims, utils

        self._dims = ParallelDims(
            dp_replicate=1, dp_shard=self.shards, cp=self.contexts, tp=self.tensors, pp=1,
            world_size=self.ranks, enable_loss_parallel=True,
        )  # fmt: skip
        self._mesh, context = self._dims.build_mesh("cuda"), None
        if self.contexts > 1:
            buffers = [*self._batch, self._model.freqs_cis]
            context = utils.create_context_parallel_ctx(
                self._mesh["cp"], buffers, [1, 1, 0], {*self._batch}, "allgather"
            )
        with utils.get_train_context(self._dims.loss_parallel_enabled, False)(context):
            yield

    def spread(self, model: Any) -> None:
        """Spread the model."""
        from torchtitan.config_manager import JobConfig
        from torchtitan.models.llama3 import parallelize_llama

        config = JobConfig()
        config.activation_checkpoint.mode = "none"
        parallelize_llama(model, self._mesh, self._dims, config)

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.shards * self.contexts * self.tensors

    def step(self, **changes: Any) -> Step:
        """Return the published step; of Table 2 and 4 of December 2024 by default."""
        made: dict[str, Any] = {
            "points": (Point(unit=GIB, figure="reserved"), Point(unit=GIB, figure="reserved_expandable")),
            "plan": full_policy,
            "unknown": EITHER,
            "missing": f"{COMPILE}, float8",
        }
        return Step(
            build=self.build, spread=self.spread, ranks=self.ranks, around=self.around,
            **{"device": H100_96GB} | made | changes,
        )  # fmt: skip


_RING = (
    f"{COMPILE}, float8; the plan keeps three tensors of attention a layer (0.75 GiB), since the ring runs below "
    "autograd, where its copies are no ops of their own"
)
_SCATTERED = (
    f"{COMPILE}, float8; the plan keeps what a reduce-scatter of each layer returns (0.25 GiB), which torchtitan runs "
    "again"
)

TORCHTITAN: dict[str, Step] = {
    "titan2412-8gpu-32768": Llama("8B", 32768, 1, 8).step(),
    "titan2412-8gpu-65536-CP2": Llama("8B", 65536, 1, 4, contexts=2).step(missing=_RING),
    "titan2412-8gpu-131072-CP4": Llama("8B", 131072, 1, 2, contexts=4).step(missing=_RING),
    "titan2412-8gpu-262144-CP8": Llama("8B", 262144, 1, 1, contexts=8).step(missing=_RING),
    "titan2412-256gpu-70B-TP8": Llama("70B", 8192, 16, 32, tensors=8).step(missing=_SCATTERED),
    "titan2570-graphsac": Llama("8B", 8192, 1, 4, tensors=2).step(
        points=(Point(part=("no AC",), unit=GIB, figure="reserved_expandable"),),
        plan=None,
        assumed=True,
        unknown=f"{SEGMENTS}; sequence and batch, of which it is said that they are the default, are 8192 and 1",
        missing="",
        samples=4096,
        other_card=FITTED,
    ),
}
