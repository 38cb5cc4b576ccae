"""The errors that a user of sacplan can cause; each message says what happened, where, and what to try."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


class PlanMismatch(PlanError):
    """The plan was made for another model or another batch. The message names the first difference."""


class RecipeError(SacplanError, RuntimeError):
    """A discarded activation cannot be recomputed: something it needs was changed."""


class ChunkError(SacplanError, RuntimeError):
    """A chunk cannot do what the step asks of it: something it reads was changed, or a tensor cannot be lazy there."""


class InfeasibleBudget(SacplanError):
    """No plan keeps the step under the budget.

    Attributes:
        budget_bytes: the budget that was asked for, or what the allocator of the GPU has room for.
        smallest_feasible_bytes: the smallest peak that the search reached; a plan for it exists. If only the reserved
            segments do not fit a GPU: the fewest bytes that are reserved.
        binding: the fqn of the module that runs at that peak, or ``"optimizer step"``.
    """

    def __init__(
        self,
        message: str,
        advice: str = "",
        *,
        alternatives: Callable[[], str] | None = None,
        budget_bytes: int,
        smallest_feasible_bytes: int,
        binding: str,
    ) -> None:
        super().__init__(message)
        self._message, self._advice, self._alternatives = message, advice, alternatives
        self.budget_bytes = budget_bytes
        self.smallest_feasible_bytes = smallest_feasible_bytes
        self.binding = binding

    def __str__(self) -> str:
        """Return the message. Only now are other plans looked for, since that takes a search."""
        # Kept once made: a traceback, a log and a pickle may each ask for the text.
        if self._alternatives is not None:
            self._message += self._alternatives()
            self._alternatives = None
        return self._message + self._advice

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the whole message."""
        # The function that makes alternatives holds the step and cannot be pickled; its sentences can.
        make = functools.partial(
            type(self),
            budget_bytes=self.budget_bytes,
            smallest_feasible_bytes=self.smallest_feasible_bytes,
            binding=self.binding,
        )
        return make, (str(self),)


class OffloadError(SacplanError):
    """A tensor that was copied to the host cannot be given back as it was."""


class SolverError(SacplanError):
    """The mixed-integer program has no solution, or its solver failed or is not installed."""
