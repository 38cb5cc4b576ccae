"""Do plans for an H100 hold in a fake step, on sixty architectures of transformers?

    python -m benchmarks.architectures
    python -m benchmarks.architectures --names gpt2 t5 --budgets 60%

Each architecture is planned in bfloat16 at each budget, and a fake step with the plan applied is compared with it. A
row is a plan: its peak as predicted and as seen, recompute time as a share of the step's, and the seconds for profile,
plan and fake step. "smallest" as a budget means that the one asked for is infeasible: the smallest feasible one, which
the error reports, is planned for instead. ``benchmarks.real_models`` runs the same architectures for real, on a CPU.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from benchmarks.harness.command import Parser
from benchmarks.harness.plans import plan_or_smallest, timed
from benchmarks.harness.results import GIB, write_results
from benchmarks.harness.table import Table
from benchmarks.models import hf_models
from benchmarks.models.cases import Case

_TABLE = Table(
    ("name", "<20"), ("parameters", ">10"), ("unplanned", ">10.4f"), ("budget", ">8"), ("GiB", ">8.4f"),
    ("predicted", ">9.4f"), ("seen", ">8.4f"), ("recompute", ">9.2%"), ("seconds", ">7.1f"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One plan. ``recompute`` is a share of the step's time; ``seconds`` are for profile, plan and fake step."""

    name: str
    parameters: int
    unplanned_bytes: int
    budget: str
    budget_bytes: int
    predicted_bytes: int
    seen_bytes: int
    recompute: float
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the step seen is within the budget and its peak is the predicted one."""
        return self.seen_bytes <= self.budget_bytes and self.seen_bytes == self.predicted_bytes


def rows(name: str, size: str, device: str, budgets: list[str], dtype: torch.dtype) -> Iterator[Row]:
    """Profile once, then plan and verify for each budget."""
    torch.manual_seed(0)
    case = Case(*hf_models.build(name, size, "meta", dtype))
    profile, seconds = timed(lambda: case.profile(device))
    for budget in budgets:
        (plan, found), planning = timed(lambda budget=budget: plan_or_smallest(profile, budget))
        seen, verifying = timed(lambda plan=plan: case.verify(plan))
        yield Row(
            name=name,
            parameters=sum(p.numel() for p in case.model.parameters()),
            unplanned_bytes=profile.peak_bytes,
            budget=found,
            budget_bytes=plan.budget_bytes or 0,
            predicted_bytes=plan.peak_bytes,
            seen_bytes=seen.peak_bytes,
            recompute=plan.recompute_ms / profile.step_ms,
            seconds=seconds + planning + verifying,
        )


def _line(row: Row) -> str:
    verdict = "" if row.holds else f"seen {row.seen_bytes - row.predicted_bytes:+d} B"
    if row.seen_bytes > row.budget_bytes:
        verdict += " OVER BUDGET"
    figures = _TABLE.row(
        row.name, f"{row.parameters / 1e6:.1f}M", row.unplanned_bytes / GIB, row.budget, row.budget_bytes / GIB,
        row.predicted_bytes / GIB, row.seen_bytes / GIB, row.recompute, row.seconds,
    )  # fmt: skip
    return f"{figures} {verdict}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is the number of failures."""
    parser = Parser(__doc__)
    parser.choice("--names", hf_models.NAMES)
    parser.add_argument("--budgets", nargs="*", default=["75%", "50%"])
    parser.add_argument("--size", choices=["small", "medium"], default="medium")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--traceback", action="store_true", help="show where a failure comes from")
    parser.add_argument("--warnings", action="store_true", help="show what the fake trace assumed")
    args = parser.parse_args(argv)
    if not args.warnings:
        warnings.simplefilter("ignore")
    print(_TABLE.head)
    found: list[Row] = []
    failures = 0
    for name in args.names:
        try:
            for row in rows(name, args.size, args.device, args.budgets, getattr(torch, args.dtype)):
                found.append(row)
                failures += not row.holds
                print(_line(row), flush=True)
        except Exception as error:  # whatever it is: the other architectures go on
            failures += 1
            print(f"{name:20} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            if args.traceback:
                traceback.print_exc()
    write_results(args.json, [asdict(row) for row in found])
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
