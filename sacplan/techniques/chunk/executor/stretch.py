"""Stretches on a model: the forward of a unit runs under a dispatch mode that defers the ops of its stretches.

The mode finds the recorded op that each op is (``alignment.py``), as for recipes. Ops at the sites of a stretch are
collected (``collected.py``), and the loop runs when the last of them is reached. A step that departs from the recorded
one may read a tensor of a stretch too early, overwrite what the loop will read, or never reach the last op: then what
was put off is computed whole, and a ``StepDifference`` is noted.

Units may nest: there is one mode for a thread, with a frame for each unit that runs. The stretches of a plan do not
interleave, so one at a time collects ops. Where gradients are computed, a unit runs as if nothing had been applied.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from sacplan.core.call_sites import CallSites, StepDifference, described
from sacplan.core.decisions import Chunk
from sacplan.core.elements import CallSite
from sacplan.device.kernels import kernel_layouts
from sacplan.techniques.chunk.executor.collected import Stretch, StretchTensor, computed
from sacplan.techniques.runtime.alignment import Alignment, Differences, RecordedUnit
from sacplan.techniques.runtime.recording import here
from sacplan.techniques.runtime.stand_ins import RecordedStandIn
from sacplan.torch_compat.fake_tensors import fake_device_of
from sacplan.torch_compat.local_tensors import Watching, has_local_parts
from sacplan.torch_compat.ops import is_alias, is_composite, is_computation, run_in_parts, tensors_in
from sacplan.torch_compat.private import dispatch_modes, is_plain, module_calls


class _Frame:
    """One call of a unit that runs now.

    Attributes:
        over: the last sites of stretches that have run or were given up. Other ops of these stretches run as they are.
    """

    def __init__(self, unit: SlicedForward, outer: FrameType) -> None:
        self.unit = unit
        self.over: set[CallSite] = set()
        self._alignment = Alignment(unit.recorded)
        self._places = CallSites()
        self._names = unit.names()
        self._outer: FrameType | None = outer
        self._calls: dict[FrameType, torch.nn.Module] = {}

    def locate(self, description: str) -> CallSite | None:
        """Return the site of the next op, if it is one of a stretch."""
        assert self._outer is not None
        self._calls = module_calls(self._outer, self._calls)
        # Places are told by the module calls around an op, which are read from Python's stack.
        around = [(frame, self._names[id(m)]) for frame, m in self._calls.items() if id(m) in self._names]
        place = self._places.at(around)
        recorded = self._alignment.next(self._places.caller, place, description)
        return recorded.site if recorded is not None and recorded.site in self.unit.decisions else None

    def note(self, ran: str | None, recorded: str) -> None:
        """Note that an op ran, or that the call ended (None), where a stretch would have waited for another."""
        found = StepDifference(self.unit.fqn, self._places.place, ran, recorded)
        self.unit.differences.note(found, may_warn=True)

    def end(self) -> None:
        """End the call."""
        self._alignment.end()
        if self._alignment.difference is not None:
            self.unit.differences.note(self._alignment.difference, may_warn=True)

    def let_go(self) -> None:
        """Forget the frames of Python's stack, which hold this object and all local variables."""
        self._outer, self._calls, self._places = None, {}, CallSites()


def _as_outside() -> AbstractContextManager[object]:
    """Let composite ops reach the modes below decomposed, as they would outside of a dispatch mode."""
    return enable_reentrant_dispatch() if dispatch_modes() else nullcontext()


