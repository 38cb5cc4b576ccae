"""The errors that a user of sacplan can cause; each message says what happened, where, and what to try."""

from __future__ import annotations

import functools
from typing import Any


class SacplanError(Exception):
    """Base of all errors that sacplan raises on purpose."""


class SacplanWarning(UserWarning):
    """Something was assumed, and the result is only as good as the assumption."""


class SumOfOutputsWarning(SacplanWarning):
    """A step trains the sum of its outputs, since no ``loss_fn`` was given and the outputs have no loss."""


class UnsupportedTorch(SacplanError, ImportError):
    """The torch that is installed lacks something that sacplan needs of it."""


class BudgetError(SacplanError, ValueError):
    """A memory budget cannot be parsed: it is negative, NaN, or has an unknown unit."""


class DeviceError(SacplanError, ValueError):
    """A device is not in the table, not present on this machine, or cannot run what is asked of it."""


class TraceError(SacplanError):
    """The step cannot be recorded, or has nothing to plan."""


class DataDependentError(TraceError):
    """A fake trace needs a size or a value that only real data has."""


class PlanError(SacplanError):
    """A plan, a unit or a solver option does not make sense here."""


class NotInGraph(PlanError):
    """An op that a plan discards is in no graph of ``torch.compile``.

    Attributes:
        units: those in which the compiler broke the graph; units that discard the same ops are listed together.
        ops: names of discarded ops that the compiler traces as others.
    """

    def __init__(
        self, message: str, units: frozenset[str] = frozenset(), ops: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(message)
        self.units = units
        self.ops = ops


class PlanMismatch(PlanError):
    """The plan was made for another model or another batch. The message names the first difference."""


class RecipeError(SacplanError, RuntimeError):
    """A discarded activation cannot be recomputed: something it needs was changed."""


class ChunkError(SacplanError, RuntimeError):
    """A chunk cannot do what the step asks of it: something it reads was changed, or a tensor in it cannot be lazy."""


class InfeasibleBudget(SacplanError):
    """No plan keeps the step under the budget.

    Attributes:
        budget_bytes: the budget that was asked for, or what the allocator of the GPU has room for.
        smallest_feasible_bytes: the smallest peak that the search reached; a plan for it exists. If only the reserved
            segments do not fit a GPU: the fewest bytes that are reserved.
        binding: the fqn of the module that runs at that peak, or ``"optimizer step"``.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, smallest_feasible_bytes: int, binding: str
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        # By default only ``args`` are pickled, without the keyword arguments.
        return functools.partial(type(self), **vars(self)), self.args


class OffloadError(SacplanError):
    """A tensor that was copied to the host cannot be given back as it was."""


class SolverError(SacplanError):
    """The mixed-integer program has no solution, or its solver failed or is not installed."""
