"""``compile_budget``: a budget in bytes for ``torch.compile``, in the place of ``activation_memory_budget``.

Of each graph that is compiled for training, PyTorch's own partition into forward and backward is tried first, and then
what ``saved_values`` chooses for a limit of saved bytes. Inductor lowers the two graphs, fuses and orders them, and
says how much is alive at most; no kernel is compiled. The limit moves by what is over the budget, or left. The cheapest
that fits is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sacplan._plan.partitions import JointGraph, Partitioner, Peaks
from sacplan._plan.saved_values import SHARES, SavedValues, cheapest_saved
from sacplan._program.arguments import checked
from sacplan._program.budget import exact_bytes, format_bytes, parse_budget
from sacplan._torch.partitioning import GraphPeaks
from sacplan.errors import InfeasibleBudget, PlanError

_ROUNDS = 6
_CLOSE = 0.01
"""Share of the budget that may stay unused without a cheaper partition being sought."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was compiled under a budget.

    Attributes:
        budget_bytes: its budget.
        needs_bytes: most that is alive while it runs, with what its other calls have saved.
        default_bytes: the same with PyTorch's own partition.
        recompute_ms: predicted time of what runs again; None: PyTorch's own partition was taken.
    """

    budget_bytes: int
    needs_bytes: int
    default_bytes: int
    recompute_ms: float | None


class CompileBudget:
    """A budget that holds for what ``torch.compile`` compiles until ``remove()``, or to the end of a ``with``.

    Attributes:
        graphs: those that were compiled for training so far. What comes from the compiler's cache is not among them.
    """

    def __init__(self, budget: float | str, calls: int) -> None:
        self.graphs: list[CompiledGraph] = []
        self._budget = budget
        self._calls = calls
        self._partitioner = Partitioner(self._choose, ("sacplan", str(budget), calls))

    def _choose(self, key: str, graph: JointGraph, peaks: Peaks) -> SavedValues | None:
        first = peaks(None)
        default = self._needs(first)
        budget = parse_budget(self._budget, default)
        if default <= budget:
            self.graphs.append(CompiledGraph(budget, default, default, None))
            return None
        tried = self._search(graph, first, budget, peaks)
        fitting = (saved for saved in tried if tried[saved] <= budget)
        if best := min(fitting, key=lambda saved: saved.rerun_ms, default=None):
            self.graphs.append(CompiledGraph(budget, tried[best], default, best.rerun_ms))
            return best
        least = min([default, *tried.values()])
        raise InfeasibleBudget(
            f"a compiled graph does not fit {format_bytes(budget)}: PyTorch's own partition takes "
            f"{format_bytes(default)}, and the smallest of {len(tried)} others {format_bytes(least)}. "
            f"Give at least {exact_bytes(least)}, or make the batch smaller.",
            budget_bytes=budget,
            smallest_feasible_bytes=least,
            binding="a compiled graph",
        )

    def _needs(self, found: GraphPeaks) -> int:
        return found.peak_bytes + (self._calls - 1) * found.saved_bytes

    def _search(
        self, graph: JointGraph, first: GraphPeaks, budget: int, peaks: Peaks
    ) -> dict[SavedValues, int]:
        """Return what was tried, and what it needs; ``first`` is PyTorch's own partition."""
        tried: dict[SavedValues, int] = {}
        low, high = 0.0, math.inf  # limits between which to search
        limit = first.saved_bytes - (self._needs(first) - budget) / self._calls
        for _ in range(_ROUNDS):
            saved = cheapest_saved(graph.values, limit)
            if saved in tried:
                break
            tried[saved] = self._needs(peaks(saved))
            left = budget - tried[saved]
            if 0 <= left <= _CLOSE * budget:
                break
            low, high = (saved.n_bytes, high) if left > 0 else (low, saved.n_bytes)
            limit = saved.n_bytes + left / self._calls
            if not low < limit < high:
                limit = (low + high) / 2
        if all(needed > budget for needed in tried.values()):
            # The same for every budget, so that what an error names is found again.
            found = dict.fromkeys(cheapest_saved(graph.values, share * first.saved_bytes) for share in SHARES)
            tried = {saved: self._needs(peaks(saved)) for saved in found}
        return tried

    def remove(self) -> None:
        """Have ``torch.compile`` partition graphs as it did before. What is compiled stays as it is."""
        self._partitioner.remove()

    def __enter__(self) -> CompileBudget:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()


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
