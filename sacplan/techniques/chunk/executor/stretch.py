"""Stretches on a model: the forward of a unit runs under a dispatch mode that defers the ops of its stretches.

The mode finds the recorded op that each op is (``alignment.py``), as for recipes. Ops at the sites of a stretch are
collected (``collected.py``), and the loop runs when the last of them is reached. A step that departs from the recorded
one may read a tensor of a stretch too early, overwrite what the loop will read, or never reach the last op: then what
was put off is computed whole, and a ``StepDifference`` is noted.

Units may nest: there is one mode for a thread, with a frame for each unit that runs. Where gradients are computed, a
unit runs as if nothing had been applied.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from sacplan.core.decisions import Chunk
from sacplan.core.elements import CallSite
from sacplan.core.places import CallSites, StepDifference, described
from sacplan.device.kernels import kernel_layouts
from sacplan.techniques.chunk.executor.collected import Stretch, StretchTensor, computed
from sacplan.techniques.runtime.alignment import Alignment, Differences, RecordedUnit
from sacplan.techniques.runtime.recording import here
from sacplan.techniques.runtime.stand_ins import StandIn
from sacplan.torch_compat.fake_tensors import fake_device_of
from sacplan.torch_compat.local_tensors import Watching, has_local_parts
from sacplan.torch_compat.ops import (
    is_alias,
    is_composite,
    is_computation,
    op_traits,
    run_in_parts,
    tensors_in,
)
from sacplan.torch_compat.private import dispatch_modes, is_plain, module_calls


class _ThreadStretch(threading.local):
    mode: StretchMode | None = None


_here = _ThreadStretch()


class _Frame:
    """One call of a unit that runs now.

    Attributes:
        open: by last site, the stretches that have begun; None for one that is over, or was given up.
    """

    def __init__(self, unit: SlicedForward, outer: FrameType) -> None:
        self.unit = unit
        self.open: dict[CallSite, Stretch | None] = {}
        self._alignment = Alignment(unit.recorded)
        self._places = CallSites()
        self._names = unit.names()
        self._outer: FrameType | None = outer
        self._calls: dict[FrameType, torch.nn.Module] = {}
        self._here = ""

    @property
    def stretches(self) -> list[Stretch]:
        """The stretches that wait for their last op."""
        return [one for one in self.open.values() if one is not None and not one.is_over]

    def locate(self, description: str) -> CallSite | None:
        """Return the site of the next op, if it is one of a stretch."""
        assert self._outer is not None
        self._calls = module_calls(self._outer, self._calls)
        # Places are told by the module calls around an op, which are read from Python's stack.
        around = [(frame, self._names[id(m)]) for frame, m in self._calls.items() if id(m) in self._names]
        self._here = self._places.at(around)
        recorded = self._alignment.next(self._places.caller, self._here, description)
        return recorded.site if recorded is not None and recorded.site in self.unit.decisions else None

    def stretch_of(self, site: CallSite) -> Stretch | None:
        """Return the stretch of a site, begun if need be; None if it is over, or was given up."""
        decision = self.unit.decisions[site]
        last = decision.sites[-1]
        if last not in self.open:
            self.open[last] = Stretch(decision)
        stretch = self.open[last]
        if stretch is not None and stretch.is_over:
            # Somebody read a tensor of it without an op, such as its data_ptr(). Its remaining ops run as they are.
            self.open[last] = stretch = None
            self._note("a look at the memory of a tensor", "none that touches what was put off")
        return stretch

    def run(self, last: CallSite, stretch: Stretch, description: str) -> None:
        """Run a stretch, since its last op is reached."""
        self.open[last] = None
        with _as_outside():
            sliced = stretch.run()
        if not sliced:
            self._note(description, "one that can be sliced as planned")

    def give_up(self, stretch: Stretch, description: str | None) -> None:
        """Compute deferred ops without slices, since an op that runs now (None: the call ends) needs them."""
        with nullcontext() if description is None else _as_outside():
            stretch.run_whole()
        # Its other ops would wait for what is there already, so they run as they are.
        self.open.update((last, None) for last, one in self.open.items() if one is stretch)
        self._note(description, "none that touches what was put off")

    def _note(self, ran: str | None, recorded: str) -> None:
        found = StepDifference(self.unit.fqn, self._here, ran, recorded)
        self.unit.differences.note(found, may_warn=True)

    def end(self) -> None:
        """End the call: give up stretches whose last op was not reached."""
        for stretch in self.stretches:
            self.give_up(stretch, None)
        self._alignment.end()
        if self._alignment.difference is not None:
            self.unit.differences.note(self._alignment.difference, may_warn=True)

    def let_go(self) -> None:
        """Forget the frames of Python's stack, which hold this and all local variables."""
        self._outer, self._calls, self._places = None, {}, CallSites()
        self.open = {}


def _as_outside() -> AbstractContextManager[object]:
    """Let composite ops reach the modes below decomposed, as they would outside of a dispatch mode."""
    return enable_reentrant_dispatch() if dispatch_modes() else nullcontext()


