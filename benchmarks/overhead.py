"""How much CPU time does a training step take under a plan, beside a plain one and ``torch.utils.checkpoint``?

    python -m benchmarks.overhead [--models tiny small] [--rounds N] [--json FILE]

A row is a way to run the step of a model: forward and backward pass, no optimizer, no dropout, one thread.

- tiny: a GPT so small that a step is all Python and dispatch. What is left of a difference is overhead.
- small: a GPT whose matmuls take the time, as in real training.

Each way must first give the loss and the gradients of the plain step bit by bit. Then all are timed in turns, one step
each, round after round. A time is the median over the rounds, the ratio to plain the median of the ratios within a
round. Times are CPU time of the process, which other processes disturb less than the clock. ``ops`` are those that a
step dispatches, ``again`` how many more these are than the plain step's, ``us/op`` the time over that of the plain
step, by the plain step's ops: with recomputation it contains what runs again.

"no plan" is a plan without units; "one" discards one op of each unit, whose other ops are kept although they are
watched; "half" discards every second op that may be, "all" all of them. "checkpoint" is
torch.utils.checkpoint around every layer (use_reentrant=False), "selective" the same with contexts that must save
matmuls and attention.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import Row
from benchmarks.harness.table import Table
from examples.transformer import Transformer
from sacplan.core.decisions import as_decisions
from sacplan.core.program import CallSite, Phase
from sacplan.planning.units import unit_plans

_MUST_SAVE = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


@dataclass(frozen=True, slots=True)
class Size:
    """A model and a batch."""

    layers: int
    heads: int
    dim: int
    vocab: int
    batch: int
    length: int


SIZES = {
    "tiny": Size(layers=2, heads=2, dim=16, vocab=32, batch=2, length=8),
    "small": Size(layers=4, heads=4, dim=256, vocab=2000, batch=4, length=128),
}
ROUNDS = {"tiny": 400, "small": 25}


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that hands every op on: what any mode costs at least."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountOps(EmptyMode):
    """A dispatch mode that counts ops."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step of the model."""

    name: str
    model: nn.Module
    tokens: torch.Tensor
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self) -> torch.Tensor:
        """Run forward and backward pass, and leave the gradients; return the loss."""
        self.model.zero_grad(set_to_none=True)
        with self.around():
            loss = loss_of(self.model, self.tokens)
            loss.backward()
        return loss.detach()

    def results(self) -> list[torch.Tensor]:
        """Run a step; return the loss and the gradients."""
        loss = self.step()
        return [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of the tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def ways(size: Size) -> Iterator[Way]:
    """Yield the ways that are compared, plain first; each has a model of its own with the same weights."""
    torch.manual_seed(0)
    plain = Transformer(size.layers, size.heads, size.vocab, size.length, size.dim, dropout=0.0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.length))
    profile = sacplan.profile(plain, tokens, loss_fn=loss_of, device="cpu")
    units = {fqn: discardable(profile, fqn) for fqn in (f"layers.{i}" for i in range(size.layers))}

    def planned(name: str, sites: dict[str, list[CallSite]]) -> Way:
        model = copy.deepcopy(plain)
        sacplan.apply(model, plan_of(profile, sites))
        return Way(name, model, tokens)

    yield Way("plain", plain, tokens)
    yield Way("empty dispatch mode", copy.deepcopy(plain), tokens, EmptyMode)
    yield planned("sacplan, no plan", {})
    yield planned("sacplan, one", {f: s[:1] for f, s in units.items()})
    yield planned("sacplan, half", {f: s[::2] for f, s in units.items()})
    yield planned("sacplan, all", units)
    yield Way("checkpoint", checkpointed(plain), tokens)
    selective = functools.partial(create_selective_checkpoint_contexts, _policy)
    yield Way("selective", checkpointed(plain, context_fn=selective), tokens)


def discardable(profile: sacplan.Profile, fqn: str) -> list[CallSite]:
    """Return the call sites of a unit that may run again, in the order in which they run."""
    r = profile.program
    (scope,) = r.calls[fqn]
    return [s for i, s in r.sites(scope).items() if r.ops[i].recomputable and r.ops[i].phase == Phase.FORWARD]


def plan_of(profile: sacplan.Profile, sites: dict[str, list[CallSite]]) -> sacplan.Plan:
    """Make a plan that discards these call sites of each unit; its figures are not those of the decisions."""
    discarded = {fqn: dict.fromkeys(s, 1) for fqn, s in sites.items()}
    units, sequences = unit_plans(profile.program, discarded, discarded)
    return structs.replace(
        sacplan.plan(profile, "200%"), decisions=as_decisions(discarded), units=units, sequences=sequences
    )


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in _MUST_SAVE else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(plain: Transformer, **options: Any) -> nn.Module:
    """Return a copy of the model with every layer in a checkpoint."""
    model = copy.deepcopy(plain)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **options)
    return model


def count(way: Way) -> int:
    """Count the ops that a step dispatches."""
    with CountOps() as counter:
        way.step()
    return counter.ops


def measure(name: str, rounds: int) -> list[Row]:
    """Return one row for each way to run a step of the model.

    Raises:
        AssertionError: a way gives other bits than the plain step.
    """
    all_ways = list(ways(SIZES[name]))
    plain = all_ways[0]
    expected = plain.results()
    for way in all_ways:
        for _ in range(3):  # the first steps of a plan differ: they check the step, and make its schedule
            if not all(map(torch.equal, way.results(), expected)):
                raise AssertionError(f"{way.name} gives other bits than the plain step of {name}.")
    times: dict[str, list[float]] = {way.name: [] for way in all_ways}
    gc.collect()
    gc.disable()  # the same for all; references alone must free a step's tensors
    try:
        for i in range(rounds):
            # Each round begins with another way, so that none always runs after the same one.
            for way in all_ways[i % len(all_ways) :] + all_ways[: i % len(all_ways)]:
                began = time.process_time()
                way.step()
                times[way.name].append((time.process_time() - began) * 1e3)
    finally:
        gc.enable()
    plain_ops, base = count(plain), times["plain"]
    plain_ms = statistics.median(base)
    rows = []
    for way in all_ways:
        ms = statistics.median(times[way.name])
        ratio = statistics.median(t / b for t, b in zip(times[way.name], base, strict=True))
        ops = count(way)
        rows.append(
            {
                "model": name, "way": way.name, "ms": ms, "ratio": ratio, "ops": ops, "again": ops - plain_ops,
                "us_per_op": (ms - plain_ms) * 1e3 / plain_ops, "rounds": rounds,
            }
        )  # fmt: skip
    return rows


_TABLE = Table(
    ("model", ">6"), ("way", ">22"), ("ms", ">9.3f"), ("ratio", ">6.3f"), ("us/op", ">6.2f"), ("ops", ">5"),
    ("again", ">6"),
)  # fmt: skip


def _line(row: Row) -> str:
    return _TABLE.row(*(row[k] for k in ("model", "way", "ms", "ratio", "us_per_op", "ops", "again")))


def main() -> None:
    parser = Parser(__doc__, "overhead.json")
    parser.choice("--models", SIZES)
    parser.add_argument("--rounds", type=int, help="by default " + str(ROUNDS))
    torch.set_num_threads(1)
    arguments = parser.begin()

    def rows_of(name: str) -> list[Row]:
        return measure(name, arguments.rounds or ROUNDS[name])

    print(_TABLE.head)
    sizes = {n: str(SIZES[n]) for n in arguments.models}
    run_cases(arguments.models, rows_of, _line, arguments.json, sizes=sizes)


if __name__ == "__main__":
    main()
