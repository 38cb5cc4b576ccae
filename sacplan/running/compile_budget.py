"""``compile_budget``: a budget in bytes for ``torch.compile``, in the place of ``activation_memory_budget``.

Of each graph that is compiled for training, the cheapest of the ways to split it that ``partitions`` compares is taken
whose peak fits. Inductor lowers, fuses and orders each, and says how much is alive at most; no kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan.core.arguments import checked
from sacplan.core.budget import exact_bytes, format_bytes, parse_budget
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.partitions import JointGraph, Partitioner, Split, Splits, fastest, smallest


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was compiled under a budget.

    Attributes:
        budget_bytes: its budget.
        needs_bytes: most that is alive while it runs, with what its other calls have saved.
        default_bytes: the same with PyTorch's own partition.
        recompute_ms: predicted time that it takes more; None: PyTorch's own partition was taken.
    """

    budget_bytes: int
    needs_bytes: int
    default_bytes: int
    recompute_ms: float | None


class CompileBudget(Partitioner):
    """A budget that holds for what ``torch.compile`` compiles until ``remove()``, or to the end of a ``with``.

    Attributes:
        graphs: those that were compiled for training so far. What comes from the compiler's cache is not among them.
    """

    def __init__(self, budget: float | str, calls: int) -> None:
        self.graphs: list[CompiledGraph] = []
        self._budget = budget
        self._calls = calls
        super().__init__(self._split, ("sacplan", str(budget), calls), outputs_stay=True)

    def _split(self, graph: JointGraph) -> Split:
        default = graph.own.lowered.needs_bytes(self._calls)
        limit = parse_budget(self._budget, default)
        if default <= limit:
            self.graphs.append(CompiledGraph(limit, default, default, None))
            return graph.own

        def needs(splits: Splits) -> int:
            return splits[0].expected.needs_bytes(self._calls)

        options = [(split,) for split in graph.splits]
        (best,) = chosen = fastest(lambda: options, needs, limit) or smallest(lambda: options, needs)
        taken = needs(chosen)
        if taken > limit:
            raise InfeasibleBudget(
                f"a compiled graph does not fit {format_bytes(limit)}: without a budget it takes "
                f"{format_bytes(default)}, and the smallest of {len(options)} that were compared "
                f"{format_bytes(taken)}. Give at least {exact_bytes(taken)}, or make the batch smaller.",
                budget_bytes=limit,
                smallest_feasible_bytes=taken,
                binding="a compiled graph",
            )
        more_ms = max(0.0, best.lowered.ms - graph.own.lowered.ms)
        self.graphs.append(CompiledGraph(limit, taken, default, more_ms))
        return best


@checked(PlanError)
def compile_budget(budget: float | str, *, calls: int = 1) -> CompileBudget:
    """Set a budget in bytes for what ``torch.compile`` compiles for training, with inductor.

        sacplan.compile_budget("22GiB")
        model = torch.compile(model)

    It takes the place of ``torch._functorch.config.activation_memory_budget``, which is a share of the saved bytes and
    says nothing of the peak. What runs again is chosen op by op, heavy and light ones together.

    Args:
        budget: for all that a graph has alive while its forward or backward pass runs: parameters and batch, what it
            saves and makes, gradients. A number is GiB; a share refers to the peak of PyTorch's own partition. Subtract
            what else is on the device: optimizer state, the parameters of other graphs.
        calls: how many forward passes of a graph come before its first backward pass: the number of layers, if they
            are alike and each is compiled by itself.

    Returns:
        What was compiled so far (``graphs``), and ``remove()``; a context manager that calls it at the end.

    Raises:
        BudgetError: not a budget.
        PlanError: ``calls`` is not a positive integer.
        InfeasibleBudget: when a graph is compiled: no partition that was tried fits. Dynamo raises its own error, with
            this one as ``inner_exception``.
    """
    parse_budget(budget, 2**40)  # what is no budget is an error now, and not in the first step
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise PlanError(f"calls is {calls!r}; give a number of forward passes, 1 or more.")
    return CompileBudget(budget, calls)
