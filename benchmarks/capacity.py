"""What fits on a GPU: the largest batch without a plan and with one, the fastest, and the headroom that they need.

    python -m benchmarks.capacity [--models gpt2-medium gpt2-with-cache llama-3-8b-lora]
                                  [--devices h100 h200 a100-40gb rtx-4090]

Models of transformers, bfloat16, on the meta device, nothing computed: GPT-2 medium, sequences of 1024, all parameters
trained with AdamW (states in bfloat16 too); the same with ``use_cache=True``, the default of transformers, where the
output holds keys and values of all layers; and Llama-3-8B's shape, sequences of 2048, with LoRA of rank 16 on all
linear layers of the blocks (peft), trained with AdamW. The budget is the device's memory less the default headroom.
Samples per second are those of the cost model, on every device.

What headroom is for: the largest batch without a plan, the largest with one, and one half way between are traced with
their plans applied, and played through torch's caching allocator in its default settings
(``benchmarks/allocator.py``), twice: with unlimited memory (``res``), and with ever less of it, where free
segments are given back before it gives up, as the real one does, to find what it needs (``need``). Both are over the
step's peak. It is one step on an empty device: what later steps find split is not in it.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

import sacplan
from benchmarks import allocator, common
from benchmarks.common import GIB, describe, machine, write_results
from sacplan._apply.apply import apply
from sacplan._plan.limits import DEFAULT_HEADROOM
from sacplan._profile.tracing import trace_step
from sacplan._program.program import Program

DEVICES = ("h100", "h200", "a100-40gb", "rtx-4090")
_CLOSE = 1 / 500  # of the peak: how closely what a step needs is searched for


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how to make batches for it."""

    model: torch.nn.Module
    vocabulary: int
    length: int
    optimizer: Any

    def batch(self, n: int) -> dict[str, torch.Tensor]:
        """Token ids without data."""
        tokens = torch.empty(n, self.length, dtype=torch.long, device="meta")
        return {"input_ids": tokens, "labels": tokens}


def gpt2_medium(use_cache: bool = False) -> Case:
    """355 M parameters, all trained."""
    import transformers

    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=use_cache)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).bfloat16()
    return Case(model, config.vocab_size, 1024, torch.optim.AdamW)


def llama_lora() -> Case:
    """8 B parameters, frozen but for adapters of rank 16."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config).bfloat16(), lora)
    return Case(model, config.vocab_size, 2048, torch.optim.AdamW)


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2-medium": gpt2_medium,
    "gpt2-with-cache": functools.partial(gpt2_medium, use_cache=True),
    "llama-3-8b-lora": llama_lora,
}


# --- what the allocator needs -----------------------------------------------------------------------------


class OutOfMemory(Exception):
    """A step does not run in the memory that there is."""


class LimitedAllocator(allocator.CachingAllocator):
    """A caching allocator on a device with little memory: it gives free segments back before it gives up."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.given_back_bytes = 0

    def _new_segment(self, nbytes: int, small: bool) -> allocator._Block:
        before = self.reserved_bytes
        block = super()._new_segment(nbytes, small)
        if self.reserved_bytes - self.given_back_bytes > self.limit_bytes:
            for free in [b for b in self._at.values() if b.before is b.after is None]:
                self._forget(free)
                self.given_back_bytes += free.nbytes
            if self.reserved_bytes - self.given_back_bytes > self.limit_bytes:
                raise OutOfMemory(f"{self.reserved_bytes - before} bytes")
        return block


def runs_in(program: Program, limit_bytes: int) -> bool:
    """Whether the default allocator gets through a step with that much memory."""
    limited = LimitedAllocator(limit_bytes)
    with mock.patch.object(allocator, "CachingAllocator", return_value=limited):
        try:
            allocator.allocator_peaks(program)
        except OutOfMemory:
            return False
    return True


