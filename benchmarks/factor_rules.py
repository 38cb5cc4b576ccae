"""How many of the ops that real models run have factor rules, and which of those without return most bytes?

    python -m benchmarks.factor_rules [--models gpt2 t5 ...] [--devices h100 cpu]

The ops are those of a training step, forward and backward, and of an inference step of the models of transformers.
Ops on scalars are left out. A row is a model on a device; it counts calls, and the bytes that they return:

- ``sliced``: some dimension of what the call returns, or of what it reads, may be sliced;
- ``whole``: it has a rule, by which every tensor must be whole;
- ``random``: it draws numbers;
- ``none``: it has no rule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import MIB, Row, write_results
from benchmarks.harness.table import Table
from benchmarks.models import hf_models
from sacplan._factors.rule import Rule, rule_of
from sacplan._program.elements import Op, Phase, Tensor
from sacplan._program.program import Program
from sacplan._torch.ops import draws_numbers, op_named

Outcome = Literal["sliced", "whole", "random", "none"]
OUTCOMES: tuple[Outcome, ...] = ("sliced", "whole", "random", "none")


def arguments_of(program: Program, op: Op) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a recorded call, with descriptions in the place of tensors."""
    inputs = [program.tensors[i] for i in op.inputs]

    def described(value: Any) -> Any:
        if isinstance(value, list):
            return [described(item) for item in value]
        if isinstance(value, dict):
            return inputs[value["tensor"]] if "tensor" in value else None
        return value

    args, kwargs = op.call
    return described(args), {name: described(value) for name, value in kwargs.items()}


def outcome_of(program: Program, op: Op) -> tuple[Outcome, Rule | None]:
    """Return what the rules say of a recorded call, and the rule."""
    func = op_named(op.name)
    if func is None:
        return "none", None
    args, kwargs = arguments_of(program, op)
    rule = rule_of(func, args, kwargs, [program.tensors[i] for i in op.outputs])
    if rule is not None:
        return ("sliced" if rule.sliceable else "whole"), rule
    return ("random" if draws_numbers(func, args, kwargs) else "none"), None


@dataclass
class Coverage:
    """Counts of a step.

    Attributes:
        calls, returned: calls and the bytes that they return, by outcome.
        calls_of, returned_of: the same of what is not sliced, by outcome and name of the op.
    """

    calls: Counter[str] = field(default_factory=Counter)
    returned: Counter[str] = field(default_factory=Counter)
    calls_of: Counter[tuple[str, str]] = field(default_factory=Counter)
    returned_of: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, program: Program) -> None:
        """Count the ops of a step."""
        for op, n_bytes in _ops_with_tensors(program):
            outcome, _ = outcome_of(program, op)
            self.calls[outcome] += 1
            self.returned[outcome] += n_bytes
            if outcome != "sliced":
                self.calls_of[outcome, op.name] += 1
                self.returned_of[outcome, op.name] += n_bytes

    def update(self, other: Coverage) -> None:
        """Add another's counts."""
        for mine, its in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update(its)

    def share(self, outcome: Outcome) -> float:
        """Return the share of all calls that have an outcome."""
        return self.calls[outcome] / max(sum(self.calls.values()), 1)


def _ops_with_tensors(program: Program) -> Iterator[tuple[Op, int]]:
    for op in program.ops:
        outputs = [program.tensors[i] for i in op.outputs]
        tensors = [*outputs, *(program.tensors[i] for i in op.inputs)]
        if op.phase != Phase.OPTIMIZER and outputs and any(_elements(t) > 1 for t in tensors):
            yield op, sum(_elements(t) * getattr(torch, t.dtype).itemsize for t in outputs)


def _elements(t: Tensor) -> int:
    return torch.Size(t.shape).numel()


def coverage_of(name: str, device: str, size: str = "small") -> Coverage:
    """Count the ops of a training step and of an inference step of one model of ``hf_models``."""
    found = Coverage()
    model, batch, loss_fn = hf_models.build(name, size, "meta")
    found.add(sacplan.profile(model, batch, loss_fn, device=device).program)
    found.add(sacplan.profile(model, batch, device=device, mode="inference").program)
    return found


def table(found: Coverage, most: int = 12) -> str:
    """Write a table of the ops that are not sliced and return most bytes."""
    columns = Table(("outcome", "<8"), ("op", "<62"), ("calls", ">7"), ("MiB", ">9.2f"))
    lines = [columns.head]
    for (outcome, op), n_bytes in found.returned_of.most_common(most):
        lines.append(columns.row(outcome, op, found.calls_of[outcome, op], n_bytes / MIB))
    return "\n".join(lines)


def _row(name: str, device: str, found: Coverage) -> Row:
    return {
        "model": name,
        "device": device,
        "calls": {outcome: found.calls[outcome] for outcome in OUTCOMES},
        "bytes": {outcome: found.returned[outcome] for outcome in OUTCOMES},
    }


_TABLE = Table(
    ("model", "<24"), ("device", "<6"), ("calls", ">7"), *((outcome, ">8.2%") for outcome in OUTCOMES)
)


def _line(row: Row) -> str:
    calls = sum(row["calls"].values())
    shares = (n / max(calls, 1) for n in row["calls"].values())
    return _TABLE.row(row["model"], row["device"], calls, *shares)


def main(argv: Sequence[str] | None = None) -> None:
    """Count, print, and write the figures."""
    parser = Parser(__doc__, "factor_rules.json")
    parser.choice("--models", hf_models.NAMES)
    parser.add_argument("--devices", nargs="+", default=("h100", "cpu"))
    parser.add_argument("--size", default="small", choices=("small", "medium"))
    arguments = parser.begin(None if argv is None else list(argv))
    everything = Coverage()

    def rows_of(where: tuple[str, str]) -> Iterator[Row]:
        name, device = where
        found = coverage_of(name, device, arguments.size)
        everything.update(found)
        yield _row(name, device, found)

    print(_TABLE.head)
    where = itertools.product(arguments.models, arguments.devices)
    rows = run_cases(where, rows_of, _line, None)
    print("all " + ", ".join(f"{outcome} {everything.share(outcome):.2%}" for outcome in OUTCOMES))
    print(table(everything, most=60))
    not_sliced = [
        {"outcome": outcome, "op": op, "calls": everything.calls_of[outcome, op], "bytes": n_bytes}
        for (outcome, op), n_bytes in everything.returned_of.most_common()
    ]
    write_results(arguments.json, rows, row_a_line=True, not_sliced=not_sliced)


if __name__ == "__main__":
    main()
