"""Do plans hold on every architecture that transformers can build small, and is every predicted peak exact?

    python -m benchmarks.compatibility                  # all; into benchmarks/results, and published in the docs
    python -m benchmarks.compatibility llama vit        # these alone, printed
    python -m benchmarks.compatibility --resume         # what an interrupted run has not done yet
    python -m benchmarks.compatibility --table          # publish the figures that are there

Each architecture (``models/small_configs.py``: its config made small, a head to train, a batch from the signature of
its forward) is profiled, planned for three budgets (``harness/budgets.py``), and run for real on one CPU thread.
A row is an architecture. It says whether each predicted peak is the measured one, whether each planned step stays
within its budget, and whether its loss, gradients and buffers are those of the unplanned step bit by bit.

A row that has no figures says why: the architecture needs a package that is not here, no config made by rule builds it,
its plain step does not train, or sacplan refused or failed (which counts against it).

Architectures run in processes of their own, with a limit on time and memory.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers

import sacplan
from benchmarks.harness.budgets import Row as StepRow
from benchmarks.harness.budgets import steps_of
from benchmarks.harness.results import MIB, Row, describe
from benchmarks.harness.sweep import Sweep
from benchmarks.harness.table import csv_text, markdown_table
from benchmarks.models import small_configs, zoo_models

TRAINED, NOT_BUILT, FAILED = "trained", "not built", "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one architecture.

    Attributes:
        status: "trained", "not built" (transformers alone does not get so far here), or "failed" (sacplan did).
        reason: why there are no figures.
        steps: the unplanned step, then one for each budget.
    """

    model_type: str
    status: str
    reason: str = ""
    model_class: str = ""
    source: str = ""
    seconds: float = 0.0
    steps: tuple[StepRow, ...] = ()

    @property
    def trace(self) -> str:
        return self.steps[0].trace

    @property
    def planned(self) -> tuple[StepRow, ...]:
        return self.steps[1:]

    @property
    def exact(self) -> bool:
        """Whether each predicted peak is the measured one to the byte."""
        return all(s.predicted_bytes == s.measured_bytes for s in self.steps)

    @property
    def worst(self) -> StepRow:
        """The step whose predicted peak differs most from the measured one."""
        return max(self.steps, key=lambda s: abs(s.error))

    @property
    def worst_error(self) -> float:
        """The largest error of a predicted peak, as a share of the measured one."""
        return self.worst.error

    @property
    def difference(self) -> str:
        """How predicted and measured peaks differ, in words: bytes where they are few, else a share."""
        if self.exact:
            return "exact"
        nbytes = self.worst.predicted_bytes - self.worst.measured_bytes
        return f"{nbytes:+d} B" if abs(nbytes) < 1024 else f"{self.worst_error:+.3%}"

    @property
    def why_not_exact(self) -> str:
        """Why predicted and measured peaks differ, where that was found out."""
        return "" if self.exact else zoo_models.REASONS.get(self.model_type, "not known")

    @property
    def within_budget(self) -> int:
        return sum(s.within_budget for s in self.planned)

    @property
    def bit_equal(self) -> int:
        return sum(bool(s.bit_equal) for s in self.planned)

    @property
    def good(self) -> bool:
        """Whether nothing speaks against sacplan. That a model is not built does not."""
        if self.status == TRAINED:
            return self.within_budget == len(self.planned) and all(
                s.bit_equal is not False for s in self.planned
            )
        return self.status == NOT_BUILT

    def __str__(self) -> str:
        """Write the outcome as a line."""
        if self.status != TRAINED:
            return f"{self.model_type:>28} {self.status}: {self.reason}"
        return (
            f"{self.model_type:>28} {self.trace} {self.steps[0].measured_bytes / MIB:7.1f} MiB {self.difference:>8}, "
            f"within {self.within_budget} of {len(self.planned)}, equal {self.bit_equal}, {self.seconds:.1f} s"
            f"{'' if self.good else '  <-- WRONG'}"
        )

    def as_row(self) -> Row:
        """Return the row of the file, which has what the steps share once."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["steps"] = [{name: getattr(step, name) for name in _OF_A_STEP} for step in self.steps]
        return data | {name: getattr(step, name) for step in self.steps[:1] for name in _OF_ALL_STEPS}

    @classmethod
    def of_row(cls, row: Row) -> Outcome:
        """Return the outcome of a row of the file."""
        data = dict(row)
        shared = {name: data.pop(name) for name in _OF_ALL_STEPS if name in data}
        about = {"model": data["model_type"], "family": data["source"], **shared}
        return cls(**data | {"steps": tuple(StepRow(**about, **step) for step in data["steps"])})


_OF_ALL_STEPS = ("trace", "parameters")
_OF_A_STEP = (
    "budget", "budget_bytes", "predicted_bytes", "measured_bytes", "recompute_share", "wall_ms", "bit_equal", "seconds",
)  # fmt: skip


# --- one architecture ------------------------------------------------------------------------------------------------


def outcome_of(model_type: str) -> Outcome:
    """Build, profile, plan and run one architecture."""
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    try:
        case = small_configs.build(model_type)
    except small_configs.NotBuilt as error:
        return Outcome(model_type, NOT_BUILT, reason=str(error), seconds=time.perf_counter() - began)

    source = "hf_models" if model_type in small_configs.by_hand() else "rules"
    steps = functools.partial(steps_of, model_type, source, case)
    return outcome_of_steps(model_type, source, case.model, steps, began)


def outcome_of_steps(
    name: str, source: str, model: torch.nn.Module, steps: Callable[[], Iterable[StepRow]], began: float
) -> Outcome:
    """Run the steps of a model; seconds count from ``began``."""
    about: Any = {"model_type": name, "model_class": type(model).__name__, "source": source}
    try:
        ran = tuple(steps())
    except Exception as error:  # whatever it is, it is what the row is about
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, sacplan.SacplanError) else "not one of sacplan's errors: "
        reason = f"{kind}{type(error).__name__}: {text[:300]}"
        return Outcome(status=FAILED, reason=reason, seconds=time.perf_counter() - began, **about)
    return Outcome(status=TRAINED, seconds=time.perf_counter() - began, steps=ran, **about)


# --- all of them -----------------------------------------------------------------------------------------------------


def lost(model_type: str, reason: str, seconds: float) -> Outcome:
    """Return the outcome where a process died or took too long."""
    return Outcome(model_type, FAILED, reason, seconds=seconds)


def summary(found: Iterable[Outcome], what: str = "architectures trained") -> str:
    """Sum up all outcomes in one line."""
    found = list(found)
    trained = [o for o in found if o.status == TRAINED]
    steps = [s for o in trained for s in o.steps]
    planned = [s for o in trained for s in o.planned]
    worst = max((o.worst_error for o in trained), key=abs, default=0.0)
    return (
        f"{len(trained)} {what}, {len(steps)} steps: {sum(o.exact for o in trained)} exact to the byte "
        f"in every step, worst error {worst:+.3%}; {sum(s.within_budget for s in planned)} of {len(planned)} planned "
        f"steps within the budget, {sum(bool(s.bit_equal) for s in planned)} bit-equal; "
        f"{sum(o.status == FAILED for o in found)} failed, {sum(o.status == NOT_BUILT for o in found)} not built"
    )


# --- what the docs publish -------------------------------------------------------------------------------------------


def table(about: dict[str, Any], found: Iterable[Outcome]) -> str:
    """Write one row per architecture, as CSV."""
    heads = (
        "architecture", "outcome", "class", "trace", "peak_mib", "predicted", "budgets", "within_budget", "bit_equal",
        "reason",
    )  # fmt: skip
    return csv_text(heads, (_cells(o) for o in found))


def _cells(o: Outcome) -> list[object]:
    if o.status != TRAINED:
        return [o.model_type, o.status, o.model_class, "", "", "", "", "", "", o.reason]
    budgets = ", ".join(s.budget for s in o.planned)
    peak = f"{o.steps[0].measured_bytes / MIB:.1f}"
    return [
        *(o.model_type, o.status, o.model_class, o.trace, peak, o.difference, budgets),
        *(o.within_budget, o.bit_equal, o.why_not_exact),
    ]


def block(about: dict[str, Any], found: list[Outcome]) -> str:
    """Write the part of the page that is made of the figures: the sum, and every exception."""
    text = f"{summary(found)}.\n\n{describe(about['machine'])}; {about['date']}."
    wrong = [o for o in found if o.status == FAILED or (o.status == TRAINED and not (o.good and o.exact))]
    said = (
        (o.difference, o.why_not_exact) if o.status == TRAINED else (FAILED, escaped(o.reason)) for o in wrong
    )
    lines = [(f"`{o.model_type}`", *words) for o, words in zip(wrong, said, strict=True)]
    return f"{text}\n\n{markdown_table('exception | predicted | why', lines)}" if wrong else text


def escaped(text: str) -> str:
    return text.translate(str.maketrans({"|": "\\|", "<": "&lt;", "*": "\\*", "_": "\\_", "`": "'"}))


SWEEP = Sweep("compatibility", Outcome, outcome_of, lost, summary, page=block, csv=table)


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a budget was broken, bits differ, or sacplan failed."""
    known = small_configs.architectures()
    _, arguments = SWEEP.parse(__doc__, argv, known)
    return int(not all(o.good for o in SWEEP.run(arguments, arguments.names or known)))


if __name__ == "__main__":
    sys.exit(main())
