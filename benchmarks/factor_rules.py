"""How many of the ops that real models run have factor rules, and which of those without return most bytes.

    python -m benchmarks.factor_rules [--models gpt2 t5 ...] [--devices h100 cpu]

Ops of the forward and the backward pass of one step, and of inference, of the models in
``benchmarks/hf_models.py``. Ops on scalars are left out. A call is

- ``sliced``: some dimension of what it returns, or of what it reads, may be sliced;
- ``whole``: it has a rule, by which everything must be whole;
- ``random``: it draws numbers;
- ``none``: it has no rule.

Results go to ``benchmarks/results/factor_rules.json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import sacplan
from benchmarks import common, hf_models
from sacplan._factors.rule import Rule, rule_of
from sacplan._program.elements import Op, Phase, Tensor
from sacplan._program.program import Program
from sacplan._torch.ops import draws_numbers, op_named

Outcome = Literal["sliced", "whole", "random", "none"]
OUTCOMES: tuple[Outcome, ...] = ("sliced", "whole", "random", "none")


def arguments_of(program: Program, op: Op) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a recorded call, tensors described."""
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
    """What the rules say of a recorded call."""
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
    """Calls and bytes returned by outcome; of what is not sliced, by the name of the op."""

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
        """Of all calls."""
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
    """Of one model of ``hf_models``: a training step and one of inference."""
    found = Coverage()
    model, batch, loss_fn = hf_models.build(name, size, "meta")
    found.add(sacplan.profile(model, batch, loss_fn, device=device).program)
    found.add(sacplan.profile(model, batch, device=device, mode="inference").program)
    return found


def table(found: Coverage, most: int = 12) -> str:
    """The ops that are not sliced and return most bytes."""
    lines = [f"{'outcome':8} {'op':62} {'calls':>7} {'MiB':>9}"]
    for (outcome, op), n_bytes in found.returned_of.most_common(most):
        lines.append(f"{outcome:8} {op:62} {found.calls_of[outcome, op]:7} {n_bytes / common.MIB:9.2f}")
    return "\n".join(lines)


def _row(name: str, device: str, found: Coverage) -> dict[str, Any]:
    return {
        "model": name,
        "device": device,
        "calls": {outcome: found.calls[outcome] for outcome in OUTCOMES},
        "bytes": {outcome: found.returned[outcome] for outcome in OUTCOMES},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and write the figures."""
    parser = common.parser(__doc__, "factor_rules.json")
    parser.add_argument(
        "--models", nargs="+", default=hf_models.NAMES, choices=hf_models.NAMES, metavar="NAME"
    )
    parser.add_argument("--devices", nargs="+", default=("h100", "cpu"))
    parser.add_argument("--size", default="small", choices=("small", "medium"))
    options = parser.parse_args(arguments)
    print(common.describe(common.machine()))
    print(f"{'model':24} {'device':6} {'calls':>7}" + "".join(f" {outcome:>8}" for outcome in OUTCOMES))
    rows, everything = [], Coverage()
    for name in options.models:
        for device in options.devices:
            found = coverage_of(name, device, options.size)
            shares = "".join(f" {found.share(outcome):8.2%}" for outcome in OUTCOMES)
            print(f"{name:24} {device:6} {sum(found.calls.values()):7}{shares}", flush=True)
            rows.append(_row(name, device, found))
            everything.update(found)
    print("all " + ", ".join(f"{outcome} {everything.share(outcome):.2%}" for outcome in OUTCOMES))
    print(table(everything, most=60))
    not_sliced = [
        {"outcome": outcome, "op": op, "calls": everything.calls_of[outcome, op], "bytes": n_bytes}
        for (outcome, op), n_bytes in everything.returned_of.most_common()
    ]
    common.write_results(options.json, rows, row_a_line=True, not_sliced=not_sliced)


if __name__ == "__main__":
    main()