def needed_bytes(program: Program, peak_bytes: int) -> int:
    """The least memory found that the default allocator runs the step in, by bisection."""
    low, high = peak_bytes - 1, allocator.allocator_peaks(program).reserved_bytes
    while high - low > peak_bytes * _CLOSE:
        middle = (low + high) // 2
        if runs_in(program, middle):
            high = middle
        else:
            low = middle
    return high


def fragmentation(case: Case, n: int, device: str, budget_bytes: int) -> dict[str, Any]:
    """Shares of the peak that a planned step reserves, and needs."""
    plan = sacplan.plan(
        sacplan.profile(case.model, case.batch(n), optimizer=case.optimizer, device=device),
        f"{budget_bytes}B",
    )
    seen = trace_step(
        case.model, case.batch(n), None, case.optimizer, device, "cost-model", "fake",
        prepare=lambda fake: apply(fake, plan), saved="observe",
    )  # fmt: skip
    peak = seen.peak_bytes
    return {
        "batch_size": n,
        "peak_bytes": peak,
        "reserved_share": allocator.allocator_peaks(seen.program).reserved_bytes / peak,
        "needed_share": needed_bytes(seen.program, peak) / peak,
    }


# --- the table --------------------------------------------------------------------------------------------


def measured(name: str, case: Case, device: str) -> dict[str, Any]:
    """One row: the three batches on a device."""
    began = time.perf_counter()
    row: dict[str, Any] = {"model": name, "device": device}
    try:
        found = sacplan.throughput(case.model, case.batch, device=device, optimizer=case.optimizer)
    except sacplan.InfeasibleBudget as error:
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
        **{kind: asdict(points[n]) for kind, n in kinds.items() if n},
        "allocator": {
            kind: fragmentation(case, n, device, found.budget_bytes) for kind, n in played.items() if n
        },
        "points": [asdict(p) for p in found.points],
        "seconds": time.perf_counter() - began,
    }


def _line(row: dict[str, Any]) -> str:
    left = f"{row['model']:>15} {row['device']:>10} {row['budget_bytes'] / GIB:7.2f}"
    if "points" not in row:
        least = row["smallest_feasible_bytes"] / GIB
        return f"{left} | one sample does not fit, it takes {least:.2f} GiB"
    batches = [row.get(kind) for kind in ("unplanned", "fastest", "largest")]
    rates = "".join(
        f" | {'-':>5} {'':>8}" if b is None else f" | {b['batch_size']:>5} {b['samples_per_s']:>8.2f}"
        for b in batches
    )
    shares = [row["allocator"].get(kind) for kind in ("unplanned", "half way", "largest")]
    needs = "".join(
        f" | {'-':>11}" if s is None else f" | {s['needed_share']:>5.3f} {s['reserved_share']:>5.3f}"
        for s in shares
    )
    return f"{left}{rates}{needs} | {len(row['points']):>5} {row['seconds']:5.0f}"


def main() -> None:
    parser = common.parser(__doc__, "capacity.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", default=list(DEVICES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe(machine()))
    print("n: samples in a batch; /s: predicted samples a second; need, res: over the peak; looks: traces")
    heads = "".join(f" | {kind:>14}" for kind in ("without a plan", "the fastest", "the largest"))
    heads += "".join(f" | {kind:>11}" for kind in ("unplanned", "half way", "largest"))
    columns = f" | {'n':>5} {'/s':>8}" * 3 + f" | {'need':>5} {'res':>5}" * 3
    print(f"{'':>15} {'':>10} {'budget':>7}{heads}")
    print(f"{'model':>15} {'device':>10} {'GiB':>7}{columns} | {'looks':>5} {'s':>5}")
    rows = []
    for name in arguments.models:
        case = MODELS[name]()
        for device in arguments.devices:
            rows.append(measured(name, case, device))
            print(_line(rows[-1]), flush=True)
            write_results(arguments.json, rows, headroom=DEFAULT_HEADROOM)  # so far


if __name__ == "__main__":
    main()