class StretchMode(Watching):
    """The dispatch mode that defers ops of stretches, on while calls of units run."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._frames: list[_Frame] = []
        # The stretch that waits for its last op, with the call that it is in.
        self._open: tuple[_Frame, Stretch] | None = None

    def saved_on(self, tensor: torch.Tensor) -> None:
        """Return None: without gradients nothing is saved."""

    def call(self, unit: SlicedForward, outer: FrameType, args: Any, kwargs: Any) -> Any:
        """Call a unit, and end the stretch that stays open in it. Python's stack is read up to the frame ``outer``."""
        frame = _Frame(unit, outer)
        self._frames.append(frame)
        try:
            out = unit.original(*args, **kwargs)
            # What is computed here is no op of the model: the frames must not look for it in the recording.
            self.paused = True
            if self._open is not None and self._open[0] is frame:
                self._give_up(None)
            frame.end()
        finally:
            self.paused = False
            # After an error a stretch of this call may still be open.
            if self._open is not None and self._open[0] is frame:
                self._open = None
            self._frames.remove(frame)
            frame.let_go()
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_local_parts(types):
            return NotImplemented  # a DTensor, for one, comes back here with its local tensors
        kwargs = kwargs or {}
        device = fake_device_of(func, args)
        if device is not None:
            return device  # the device of a fake tensor was asked for, which runs nothing
        if self.paused:
            return func(*args, **kwargs)
        if is_composite(func):
            return run_in_parts(self, func, args, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        name = str(func)
        site = self._follow(name, tensors) if is_computation(name) else None
        if self._open is not None:
            _, stretch = self._open
            # Views have no site of their own. A view of what is put off is put off as well.
            joins = any(map(stretch.waits_for, tensors)) if is_alias(name) else site is not None
            if joins and stretch.may_defer(func, args, kwargs):
                decision = stretch.decision
                kept = tuple(output for at, output in decision.exits if decision.sites[at] == site)
                out = stretch.defer(func, args, kwargs, kept)
                if site == decision.sites[-1]:
                    self._run(name)
                return out
            if joins or stretch.is_touched_by(func, args, kwargs):
                self._give_up(name)
        if any(isinstance(t, StretchTensor) for t in tensors):
            args, kwargs = computed((args, kwargs))
        return func(*args, **kwargs)

    def _follow(self, name: str, tensors: Sequence[torch.Tensor]) -> CallSite | None:
        """Find the next op in the recording, and return its site if its stretch is now open.

        It opens its stretch, unless this has run or was given up. An open stretch that is another one is given up.
        """
        ranks = [t.dim() for t in tensors if isinstance(t, StretchTensor) or is_plain(t)]
        description, found = described(name, ranks), None
        # Every frame must see every op, to keep its place in the recording; the innermost unit counts.
        for frame in self._frames:
            site = frame.locate(description)
            if site is not None:
                found = frame, site
        if found is None:
            return None
        frame, site = found  # a site of a stretch: ``locate`` returns no others
        decision = frame.unit.decisions[site]
        if self._open is not None and self._open[1].is_over:
            # Somebody read a tensor of the stretch without an op, as by data_ptr(). Its other ops run as they are.
            self._give_up("a look at the memory of a tensor")
        if self._open is not None and self._open[1].decision is not decision:
            self._give_up(name)  # another stretch begins before the last op of the open one
        if decision.sites[-1] in frame.over:
            return None  # the stretch has run, or was given up
        if self._open is None:
            self._open = frame, Stretch(decision)
        return site

    def _run(self, description: str) -> None:
        """Run the open stretch, since its last op is reached."""
        frame, stretch = self._close()
        with _as_outside():
            sliced = stretch.run()
        if not sliced:
            frame.note(description, "one that can be sliced as planned")

    def _give_up(self, description: str | None) -> None:
        """Compute the open stretch without slices, since an op that runs now (None: the call ends) needs it."""
        frame, stretch = self._close()
        with nullcontext() if description is None else _as_outside():
            stretch.run_whole()
        frame.note(description, "none that touches what was put off")

    def _close(self) -> tuple[_Frame, Stretch]:
        assert self._open is not None
        (frame, stretch), self._open = self._open, None
        frame.over.add(stretch.decision.sites[-1])
        return frame, stretch


class SlicedForward(RecordedStandIn):
    """Stands in for a unit's ``forward`` on the instance (``stand_ins.py``).

    Args:
        module, recorded, elsewhere, differences: see ``RecordedStandIn``.
        decisions: its stretches.

    Attributes:
        decisions: the stretches by the call sites of their ops.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        recorded: RecordedUnit,
        decisions: Sequence[Chunk],
        elsewhere: frozenset[str],
        differences: Differences,
    ) -> None:
        super().__init__(module, recorded, elsewhere, differences)
        self.decisions = {site: decision for decision in decisions for site in decision.sites}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # ops of a compiled graph reach no mode
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with its stretches in slices unless gradients are recorded."""
        if torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        around = here.recorder
        if isinstance(around, StretchMode):  # the unit is inside of another one
            return around.call(self, sys._getframe(0), args, kwargs)
        # The mode is also the recorder, so that unrecorded() pauses it while deferred ops run.
        mode = here.recorder = StretchMode()
        try:
            with kernel_layouts(self._device_kind()), mode:
                return mode.call(self, sys._getframe(0), args, kwargs)
        finally:
            here.recorder = around

    def _device_kind(self) -> str:
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return "cpu" if first is None else first.device.type
