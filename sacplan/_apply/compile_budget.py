"""``compile_budget``: a budget in bytes for ``torch.compile``, in the place of ``activation_memory_budget``.

Of each graph that is compiled for training, PyTorch's own partition into forward and backward is tried first, and then
what ``saved_values`` chooses for a limit of saved bytes. Inductor lowers the two graphs, fuses and orders them, and
says how much is alive at most; no kernel is compiled. The limit moves by what is over the budget, or left. The cheapest
that fits is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._apply.saved_values import SavedValues, cheapest_saved
from sacplan._device.cost import CostModel
from sacplan._device.devices import resolve_device
from sacplan._device.kernels import active_device
from sacplan._program.arguments import checked
from sacplan._program.budget import exact_bytes, format_bytes, parse_budget
from sacplan._torch import partitioning
from sacplan._torch.partitioning import Choose, ForwardValue, GraphPeaks, copied, partitioned
from sacplan.errors import InfeasibleBudget, PlanError

_ROUNDS = 6
_CLOSE = 0.01
"""Share of the budget that may stay unused without a cheaper partition being sought."""

_SHARES = (0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
"""Limits, as shares of the bytes that PyTorch saves. The smallest peak is sought among them if nothing fits; it lies
between, since what runs again is alive at once where little is saved."""


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
        graphs: those that were compiled for training so far.
    """

    def __init__(self, budget: float | str, calls: int) -> None:
        self.graphs: list[CompiledGraph] = []
        self._budget = budget
        self._calls = calls
        self._before = partitioning.swap_partitioner(
            partitioning.as_partitioner(self._partition, ("sacplan", str(budget), calls))
        )

    def _partition(self, module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        def peaks(choose: Choose) -> GraphPeaks:
            graph, static = copied(module), arguments["static_lifetime_input_indices"] or ()
            graphs = partitioned(graph, inputs, arguments, choose)
            return partitioning.lowered_peaks(graph, graphs, arguments["num_fwd_outputs"], static)

        values: list[ForwardValue] = []
        first = peaks(functools.partial(_note, values, arguments["num_fwd_outputs"]))
        default = self._needs(first)
        budget = parse_budget(self._budget, default)
        if default <= budget:
            self.graphs.append(CompiledGraph(budget, default, default, None))
            return partitioned(module, inputs, arguments, lambda graph, info, own: own())
        tried = self._search(values, first, budget, peaks)
        fitting = (saved for saved in tried if tried[saved] <= budget)
        if best := min(fitting, key=lambda saved: saved.rerun_ms, default=None):
            self.graphs.append(CompiledGraph(budget, tried[best], default, best.rerun_ms))
            return partitioned(module, inputs, arguments, _choice(best))
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
        self,
        values: list[ForwardValue],
        first: GraphPeaks,
        budget: int,
        peaks: Callable[[Choose], GraphPeaks],
    ) -> dict[SavedValues, int]:
        """Return what was tried, and what it needs; ``first`` is PyTorch's own partition."""
        tried: dict[SavedValues, int] = {}
        low, high = 0.0, math.inf  # limits between which to search
        limit = first.saved_bytes - (self._needs(first) - budget) / self._calls
        for _ in range(_ROUNDS):
            saved = cheapest_saved(values, limit)
            if saved is None or saved in tried:
                break
            tried[saved] = self._needs(peaks(_choice(saved)))
            left = budget - tried[saved]
            if 0 <= left <= _CLOSE * budget:
                break
            low, high = (saved.weight, high) if left > 0 else (low, saved.weight)
            limit = saved.weight + left / self._calls
            if not low < limit < high:
                limit = (low + high) / 2
        if all(needed > budget for needed in tried.values()):
            # The same for every budget, so that what an error names is found again.
            found = dict.fromkeys(cheapest_saved(values, share * first.saved_bytes) for share in _SHARES)
            tried = {saved: self._needs(peaks(_choice(saved))) for saved in found if saved is not None}
        return tried

    def remove(self) -> None:
        """Have ``torch.compile`` partition graphs as it did before. What is compiled stays as it is."""
        partitioning.swap_partitioner(self._before)

    def __enter__(self) -> CompileBudget:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()


def _note(
    values: list[ForwardValue], n_outputs: int, graph: Any, info: Any, own: Callable[[], list[Any]]
) -> list[Any]:
    """Choose what PyTorch chooses, and note what else there is to choose from."""
    device = next(v.device for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    model = CostModel(active_device() or resolve_device(device))
    ms_per_byte = 1e3 / (model.spec.bandwidth_bytes_per_s * model.spec.bandwidth_efficiency)
    values += partitioning.forward_values(
        graph, info, n_outputs, lambda *call: model.cost(*call)[1], ms_per_byte
    )
    return own()


def _choice(saved: SavedValues) -> Choose:
    return lambda graph, *_: [node for node in graph.nodes if node.name in saved.names]


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
