"""Plans for models of transformers, run for real on this CPU and measured.

    python -m benchmarks.real_models                    # all, one thread; figures into benchmarks/results
    python -m benchmarks.real_models gpt2 mixtral

For each model the unplanned step, then plans at three budgets, dropout on. Predicted is the peak that the profile,
or the plan, promises; measured are the profiler's allocation events over one real step, plus what was alive
before. Recompute is a share of the step's predicted time. `bits` says whether loss, gradients and buffers of the
very step that was measured are the same bits as those of the unplanned step.

The budgets are 85, 70 and 55 % of the unplanned peak. Where no plan has 55 %, they are the smallest feasible peak
(marked `smallest`), and a third and two thirds of the way from there to the unplanned peak.

A profile is fake where it can be. Where the fake trace had to assume what depends on data (routing, matching,
masks drawn at random), the profile is made again with trace="real", from the same random state as the step.

Gradient accumulation is planned as one step whose loss_fn does the micro-batches (`llama+accumulation`: each has
its backward pass, the last one's is left to the caller). A profile of one micro-batch starts without gradients, so
it is no plan for the second one, which has the gradients of the first beside it.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import sacplan
from benchmarks import common, zoo
from benchmarks.common import (
    MIB,
    RESULTS,
    describe,
    machine,
    on_one_thread,
    real_step,
    seed_everything,
    write_results,
)

SHARES = (0.85, 0.70, 0.55)
TOLERANCE = 0.005
_SEED = 7

_NAMES_BY_FAMILY = {
    "dense": "gpt2 llama mistral qwen2 qwen3 gemma2 gemma3 phi3 falcon gptj gpt_neox opt bloom xlnet",
    "encoder": "bert roberta albert electra deberta_v2 modernbert distilbert",
    "encoder-decoder": "t5 bart pegasus mbart",
    "mixture": "mixtral qwen3_moe olmoe deepseek_v3 switch",
    "state space": "mamba mamba2 rwkv jamba",
    "vision": "vit deit beit dinov2 resnet convnext swin segformer vit_mae yolos",
    "audio": "whisper wav2vec2 hubert speech_to_text",
    "multimodal": "clip siglip blip vilt llava qwen2_vl",
    "variant": "llama+lora llama+frozen llama+accumulation llama+summed llama+autocast gpt2+adamw",
}
FAMILY = {name: family for family, names in _NAMES_BY_FAMILY.items() for name in names.split()}
"""Of each entry; the names are those of ``zoo``, and one with an optimizer."""

Case = tuple[torch.nn.Module, Any, Any, Any]

_OPTIMIZERS = {"gpt2+adamw": torch.optim.AdamW}
_WITHOUT_DROPOUT = (
    "mistral",
    "deepseek_v3",
    "llava",
)  # so that the CPU's flash attention is among what is measured
_COPIES = {"rwkv": 2, "mamba": 2, "jamba": 2}  # else 4: activations outweigh the parameters


@dataclass(frozen=True, slots=True)
class Row:
    """One step: unplanned (``budget`` is "none"), or with the plan for a budget.

    Attributes:
        budget: "85%", "smallest 61%", or "none".
        trace: how the profile was made.
        recompute_share: of the predicted time of the unplanned step.
        wall_ms: of the measured step, under the profiler.
        bit_equal: loss, gradients and buffers as in the unplanned step; None for that one itself.
        seconds: for the profile (unplanned), or for the plan.
    """

    model: str
    family: str
    trace: str
    parameters: int
    budget: str
    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int
    recompute_share: float
    wall_ms: float
    bit_equal: bool | None
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes


@on_one_thread
def profile_of(model: torch.nn.Module, batch: Any, loss_fn: Any, optimizer: Any) -> sacplan.Profile:
    """A fake profile, or a real one where the fake one rests on assumptions about data."""

    def profile(trace: Any) -> sacplan.Profile:
        seed_everything(_SEED)
        return sacplan.profile(model, batch, loss_fn, optimizer, device="cpu", trace=trace)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sacplan.SacplanWarning)
            found = profile("fake")
    except sacplan.DataDependentError:
        return profile("real")
    return profile("real") if found.assumptions else found


def plans_of(
    profile: sacplan.Profile, shares: tuple[float, ...] = SHARES
) -> Iterator[tuple[str, sacplan.Plan, float]]:
    """``(budget in words, plan, seconds)``, the largest budget first; see the module's docstring."""
    peak = profile.peak_bytes
    shares = tuple(sorted(shares))
    try:
        sacplan.plan(profile, int_budget(shares[0] * peak))
        budgets = [(f"{share:.0%}", int(share * peak)) for share in shares]
    except sacplan.InfeasibleBudget as error:
        smallest = error.smallest_feasible_bytes
        steps = [smallest + (peak - smallest) * i // len(shares) for i in range(len(shares))]
        budgets = [(f"{b / peak:.0%}" if i else f"smallest {b / peak:.0%}", b) for i, b in enumerate(steps)]
    for words, budget_bytes in reversed(budgets):
        began = time.perf_counter()
        plan = sacplan.plan(profile, int_budget(budget_bytes))
        yield words, plan, time.perf_counter() - began


def int_budget(budget_bytes: float) -> str:
    """Bytes, as ``sacplan.plan`` reads them."""
    return f"{int(budget_bytes)}B"


@on_one_thread
def rows_of(name: str, shares: tuple[float, ...] = SHARES, copies: int | None = None) -> list[Row]:
    """The unplanned step of an entry, then one row for each budget."""
    seed_everything(0)
    model, batch, loss_fn = zoo.build(
        name.removesuffix("+adamw"),
        "small",
        "cpu",
        dropout=None if name in _WITHOUT_DROPOUT else 0.1,
        copies=copies or _COPIES.get(name, 4),
    )
    return list(steps_of(name, FAMILY[name], (model, batch, loss_fn, _OPTIMIZERS.get(name)), shares))


@on_one_thread
def steps_of(name: str, family: str, case: Case, shares: tuple[float, ...] = SHARES) -> Iterator[Row]:
    """The same for any model: ``case`` is the model, its batch, its loss_fn and its optimizer."""
    model, batch, loss_fn, optimizer = case
    began = time.perf_counter()
    profile = profile_of(model, batch, loss_fn, optimizer)
    seconds = time.perf_counter() - began
    plain = real_step(model, batch, loss_fn, optimizer=optimizer, seed=_SEED)

    def row(budget: str, plan: sacplan.Plan | None, seconds: float) -> Row:
        seen = plain if plan is None else real_step(
            model, batch, loss_fn, optimizer=optimizer, plan=plan, seed=_SEED
        )  # fmt: skip
        return Row(
            model=name,
            family=family,
            trace=profile.trace,
            parameters=sum(p.numel() for p in model.parameters()),
            budget=budget,
            budget_bytes=None if plan is None else plan.budget_bytes,
            predicted_bytes=profile.peak_bytes if plan is None else plan.peak_bytes,
            measured_bytes=seen.peak_bytes,
            recompute_share=0.0 if plan is None else plan.recompute_ms / plan.step_ms,
            wall_ms=seen.wall_ms,
            bit_equal=None if plan is None else seen.same_bits(plain),
            seconds=seconds,
        )

    yield row("none", None, seconds)
    for words, plan, took in plans_of(profile, shares):
        yield row(words, plan, took)


def summary(rows: list[Row], failed: list[str]) -> str:
    """One line: the worst error, and how many rows are as they should be."""
    worst = max(rows, key=lambda r: abs(r.error))
    planned = [r for r in rows if r.budget_bytes is not None]
    return (
        f"{len({r.model for r in rows})} models, {len(rows)} steps: worst error {worst.error:+.3%} ({worst.model}, "
        f"{worst.budget}); {sum(abs(r.error) <= TOLERANCE for r in rows)} of {len(rows)} within {TOLERANCE:.1%}; "
        f"{sum(r.within_budget for r in planned)} of {len(planned)} within the budget; "
        f"{sum(bool(r.bit_equal) for r in planned)} of {len(planned)} bit-equal"
        + (f"; FAILED: {', '.join(failed)}" if failed else "")
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a model failed, a budget was broken or bits differ."""
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAMILY)}", metavar="name")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in FAMILY]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(FAMILY)}")
    torch.set_num_threads(1)
    print(describe(machine()))
    print("peaks in MiB; recompute is a share of the predicted time of the step")
    print(
        f"{'model':>18} {'family':>15} {'trace':>5} {'budget':>12} {'MiB':>8} {'predicted':>9} {'measured':>8} "
        f"{'error':>8} {'recompute':>9} bits"
    )
    json_path = arguments.json or (None if arguments.names else RESULTS / "real_models.json")
    began = time.perf_counter()
    rows: list[Row] = []
    failed: list[str] = []
    for name in arguments.names or FAMILY:
        try:
            found = rows_of(name)
        except Exception:
            failed.append(name)
            print(f"{name:>18} FAILED")
            traceback.print_exc(file=sys.stdout)
            continue
        rows.extend(found)
        for row in found:
            print(_line(row), flush=True)
        data = [asdict(r) | {"error": r.error, "within_budget": r.within_budget} for r in rows]
        write_results(
            json_path, data, summary=summary(rows, failed)
        )  # a sweep that is stopped leaves what it has
    if rows:
        print(summary(rows, failed))
        print(f"{time.perf_counter() - began:.0f} s")
    good = all(r.within_budget and r.bit_equal is not False for r in rows)
    return int(bool(failed) or not good)


def _line(row: Row) -> str:
    budget = "" if row.budget_bytes is None else f"{row.budget_bytes / MIB:8.3f}"
    over = "" if row.within_budget else f" OVER by {row.measured_bytes - (row.budget_bytes or 0)} B"
    bits = {None: "", True: "equal", False: "DIFFER"}[row.bit_equal]
    return (
        f"{row.model:>18} {row.family:>15} {row.trace:>5} {row.budget:>12} {budget:>8} "
        f"{row.predicted_bytes / MIB:9.3f} {row.measured_bytes / MIB:8.3f} {row.error:+8.3%} "
        f"{row.recompute_share:9.1%} {bits}{over}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
