"""What do slices of a head and its loss cost in time and save in memory, beside the plain loss and other ways?

    python -m benchmarks.chunked_loss [--sizes small medium] [--variants plain linear_cross_entropy] [--rounds N]
                                      [--device cuda] [--json FILE]

A step is forward and backward pass of an MLP, a linear head and the cross entropy. A row is a way to write the loss, or
the reason why it does not run here:

- ``time_ms`` and ``ratio``: variants are timed in turns, one step each, round after round. The time is the median over
  the rounds, the ratio to plain the median of the ratios within a round.
- ``peak_bytes``: of the step, everything included that it has on the device, by the allocator (on a CPU: the profiler's
  allocation events).
- ``error``: the largest difference of a gradient from plain's, relative to the largest element of that gradient.

``linear_cross_entropy/16`` is told to take 16 slices; ``chunked/16`` is a plan of sacplan with as many. ``VARIANTS``
maps names to functions that make a loss function for a model.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import MIB, Row
from benchmarks.harness.table import Table
from sacplan._chunk.entries import ChunkOptions, loss_chunks
from sacplan._plan.make import MadeBy, plan_by_hand
from sacplan._record.step import Step
from sacplan._verify.measure import measured_step

SLICES = 16


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a head and of what comes before it."""

    tokens: int
    width: int
    vocabulary: int


SIZES = {
    "small": Size(tokens=1024, width=128, vocabulary=16000),
    "medium": Size(tokens=2048, width=256, vocabulary=50257),
    "large": Size(tokens=8192, width=4096, vocabulary=128256),
}


class Model(nn.Module):
    """An MLP and a head; ``forward`` returns the logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(size.width, size.width), nn.GELU(), nn.Linear(size.width, size.width)
        )
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(x))


Batch = tuple[torch.Tensor, torch.Tensor]
LossFn = Callable[[nn.Module, Any], torch.Tensor]


class NotHere(Exception):
    """A variant does not run in this environment; the message says why."""


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Compute all logits, then their cross entropy."""
    x, targets = batch
    return F.cross_entropy(model(x), targets)


def plain(model: Model, batch: Batch) -> LossFn:
    """Return the loss as people write it."""
    return plain_loss


