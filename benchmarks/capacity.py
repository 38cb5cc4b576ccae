"""What batch is the largest on a GPU, without a plan and with one, which is fastest, and what headroom do they need?

    python -m benchmarks.capacity [--models gpt2-medium gpt2-with-cache llama-3-8b-lora]
                                  [--devices h100 h200 a100-40gb rtx-4090]

Models of transformers, bfloat16, AdamW with states in bfloat16 too, on the meta device; nothing is computed:

- GPT-2 medium, sequences of 1024, all parameters trained;
- the same with ``use_cache=True``, the default of transformers, where the output holds keys and values of all layers;
- Llama-3-8B's shape, sequences of 2048, with LoRA of rank 16 on all linear layers of the blocks (peft).

A row is a model on a device. The budget is the device's memory less a headroom of 15 %; samples per second are those of
the cost model.

The headroom is for what the caching allocator needs over the step's peak. The largest batch without a plan, the largest
with one, and one half way between are traced with their plans applied, and played through torch's allocator in its
default settings (``sacplan/_device/device_memory.py``): with unlimited memory (``res``), and with ever less of it
(``need``), where free segments are given back before it gives up, as the real one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget, timed
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import Table
from benchmarks.models.cases import empty_text, llama_3_8b, on_meta
from sacplan._apply.apply import apply
from sacplan._device.caching_allocator import Block, CachingAllocator, PoolKey
from sacplan._device.device_memory import device_memory, peaks_on
from sacplan._plan.limits import DEFAULT_HEADROOM
from sacplan._profile.tracing import trace_step
from sacplan._program.program import Program

DEVICES = ("h100", "h200", "a100-40gb", "rtx-4090")
_CLOSE = 1 / 500  # of the peak: how closely what a step needs is searched for


@dataclass(frozen=True, slots=True)
class Batches:
    """A model, and batches of any number of sequences for it."""

    model: torch.nn.Module
    length: int
    optimizer: Any = torch.optim.AdamW

    def batch(self, n: int) -> dict[str, torch.Tensor]:
        """Return ``n`` sequences without data."""
        return empty_text(n, self.length)


def gpt2_medium(use_cache: bool = False) -> Batches:
    """Build GPT-2 medium, 355 M parameters, all trained."""
    import transformers

    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=use_cache)
    return Batches(on_meta(transformers.GPT2LMHeadModel, config), 1024)


def llama_lora() -> Batches:
    """Build Llama-3-8B's shape, frozen but for adapters of rank 16."""
    import peft

    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    base = llama_3_8b(use_cache=False)
    with torch.device("meta"):
        return Batches(peft.get_peft_model(base, lora), 2048)


MODELS: dict[str, Callable[[], Batches]] = {
    "gpt2-medium": gpt2_medium,
    "gpt2-with-cache": functools.partial(gpt2_medium, use_cache=True),
    "llama-3-8b-lora": llama_lora,
}


# --- what the allocator needs -----------------------------------------------------------------------------


class OutOfMemory(Exception):
    """A step does not run in the memory that there is."""


class LimitedAllocator(CachingAllocator):
    """A caching allocator on a device with little memory: it gives free segments back before it gives up."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.given_back_bytes = 0

    def _new_block(self, nbytes: int, pool: PoolKey) -> Block:
        before = self.reserved_bytes
        block = super()._new_block(nbytes, pool)
        if self.reserved_bytes - self.given_back_bytes > self.limit_bytes:
            for free in [b for b in self._at.values() if b.before is b.after is None]:
                self._forget(free)
                self.given_back_bytes += free.nbytes
            if self.reserved_bytes - self.given_back_bytes > self.limit_bytes:
                raise OutOfMemory(f"{self.reserved_bytes - before} bytes")
        return block


def runs_in(program: Program, limit_bytes: int) -> bool:
    """Whether torch's default allocator gets through a step with that much memory."""
    try:
        peaks_on(LimitedAllocator(limit_bytes), program)
    except OutOfMemory:
        return False
    return True


def needed_bytes(program: Program, peak_bytes: int) -> int:
    """Find the least memory that the default allocator runs the step in, by bisection."""
    low, high = peak_bytes - 1, device_memory(program).steps.max_memory_reserved
    while high - low > peak_bytes * _CLOSE:
        middle = (low + high) // 2
        if runs_in(program, middle):
            high = middle
        else:
            low = middle
    return high


