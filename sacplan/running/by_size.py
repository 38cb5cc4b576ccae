"""Several plans on one model: each call of the model runs with the first plan that was made for a call as large.

All forwards are made when the plans are applied. The hook that looks at the shapes of a call (``watch.py``) chooses the
plan from there on. For shapes that came before, choosing is a look-up. A backward pass goes on with the plan of its
forward pass, whichever plan is chosen in between: autograd holds what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.core.call_sites import StepDifference
from sacplan.errors import PlanError
from sacplan.running.watch import InputWatch
from sacplan.techniques.base.technique import Installed
from sacplan.techniques.recompute.executor.partitions import InstalledPartitions
from sacplan.techniques.runtime.stand_ins import InstalledStandIns, StandIn
from sacplan.torch_compat.compiling import stop_compiling


class ChosenForward(StandIn):
    """Runs a module with its forward in the chosen plan, or with its own if that plan leaves the module alone."""

    def __init__(
        self, module: torch.nn.Module, fqn: str, watch: InputWatch, forwards: Sequence[StandIn | None]
    ) -> None:
        super().__init__(module, fqn)
        self._watch, self._forwards = watch, forwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the chosen plan says."""
        if torch.compiler.is_compiling():
            stop_compiling(
                PlanError,
                f"unit {self.fqn!r} has several plans, of which the shapes of a call choose one, and torch.compile "
                "cannot do that. Run the model uncompiled, or apply one plan.",
            )
        chosen = self._forwards[self._watch.index]
        return self.call_original(*args, **kwargs) if chosen is None else chosen(*args, **kwargs)


class InstalledBySize(InstalledStandIns):
    """Several plans, as one part of what is installed on a model.

    Args:
        model: the model, with nothing of the plans on it.
        watch: its ``index`` is that of the chosen plan.
        plans: for each, what ``lifted`` returned.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        watch: InputWatch,
        plans: Sequence[tuple[Sequence[Installed], Mapping[str, StandIn]]],
    ) -> None:
        super().__init__()
        self._parts = [part for parts, _ in plans for part in parts]
        units = dict.fromkeys(fqn for _, forwards in plans for fqn in forwards)
        self._put_on(
            ChosenForward(model.get_submodule(fqn), fqn, watch, [forwards.get(fqn) for _, forwards in plans])
            for fqn in units
        )

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """For each unit that departed from the recorded step of a plan, its first difference there."""
        return tuple(found for part in self._parts for found in part.differences)

    def forget_differences(self) -> None:
        """Start a new step: drop the differences so far."""
        for part in self._parts:
            part.forget_differences()


def lifted(installed: Sequence[Installed]) -> tuple[Sequence[Installed], Mapping[str, StandIn]]:
    """Take a plan off its model; return its parts, and by unit what ran in place of the module's forward, ready to run.

    Raises:
        PlanError: a part does more than replace forwards.
    """
    without_partitions = [part for part in installed if not isinstance(part, InstalledPartitions)]
    parts = [part for part in without_partitions if isinstance(part, InstalledStandIns)]
    if len(parts) < len(installed):
        raise PlanError(
            "a plan that splits compiled graphs or keeps weights on the host cannot be one of several. Apply it alone."
        )
    forwards: dict[str, StandIn] = {}
    for part in reversed(parts):
        # Later parts are removed first, and win: their stand-ins lie on top, and hold those below.
        forwards = {stand_in.fqn: stand_in for stand_in in part.lift()} | forwards
    return parts, forwards
