"""How long a sequence fits one GPU, and what does it cost, with chunks and without?

    python -m benchmarks.long_sequences [--models llama-3-8b gemma-2-2b] [--device h100] [--headroom 0.15]

Models: Llama-3-8B's shape, all 32 layers, and Gemma-2-2B's, whose vocabulary is twice as large; bfloat16, fused AdamW,
one sequence, on the meta device; nothing is computed. The budget is the device's memory less a headroom of 15 %,
or as much as is asked for.

A row is a model. By recomputation alone and with chunks it has the smallest peak, the plan for the budget, whose peak
is that of a fake step with it, and the longest sequence. That is searched among multiples of 1024 tokens by the
smallest peak; it and the next one are looked at. The row also says what slices of the loss cost, and how much longer
planning takes with chunks: in turns, on fresh copies of the profile's program in one process, the median of the ratios
of a turn.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget, timed
from benchmarks.harness.results import GIB, Row
from benchmarks.models.cases import Case
from benchmarks.models.chunk_models import PLANNED
from sacplan._chunk.entries import ChunkOptions, loss_chunks
from sacplan._device.devices import resolve_device
from sacplan._plan.limits import DEFAULT_HEADROOM

TOKENS = {"llama-3-8b": 32768, "gemma-2-2b": 8192}
TECHNIQUES = {"recomputed": ("recompute",), "chunked": ("recompute", "chunk")}
STEP = 1024  # tokens
SLICES = 16
ROUNDS = 3


def fresh(profile: sacplan.Profile) -> sacplan.Profile:
    """Return the same profile without what planning has worked out."""
    return replace(profile, recorded=msgspec.structs.replace(profile.recorded))


def planned(case: Case, profile: sacplan.Profile, budget_bytes: int, techniques: tuple[str, ...]) -> Row:
    """Return the smallest peak, and the plan for the budget or for that peak, whichever is larger."""
    smallest = sacplan.plan(profile, "smallest", techniques=techniques)
    row: Row = {"smallest_peak_bytes": smallest.peak_bytes}
    plan = smallest
    if smallest.peak_bytes <= budget_bytes:
        plan = sacplan.plan(profile, as_budget(budget_bytes), techniques=techniques)
    return row | {
        "within_budget": plan.peak_bytes <= budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "fake_peak_bytes": case.verify(plan).peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "added_ms": plan.added_ms,
        "step_ms": plan.step_ms + plan.recompute_ms + plan.added_ms,
        "slices": [chunk.slices for chunk in plan.chunks],
    }


def slices_cost(profile: sacplan.Profile) -> Row:
    """Return what a fixed number of slices of the loss adds to the step without a plan."""
    found = loss_chunks(profile.program, profile.spec)
    assert isinstance(found, ChunkOptions), found
    rewrite = next(found.rewrite(chunk) for chunk in found.chunks if chunk.slices == SLICES)
    return {
        "slices": SLICES,
        "unit": found.unit,
        "added_ms": rewrite.added_ms,
        "share": rewrite.added_ms / profile.step_ms,
    }


def planning_time(profile: sacplan.Profile, budget_bytes: int, rounds: int = ROUNDS) -> Row:
    """Time planning for a budget that both can hold, in turns; return seconds and ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in TECHNIQUES}
    for _ in range(rounds):
        for name, techniques in TECHNIQUES.items():
            copy, budget = fresh(profile), as_budget(budget_bytes)
            _, took = timed(functools.partial(sacplan.plan, copy, budget, techniques=techniques))
            seconds[name].append(took)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return {
        "budget_bytes": budget_bytes,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "ratio": statistics.median(ratios),
    }


