"""What do the checkpointing modes of today cost, beside a plan for the same bytes?

    python -m benchmarks.modes [--models gpt2 llama resnet50] [--json FILE]

Three models on an H100; nothing is computed, times are those of the cost model: GPT-2 (12 layers, 16 x 1024 tokens) and
the shape of Llama 3.2 1B (16 layers, 4 x 2048 tokens), both of transformers, bfloat16, AdamW with states in bfloat16
too, ``use_cache=False``; and ResNet-50 (16 blocks, 128 images of 224 x 224, float32, SGD with momentum).

A row is a mode of ``sacplan.policy``, as ``sacplan.frontier`` lists them: its peak, and what it recomputes. A fake step
with the mode applied must have the peak and the FLOPs that are predicted. Beside it, for the mode's peak as the budget,
stand the plan of "best", and that of "rotor" where the model is a chain; ``-`` where a solver finds no plan.

On the two transformers the modes none, every 2nd layer, every 3rd layer, op and full must recompute five different
numbers of FLOPs. On ResNet-50 two of the five are equal, by the arithmetic of its blocks: see ``resnet50``. The tables
are Markdown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import GIB, Row, write_results
from benchmarks.harness.table import markdown_table
from benchmarks.models import cases
from tests.zoo import convnets

DEVICE = "h100"
MODES: dict[str, tuple[str, int | str | None]] = {
    "none": ("none", None),
    "every 3rd layer": ("selective", 3),
    "every 2nd layer": ("selective", 2),
    "op, all matmuls kept": ("selective", "op-keep-matmuls"),
    "op": ("selective", "op"),
    "full": ("full", None),
}
"""What ``sacplan.policy`` takes, by the names of ``sacplan.frontier``."""

DISTINCT = ("none", "every 2nd layer", "every 3rd layer", "op", "full")
SOLVERS = ("best", "rotor")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on the meta device, a batch, and the optimizer.

    Attributes:
        alike: modes that recompute the same number of FLOPs, for a reason that is known.
    """

    title: str
    model: torch.nn.Module
    batch: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    alike: frozenset[str] = frozenset()


def gpt2() -> Case:
    """Build GPT-2, 124 M parameters."""
    made = cases.gpt2(use_cache=False)
    return Case(
        "GPT-2 (12 layers, 16 x 1024 tokens, bfloat16, AdamW)", made.model, made.batch, made.optimizer
    )


def llama() -> Case:
    """Build the shape of Llama 3.2 1B, embedding and output tied."""
    model = cases.llama_3_8b(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, use_cache=False
    )  # fmt: skip
    title = "Llama 3.2 1B (16 layers, 4 x 2048 tokens, bfloat16, AdamW)"
    return Case(title, model, cases.text(128256, 4, 2048), torch.optim.AdamW)


def resnet50() -> Case:
    """Build ResNet-50, 26 M parameters, ReLUs in place.

    Of a block with c channels its convolutions take 4, 9 and 4 parts of c * c / 16 multiplications per position. In the
    first blocks of the last three rows, which the stride of 2 is in, they take 8, 9 and 4, and their shortcut 8; the
    shortcut of the very first takes 4. Every second layer is five blocks of 17 parts and three of 29. op runs the
    second convolution of all sixteen again, and all shortcuts: 16 * 9 + 3 * 8 + 4. Both are 172.
    """
    with torch.device("meta"):
        model, batch = convnets.resnet50(), torch.empty(128, 3, 224, 224)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    alike = frozenset({"every 2nd layer", "op"})
    return Case("ResNet-50 (128 images of 224 x 224, float32, SGD)", model, batch, optimizer, alike)


MODELS: dict[str, Callable[[], Case]] = {"gpt2": gpt2, "llama": llama, "resnet50": resnet50}


# --- figures ----------------------------------------------------------------------------------------------


