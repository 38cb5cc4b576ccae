"""Do plans hold on models of other packages, from timm to x-transformers, and are peaks exact?

    pip install -e '.[zoo]'
    python -m benchmarks.zoo                            # all that is installed; figures into benchmarks/results
    python -m benchmarks.zoo peft timm/resnet           # a whole package, or some of its models, printed
    python -m benchmarks.zoo --resume                   # what an interrupted run has not done yet

A row is a model: one of each module of ``timm.models`` and ``torchvision.models``, and some of the other packages,
without weights and as small as they come (``models/zoo_models.py``). It has a step without a plan and at three budgets,
on the CPU, predicted and measured, as in ``benchmarks.compatibility``. Of some models inference is a row, too
(``timm/resnet+inference``), at a budget half way to the smallest peak. Slices may round otherwise, so its outputs are
compared within a tolerance.

A package that is not installed is left out. The last lines say what failed and what is not exact, then sum
up.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers

import sacplan
from benchmarks.compatibility import NOT_BUILT, TRAINED, Outcome, lost, outcome_of_steps, summary
from benchmarks.harness.budgets import Row, steps_of
from benchmarks.harness.plans import as_budget, timed
from benchmarks.harness.steps import on_one_thread, seed_everything, tensors_of
from benchmarks.harness.sweep import Sweep
from benchmarks.models.cases import Case
from benchmarks.models.zoo_models import FAMILIES, loss_of
from sacplan.record.state import preserved_state
from sacplan.record.step import Step, call_model
from sacplan.running.measure import measured_step

INFERENCE = "+inference"
_SEED = 7


def names_of(family: str) -> list[str]:
    """Return the entries of a package that is installed: its models, then those whose inference is planned, too."""
    found = FAMILIES[family]
    return [f"{family}/{n}" for n in found.models()] + [f"{family}/{n}{INFERENCE}" for n in found.inference]


def chosen(asked: Sequence[str]) -> list[str]:
    """Return the entries to run, of packages that are installed.

    Args:
        asked: packages and entries; none of them: all.

    Raises:
        ValueError: one of them is not there.
    """
    known = [name for family, found in FAMILIES.items() if found.installed for name in names_of(family)]
    unknown = {*asked} - {*known, *(name.split("/")[0] for name in known)}
    if unknown:
        raise ValueError(f"no {', '.join(sorted(unknown))} is installed; there are {', '.join(known)}")
    return [name for name in known if not asked or not {name, name.split("/")[0]}.isdisjoint(asked)]


# --- one model -------------------------------------------------------------------------------------------------------


def outcome_of(name: str) -> Outcome:
    """Build, profile, plan and run one entry."""
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    family, _, model_name = name.partition("/")
    seed_everything(_SEED)
    try:
        model, batch = FAMILIES[family].models()[model_name.removesuffix(INFERENCE)]()
    except Exception as error:  # the package's own, and it says why
        return Outcome(
            name, NOT_BUILT, f"{type(error).__name__}: {error}", seconds=time.perf_counter() - began
        )

    steps = functools.partial(steps_of, name, family, Case(model, batch, loss_of))
    if name.endswith(INFERENCE):
        steps = functools.partial(inference_of, name, family, model.eval(), batch)
    return outcome_of_steps(name, family, model, steps, began)


@on_one_thread
def inference_of(name: str, family: str, model: torch.nn.Module, batch: Any) -> Iterator[Row]:
    """Run the plain forward pass, then one with a plan whose budget is half way to the smallest peak.

    Raises:
        AssertionError: outputs with the plan are not close to the plain ones.
    """
    profile, seconds = timed(lambda: sacplan.profile(model, batch, device="cpu", mode="inference"))
    plain, row = _forward(model, batch, None)
    row |= {"model": name, "family": family, "trace": profile.trace, "recompute_share": 0.0}
    row |= {"parameters": sum(p.numel() for p in model.parameters())}
    unplanned = {
        "budget": "none",
        "budget_bytes": None,
        "predicted_bytes": profile.peak_bytes,
        "bit_equal": None,
    }
    yield Row(**row, **unplanned, seconds=seconds)
    plan, seconds = timed(lambda: _half_way(profile))
    sliced, measured = _forward(model, batch, plan)
    torch.testing.assert_close(sliced, plain, rtol=1e-4, atol=1e-5)
    yield Row(
        **row | measured,
        budget=f"{plan.budget_bytes / profile.peak_bytes:.0%}",
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.peak_bytes,
        bit_equal=all(map(torch.equal, sliced, plain)) or None,
        seconds=seconds,
    )


def _half_way(profile: sacplan.Profile) -> sacplan.Plan:
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    return sacplan.plan(profile, as_budget((smallest + profile.peak_bytes) // 2))


def _forward(
    model: torch.nn.Module, batch: Any, plan: sacplan.Plan | None
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the outputs of a forward pass, and what was measured of another one."""
    step = Step(model, batch, call_model, None, "inference")
    with preserved_state(model, None), sacplan.apply(model, plan) if plan is not None else nullcontext():
        seed_everything(_SEED)
        seen = measured_step(step, tensors_of(batch))
        seed_everything(_SEED)
        outputs = tensors_of(step.run())
    return outputs, {"measured_bytes": seen.peak_bytes, "wall_ms": seen.wall_ms}


# --- all of them -----------------------------------------------------------------------------------------------------


def remarks(found: Iterable[Outcome]) -> list[str]:
    """Write a line for each model that failed or was not built, and for each whose predicted peaks are not exact."""
    lines = []
    for o in found:
        if o.status != TRAINED:
            lines.append(f"{o.model_type}: {o.status}: {o.reason}")
        elif not o.exact or not o.good:
            wrong = (
                "" if o.good else f"; within {o.within_budget}, bit-equal {o.bit_equal} of {len(o.planned)}"
            )
            why = f": {o.why_not_exact}" if o.why_not_exact else ""
            lines.append(f"{o.model_type}: {o.difference} ({o.worst.budget}){wrong}{why}")
    return lines


SUMMARY = functools.partial(summary, what="models of other packages run")
SWEEP = Sweep("zoo", Outcome, outcome_of, lost, SUMMARY)


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a budget was broken, bits differ, or sacplan failed."""
    parser, arguments = SWEEP.parse(__doc__, argv)
    try:
        names = chosen(arguments.names)
    except ValueError as error:
        parser.error(str(error))
    versions = {f: importlib.metadata.version(f) for f in dict.fromkeys(n.split("/")[0] for n in names)}
    found = SWEEP.run(arguments, names, packages=versions)
    print("\n".join(remarks(found)))
    return int(not all(o.good for o in found))


if __name__ == "__main__":
    sys.exit(main())
