"""Do plans hold on every architecture that transformers can build small, and is every predicted peak exact?

    python -m benchmarks.compatibility                  # all; into benchmarks/results, and the page of the docs
    python -m benchmarks.compatibility llama vit        # these alone, printed
    python -m benchmarks.compatibility --resume         # what an interrupted run has not done yet
    python -m benchmarks.compatibility --table          # the page again, from the figures that are there

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
from benchmarks.harness.table import markdown_head, markdown_line
from benchmarks.models import small_configs, zoo_models
from benchmarks.models.cases import Case

FIGURES = RESULTS / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"

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


# --- the page --------------------------------------------------------------------------------------------------------

_HEAD = """\
# Architectures of transformers

<!-- Written by `python -m benchmarks.compatibility --table` from benchmarks/results/compatibility.json. -->

This page shows for which architectures of `transformers` plans were checked, and with what result. It has every
architecture that can be built small from its config, without weights. Each runs a training step without a plan and at
three budgets on the CPU, and predicted peaks are compared with measured ones. One command makes the figures and this
page:

<!-- not run by the tests: takes an hour -->
```bash
python -m benchmarks.compatibility
```
"""

_WORKFLOW = """\
## Made by a scheduled workflow

`.github/workflows/compatibility.yml` makes this table, the one of [models by name](hf_targets.md) and the one of
[trainers](trainers.md#with-which-versions) again each week, with the newest versions of `transformers` and the trainers
that pip takes. It changes nothing by itself: the files are artifacts of the run, and its log has the lines that differ.
On a public runner it needs:

- **Time.** This table took about an hour and the one of models by name about half an hour on two cores with two
  processes. A public runner has four cores. The workflow allows six hours, which is what a job may take there.
- **Memory.** Each process is limited to 16 GiB of address space. The models of this table are small, and those of the
  other one have no weights. The runner has 16 GB for the four processes together.
- **Disk.** The CPU build of torch and the packages of the extra `zoo` take about 3 GB. Nothing else is downloaded: no
  weights, no data, no configuration from a hub. No secret is needed.
- **A person.** A row that turns from *trained* to *failed* is a bug of sacplan or of the library. Commit the figures
  only after looking at these rows; `tests/benchmarks/test_figures.py` keeps the page and the figures together.
"""

_COLUMNS = """\
- **class**: the class that was trained: the first one of the architecture whose training step runs. Classes with a loss
  of their own are tried first.
- **trace**: `fake`, or `real` if sizes depend on data (routing, matching, masks drawn at random).
- **peak**: the measured peak of the unplanned step, in MiB.
- **predicted**: `exact` if the predicted peaks of all four steps equal the measured ones to the byte. Otherwise the
  largest difference; the end of the page says why.
- **budgets**: shares of the unplanned peak: 85, 70 and 55 %, or the smallest feasible one (`≥`) and two above it.
- **within**: the number of planned steps whose measured peak is at most the budget.
- **bits**: the number of planned steps with the same loss, gradients and buffers as the unplanned step, bit by bit.
"""


def page(about: dict[str, Any], found: list[Outcome]) -> str:
    """Write the page of the docs."""
    trained = [o for o in found if o.status == TRAINED]
    failed = [o for o in found if o.status == FAILED]
    rest = [o for o in found if o.status == NOT_BUILT]
    lines = [_HEAD, f"{summary(found)}.", "", f"{describe(about['machine'])}; {about['date']}.", "", _COLUMNS]
    heads = ("architecture", "class", "trace", "peak", "predicted", "budgets", "within", "bits")
    lines += [*markdown_head(heads), *(markdown_line(_cells(o)) for o in trained)]
    inexact = sorted((o for o in trained if not o.exact), key=lambda o: -abs(o.worst_error))
    if inexact:
        lines += ["", "## Not exact", "", "The largest share first.", ""]
        lines += markdown_head(("architecture", "predicted", "budget", "why"))
        lines += [
            markdown_line((f"`{o.model_type}`", o.difference, o.worst.budget, o.why_not_exact))
            for o in inexact
        ]
    if failed:
        lines += ["", "## Refused or failed", "", *markdown_head(("architecture", "class", "why"))]
        lines += [markdown_line((f"`{o.model_type}`", o.model_class, escaped(o.reason))) for o in failed]
    if rest:
        lines += [
            "",
            "## Not built",
            "",
            "Not counted above. These need a package that was not installed, a config that the benchmark's rules do "
            "not find,",
            "or a step that `transformers` does not run in training.",
            "",
            *markdown_head(("architecture", "why")),
        ]
        lines += [markdown_line((f"`{o.model_type}`", escaped(o.reason))) for o in rest]
    lines += ["", _WORKFLOW.rstrip()]
    return "\n".join(lines) + "\n"


def _cells(o: Outcome) -> list[str]:
    unplanned = o.steps[0]
    budgets = [s.budget.replace("smallest ", "≥ ") for s in o.planned]
    return [
        f"`{o.model_type}`",
        o.model_class,
        o.trace,
        f"{unplanned.measured_bytes / MIB:.1f}",
        o.difference,
        ", ".join(budgets),
        f"{o.within_budget} of {len(o.planned)}",
        f"{o.bit_equal} of {len(o.planned)}",
    ]


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
    parser.add_argument("--table", action="store_true", help="write the page from the file, run nothing")
    arguments = parser.parse_args(argv)
    if arguments.table:
        PAGE.write_text(page(*read(arguments.json or FIGURES)))
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
        PAGE.write_text(page(*read(path)))
    return int(not all(o.good for o in ordered))


if __name__ == "__main__":
    sys.exit(main())
