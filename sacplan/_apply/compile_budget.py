"""``compile_budget``: a budget in bytes for ``torch.compile``, in the place of ``activation_memory_budget``.

For each graph that is compiled for training, a few partitions into forward and backward are tried, from the one with
least recomputation on. PyTorch's own partitioner makes each on a copy of the graph. Inductor lowers the two graphs,
fuses and orders them, and says how much is alive at most; no kernel is compiled. The first that fits is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacplan._program.arguments import checked
from sacplan._program.budget import exact_bytes, format_bytes, parse_budget
from sacplan._torch.partitioning import (
    GraphPeaks,
    as_partitioner,
    copied,
    lowered_peaks,
    partitioned,
    results_of,
    swap_partitioner,
)
from sacplan.errors import InfeasibleBudget, PlanError

_SHARES: tuple[float | None, ...] = (1.0, None, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
"""Partitions, the one with least recomputation first: PyTorch's, that with all that is cheap run again, and those of a
share of the saved bytes. The peak does not always fall with the share, so it is not bisected."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph that was compiled under a budget.

    Attributes:
        budget_bytes: its budget.
        needs_bytes: most that is alive while it runs, with what its other calls have saved.
        default_bytes: the same with PyTorch's own partition.
        share: the ``activation_memory_budget`` that was taken; None: all that is cheap runs again, and nothing else.
    """

    budget_bytes: int
    needs_bytes: int
    default_bytes: int
    share: float | None


class CompileBudget:
    """A budget that holds for what ``torch.compile`` compiles until ``remove()``, or to the end of a ``with``.

    Attributes:
        graphs: those that were compiled for training so far.
    """

    def __init__(self, budget: float | str, calls: int) -> None:
        self.graphs: list[CompiledGraph] = []
        self._budget = budget
        self._calls = calls
        self._before = swap_partitioner(as_partitioner(self._partition, ("sacplan", str(budget), calls)))

    def _partition(self, module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        tried: dict[tuple[str, ...], int] = {}  # by what is saved
        for share in _SHARES:
            graph = copied(module)
            graphs = partitioned(graph, inputs, arguments, share)
            saved = results_of(graphs[0])
            if saved in tried:
                continue
            static = arguments["static_lifetime_input_indices"] or ()
            needs = self._needs(lowered_peaks(graph, graphs, arguments["num_fwd_outputs"], static))
            tried[saved] = needs
            default = next(iter(tried.values()))
            budget = parse_budget(self._budget, default)
            if needs <= budget:
                self.graphs.append(CompiledGraph(budget, needs, default, share))
                return partitioned(module, inputs, arguments, share)
        least = min(tried.values())
        raise InfeasibleBudget(
            f"a compiled graph does not fit {format_bytes(budget)}: PyTorch's own partition takes "
            f"{format_bytes(default)}, and the smallest of {len(tried)} that were tried {format_bytes(least)}. "
            f"Give at least {exact_bytes(least)}, or make the batch smaller.",
            budget_bytes=budget,
            smallest_feasible_bytes=least,
            binding="a compiled graph",
        )

    def _needs(self, found: GraphPeaks) -> int:
        return found.peak_bytes + (self._calls - 1) * found.saved_bytes

    def remove(self) -> None:
        """Have ``torch.compile`` partition graphs as it did before. What is compiled stays as it is."""
        swap_partitioner(self._before)

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
    says nothing of the peak. It is no search over single ops, as a plan from ``profile(..., compile=True)`` is.

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
