"""Every architecture that transformers can build small, trained for a step with plans and measured: the table.

    python -m benchmarks.compatibility                  # all; into benchmarks/results, and the page of the docs
    python -m benchmarks.compatibility llama vit        # these alone, printed
    python -m benchmarks.compatibility --resume         # what an interrupted run has not done yet
    python -m benchmarks.compatibility --table          # the page again, from the figures that are there

Each architecture (``small_configs``: its config made small, a head to train, a batch from the signature of its
forward) is profiled, planned for three budgets as ``real_models`` chooses them, and run for real on one CPU thread.
The row says whether each predicted peak is the measured one, whether each planned step stays within its budget, and
whether its loss, gradients and buffers are those of the unplanned step bit by bit.

A row that has no figures says why: the architecture needs a package that is not here, no config made by rule builds
it, its plain step does not train, or sacplan refused or failed (which counts against it).

They run in processes of their own, with a limit on time and memory.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

import sacplan
from benchmarks import common, small_configs, zoo_models
from benchmarks.common import MIB, RESULTS, describe, machine, write_results
from benchmarks.real_models import Case, Row, steps_of

FIGURES = RESULTS / "compatibility.json"
PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
SECONDS = 180
GIB_EACH = 16
"""Of address space: with the libraries of a CUDA build in it, and less room, oneDNN takes other kernels or none."""
ARCHITECTURES_EACH = 50
"""For a process: after as many it is replaced."""

TRAINED, NOT_BUILT, FAILED = "trained", "not built", "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one architecture.

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
        """Of the predicted peaks, as a share of the measured one."""
        return self.worst.error

    @property
    def difference(self) -> str:
        """Of predicted and measured peaks, in words: bytes where they are few, else a share."""
        if self.exact:
            return "exact"
        nbytes = self.worst.predicted_bytes - self.worst.measured_bytes
        return f"{nbytes:+d} B" if abs(nbytes) < 1024 else f"{self.worst_error:+.3%}"

    @property
    def why_not_exact(self) -> str:
        """Why predicted and measured peaks differ, where that was found out."""
        if self.exact:
            return ""
        return (small_configs.REASONS | zoo_models.REASONS).get(self.model_type, "not known")

    @property
    def within_budget(self) -> int:
        return sum(s.within_budget for s in self.planned)

    @property
    def bit_equal(self) -> int:
        return sum(bool(s.bit_equal) for s in self.planned)

    @property
    def good(self) -> bool:
        """Whether nothing speaks against sacplan: a model that is not built is no fault of its."""
        if self.status == TRAINED:
            return self.within_budget == len(self.planned) and all(
                s.bit_equal is not False for s in self.planned
            )
        return self.status == NOT_BUILT

    def as_dict(self) -> dict[str, Any]:
        """For the file: what the steps share once."""
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


def _worker(connection: Connection, work: Callable[[str], Any]) -> None:
    """Answer model types with what ``work`` makes of them, until None comes."""
    resource.setrlimit(resource.RLIMIT_AS, (GIB_EACH << 30, GIB_EACH << 30))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    while (model_type := connection.recv()) is not None:
        connection.send(work(model_type))


class _Process:
    """A worker, what it is at, and since when."""

    def __init__(self, work: Callable[[str], Any], lost: Callable[[str, str, float], Any]) -> None:
        self._lost = lost
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()
        self.model_type = ""
        self.began = 0.0
        self.done = 0

    def start(self, model_type: str) -> None:
        self.model_type, self.began = model_type, time.monotonic()
        self.connection.send(model_type)

    def outcome(self, seconds: float) -> Any:
        """What became of the architecture that it is at, or None while that is open."""
        took = time.monotonic() - self.began
        if self.connection.poll():
            try:
                self.done += 1
                return self.connection.recv()
            except EOFError:
                self.end()
                reason = f"the process ended with exit code {self.process.exitcode}"
                return self._lost(self.model_type, reason, took)
        if took > seconds:
            self.end()
            return self._lost(self.model_type, f"not done after {seconds:.0f} s", took)
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    @property
    def spent(self) -> bool:
        """Whether another process should take over: this one is gone, or has collected enough of what models leave."""
        return not self.process.is_alive() or self.done >= ARCHITECTURES_EACH


def _lost(model_type: str, reason: str, seconds: float) -> Outcome:
    return Outcome(model_type, FAILED, reason, seconds=seconds)


def outcomes(
    model_types: Iterable[str],
    jobs: int = 2,
    seconds: float = SECONDS,
    work: Callable[[str], Any] = outcome_of,
    lost: Callable[[str, str, float], Any] = _lost,
) -> Iterator[Any]:
    """What ``work`` makes of each, as they come, from ``jobs`` processes at a time.

    Args:
        model_types: what is worked on.
        jobs: processes.
        seconds: for each.
        work: a function of a module, which a process imports.
        lost: what to make of a type, a reason and seconds, where a process died or took too long.
    """
    waiting = list(reversed(list(model_types)))
    idle: list[_Process] = []
    busy: list[_Process] = []
    while waiting or busy:
        while waiting and len(busy) < jobs:
            worker = idle.pop() if idle else _Process(work, lost)
            worker.start(waiting.pop())
            busy.append(worker)
        wait([worker.connection for worker in busy], timeout=1.0)
        for worker in list(busy):
            outcome = worker.outcome(seconds)
            if outcome is None:
                continue
            busy.remove(worker)
            if not worker.spent:
                idle.append(worker)
            elif worker.process.is_alive():
                worker.end()
            yield outcome
    for worker in idle:
        worker.end()


def summary(found: Iterable[Outcome], what: str = "architectures trained") -> str:
    """One line."""
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
    """A file of figures: what it says of the run, and its outcomes."""
    data = json.loads(path.read_text())
    rows = [Outcome.from_dict(row) for row in data.pop("rows")]
    return data, rows


# --- the page --------------------------------------------------------------------------------------------------------

_HEAD = """\
# Architectures of transformers

