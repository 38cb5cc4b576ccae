"""The figures of a GPU's allocator for a step in a training loop of somebody else.

``sacplan.DeviceMemory`` takes the loop to be a plain one. What another loop holds longer, and what libraries of its
time allocate besides, is written into the program here (``Loop``); the allocator is the package's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

import sacplan
from sacplan.core.program import Event, Op, Patch, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.caching_allocator import CachingAllocator, ExpandableAllocator
from sacplan.device.device_memory import peaks_on


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop holds between steps, and what the libraries of its time allocate.

    Attributes:
        gradients: when the loop drops them: ``"step"`` after the optimizer's step; ``"backward"`` only right before the
            next backward pass, so that they are there during the forward pass; ``"never"``: they are set to zero, as
            ``zero_grad()`` did before torch 2.0, and each new gradient is added to the old one and freed.
        held: of a program, the storages that a variable of the loop holds until the next forward pass has returned,
            such as the logits.
        workspace: bytes that an op takes besides, while it runs.
        until: of a program, storages that something holds beyond their last use, and the op before which it drops each.
    """

    gradients: Literal["step", "backward", "never"] = "step"
    held: Callable[[Program], Iterable[int]] = lambda program: ()
    workspace: Callable[[Program, Op], int] = lambda program, op: 0
    until: Callable[[Program], Mapping[int, int]] = lambda program: {}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a run up to the end of a step, in bytes.

    Attributes:
        tensors: the peak of the sum of tensors, each rounded to 512 bytes.
        allocated: ``torch.cuda.max_memory_allocated()``.
        reserved: ``torch.cuda.max_memory_reserved()``.
        reserved_expandable: the same with ``expandable_segments:True``.
    """

    tensors: int
    allocated: int
    reserved: int
    reserved_expandable: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures after the first step, and after as many as it takes until they no longer change.

    Attributes:
        first, steady: the two.
        end: ``torch.cuda.memory_allocated()`` when the last step is over, with the gradients and the batch.
    """

    first: StepFigures
    steady: StepFigures
    end: int


def allocator_figures(profile: sacplan.Profile, plan: Any = None, loop: Loop | None = None) -> RunFigures:
    """Play a profile's step, with a plan or without, from the start of a run."""
    loop = loop or Loop()
    program = profile.program if plan is None else profile.with_plan(plan)
    # The parts are not independent: the gradient that is added and freed must not be one that is dropped already.
    program = program.with_(_held_longer(program, loop)).with_(_accumulated(program, loop))
    zero_grad: Literal["step", "backward"] = "backward" if loop.gradients == "backward" else "step"
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    by_default = peaks_on(plain, program, zero_grad=zero_grad)
    expanded = peaks_on(expandable, program, zero_grad=zero_grad)
    first, steady = (
        StepFigures(
            other.max_memory_allocated,  # with expandable segments no remainder counts
            one.max_memory_allocated,
            one.max_memory_reserved,
            other.max_memory_reserved,
        )
        for one, other in zip(by_default, expanded, strict=True)
    )
    return RunFigures(first, steady, plain.allocated_bytes)


def _held_longer(program: Program, loop: Loop) -> Patch:
    """Hold storages until something else drops them or the step is over, and let ops take more while they run."""
    draft = PatchBuilder(program)
    until = loop.until(program)
    handles = {storage: draft.new_handle(storage) for storage in (*loop.held(program), *until)}
    drops: dict[int, list[int]] = defaultdict(list)
    for storage, index in until.items():
        drops[index].append(handles[storage])
    for position, (code, arg) in enumerate(program.events):
        if code != Event.OP:
            continue
        op = program.ops[arg]
        before = [(int(Event.RELEASE), handle) for handle in drops[arg]]
        after = [(int(Event.PACK), handles[s]) for s in op.writes if s in handles]
        if before or after:
            draft.events[position] = (*before, (code, arg), *after)
        if more := loop.workspace(program, op):
            draft.ops[arg] = msgspec.structs.replace(op, workspace_bytes=op.workspace_bytes + more)
    return draft.patch()


def _accumulated(program: Program, loop: Loop) -> Patch:
    """Add each gradient to one that is there from the beginning, and free it before the next op."""
    draft = PatchBuilder(program)
    if loop.gradients != "never":
        return draft.patch()
    made = {program.tensors[tensor].storage for tensor in program.gradients.values()}
    draft.initial += [draft.new_storage(program.storage_bytes[s], StorageKind.GRADIENT) for s in sorted(made)]
    new: list[int] = []
    for position, (code, arg) in enumerate(program.events):
        if code != Event.OP:
            continue
        writes = program.ops[arg].writes
        if new and writes:
            frees = [(int(Event.FREE), s) for s in new]
            draft.events[position] = (*frees, (code, arg))
            new = []
        new += [s for s in writes if s in made]
    return draft.patch()
