"""Compare the arguments of a planned model with those that its plan was made for, before the model runs.

A plan holds for calls that are at most as large as the recorded ones (``larger_than``). A hook on the model looks at
the shapes of the arguments. It compares each different call once; from then on, such a call costs a look-up.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sacplan.core.budget import format_bytes
from sacplan.core.model_calls import Shapes, larger_than, shapes_of
from sacplan.core.setup import compiled_inside
from sacplan.errors import SacplanWarning
from sacplan.planning.plan import Plan
from sacplan.techniques.base.technique import Installed
from sacplan.techniques.registry import why_uncompiled
from sacplan.techniques.runtime.stand_ins import cannot_be_scripted
from sacplan.torch_compat.compiling import warn_compiling

_applied = itertools.count()

_MOST_SEEN = 2**16
"""Different calls to remember: a loop in which every call differs must not take memory without a limit."""

ADVICE = (
    "Plan for the longest batch: give sacplan.profile the data loader, or cut samples to the planned size."
)


def compiled_otherwise(plan: Plan) -> str:
    """Return the warning for a compiled step whose plan was made for a step that is not compiled."""
    why = why_uncompiled(plan.decisions)
    return (
        "this plan was made for a step that is not compiled. Compiled, what it recomputes is still recomputed, but the "
        f"compiler fuses and saves as it sees fit: the peak of {format_bytes(plan.peak_bytes)} is not promised. "
        f"Measure the compiled step, and plan for less if it takes more; or run it uncompiled.{why and f' {why}'}"
    )


class ShapeWatch:
    """Warn of calls that are larger than those that a plan was made for.

    Args:
        plan: the plan, for what the warning says; the last of several.
        planned: for each plan, the calls that it was made for.

    One warning for each call that is larger than all that were warned of before.
    """

    def __init__(self, plan: Plan, *planned: Iterable[Shapes]) -> None:
        self._planned = [list(calls) for calls in planned]
        self._peak_bytes, self._budget_bytes = plan.peak_bytes, plan.budget_bytes
        self._seen: dict[Shapes, int] = {}
        self._warned: list[Shapes] = []

    def look(self, here: Shapes, stacklevel: int) -> int:
        """Compare one call, and return the index of the first plan that holds it; of the last plan if none does.

        ``stacklevel`` is that of the caller's ``warnings.warn``.
        """
        index = self._seen.get(here)
        if index is not None:
            return index
        last = len(self._planned) - 1
        holds = (i for i, calls in enumerate(self._planned) if larger_than(here, calls) is None)
        index = next(holds, last)
        if len(self._seen) < _MOST_SEEN:
            self._seen[here] = index
        larger = larger_than(here, self._planned[index])
        # No larger than planned, or than a call that was warned of: nothing new to say.
        if larger is None or (self._warned and larger_than(here, self._warned) is None):
            return index
        self._warned.append(here)
        budget = (
            "" if self._budget_bytes is None else f", and its budget is {format_bytes(self._budget_bytes)}"
        )
        warnings.warn(
            f"this batch is larger than the plan was made for: {larger.name} is {list(larger.shape)}, and the plan "
            f"holds up to {list(larger.planned)}. The step may take more than the "
            f"{format_bytes(self._peak_bytes)} that the plan predicts{budget}. {ADVICE}",
            SacplanWarning,
            stacklevel=stacklevel + 1,
        )
        return index


class InputWatch:
    """A hook on a planned model that warns of larger shapes, and of gradients that the planned step did not have.

    Args:
        plans: the plan, or several.

    It holds no tensor and no module, so that copies of the model can be made with it.

    Attributes:
        index: that of the plan which holds the latest call.
    """

    __name__ = "sacplan_watch"  # torch.jit.script reads it before anything else

    def __init__(self, *plans: Plan) -> None:
        calls = [call for one in plans for call in one.fingerprint.calls]
        plan, self.index = plans[-1], len(plans) - 1
        self._shapes = ShapeWatch(plan, *([call.tensors for call in one.fingerprint.calls] for one in plans))
        first = next(iter(plan.units), None)
        self._where = "this model" if first is None else f"unit {first!r}"
        # A key for each plan that is applied. Text, since torch.compile may make a symbol of a number that changes.
        self._key = str(next(_applied))
        self._compiled = "" if plan.fingerprint.setup.compiled else compiled_otherwise(plan)
        self._trains = plan.provenance.mode == "train"
        # No warning if the plan does not train, has no calls, or has calls of the model with gradients already there.
        self._is_told = not self._trains or any(call.with_gradients for call in calls) or not calls

    @property
    def __globals__(self) -> dict[str, Any]:
        """``torch.jit.script`` asks a hook for this attribute. A plan cannot be scripted, so say that."""
        raise cannot_be_scripted(self._where)

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Look at one call of the model."""
        # Without gradients, a plan for training does nothing.
        if self._trains and not torch.is_grad_enabled():
            return
        # The rest does not run in a compiled model: whatever a hook reads would become a guard.
        if torch.compiler.is_compiling():
            if self._compiled:
                warn_compiling(self._key, self._compiled)
            return
        # Modules may have been compiled since the plan was applied. The first call tells.
        if self._compiled and compiled_inside(model):
            warnings.warn(self._compiled, SacplanWarning, stacklevel=2)
        self._compiled = ""
        self.index = self._shapes.look(shapes_of(args, kwargs), stacklevel=2)
        if not self._is_told and any(p.grad is not None for p in _some_parameters(model)):
            self._is_told = True
            warnings.warn(
                "gradients of an earlier batch are alive while the model runs, and the plan was made for a step that "
                "begins without: this step may take more. Plan with accumulation_steps= (also with 2 for a loop that "
                "calls zero_grad behind the forward pass, or with set_to_none=False).",
                SacplanWarning,
                stacklevel=2,
            )


def _some_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield parameters up to the first trained one, which stands for all: their gradients come and go together."""
    for p in model.parameters():
        yield p
        if p.requires_grad:
            return


class Watched(Installed):
    """The hook as a part of a plan that is installed on a model, see ``Installed``."""

    def __init__(self, model: torch.nn.Module, *plans: Plan) -> None:
        self.watch = InputWatch(*plans)
        # TorchScript compiles hooks, and cannot compile this one.
        scripted = isinstance(model, torch.jit.ScriptModule)
        self._hook = None if scripted else model.register_forward_pre_hook(self.watch, with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