<!-- Written by `python -m benchmarks.compatibility --table` from benchmarks/results/compatibility.json. -->

Every architecture of `transformers` that can be built small from its config, without weights: a training step without a
plan and at three budgets, on the CPU, predicted and measured. One command makes the figures and this page:

<!-- not run by the tests: takes an hour -->
```bash
python -m benchmarks.compatibility
```
"""

_COLUMNS = """\
- **class**: what was trained. The first class of the architecture that a step runs with, those with a loss of their own
  first.
- **trace**: `fake`, or `real` where sizes depend on data (routing, matching, masks drawn at random).
- **peak**: measured, of the unplanned step, in MiB.
- **predicted**: `exact` where the predicted peak of all four steps is the measured one to the byte; else the largest
  difference; the end of the page says why.
- **budgets**: as shares of the unplanned peak. 85, 70 and 55 %, or the smallest feasible one (`≥`) and two above it.
- **within**: planned steps whose measured peak is at most the budget.
- **bits**: planned steps whose loss, gradients and buffers are bit by bit those of the unplanned step.
"""


def page(about: dict[str, Any], found: list[Outcome]) -> str:
    """The page of the docs."""
    trained = [o for o in found if o.status == TRAINED]
    failed = [o for o in found if o.status == FAILED]
    rest = [o for o in found if o.status == NOT_BUILT]
    lines = [_HEAD, f"{summary(found)}.", "", f"{describe(about['machine'])}; {about['date']}.", "", _COLUMNS]
    heads = ("architecture", "class", "trace", "peak", "predicted", "budgets", "within", "bits")
    lines += [_line(heads), _line(["---"] * len(heads))]
    lines += [_line(_cells(o)) for o in trained]
    inexact = sorted((o for o in trained if not o.exact), key=lambda o: -abs(o.worst_error))
    if inexact:
        lines += ["", "## Not exact", "", "The largest share first.", ""]
        lines += [_line(("architecture", "predicted", "budget", "why")), _line(["---"] * 4)]
        lines += [
            _line((f"`{o.model_type}`", o.difference, o.worst.budget, o.why_not_exact)) for o in inexact
        ]
    if failed:
        lines += ["", "## Refused or failed", "", _line(("architecture", "class", "why")), _line(["---"] * 3)]
        lines += [_line((f"`{o.model_type}`", o.model_class, _escaped(o.reason))) for o in failed]
    if rest:
        lines += [
            "",
            "## Not built",
            "",
            "Not counted above. These need a package that was not installed, a config that the benchmark's rules do "
            "not find,",
            "or a step that `transformers` does not run in training.",
            "",
            _line(("architecture", "why")),
            _line(["---"] * 2),
        ]
        lines += [_line((f"`{o.model_type}`", _escaped(o.reason))) for o in rest]
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


def _escaped(text: str) -> str:
    return (
        text.replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("_", "\\_")
        .replace("`", "'")
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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


def done_before(path: Path | None) -> dict[str, Outcome]:
    """The outcomes of a file that the same versions of torch and transformers wrote; none without a file."""
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
    """Run what is not found yet, print each as it comes, and write the file after each; all outcomes by name.

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
    for outcome in outcomes([n for n in names if n not in found], jobs, work=work):
        found[outcome.model_type] = outcome
        show(outcome)
        ordered = [found[name] for name in sorted(found)]
        rows = [o.as_dict() for o in ordered]
        write_results(path, rows, row_a_line=True, summary=summary(ordered, what), **about)
    return ordered


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a budget was broken, bits differ, or sacplan failed."""
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", help="model types (default: all)", metavar="name")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that the file already has")
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