def longest(smallest_peak: Callable[[int], int], budget_bytes: int, known: tuple[int, int]) -> Row:
    """Find the longest sequence whose smallest peak is in the budget, among multiples of ``STEP`` tokens.

    Peaks grow almost linearly with the tokens, and one costs a profile and a search. So each guess is where a line
    through the two looks that are closest to the budget meets it. The search ends when a length fits and the next one
    does not.

    Args:
        smallest_peak: tokens to bytes.
        budget_bytes: what has to hold it.
        known: some number of tokens and its smallest peak.
    """
    looked = {known[0]: known[1]}

    def look(tokens: int) -> int:
        if tokens not in looked:
            looked[tokens] = smallest_peak(tokens)
        return looked[tokens]

    look(known[0] // 2)
    fits, does_not = 0, 0
    while not does_not or does_not - fits > STEP:
        near = sorted(looked, key=lambda n: abs(looked[n] - budget_bytes))[:2]
        slope = (looked[near[0]] - looked[near[1]]) / (near[0] - near[1])
        guess = near[0] + (budget_bytes - looked[near[0]]) / slope
        tokens = max(STEP, int(guess) // STEP * STEP)
        if tokens in looked:  # the line may point at a length that is known: its neighbour says more
            tokens += STEP if looked[tokens] <= budget_bytes else -STEP
        if does_not:
            tokens = min(max(tokens, fits + STEP), does_not - STEP)
        if tokens <= 0:  # not even ``STEP`` tokens fit
            break
        if look(tokens) <= budget_bytes:
            fits = max(fits, tokens)
        else:
            does_not = min(does_not or tokens, tokens)
    return {"tokens": fits, "looked_at": dict(sorted(looked.items()))}


def measured(name: str, device: str, headroom: float) -> Row:
    """Return the row of a model."""
    make, tokens = PLANNED[name], TOKENS[name]
    spec = resolve_device(device)
    budget_bytes = spec.memory_bytes - int(headroom * spec.memory_bytes)
    case = make(tokens)
    profile = case.profile(device)
    row: Row = {
        "model": name,
        "device": device,
        "tokens": tokens,
        "budget_bytes": budget_bytes,
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "loss": slices_cost(profile),
    }
    for kind, techniques in TECHNIQUES.items():
        row[kind] = planned(case, profile, budget_bytes, techniques)
    both = int(1.05 * row["recomputed"]["smallest_peak_bytes"])
    row["planning"] = planning_time(profile, both)
    for kind, techniques in TECHNIQUES.items():

        def smallest_peak(tokens: int, techniques: tuple[str, ...] = techniques) -> int:
            found = make(tokens).profile(device)
            return sacplan.plan(found, "smallest", techniques=techniques).peak_bytes

        row[kind]["longest"] = longest(
            smallest_peak, budget_bytes, (tokens, row[kind]["smallest_peak_bytes"])
        )
    return row


def _line(row: Row) -> str:
    lines = [
        f"{row['model']}, {row['tokens']} tokens on {row['device']}: {row['plain_peak_bytes'] / GIB:.1f} GiB, "
        f"budget {row['budget_bytes'] / GIB:.1f}; {SLICES} slices of the loss add {row['loss']['share']:.2%}; "
        f"planning takes {row['planning']['ratio']:.2f} times as long with chunks"
    ]
    for kind in TECHNIQUES:
        r = row[kind]
        held = f"{r['step_ms']:.0f} ms" if r["within_budget"] else "over budget"
        lines.append(
            f"  {kind:>10}: smallest {r['smallest_peak_bytes'] / GIB:6.2f} GiB, planned {r['peak_bytes'] / GIB:6.2f} "
            f"({held}), longest {r['longest']['tokens']} tokens"
        )
    return "\n".join(lines)


def main() -> None:
    parser = Parser(__doc__, "long_sequences.json")
    parser.choice("--models", PLANNED)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--headroom", type=float, default=DEFAULT_HEADROOM)
    arguments = parser.begin(silence=True)

    def rows_of(name: str) -> Iterator[Row]:
        yield measured(name, arguments.device, arguments.headroom)

    run_cases(arguments.models, rows_of, _line, arguments.json, headroom=arguments.headroom)


if __name__ == "__main__":
    main()
