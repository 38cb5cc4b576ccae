"""Recipes: recompute one discarded tensor instead of running a module's Python again.

While a unit's forward runs, a dispatch mode (``recorder.py``) makes a node (``nodes.py``) for every op that the plan
discards, with its arguments: tensors, or slots of other nodes. The pack hook gives autograd a handle (``handles.py``)
on a slot instead of the tensor. When autograd asks for it, the nodes that this slot needs run, arguments first; each
stores only the outputs that are still referenced and drops its arguments, so that reference counts free everything
right after its last use. Each node runs once, unless the plan says that its outputs are discarded several ``times``, as
Rotor's sequences do.

An op that writes in place gets a node too, if the value that it overwrites has one; then both ops run again.

A plan is advice, and this folder does not trust it. What the mode did not see being made (custom kernels, other
modules, wrapper subclasses), what has been written since, and ops that must not run again are kept, whatever the plan
says. What is kept is still checked: a saved-tensor hook disables autograd's own check for in-place writes, so handles
carry the version and check it themselves. A kernel that writes through a pointer (Triton, numpy) is seen by no mode and
bumps no version; so in the first step of a unit each discarded tensor leaves a checksum, which the recomputed one must
match.

Related work: RETURNN's ``gradient_checkpoint_scope``, DTR (Kirisame et al. 2020). Known inefficiencies: every op in the
forward of a unit passes through Python, kept ones too, since no op that writes may be missed, and so does every tensor
that autograd saves there; an argument that a recipe holds is not offloaded by the saved-tensor hooks around the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Discarded
from sacplan.core.elements import CallSite
from sacplan.core.setup import compiled_inside
from sacplan.errors import PlanError
from sacplan.techniques.recompute.executor.compiled import checkpointed_for_compile, tags_of
from sacplan.techniques.recompute.executor.handles import FirstStep
from sacplan.techniques.recompute.executor.recorder import UnitRecorder
from sacplan.techniques.recompute.executor.schedule import Schedule
from sacplan.techniques.runtime.alignment import Differences, RecordedUnit
from sacplan.techniques.runtime.recording import here
from sacplan.techniques.runtime.saved import Mark
from sacplan.techniques.runtime.stand_ins import InstalledStandIns, RecordedStandIn
from sacplan.torch_compat.compiling import is_exporting, keep_dynamo_out, stop_compiling

_EXECUTOR = ("draws", "handles", "lookup", "nodes", "recorder", "schedule", "slots")
_PRIVATE = ("autograd", "compiling", "fake_kernels", "fake_tensors", "kernel_settings", "ops", "private")
keep_dynamo_out("sacplan.techniques.recompute.executor", *_EXECUTOR)
keep_dynamo_out("sacplan.techniques.runtime", "alignment", "recording", "saved", "tensors")
keep_dynamo_out("sacplan.torch_compat", *_PRIVATE)
keep_dynamo_out("sacplan.core", "call_sites")


class PlannedForward(RecordedStandIn):
    """Stands in for a unit's ``forward`` on the instance (``stand_ins.py``); undone by ``Handle.remove``.

    Args:
        module, recorded, elsewhere, differences: see ``RecordedStandIn``.
        check: whether the first step compares checksums.
    """

    records = True

    def __init__(
        self,
        module: torch.nn.Module,
        recorded: RecordedUnit,
        elsewhere: frozenset[str] = frozenset(),
        differences: Differences | None = None,
        check: bool = True,
    ) -> None:
        super().__init__(module, recorded, elsewhere, differences)
        self.tags = tags_of(recorded)
        self.tags.units.add(self)
        self._first_mode: bool | None = None  # whether the first call was in training; None before it
        self.first_step = FirstStep(check)
        # By whether the module is in training mode, in which it runs other ops.
        self._schedules: dict[bool, Schedule] = {}

    def mark(self, marks: Mapping[CallSite, tuple[Mark, ...]] | None) -> None:
        """Have ``marks`` told, from the next call on, when their ops have run; None takes the marks off."""
        self.recorded = replace(self.recorded, marks=marks)
        self._schedules = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which learns from its own calls."""
        return self.__dict__ | {"_schedules": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as planned; without gradients, as it ran before the plan."""
        trains = torch.is_grad_enabled() and not is_exporting()
        if torch.compiler.is_compiling() and trains:
            if self.recorded.marks is not None:
                stop_compiling(
                    PlanError,
                    f"unit {self.fqn!r} copies tensors to the host (technique offload), which torch.compile cannot do. "
                    "Run the model uncompiled, or plan with other techniques than offload.",
                )
            return checkpointed_for_compile(self, args, kwargs)
        # Without gradients autograd saves nothing, so there is nothing to discard. A unit inside a unit belongs to the
        # outer one.
        if not trains or here.recorder is not None:
            return self.call_original(*args, **kwargs)
        is_first = self._first_mode is None
        if is_first:
            self.differences.note_compiled(self.fqn, compiled_inside(self.module))
        training = self.module.training
        recorder = UnitRecorder(self.recorded, self.names, self.first_step, self._schedules.get(training))
        with recorder:
            out = self.call_original(*args, **kwargs)
        if is_first:
            self._first_mode = training
        # Differences count only in the mode of the first call: evaluation runs other ops than training.
        if recorder.difference is not None and training == self._first_mode:
            # What the first call alone does, such as filling a cache, is worth no warning.
            self.differences.note(recorder.difference, may_warn=not is_first)
        if recorder.learned is not None:
            self._schedules[training] = recorder.learned
        return out


class InstalledRecipes(InstalledStandIns):
    """The units of a model whose forward leaves recipes, or in which something else is done when ops have run.

    A unit has one recorder for both: where recipes are installed already, their stand-in gets the marks.

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
            forward = unit.__dict__.get("forward")
            if fqn in marks and isinstance(forward, PlannedForward):
                self._marked.append(forward)
                forward.mark(marks[fqn])
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
    is_compiled = hasattr(unit.__dict__.get("forward"), "_torchdynamo_orig_callable")
    for name in ("",) if is_compiled else compiled_inside(unit)[:1]:
        path = ".".join(part for part in (fqn, name) if part)
        where = f"unit {fqn!r}" if fqn else "the model, which is one unit of the plan"
        raise PlanError(
            f"module {path!r} is compiled on its own, but it is part of {where}: inside a unit that is not compiled as "
            "a whole, nothing runs compiled. Apply the plan first, then compile whole units: model.compile(), or "
            "torch.compile(model); or compile before sacplan.profile, and the plan has no unit around what is compiled."
        )
