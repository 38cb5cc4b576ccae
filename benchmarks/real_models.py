"""Do plans for sixty models of transformers hold when they run for real on this CPU?

    python -m benchmarks.real_models                    # all, one thread; figures into benchmarks/results
    python -m benchmarks.real_models gpt2 mixtral       # some, printed

A row is a step of a model: without a plan, then with plans at three budgets, dropout on. Predicted is the peak that the
profile, or the plan, promises; measured are the profiler's allocation events over one real step, plus what was alive
before. Recompute is a share of the step's predicted time. ``bits`` says whether loss, gradients and buffers of the very
step that was measured are the same bits as those of the unplanned step.

The budgets are 85, 70 and 55 % of the unplanned peak. Where no plan has 55 %, they are the smallest feasible peak
(marked ``smallest``), and a third and two thirds of the way from there to the unplanned peak.

A profile is fake where it can be. Where the fake trace had to assume what depends on data (routing, matching, masks
drawn at random), the profile is made again with trace="real", from the same random state as the step.

Gradient accumulation is planned as one step whose loss_fn does the micro-batches (``llama+accumulation``: each has its
backward pass, the last one's is left to the caller). A profile of one micro-batch starts without gradients, so it is no
plan for the second one, which has the gradients of the first beside it.

Two things that training does and the recorded step did not are tried with every model (``models/step_variants.py``):

- *A smaller last batch*, after the full one and under the same plan: three quarters of the rows, and text of an odd
    length where the model takes it. It must need no more memory than the full one, and have the bits of the unplanned
    step on that
  batch.
- *A cache filled in the first forward*: each layer gets a table of cosines and sines that its first call computes. The
  model is profiled and planned with the table empty. Measured are the step that fills it and the one after.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import as_budget, timed
from benchmarks.harness.results import MIB, RESULTS, describe, machine, read_results, write_results
from benchmarks.harness.steps import RealStep, on_one_thread, seed_everything
from benchmarks.harness.table import Table
from benchmarks.models import hf_models, step_variants
from benchmarks.models.cases import Case

FIGURES = RESULTS / "real_models.json"
SHARES = (0.85, 0.70, 0.55)
TOLERANCE = 0.005
_SEED = 7  # of the profile, too: a real trace must see what the step sees

_NAMES_BY_FAMILY = {
    "dense": "gpt2 llama mistral qwen2 qwen3 gemma2 gemma3 phi3 falcon gptj gpt_neox opt bloom xlnet",
    "encoder": "bert roberta albert electra deberta_v2 modernbert distilbert",
    "encoder-decoder": "t5 bart pegasus mbart", "mixture": "mixtral qwen3_moe olmoe deepseek_v3 switch",
    "state space": "mamba mamba2 rwkv jamba",
    "vision": "vit deit beit dinov2 resnet convnext swin segformer vit_mae yolos",
    "audio": "whisper wav2vec2 hubert speech_to_text", "multimodal": "clip siglip blip vilt llava qwen2_vl",
    "variant": "llama+lora llama+frozen llama+accumulation llama+summed llama+autocast gpt2+adamw",
}  # fmt: skip
FAMILY = {name: family for family, names in _NAMES_BY_FAMILY.items() for name in names.split()}
"""The family of each entry. Names are those of ``hf_models``, and one with an optimizer."""


_OPTIMIZERS = {"gpt2+adamw": torch.optim.AdamW}
_WITHOUT_DROPOUT = (
    "mistral",
    "deepseek_v3",
    "llava",
)  # the CPU's flash attention takes none: it is measured, too
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
        variant: "lazy cache" where each layer has one; measured is then the second step.
        first_bytes: of the step that fills the caches.
        smaller: the smaller batch, in words.
        smaller_bytes: measured peak of a step on it, after one on the full batch.
        smaller_bit_equal: as ``bit_equal``, on the smaller batch.
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
    variant: str = ""
    first_bytes: int | None = None
    smaller: str = ""
    smaller_bytes: int | None = None
    smaller_bit_equal: bool | None = None

    @property
    def error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return (
            self.budget_bytes is None or max(self.measured_bytes, self.first_bytes or 0) <= self.budget_bytes
        )

    @property
    def smaller_fits(self) -> bool:
        """Whether the smaller batch needs no more memory than the full one."""
        return self.smaller_bytes is None or self.smaller_bytes <= self.measured_bytes

    @property
    def good(self) -> bool:
        """Whether everything is as promised, whatever was predicted."""
        return (
            self.within_budget
            and self.smaller_fits
            and self.bit_equal is not False
            and self.smaller_bit_equal is not False
        )


@on_one_thread
def profile_of(model: torch.nn.Module, batch: Any, loss_fn: Any, optimizer: Any) -> sacplan.Profile:
    """Profile with a fake trace, or with a real one where the fake one rests on assumptions about data."""

    def profile(trace: Any) -> sacplan.Profile:
        seed_everything(_SEED)
        return sacplan.profile(model, batch, loss_fn, optimizer, device="cpu", trace=trace)

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", sacplan.SacplanWarning)
            found = profile("fake")
    except sacplan.DataDependentError:
        return profile("real")
    # Or where the largest of an optimizer's steps depends on data.
    depends = any("depends on data" in str(warning.message) for warning in said)
    return profile("real") if found.rules or depends else found


def plans_of(
    profile: sacplan.Profile, shares: tuple[float, ...] = SHARES
) -> Iterator[tuple[str, sacplan.Plan, float]]:
    """Yield ``(budget in words, plan, seconds)``, the largest budget first; see the module's docstring."""
    peak = profile.peak_bytes
    shares = tuple(sorted(shares))
    try:
        sacplan.plan(profile, as_budget(shares[0] * peak))
        budgets = [(f"{share:.0%}", int(share * peak)) for share in shares]
    except sacplan.InfeasibleBudget as error:
        smallest = error.smallest_feasible_bytes
        steps = [smallest + (peak - smallest) * i // len(shares) for i in range(len(shares))]
        budgets = [(f"{b / peak:.0%}" if i else f"smallest {b / peak:.0%}", b) for i, b in enumerate(steps)]
    for words, budget_bytes in reversed(budgets):
        yield words, *timed(functools.partial(sacplan.plan, profile, as_budget(budget_bytes)))


@on_one_thread
def rows_of(name: str, shares: tuple[float, ...] = SHARES, copies: int | None = None) -> list[Row]:
    """Return the unplanned step of an entry and one row for each budget; then the same with a lazily filled cache."""

    def case() -> Case:
        seed_everything(0)
        model, batch, loss_fn = hf_models.build(
            name.removesuffix("+adamw"),
            "small",
            "cpu",
            dropout=None if name in _WITHOUT_DROPOUT else 0.1,
            copies=copies or _COPIES.get(name, 4),
        )
        return Case(model, batch, loss_fn, _OPTIMIZERS.get(name))

    family = FAMILY[name]
    return [
        *steps_of(name, family, case(), shares, smaller=True),
        *steps_with_a_lazy_cache(name, family, case(), shares),
    ]


@on_one_thread
def steps_of(
    name: str, family: str, case: Case, shares: tuple[float, ...] = SHARES, *, smaller: bool = False
) -> Iterator[Row]:
    """Yield the unplanned step of a model, then one row for each budget; ``smaller`` adds a smaller batch to each."""
    profile, seconds = _timed_profile(case)
    batch, words = (
        step_variants.smaller_batch(case.model, case.batch, case.loss_fn) if smaller else (None, "")
    )
    plain = case.step()
    plain_smaller = case.step(batch, before=(case.batch,)) if smaller else None

    def measured(row: Row, plan: sacplan.Plan | None) -> Row:
        seen = plain if plan is None else case.step(plan=plan)
        row = _with_step(row, seen, plain)
        if plain_smaller is None:
            return row
        seen = plain_smaller if plan is None else case.step(batch, plan=plan, before=(case.batch,))
        return replace(
            row,
            smaller=words,
            smaller_bytes=seen.peak_bytes,
            smaller_bit_equal=None if plan is None else seen.same_bits(plain_smaller),
        )

    yield measured(_predicted(name, family, case, profile, seconds), None)
    for budget, plan, took in plans_of(profile, shares):
        yield measured(_predicted(name, family, case, profile, took, budget, plan), plan)


def steps_with_a_lazy_cache(
    name: str, family: str, case: Case, shares: tuple[float, ...] = SHARES
) -> Iterator[Row]:
    """Yield the same rows, where each layer has a cache that the first forward fills."""
    empty = step_variants.rotate_lazily(case.model, case.batch, case.loss_fn)
    profile, seconds = _timed_profile(case)
    empty()
    plain_first = case.step()
    empty()
    plain = case.step(before=(case.batch,))

    def measured(row: Row, plan: sacplan.Plan | None) -> Row:
        empty()
        first = case.step(plan=plan)
        empty()
        seen = case.step(plan=plan, before=(case.batch,))
        row = _with_step(row, seen, plain)
        same = None if plan is None else bool(row.bit_equal) and first.same_bits(plain_first)
        return replace(row, variant="lazy cache", first_bytes=first.peak_bytes, bit_equal=same)

    yield measured(_predicted(name, family, case, profile, seconds), None)
    for budget, plan, took in plans_of(profile, shares):
        yield measured(_predicted(name, family, case, profile, took, budget, plan), plan)


def _timed_profile(case: Case) -> tuple[sacplan.Profile, float]:
    return timed(lambda: profile_of(case.model, case.batch, case.loss_fn, case.optimizer))


def _predicted(
    name: str,
    family: str,
    case: Case,
    profile: sacplan.Profile,
    seconds: float,
    budget: str = "none",
    plan: sacplan.Plan | None = None,
) -> Row:
    """Return a row whose step has not run yet."""
    return Row(
        model=name, family=family, trace=profile.trace,
        parameters=sum(p.numel() for p in case.model.parameters()), budget=budget,
        budget_bytes=None if plan is None else plan.budget_bytes,
        predicted_bytes=profile.peak_bytes if plan is None else plan.peak_bytes, measured_bytes=0,
        recompute_share=0.0 if plan is None else plan.recompute_ms / plan.step_ms, wall_ms=0.0, bit_equal=None,
        seconds=seconds,
    )  # fmt: skip


def _with_step(row: Row, seen: RealStep, plain: RealStep) -> Row:
    same = None if row.budget_bytes is None else seen.same_bits(plain)
    return replace(row, measured_bytes=seen.peak_bytes, wall_ms=seen.wall_ms, bit_equal=same)


def summary(rows: list[Row], failed: list[str]) -> str:
    """Say the worst error, and how many rows are as they should be, for each kind of step."""
    said = [
        f"{len({r.model for r in rows})} models",
        _said("recorded steps", [r for r in rows if not r.variant]),
        _said("with a lazily filled cache", [r for r in rows if r.variant]),
    ]
    smaller = [r for r in rows if r.smaller_bytes is not None]
    planned = [r for r in smaller if r.budget_bytes is not None]
    said.append(
        f"smaller last batch: {sum(r.smaller_fits for r in smaller)} of {len(smaller)} need no more than the full "
        f"one, {sum(bool(r.smaller_bit_equal) for r in planned)} of {len(planned)} bit-equal"
    )
    if failed:
        said.append(f"FAILED: {', '.join(failed)}")
    return "; ".join(said)


def _said(kind: str, rows: list[Row]) -> str:
    if not rows:
        return f"{kind}: none"
    worst = max(rows, key=lambda r: abs(r.error))
    planned = [r for r in rows if r.budget_bytes is not None]
    return (
        f"{kind}: {len(rows)}, worst error {worst.error:+.3%} ({worst.model}, {worst.budget}), "
        f"{sum(abs(r.error) <= TOLERANCE for r in rows)} within {TOLERANCE:.1%}, "
        f"{sum(r.within_budget for r in planned)} of {len(planned)} within the budget, "
        f"{sum(bool(r.bit_equal) for r in planned)} of {len(planned)} bit-equal"
    )


def claim(rows: list[Row]) -> str:
    """Write what `docs/figures.md` says of the figures."""
    recorded = [r for r in rows if not r.variant]
    lazy = [r for r in rows if r.variant]
    smaller = [r for r in recorded if r.smaller_bytes is not None]
    said = (
        f"{len({r.model for r in rows})} architectures of `transformers` at small size, run for real on the CPU, each "
        f"without a plan and at three budgets: {_claim(recorded)}"
    )
    if lazy:
        said += f". With a cache that each layer fills in its first forward: {_claim(lazy)}"
    if smaller:
        planned = [r for r in smaller if r.budget_bytes is not None]
        said += (
            f". A smaller last batch needs no more memory than the full one in "
            f"{sum(r.smaller_fits for r in smaller)} of {len(smaller)} steps, with the bits of the unplanned step in "
            f"{sum(bool(r.smaller_bit_equal) for r in planned)} of {len(planned)}"
        )
    return said


def _claim(rows: list[Row]) -> str:
    planned = [r for r in rows if r.budget_bytes is not None]
    good = sum(r.within_budget and bool(r.bit_equal) for r in planned)
    return (
        f"predicted and measured peak of {len(rows)} steps differ by {100 * max(abs(r.error) for r in rows):.3f} % at "
        f"most; {good} of {len(planned)} planned ones are within the budget, with the same loss and gradients bit by "
        "bit"
    )


def read(path: Path = FIGURES) -> list[Row]:
    """Read the rows of a file of figures."""
    names = {f.name for f in fields(Row)}
    return [Row(**{k: v for k, v in row.items() if k in names}) for row in read_results(path)[1]]


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a model failed, a budget was broken or bits differ."""
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAMILY)}", metavar="name")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in FAMILY]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(FAMILY)}")
    torch.set_num_threads(1)
    print(describe(machine()))
    print("peaks in MiB; recompute is a share of the predicted time of the step")
    print(f"{_TABLE.head} first or smaller")
    json_path = arguments.json or (None if arguments.names else FIGURES)
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
        data = [asdict(r) | {name: getattr(r, name) for name in _DERIVED} for r in rows]
        write_results(json_path, data, summary=summary(rows, failed))  # a stopped run leaves what it has
    if rows:
        print(summary(rows, failed))
        print(claim(rows))
        print(f"{time.perf_counter() - began:.0f} s")
    return int(bool(failed) or not all(r.good for r in rows))


_DERIVED = ("error", "within_budget", "smaller_fits", "good")
_BITS = {None: "", True: "equal", False: "DIFFER"}


_TABLE = Table(
    ("model", ">18"), ("family", ">15"), ("trace", ">5"), ("budget", ">12"), ("MiB", ">8.3f"), ("predicted", ">9.3f"),
    ("measured", ">8.3f"), ("error", ">+8.3%"), ("recompute", ">9.1%"), ("bits", ">6"),
)  # fmt: skip


def _line(row: Row) -> str:
    over = "" if row.within_budget else f" OVER by {row.measured_bytes - (row.budget_bytes or 0)} B"
    other = ""
    if row.smaller_bytes is not None:
        more = "" if row.smaller_fits else " MORE"
        other = f"{row.smaller_bytes / MIB:8.3f}{more} {_BITS[row.smaller_bit_equal]} ({row.smaller})"
    elif row.first_bytes is not None:
        other = f"{row.first_bytes / MIB:8.3f} ({row.variant})"
    budget = "" if row.budget_bytes is None else row.budget_bytes / MIB
    peaks = row.predicted_bytes / MIB, row.measured_bytes / MIB, row.error
    about = row.model, row.family, row.trace, row.budget, budget
    return f"{_TABLE.row(*about, *peaks, row.recompute_share, _BITS[row.bit_equal])} {other}{over}"


if __name__ == "__main__":
    raise SystemExit(main())