class StretchMode(Watching):
    """The dispatch mode that defers ops of stretches, on while calls of units run."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[_Frame] = []
        self.paused = False

    def saved_on(self, tensor: torch.Tensor) -> None:
        """Return None: without gradients nothing is saved."""

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
        # Views have no site of their own. One of what is put off is put off as well.
        site = self._locate(name, tensors) if is_computation(name) else None
        if is_alias(name):
            stretch = self._stretch_with(tensors)
            if stretch is not None and stretch.may_defer(func, args, kwargs):
                return stretch.defer(func, args, kwargs)
        elif site is not None:
            return self._at_site(*site, func, args, kwargs, tensors)
        return self._run(func, args, kwargs, tensors, name)

    def _locate(self, name: str, tensors: Sequence[torch.Tensor]) -> tuple[_Frame, CallSite] | None:
        """Return the unit in whose stretch the next op is, and its site there.

        Every frame must see every op, to keep its place in the recording; the innermost unit counts.
        """
        found = None
        description = described(
            name, [t.dim() for t in tensors if isinstance(t, StretchTensor) or is_plain(t)]
        )
        for frame in self.frames:
            site = frame.locate(description)
            if site is not None:
                found = frame, site
        return found

    def _at_site(
        self,
        frame: _Frame,
        site: CallSite,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Defer an op of a stretch, and run the loop if it is the last one."""
        name = str(func)
        stretch = frame.stretch_of(site)
        # What was put off so far runs now, and this op after it, as it is.
        if stretch is not None and not stretch.may_defer(func, args, kwargs):
            frame.give_up(stretch, name)
        if stretch is None or stretch.is_over:
            return self._run(func, args, kwargs, tensors, name)
        # Other stretches first: the op may read what they have put off, or overwrite what they will read.
        self._settle(func, args, kwargs, tensors, name, but=stretch)
        decision = frame.unit.decisions[site]
        kept = tuple(output for at, output in decision.exits if decision.sites[at] == site)
        out = stretch.defer(func, args, kwargs, kept)
        if decision.sites[-1] == site:
            frame.run(site, stretch, name)
        return out

    def _run(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], description: str
    ) -> Any:
        """Run an op that is not deferred."""
        self._settle(func, args, kwargs, tensors, description)
        if any(isinstance(t, StretchTensor) for t in tensors):
            args, kwargs = computed((args, kwargs))
        return func(*args, **kwargs)

    def _stretch_with(self, tensors: Sequence[torch.Tensor]) -> Stretch | None:
        """Return the stretch that makes one of these tensors."""
        for t in tensors:
            if isinstance(t, StretchTensor):
                return None if t.stretch.is_over else t.stretch
            for frame in self.frames:
                for stretch in frame.stretches:
                    if stretch.waits_for(t):
                        return stretch
        return None

    def _settle(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[torch.Tensor],
        description: str,
        but: Stretch | None = None,
    ) -> None:
        """Give up the stretches whose tensors an op reads, or whose inputs it overwrites."""
        written: tuple[torch.Tensor, ...] = ()
        if isinstance(func, torch._ops.OpOverload):
            written = tuple(tensors_in(op_traits(func).written(args, kwargs)))
        for frame in self.frames:
            for stretch in frame.stretches:
                if stretch is but:
                    continue  # the op joins it
                reads = any(map(stretch.waits_for, tensors))
                if reads or any(stretch.uses_memory_of(t) for t in written if is_plain(t)):
                    frame.give_up(stretch, description)


class SlicedForward(StandIn):
    """Stands in for a unit's ``forward`` on the instance (``stand_ins.py``).

    Args:
        module: the unit.
        recorded: its calls in the recorded step.
        decisions: its stretches.
        elsewhere: names, relative to the unit, of modules in it that the recorded step knows under a name outside.
        differences: notes where a call departs from the recording.

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
        super().__init__(module, recorded.fqn)
        self.recorded = recorded
        self.decisions = {site: decision for decision in decisions for site in decision.sites}
        self.differences = differences
        self._elsewhere = elsewhere

    def names(self) -> dict[int, str]:
        """Return the names of the modules in it. Asked anew in each call: modules may have been added or replaced."""
        return {id(m): n for n, m in self.module.named_modules() if n and n not in self._elsewhere}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # ops of a compiled graph reach no mode
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with its stretches in slices unless gradients are recorded."""
        if torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        frame = _Frame(self, sys._getframe(0))
        if _here.mode is not None:
            return self._within(_here.mode, frame, args, kwargs)
        around = here.recorder
        # Also the recorder, so that unrecorded() pauses it while deferred ops run.
        mode = _here.mode = here.recorder = StretchMode()
        try:
            with kernel_layouts(self._device_kind()), mode:
                return self._within(mode, frame, args, kwargs)
        finally:
            _here.mode, here.recorder = None, around

    def _device_kind(self) -> str:
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return "cpu" if first is None else first.device.type

    def _within(self, mode: StretchMode, frame: _Frame, args: Any, kwargs: Any) -> Any:
        mode.frames.append(frame)
        try:
            out = self.original(*args, **kwargs)
            # What ``end`` computes is no op of the model: the frames must not look for it in the recording.
            mode.paused = True
            frame.end()
        finally:
            mode.paused = False
            mode.frames.remove(frame)
            frame.let_go()
        return out