def fragmentation(case: Batches, n: int, device: str, budget_bytes: int) -> dict[str, Any]:
    """Return the shares of the peak that a planned step reserves, and needs."""
    plan = sacplan.plan(
        sacplan.profile(case.model, case.batch(n), optimizer=case.optimizer, device=device),
        as_budget(budget_bytes),
    )
    seen = trace_step(
        case.model, case.batch(n), None, case.optimizer, device, "cost-model", "fake",
        prepare=lambda fake: apply(fake, plan), saved="observe",
    )  # fmt: skip
    peak = seen.peak_bytes
    return {
        "batch_size": n,
        "peak_bytes": peak,
        "reserved_share": device_memory(seen.program).steps.max_memory_reserved / peak,
        "needed_share": needed_bytes(seen.program, peak) / peak,
    }


# --- the table --------------------------------------------------------------------------------------------


def rows_of(where: tuple[str, Batches, str]) -> Iterator[Row]:
    """Yield the row of a model on a device."""
    found, seconds = timed(lambda: _row(*where))
    yield found | ({"seconds": seconds} if "points" in found else {})


def _row(name: str, case: Batches, device: str) -> Row:
    row: Row = {"model": name, "device": device}
    try:
        found = sacplan.throughput(
            case.model, case.batch, device=device, optimizer=case.optimizer, headroom=DEFAULT_HEADROOM
        )
    except sacplan.InfeasibleBudget as error:  # not even one sequence fits
        return row | {
            "budget_bytes": error.budget_bytes,
            "smallest_feasible_bytes": error.smallest_feasible_bytes,
        }
    points = {p.batch_size: p for p in found.points}
    unplanned, largest = found.unplanned_batch_size, found.largest_batch_size
    kinds = {"unplanned": unplanned, "fastest": found.batch_size, "largest": largest}
    played = {"unplanned": unplanned, "half way": (unplanned + largest) // 2, "largest": largest}
    return row | {
        "budget_bytes": found.budget_bytes,
        "headroom_bytes": found.headroom_bytes,
        **{kind: _facts(points[n]) for kind, n in kinds.items() if n},
        "allocator": {
            kind: fragmentation(case, n, device, found.budget_bytes) for kind, n in played.items() if n
        },
        "points": [_facts(p) for p in found.points],
    }


def _facts(point: sacplan.CapacityPoint) -> Row:
    return {name: getattr(point, name) for name in point.shown}


_WHERE = Table(("model", ">15"), ("device", ">10"), ("GiB", ">7.2f"))
_BATCH = Table(("n", ">5"), ("/s", ">8.2f"))
_NEED = Table(("need", ">5.3f"), ("res", ">5.3f"))
_LOOKS = Table(("looks", ">5"), ("s", ">5.0f"))


def _heads() -> str:
    kinds = [f"{kind:>14}" for kind in ("without a plan", "the fastest", "the largest")]
    kinds += [f"{kind:>11}" for kind in ("unplanned", "half way", "largest")]
    columns = (_WHERE.head, *[_BATCH.head] * 3, *[_NEED.head] * 3, _LOOKS.head)
    return " | ".join([_WHERE.row("", "", "budget"), *kinds]) + "\n" + " | ".join(columns)


def _line(row: Row) -> str:
    where = _WHERE.row(row["model"], row["device"], row["budget_bytes"] / GIB)
    if "points" not in row:
        least = row["smallest_feasible_bytes"] / GIB
        return f"{where} | one sample does not fit, it takes {least:.2f} GiB"
    batches = [row.get(kind) for kind in ("unplanned", "fastest", "largest")]
    rates = (
        _BATCH.row("-", "") if b is None else _BATCH.row(b["batch_size"], b["samples_per_s"]) for b in batches
    )
    shares = [row["allocator"].get(kind) for kind in ("unplanned", "half way", "largest")]
    needs = (f"{'-':>11}" if s is None else _NEED.row(s["needed_share"], s["reserved_share"]) for s in shares)
    return " | ".join((where, *rates, *needs, _LOOKS.row(len(row["points"]), row["seconds"])))


def main() -> None:
    parser = Parser(__doc__, "capacity.json")
    parser.choice("--models", MODELS)
    parser.add_argument("--devices", nargs="+", default=list(DEVICES))
    arguments = parser.begin(silence=True)
    print("n: samples in a batch; /s: predicted samples a second; need, res: over the peak; looks: traces")
    print(_heads())
    cases = ((name, case, device) for name in arguments.models
             for case in [MODELS[name]()] for device in arguments.devices)  # fmt: skip
    run_cases(cases, rows_of, _line, arguments.json, headroom=DEFAULT_HEADROOM)


if __name__ == "__main__":
    main()
