"""Chunks on a model: the forward of each unit is replaced on the instance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sacplan._chunk.executor.forward import ChunkedForward
from sacplan._chunk.executor.lazy import import_meta_kernels
from sacplan._program.decisions import Chunk
from sacplan._program.places import StepDifference
from sacplan._recompute.executor.alignment import Differences
from sacplan._recompute.executor.copies import put_on, take_off
from sacplan.errors import PlanError


class InstalledChunks:
    """The units of a model that run in slices in training.

    Args:
        model: the model.
        decisions: with spans ``"module"`` and ``"rest"``, one for each unit.

    Raises:
        PlanError: a unit is compiled, or has two decisions.
    """

    def __init__(self, model: torch.nn.Module, decisions: Sequence[Chunk]) -> None:
        import_meta_kernels()
        self._differences = Differences()
        planned: dict[str, ChunkedForward] = {}
        for decision in decisions:
            if decision.unit in planned:
                raise PlanError(
                    f"the plan has two chunks for module {decision.unit!r}. Make a plan with sacplan.plan."
                )
            unit = model.get_submodule(decision.unit)
            _check_compiled(decision.unit, unit)
            planned[decision.unit] = ChunkedForward(unit, decision, self._differences)
        for stand_in in planned.values():
            put_on(stand_in.module, stand_in)
        self._planned = planned

    @property
    def units(self) -> tuple[str, ...]:
        """The modules whose forward is replaced."""
        return tuple(self._planned)

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """Where calls of the units could not do what was planned."""
        return tuple(self._differences.by_unit.values())

    def forget_differences(self) -> None:
        """A new step begins."""
        self._differences.clear()

    def check_removable(self) -> None:
        """``PlanError`` where somebody replaced a forward again."""
        for fqn, planned in self._planned.items():
            if planned.module.__dict__.get("forward") is not planned:
                raise PlanError(
                    f"the forward of module {fqn!r} was replaced after the plan was applied. Undo that first, then "
                    "remove the plan."
                )

    def remove(self) -> None:
        """Give every module its own forward back. Pending backward passes stay correct."""
        for planned in self._planned.values():
            take_off(planned.module, planned)
        self._planned = {}


def _check_compiled(fqn: str, unit: torch.nn.Module) -> None:
    """Compiled code cannot run on lazy tensors."""
    for name, module in unit.named_modules():
        if module._compiled_call_impl is not None or hasattr(
            module.__dict__.get("forward"), "_torchdynamo_orig_callable"
        ):
            path = ".".join(part for part in (fqn, name) if part)
            raise PlanError(
                f"module {path!r} is compiled, but module {fqn!r} is to run in slices, which torch.compile cannot "
                "keep. Leave that module uncompiled, and compile the others each with .compile()."
            )