def linear_cross_entropy(model: Model, batch: Batch, slices: int | None = None) -> LossFn:
    """Return ``F.linear_cross_entropy``, which chooses its slices if no number is given."""
    if not hasattr(F, "linear_cross_entropy"):
        raise NotHere(f"F.linear_cross_entropy needs torch 2.13; this is {torch.__version__}")
    rows = None if slices is None else -(-len(batch[0]) // slices)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, targets = batch
        return F.linear_cross_entropy(model.mlp(x), model.head.weight, targets, options=options)

    return loss


def liger(model: Model, batch: Batch) -> LossFn:
    """Return Liger's fused loss."""
    if batch[0].device.type != "cuda":
        raise NotHere("Liger's kernels run on GPUs only")
    if importlib.util.find_spec("liger_kernel") is None:
        raise NotHere("pip install liger-kernel")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x, targets = batch
        return fused(model.head.weight, model.mlp(x), targets)

    return loss


def chunked(model: Model, batch: Batch) -> LossFn:
    """Apply a plan with a chunk at the head and nothing recomputed; the loss stays the plain one."""
    profile = sacplan.profile(model, batch, plain_loss, device=batch[0].device.type)
    found = loss_chunks(profile.program, profile.spec)
    assert isinstance(found, ChunkOptions), found
    # Planning would choose the slices; the comparison needs a given number of them, so the plan is made by hand.
    (chunk,) = (chunk for chunk in found.chunks if chunk.slices == SLICES)
    made_by = MadeBy("chunked-loss", objective="time", techniques=("chunk",))
    plan = plan_by_hand(profile, (chunk,), made_by, status="feasible")
    sacplan.apply(model, plan)
    return plain_loss


Variant = Callable[[Model, Batch], LossFn]
VARIANTS: dict[str, Variant] = {
    "plain": plain,
    "linear_cross_entropy": linear_cross_entropy,
    f"linear_cross_entropy/{SLICES}": functools.partial(linear_cross_entropy, slices=SLICES),
    "liger": liger,
    f"chunked/{SLICES}": chunked,
}
"""A variant gets a model of its own, which it may change, and a batch; it returns the loss function of a step."""


@dataclass(slots=True)
class _Running:
    """A variant with its own copy of the model."""

    name: str
    model: Model
    loss: LossFn
    times_ms: list[float]

    def timed(self, batch: Batch) -> float:
        """Run a step; return its milliseconds by the clock."""
        device = batch[0].device.type
        self.model.zero_grad(set_to_none=True)
        _wait(device)
        began = time.perf_counter()
        self.loss(self.model, batch).backward()
        _wait(device)
        return (time.perf_counter() - began) * 1e3


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compared(
    size: Size,
    variants: dict[str, Variant],
    *,
    rounds: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """Run the variants and return a row for each.

    Args:
        size: of the model and the batch.
        variants: by name; the others are compared with the first.
        rounds: how many steps of each are timed.
        device, dtype: of the model.
    """
    torch.manual_seed(0)
    model = Model(size).to(device, dtype)
    batch = (
        torch.randn(size.tokens, size.width, device=device, dtype=dtype),
        torch.randint(size.vocabulary, (size.tokens,), device=device),
    )
    running, absent = [], {}
    for name, make in variants.items():
        own = copy.deepcopy(model)
        try:
            running.append(_Running(name, own, make(own, batch), []))
        except NotHere as reason:
            absent[name] = str(reason)
    gradients = {r.name: _gradients(r, batch) for r in running}
    for _ in range(rounds):
        for r in running:
            r.times_ms.append(r.timed(batch))
    first = running[0]
    rows = []
    for r in running:
        gc.collect()
        seen = measured_step(Step(r.model, batch, r.loss, None), batch)
        rows.append(
            {
                "variant": r.name,
                "time_ms": statistics.median(r.times_ms),
                "ratio": statistics.median(a / b for a, b in zip(r.times_ms, first.times_ms, strict=True)),
                "peak_bytes": seen.peak_bytes,
                "error": max(map(_difference, gradients[r.name], gradients[first.name])),
            }
        )
    return rows + [{"variant": name, "absent": reason} for name, reason in absent.items()]


def _gradients(running: _Running, batch: Batch) -> list[torch.Tensor]:
    running.timed(batch)
    return [p.grad.clone() for p in running.model.parameters() if p.grad is not None]


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


_TABLE = Table(
    ("size", ">8"), ("variant", ">22"), ("ms", ">9.1f"), ("ratio", ">7.2f"), ("peak MiB", ">9.1f"), ("error", ">9.1e"),
)  # fmt: skip


def _line(row: Row) -> str:
    if "absent" in row:
        return f"{row['size']:>8} {row['variant']:>22} {row['absent']}"
    figures = row["time_ms"], row["ratio"], row["peak_bytes"] / MIB, row["error"]
    return _TABLE.row(row["size"], row["variant"], *figures)


def main() -> None:
    parser = Parser(__doc__, "chunked_loss.json")
    parser.choice("--sizes", SIZES, ["small"])
    parser.choice("--variants", VARIANTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.begin()

    def rows_of(size: str) -> list[Row]:
        variants = {variant: VARIANTS[variant] for variant in arguments.variants}
        dtype = getattr(torch, arguments.dtype)
        about = {"size": size, "device": arguments.device, "dtype": arguments.dtype}
        found = compared(SIZES[size], variants, rounds=arguments.rounds, device=arguments.device, dtype=dtype)
        return [about | row for row in found]

    print(_TABLE.head)
    run_cases(arguments.sizes, rows_of, _line, arguments.json, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
