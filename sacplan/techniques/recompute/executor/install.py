"""Recipes on a model: the forward of each unit is replaced on the instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Discarded
from sacplan.core.elements import CallSite
from sacplan.core.setup import compiled_inside
from sacplan.errors import PlanError
from sacplan.techniques.recompute.executor.recipes import PlannedForward
from sacplan.techniques.runtime.alignment import RecordedUnit
from sacplan.techniques.runtime.saved import Mark
from sacplan.techniques.runtime.stand_ins import InstalledStandIns


class InstalledRecipes(InstalledStandIns):
    """The units of a model whose forward leaves recipes, or in which something else is done when ops have run.

    A unit has one recorder for both: where recipes are installed already, it gets the marks.

    Args:
        model: the model.
        discarded: unit to call sites, and how often each is dropped.
        recorded: unit to the ops of its calls in the recorded step.
        check: compare checksums in the first step.
        marks: by unit and call site, what else is done.

    Raises:
        PlanError: a unit is compiled in parts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        discarded: Discarded,
        recorded: Mapping[str, Sequence[OpSequence]],
        check: bool,
        marks: Mapping[str, Mapping[CallSite, tuple[Mark, ...]]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        names = {id(module): fqn for fqn, module in model.named_modules()}
        planned = []
        self._marked: list[PlannedForward] = []
        for fqn in dict.fromkeys((*discarded, *marks)):
            unit = model.get_submodule(fqn)
            there = unit.__dict__.get("forward")
            if fqn in marks and isinstance(there, PlannedForward):
                self._marked.append(there)
                there.mark(marks[fqn])
                continue
            _check_compiled(fqn, unit)
            elsewhere = self._elsewhere(names, unit, fqn)
            ops = RecordedUnit(fqn, recorded.get(fqn, ()), discarded.get(fqn, {}), marks.get(fqn))
            planned.append(PlannedForward(unit, ops, elsewhere, self._differences, check))
        self._put_on(planned)

    def remove(self) -> None:
        """Take the marks off, and give every other module its own forward back."""
        for planned in self._marked:
            planned.mark(None)
        self._marked = []
        super().remove()


def _check_compiled(fqn: str, unit: torch.nn.Module) -> None:
    """Refuse a unit with a part that is compiled on its own: under a dispatch mode it would run uncompiled."""
    own = hasattr(unit.__dict__.get("forward"), "_torchdynamo_orig_callable")
    for name in ("",) if own else compiled_inside(unit)[:1]:
        path = ".".join(part for part in (fqn, name) if part)
        where = f"unit {fqn!r}" if fqn else "the model, which is one unit of the plan"
        raise PlanError(
            f"module {path!r} is compiled on its own, but it is part of {where}: inside a unit that is not compiled as "
            "a whole, nothing runs compiled. Apply the plan first, then compile whole units: model.compile(), or "
            "torch.compile(model); or compile before sacplan.profile, and the plan has no unit around what is compiled."
        )
