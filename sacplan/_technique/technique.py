"""What a technique is: a way to save memory that rewrites a program, and that can be carried out on a model.

A technique names regions of a step, or offers options for those that others name. What an option does to memory is read
from its patch, so nobody but the technique knows how it works: neither the solvers, which see numbers, nor the fold,
which sees events, nor the planner, which knows no technique by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Decision
from sacplan._program.liveness import Footprint
from sacplan._program.places import OpSequence, StepDifference
from sacplan._program.program import Patch, Program
from sacplan._technique.offers import Offer
from sacplan._technique.regions import Option, Region
from sacplan._technique.step import PlanStep


class Installed(Protocol):
    """Decisions of one technique on a model.

    Attributes:
        units: fqns of the modules that run otherwise than before.
    """

    @property
    def units(self) -> tuple[str, ...]:
        """See above."""
        ...

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """Where a step first did not run what was recorded, by unit."""
        ...

    def forget_differences(self) -> None:
        """A new step begins."""
        ...

    def check_removable(self) -> None:
        """``PlanError`` where the model was changed since in a way that ``remove`` would spoil."""
        ...

    def remove(self) -> None:
        """Undo it."""
        ...


@runtime_checkable
class StepSolver(Protocol):
    """A solver that looks at the whole step, and not at what regions offer."""

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        ...

    @property
    def techniques(self) -> tuple[str, ...]:
        """What its plans do."""
        ...

    def proposals(self, step: PlanStep, budget_bytes: int) -> Sequence[tuple[Decision, ...]]:
        """Decisions that are worth measuring for a budget; for 0, those with the smallest peak.

        Raises:
            PlanError: it cannot plan for this step.
        """
        ...


class Technique(Protocol):
    """One technique; ``sacplan/_techniques.py`` lists them."""

    name: str
    """As in ``plan(techniques=...)``, ``Option.technique`` and the tag of its decisions."""

    decision: type[Any]
    """The class of its decisions."""

    one_device: str
    """Why it does not go together with a mesh; empty where it does."""

    how: str
    """How its own solver looked for plans, for the message that none holds a budget; empty if it has none."""

    # --- what a plan chooses from ---

    def longest_run(self, step: PlanStep) -> int:
        """How many of its neighbouring regions can be joined to one; 0 if it names none."""
        ...

    def regions(self, step: PlanStep, size: int) -> Sequence[Region]:
        """The parts of the forward pass that it names, with up to ``size`` neighbours joined, and its options for them.

        Other techniques add options to these regions, also where this one is not asked for.
        """
        ...

    def options(self, step: PlanStep, region: Region) -> Sequence[Option]:
        """Options for a region that another technique named."""
        ...

    def offers(self, step: PlanStep, peak: Footprint | None) -> Sequence[Offer]:
        """Choices about ops that it does not share with other techniques.

        Args:
            step: what is planned for.
            peak: of the smallest peak that was found so far. None: what may pay at any budget.
        """
        ...

    def solvers(self, step: PlanStep) -> Sequence[StepSolver]:
        """Solvers of its own for this step, where options of regions do not say what it can do."""
        ...

    # --- what it does to a program, and to a model ---

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        """The rewrite that an option is: of events about what the region touches, no others."""
        ...

    def decisions(self, program: Program, taken: Sequence[tuple[Region, Option]]) -> tuple[Decision, ...]:
        """Options that were chosen as decisions of a plan."""
        ...

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """The rewrite that decisions of a plan are. The program may be rewritten by other techniques already.

        ``device``: what the step runs on. None where it is not known; a technique may then refuse.
        """
        ...

    def install(
        self,
        model: torch.nn.Module,
        decisions: Sequence[Decision],
        recorded: Mapping[str, Sequence[OpSequence]],
        *,
        check: bool,
    ) -> Installed:
        """Put decisions on a model.

        ``recorded``: by unit, the ops of its calls in the recorded step. ``check``: compare in the first step what can
        be compared.
        """
        ...
