"""Several plans on one model: each of its calls runs with the first plan that was made for one as large.

The forwards of all plans are made when they are applied. A hook on the model looks at the shapes of its arguments, as
``watch.py`` does, and says which plan counts from there on. For shapes that came before, that is a look-up. A backward
pass goes on with the plan of its forward pass, whichever is chosen in between: autograd holds what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.core.model_calls import Shapes, larger_than, shapes_of
from sacplan.core.places import StepDifference
from sacplan.errors import PlanError
from sacplan.planning.plan import Plan
from sacplan.running.watch import MOST_SEEN
from sacplan.techniques.base.technique import Installed
from sacplan.techniques.runtime.stand_ins import InstalledStandIns, StandIn, cannot_be_scripted
from sacplan.torch_compat.compiling import stop_compiling


class PlanChoice:
    """A hook on the model: the plan for a call, the last one if the call is larger than all were made for.

    It holds no tensor and no module, so that copies of the model can be made with it.

    Attributes:
        index: of the plan that counts.
    """

    __name__ = "sacplan_choice"  # torch.jit.script reads it before anything else

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.index = len(plans) - 1
        self._planned = [[call.tensors for call in plan.fingerprint.calls] for plan in plans]
        self._seen: dict[Shapes, int] = {}

    @property
    def __globals__(self) -> dict[str, Any]:
        """``torch.jit.script`` asks a hook for this attribute. A plan cannot be scripted, so say that."""
        raise cannot_be_scripted("this model")

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Choose a plan for one call of the model."""
        if torch.compiler.is_compiling():
            return  # the units say that they cannot be compiled
        here = shapes_of(args, kwargs)
        index = self._seen.get(here)
        if index is None:
            fitting = (i for i, calls in enumerate(self._planned) if larger_than(here, calls) is None)
            index = next(fitting, len(self._planned) - 1)
            if len(self._seen) < MOST_SEEN:
                self._seen[here] = index
        self.index = index


class ChosenForward(StandIn):
    """Runs a module as the plan that counts has it; as it is if that plan leaves it alone."""

    def __init__(
        self, module: torch.nn.Module, fqn: str, choice: PlanChoice, forwards: Sequence[StandIn | None]
    ) -> None:
        super().__init__(module, fqn)
        self._choice, self._forwards = choice, forwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if torch.compiler.is_compiling():
            stop_compiling(
                PlanError,
                f"unit {self.fqn!r} has several plans, of which the shapes of a call choose one, and torch.compile "
                "cannot do that. Run the model uncompiled, or apply one plan.",
            )
        chosen = self._forwards[self._choice.index]
        return self.call_original(*args, **kwargs) if chosen is None else chosen(*args, **kwargs)

    def for_replica(self, replica: torch.nn.Module) -> StandIn:
        """Return the stand-in of a replica."""
        other = super().for_replica(replica)
        assert isinstance(other, ChosenForward)
        other._forwards = [one if one is None else one.for_replica(replica) for one in self._forwards]
        return other


class InstalledBySize(InstalledStandIns):
    """Several plans, as one part of what is installed on a model.

    Args:
        model: the model, with nothing of the plans on it.
        plans: the plans.
        lifted: for each, what ``lifted`` returned.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plans: Sequence[Plan],
        lifted: Sequence[tuple[Sequence[Installed], Mapping[str, StandIn]]],
    ) -> None:
        super().__init__()
        self._parts = [part for parts, _ in lifted for part in parts]
        choice = PlanChoice(plans)
        units = dict.fromkeys(fqn for _, forwards in lifted for fqn in forwards)
        self._put_on(
            ChosenForward(
                model.get_submodule(fqn), fqn, choice, [forwards.get(fqn) for _, forwards in lifted]
            )
            for fqn in units
        )
        self._hook = model.register_forward_pre_hook(choice, with_kwargs=True)

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """For each unit that departed from the recorded step of a plan, its first difference there."""
        return tuple(found for part in self._parts for found in part.differences)

    def forget_differences(self) -> None:
        """Start a new step: drop the differences so far."""
        for part in self._parts:
            part.forget_differences()

    def remove(self) -> None:
        """Give every module its own forward back. Pending backward passes stay correct."""
        self._hook.remove()
        super().remove()


def lifted(installed: Sequence[Installed]) -> tuple[Sequence[Installed], Mapping[str, StandIn]]:
    """Take a plan off its model, ready to run: its parts, and by unit what ran in place of the module's forward.

    Raises:
        PlanError: a part is more than other forwards.
    """
    parts = [part for part in installed if isinstance(part, InstalledStandIns)]
    if len(parts) < len(installed):
        raise PlanError(
            "a plan that splits compiled graphs or keeps weights on the host cannot be one of several. Apply it alone."
        )
    forwards: dict[str, StandIn] = {}
    for part in reversed(parts):
        # The parts that came later lie on top, and hold those below.
        forwards = {one.fqn: one for one in part.lift()} | forwards
    return parts, forwards
