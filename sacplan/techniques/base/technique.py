"""The base class of techniques: ways to save memory that rewrite a program and can be carried out on a model.

A technique names regions of a step, or offers options for regions that others name. The effect of an option on memory
is read from its patch, so only the technique knows how it works. Solvers see numbers, the fold sees events, and the
planner knows no technique by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from sacplan.core.call_sites import OpSequence, StepDifference
from sacplan.core.decisions import Decision
from sacplan.core.liveness import Footprint
from sacplan.core.program import Patch, Program
from sacplan.device.devices import DeviceSpec
from sacplan.techniques.base.offers import Offer
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.base.step import PlanStep


@dataclass(frozen=True, slots=True)
class ToInstall:
    """The decisions of one technique, and the model that they are put on.

    Attributes:
        model: the model.
        decisions: those of the technique.
        recorded: by unit, the ops of its calls in the recorded step.
        check: whether the first step is compared with the recorded one, as far as it can be.
    """

    model: torch.nn.Module
    decisions: Sequence[Decision]
    recorded: Mapping[str, Sequence[OpSequence]]
    check: bool


class Installed(Protocol):
    """The decisions of one technique, in force on a model. A subclass may leave out what does not apply to it."""

    @property
    def units(self) -> tuple[str, ...]:
        """The fully qualified names of the modules whose forward is replaced."""
        return ()

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """For each unit that departed from the recorded step, its first difference."""
        return ()

    def forget_differences(self) -> None:
        """Start a new step: drop the differences so far."""
        return

    def check_removable(self) -> None:
        """Raise ``PlanError`` if the model has changed since, so that ``remove`` would undo somebody else's work."""
        return

    def remove(self) -> None:
        """Give every module its own forward back."""
        ...


# The search asks by ``isinstance`` which of the two kinds of solver it has.
@runtime_checkable
class StepSolver(Protocol):
    """A solver that looks at the whole step instead of the options of regions."""

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        ...

    @property
    def techniques(self) -> tuple[str, ...]:
        """The techniques that its plans use."""
        ...

    def proposals(self, step: PlanStep, budget_bytes: int) -> Iterable[tuple[Decision, ...]]:
        """Return sets of decisions that are worth measuring for a budget.

        A budget of 0 asks for those with the smallest peak.

        Raises:
            PlanError: the solver cannot plan for this step.
        """
        ...


class Technique(ABC):
    """One technique; ``sacplan/techniques/registry.py`` lists them.

    A subclass overrides only what it can do. The defaults are those of a technique that names no regions and offers
    nothing, and whose options come with their decision and patch.
    """

    name: ClassVar[str]
    """As in ``plan(techniques=...)``, ``Option.technique`` and the tag of its decisions."""

    decision: ClassVar[type[Any] | tuple[type[Any], ...]]
    """The class of its decisions, or classes."""

    # The careful default: plans do not use a technique on their own unless it says that it keeps every bit.
    keeps_bits: ClassVar[bool] = False
    """Whether gradients with it equal those without it bit by bit. Plans then use it by default, unless it
    ``takes_host``."""

    takes_host: ClassVar[bool] = False
    """Whether it takes memory of the host. A plan does so only if it is asked to."""

    one_device: ClassVar[str] = ""
    """Why it does not go together with a mesh; empty if it does."""

    uncompiled: ClassVar[str] = ""
    """A sentence on why a step with it cannot be compiled, and what to do; empty if it can."""

    row: ClassVar[str] = ""
    """What it adds to a step, in the rows of ``fit``. A technique of the default plan needs none."""

    row_of_long_search: ClassVar[str] = ""
    """Label of its row in ``fit`` for the exhaustive search; empty if there is none."""

    how: ClassVar[str] = ""
    """How its own solver looked for plans, for the message that none fits a budget; empty if it has no solver."""

    # --- what a plan chooses from ---

    @property
    def is_about_regions(self) -> bool:
        """Whether it can have options for regions of the forward pass, its own or those of others."""
        # By what the subclass overrides, so that no technique has to say it a second time.
        own = type(self)
        return own.regions is not Technique.regions or own.options is not Technique.options

    @property
    def is_about_peaks(self) -> bool:
        """Whether it can settle or offer something about the peak of a plan."""
        own = type(self)
        return own.settled is not Technique.settled or own.offers is not Technique.offers

    def longest_run(self, step: PlanStep) -> int:
        """Return how many neighbouring regions can be joined into one; 0 if it names no regions."""
        return 0

    def regions(self, step: PlanStep, size: int) -> Sequence[Region]:
        """Return the regions of the forward pass that it names, with up to ``size`` neighbours joined, and its options.

        Other techniques add options to these regions, even in a plan that does not use this technique.
        """
        return ()

    def options(self, step: PlanStep, region: Region) -> Sequence[Option]:
        """Return options for a region that another technique named."""
        return ()

    def leaving_bytes(self, step: PlanStep) -> int:
        """Return the bytes that are on the device for all of the step, and that its options may have elsewhere."""
        return 0

    def offers(self, step: PlanStep, peak: Footprint | None) -> Sequence[Offer]:
        """Return choices about ops that it does not share with other techniques.

        Args:
            step: the step to plan for.
            peak: the footprint of the best plan so far, whose peak is to be lowered. None asks for offers that may
                pay at any budget.
        """
        return ()

    def settled(self, step: PlanStep, peak: Footprint, decisions: Sequence[Decision]) -> Sequence[Decision]:
        """Return decisions that lower a peak, the same for all modules that are alike; () if there are none.

        No solver chooses among them. The step with these decisions is planned for as if it had been recorded so, and
        other techniques may use all that is left of the modules. One search decides once for all layers.

        Args:
            step: the step as it was recorded.
            peak: the footprint of the best plan so far.
            decisions: those of that plan. The ones returned take the place of those about the same modules.
        """
        return ()

    def solvers(self, step: PlanStep) -> Sequence[StepSolver]:
        """Return its own solvers for this step, for choices that options of regions cannot express."""
        return ()

    # --- what it does to a program, and to a model ---

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        """Return the rewrite of one option. It changes only events of what the region touches."""
        # An option may leave its patch for later. Its technique then has to override this method.
        assert option.patch is not None, f"{self.name}: an option without a patch needs its own option_patch"
        return option.patch

    shares_units: ClassVar[bool] = False
    """Whether its units must not nest with those of other such techniques: one recorder runs in a unit for all."""

    frees_otherwise: ClassVar[bool] = False
    """Whether its options free what autograd keeps without running ops again: bounds on that then say nothing."""

    def decisions(
        self, program: Program, taken: Sequence[tuple[Region, Option]], units: Collection[str] | None = None
    ) -> tuple[Decision, ...]:
        """Turn the chosen options into the decisions of a plan.

        Args:
            program: the step, with the decisions of the techniques before this one.
            taken: the options with decisions of this technique.
            units: the units of the options of all techniques that share units; None: those of ``taken``. A unit inside
                another one belongs to the outer one.
        """
        # A technique whose options come without a decision overrides this.
        return tuple(option.decision for _, option in taken if option.decision is not None)

    @abstractmethod
    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """Return the rewrite for the decisions of a plan. Other techniques may have rewritten the program before.

        Args:
            program: the step, with what other techniques did to it.
            decisions: those of this technique.
            device: what the step runs on. None where it is not known; a technique may then refuse.

        Raises:
            PlanError: a decision cannot be carried out on this step, or not together with another one.
        """

    @abstractmethod
    def install(self, wanted: ToInstall) -> Iterator[Installed]:
        """Put the decisions on the model, part by part: where one fails, the caller takes off those before it."""