def rows_of(name: str, case: Case) -> list[Row]:
    """Return one row for each mode.

    Raises:
        AssertionError: a fake step does not do what its mode predicts, or two modes recompute the same.
    """
    profile = sacplan.profile(case.model, case.batch, optimizer=case.optimizer, device=DEVICE)
    table = sacplan.frontier(profile, points=2, solvers=("best",))
    figures = {row["solver"]: row for row in table.to_dict("records")}
    figures["none"] = figures.pop("best")  # the last row of a solver is the unplanned step
    solvers = SOLVERS if _is_chain(profile) else SOLVERS[:1]
    rows = []
    for mode, (kind, option) in MODES.items():
        if mode not in figures:  # the model has too few layers, or the mode discards nothing
            continue
        plan = sacplan.policy(kind, option, profile=profile)
        seen = sacplan.verify(case.model, case.batch, plan, optimizer=case.optimizer)
        predicted = tuple(figures[mode][k] for k in ("peak_bytes", "recompute_flops"))
        if predicted != (seen.peak_bytes, seen.recompute_flops):
            raise AssertionError(
                f"{name}, {mode}: predicted {predicted}, seen {(seen.peak_bytes, seen.recompute_flops)}"
            )
        rows.append(
            {"model": name, "title": case.title, "mode": mode, "unplanned_bytes": profile.peak_bytes}
            | {k: figures[mode][k] for k in _FIGURES}
            | {solver: _for_bytes(profile, plan.peak_bytes, solver) for solver in solvers}
        )
    check_different(rows, case.alike)
    return rows


_FIGURES = ("peak_bytes", "recompute_ms", "recompute_share", "recompute_flops", "recompute_flops_share")


def check_different(rows: list[Row], alike: frozenset[str]) -> None:
    """Check that all of the five modes but those named recompute different numbers of FLOPs.

    Raises:
        AssertionError: they do not, or one is missing.
    """
    flops = {row["mode"]: row["recompute_flops"] for row in rows if row["mode"] in DISTINCT}
    seen = {mode for mode, n in flops.items() if list(flops.values()).count(n) > 1}
    if len(flops) < len(DISTINCT) or seen != alike:
        raise AssertionError(f"{rows[0]['title']}: the FLOPs of the modes {DISTINCT} are {flops}")


def _is_chain(profile: sacplan.Profile) -> bool:
    try:
        profile.chain  # noqa: B018, the property raises
    except sacplan.errors.PlanError:
        return False
    return True


def _for_bytes(profile: sacplan.Profile, budget_bytes: int, solver: str) -> Row | None:
    """Return the figures of a solver's plan for a budget, or None where it finds none."""
    (plan, _), seconds = timed(lambda: plan_or_least(profile, budget_bytes, solver))
    if plan is None:
        return None
    return {
        "peak_bytes": plan.peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "recompute_share": plan.recompute_ms / plan.step_ms,
        "recompute_flops": plan.recompute_flops,
        "recompute_flops_share": plan.recompute_flops / plan.step_flops,
        "lower_bound_share": plan.lower_bound_ms / plan.step_ms,
        "seconds": seconds,
    }


# --- tables -----------------------------------------------------------------------------------------------


def markdown(rows: list[Row]) -> str:
    """Write the table of one model, under its title."""
    solvers = [solver for solver in SOLVERS if solver in rows[0]]
    heads = ["mode", "peak GiB", "recompute, % of time", "% of FLOPs"]
    heads += [f"{solver}: {share}" for solver in solvers for share in ("% of time", "% of FLOPs")]
    lines = (
        (
            row["mode"],
            f"{row['peak_bytes'] / GIB:.2f}",
            *_shares(row),
            *(s for solver in solvers for s in _shares(row[solver])),
        )
        for row in rows
    )
    return f"**{rows[0]['title']}**\n\n{markdown_table(' | '.join(heads), lines)}\n"


def _shares(figures: Row | None) -> tuple[str, str]:
    if figures is None:
        return "-", "-"
    return f"{100 * figures['recompute_share']:.1f}", f"{100 * figures['recompute_flops_share']:.1f}"


def main() -> None:
    parser = Parser(__doc__, "modes.json")
    parser.choice("--models", MODELS)
    arguments = parser.begin(note=f"; planned for: {DEVICE}\n", silence=True)
    rows: list[Row] = []
    for name in arguments.models:
        found = rows_of(name, MODELS[name]())
        rows += found
        print(markdown(found))
        recomputed = (f"{r['mode']} {r['recompute_flops'] / 1e9:.3f}" for r in found if r["mode"] in DISTINCT)
        different = len({r["recompute_flops"] for r in found if r["mode"] in DISTINCT})
        print(f"GFLOP recomputed, {different} different: {', '.join(recomputed)}\n", flush=True)
        write_results(arguments.json, rows, device=DEVICE)


if __name__ == "__main__":
    main()
