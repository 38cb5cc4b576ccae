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

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers

import sacplan
from benchmarks.harness.budgets import Row, steps_of
from benchmarks.harness.command import Parser
from benchmarks.harness.processes import in_workers
from benchmarks.harness.results import MIB, RESULTS, ROOT, describe, machine, read_results, write_results
from benchmarks.harness.table import csv_text, markdown_head, markdown_line, put_on_page
from benchmarks.models import small_configs, zoo_models
from benchmarks.models.cases import Case

FIGURES = RESULTS / "compatibility.json"
PAGE, COMMAND = ROOT / "docs" / "compatibility.md", "python -m benchmarks.compatibility"
TABLE = ROOT / "docs" / "data" / "compatibility.csv"

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
    steps: tuple[Row, ...] = ()

    @property
    def trace(self) -> str:
        return self.steps[0].trace

    @property
    def planned(self) -> tuple[Row, ...]:
        return self.steps[1:]

    @property
    def exact(self) -> bool:
        """Whether each predicted peak is the measured one to the byte."""
        return all(s.predicted_bytes == s.measured_bytes for s in self.steps)

    @property
    def worst(self) -> Row:
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
        if self.exact:
            return ""
        return zoo_models.REASONS.get(self.model_type, "not known")

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

    def as_dict(self) -> dict[str, Any]:
        """Return the row of the file, which has what the steps share once."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["steps"] = [{name: getattr(step, name) for name in _OF_A_STEP} for step in self.steps]
        return data | {name: getattr(step, name) for step in self.steps[:1] for name in _OF_ALL_STEPS}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        data = dict(data)
        shared = {name: data.pop(name) for name in _OF_ALL_STEPS if name in data}
        about = {"model": data["model_type"], "family": data["source"], **shared}
        return cls(**data | {"steps": tuple(Row(**about, **step) for step in data["steps"])})


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

    def steps() -> Iterable[Row]:
        return steps_of(model_type, case.source, Case(case.model, case.batch, case.loss_fn))

    return outcome_of_steps(
        steps, began, model_type=model_type, model_class=case.model_class, source=case.source
    )


def outcome_of_steps(steps: Callable[[], Iterable[Row]], began: float, **about: Any) -> Outcome:
    """Run the steps; ``about`` are fields of the outcome."""
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


def read(path: Path = FIGURES) -> tuple[dict[str, Any], list[Outcome]]:
    """Read a file of figures: what it says of the run, and its outcomes."""
    about, rows = read_results(path)
    return about, [Outcome.from_dict(row) for row in rows]


# --- what the docs publish -------------------------------------------------------------------------------------------


def table(found: Iterable[Outcome]) -> str:
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
    lines = [f"{summary(found)}.", "", f"{describe(about['machine'])}; {about['date']}."]
    wrong = [o for o in found if o.status == FAILED or (o.status == TRAINED and not (o.good and o.exact))]
    if wrong:
        lines += ["", *markdown_head(("exception", "predicted", "why"))]
    for o in wrong:
        said = (o.difference, o.why_not_exact) if o.status == TRAINED else (FAILED, escaped(o.reason))
        lines.append(markdown_line((f"`{o.model_type}`", *said)))
    return "\n".join(lines) + "\n"


def publish() -> None:
    """Write the table beside the page, and the sum on it."""
    about, found = read()
    TABLE.write_text(table(found), encoding="utf-8")
    put_on_page(PAGE, COMMAND, block(about, found))


def escaped(text: str) -> str:
    return text.translate(str.maketrans({"|": "\\|", "<": "&lt;", "*": "\\*", "_": "\\_", "`": "'"}))


# --- command line ----------------------------------------------------------------------------------------------------


def show(o: Outcome) -> None:
    """Print an outcome as a line."""
    if o.status != TRAINED:
        print(f"{o.model_type:>28} {o.status}: {o.reason}", flush=True)
        return
    note = "" if o.good else "  <-- WRONG"
    print(
        f"{o.model_type:>28} {o.trace} {o.steps[0].measured_bytes / MIB:7.1f} MiB {o.difference:>8}, within "
        f"{o.within_budget} of {len(o.planned)}, equal {o.bit_equal}, {o.seconds:.1f} s{note}",
        flush=True,
    )


def sweep_parser(doc: str | None, names: str) -> Parser:
    """Make the parser of a command that runs many models: names, ``--jobs`` and ``--resume``."""
    parser = Parser(doc)
    parser.add_argument("names", nargs="*", help=f"{names} (default: all)", metavar="name")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that the file already has")
    return parser


def done_before(path: Path | None) -> dict[str, Outcome]:
    """Read the outcomes of a file, if the same versions of torch and transformers wrote it."""
    if path is None or not path.exists():
        return {}
    about, before = read(path)
    here = torch.__version__, transformers.__version__
    same = (about["machine"]["torch"], about["machine"]["transformers"]) == here
    return {o.model_type: o for o in before} if same else {}


def run_all(
    names: Iterable[str],
    path: Path | None,
    found: dict[str, Outcome],
    *,
    jobs: int,
    work: Callable[[str], Outcome] = outcome_of,
    what: str = "architectures trained",
    **about: Any,
) -> list[Outcome]:
    """Run what is not found yet, print each as it comes, and write the file after each; return all by name.

    Args:
        names: what is run.
        path: of the file; None: none.
        found: outcomes by name that there are already; the new ones are added.
        jobs: processes at a time.
        work: what makes an outcome of a name.
        what: of the summary.
        about: more that the file says.
    """
    ordered = [found[name] for name in sorted(found)]
    for outcome in in_workers([n for n in names if n not in found], work, lost, jobs=jobs):
        found[outcome.model_type] = outcome
        show(outcome)
        ordered = [found[name] for name in sorted(found)]
        rows = [o.as_dict() for o in ordered]
        write_results(path, rows, row_a_line=True, summary=summary(ordered, what), **about)
    return ordered


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a budget was broken, bits differ, or sacplan failed."""
    parser = sweep_parser(__doc__, "model types")
    parser.add_argument(
        "--table", action="store_true", help="publish the figures that are there, run nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.table:
        publish()
        return 0
    unknown = sorted(set(arguments.names) - set(small_configs.architectures()))
    if unknown:
        parser.error(f"no architecture of transformers {transformers.__version__}: {', '.join(unknown)}")
    path = arguments.json or (None if arguments.names else FIGURES)
    found = done_before(path) if arguments.resume else {}
    torch.set_num_threads(1)
    print(describe(machine()))
    ordered = run_all(arguments.names or small_configs.architectures(), path, found, jobs=arguments.jobs)
    print(summary(ordered))
    if path == FIGURES:
        publish()
    return int(not all(o.good for o in ordered))


if __name__ == "__main__":
    sys.exit(main())
