"""What a technique is: a way to save memory that rewrites a program, and that can be carried out on a model.

A technique offers options to regions. What an option does to memory is read from its patch, so nobody but the technique
knows how it works: neither the solvers, which see numbers, nor the fold, which sees events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Decision
from sacplan._program.places import OpSequence, StepDifference
from sacplan._program.program import Patch, Program
from sacplan._program.regions import Option, Region


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


class Technique(Protocol):
    """One technique; ``sacplan/_techniques.py`` lists them."""

    name: str
    """As in ``plan(techniques=...)``, ``Option.technique`` and the tag of its decisions."""

    decision: type[Any]
    """The class of its decisions."""

    def options(self, program: Program, region: Region, costs: Sequence[float]) -> Sequence[Option]:
        """Options for a region beyond those that it has; ``costs``: by op, what running it again costs."""
        ...

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
