"""Replace the optimizer of a recorded step by another one, whose step is recorded on parameters alone.

The optimizer's step reads parameters and gradients, whatever made them. So it is recorded once for some parameters,
without the model that they belong to, and put after the recorded backward pass. That is exact
(``tests/questions/test_advise.py`` compares it with a recording of the whole step), and quick where a model is large.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace

from sacplan.core.optimizer_ops import steps_in_backward
from sacplan.core.program import Event, Op, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import Indices, PatchBuilder
from sacplan.device.devices import DeviceSpec
from sacplan.errors import TraceError
from sacplan.profiling.optimizer_table import Factory
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import profile

_ALLOC, _FREE, _OP = int(Event.ALLOC), int(Event.FREE), int(Event.OP)


# --- recording an optimizer's step alone


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """An optimizer's step, recorded on parameters alone.

    Attributes:
        recorded: the recording.
        parameters: the storages of the parameters in ``recorded``, in the model's order.
    """

    recorded: Profile
    parameters: tuple[int, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """The optimizer's ops, in order."""
        return tuple(op for op in self.recorded.recorded.ops if op.phase == Phase.OPTIMIZER)

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps from step to step."""
        return state_bytes(self.recorded.recorded)


def state_bytes(program: Program) -> int:
    """Return the bytes of the optimizer's state in a program."""
    sizes = program.storage_bytes
    return sum(sizes[s] for s in program.initial if program.storage_kinds[s] == StorageKind.OPTIMIZER_STATE)


Like: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a parameter."""


class _Gradients(torch.autograd.Function):
    """Gives each parameter a gradient of its own, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        # The only scalar among the outputs is taken for the loss (``DefaultLoss``). It reads nothing, so the forward
        # pass keeps nothing.
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.parameters))


class _Parameters(torch.nn.Module):
    def __init__(self, like: Iterable[Like]) -> None:
        super().__init__()
        # On the meta device there is nothing to allocate. Strides matter, since an optimizer's state copies them.
        empty = functools.partial(torch.empty_strided, device="meta")
        self.all = torch.nn.ParameterList(
            torch.nn.Parameter(empty(shape, stride, dtype=dtype)) for shape, stride, dtype in like
        )

    def forward(self, _: torch.Tensor) -> Any:
        return _Gradients.apply(*self.all)


def recorded_on(like: Iterable[Like], make: Factory, spec: DeviceSpec) -> Profile:
    """Record an optimizer's step on parameters of these shapes, strides and types, without a model."""
    return profile(_Parameters(like), torch.empty(1, device="meta"), None, make, spec)


def trained(program: Program) -> tuple[int, ...]:
    """Return the storages of the parameters that get a gradient, in the model's order."""
    return tuple(sorted(program.gradients))


def recorded_step(of: Profile, make: Factory) -> OptimizerStep | None:
    """Record an optimizer's step on the parameters of a profile that get a gradient.

    None if the optimizer frees gradients in the backward pass, so that only a whole step can be recorded with it.
    """
    # Shapes and types are those of the gradients, in the order of ``trained``.
    gradients = [of.recorded.tensors[of.recorded.gradients[s]] for s in trained(of.recorded)]
    like = [(t.shape, t.stride, getattr(torch, t.dtype)) for t in gradients]
    found = recorded_on(like, make, of.spec)
    parameters = trained(found.recorded)
    # Fewer: a hook has dropped gradients in the backward pass, as that of an optimizer which offloads them does.
    return None if len(parameters) < len(like) else OptimizerStep(found, parameters)


# --- taking an optimizer out of a step, and putting another in


def without_optimizer(of: Profile) -> Profile:
    """Return the step up to the end of the backward pass, without an optimizer and its state."""
    program = of.recorded
    tail = _first_of_optimizer(program)
    # There is no optimizer to take out.
    if tail is None:
        return of
    # Indices stay the same, so that nothing else changes: the optimizer's events go, and its storages (state, what it
    # allocates, what its ops write) get no bytes.
    gone = {s for s, kind in enumerate(program.storage_kinds) if kind == StorageKind.OPTIMIZER_STATE}
    gone |= {arg for code, arg in program.events[tail:] if code == _ALLOC}
    gone |= {s for op in program.ops if op.phase == Phase.OPTIMIZER for s in op.writes}
    events = {
        at: ()
        for at, (code, arg) in enumerate(program.events)
        if (code == _OP and program.ops[arg].phase == Phase.OPTIMIZER)
        or (code in (_ALLOC, _FREE) and arg in gone)
    }
    patch = Patch(events=events, resized=dict.fromkeys(gone, 0))
    return dataclasses.replace(of, recorded=program.with_(patch), source=None)


def with_optimizer(of: Profile, step: OptimizerStep) -> Profile:
    """Return a step without an optimizer, with this optimizer's step added after its backward pass."""
    own = step.recorded.fingerprint.setup
    taken = {"optimizer": own.optimizer, "optimizer_host_bytes": own.optimizer_host_bytes}
    fingerprint = replace(of.fingerprint, setup=replace(of.fingerprint.setup, **taken))
    program = program_with_optimizer(of.recorded, step)
    return dataclasses.replace(of, recorded=program, fingerprint=fingerprint, source=None)


def is_replaceable(of: Profile) -> bool:
    """Whether the step's optimizer can be replaced: it steps after the backward pass, on tensors of the device."""
    return not of.unplanned_host_bytes and not steps_in_backward(of.recorded)


def with_other_optimizer(of: Profile, make: Factory) -> Profile:
    """Return a step with another optimizer in place of its own.

    Raises:
        TraceError: the optimizer lets gradients go in the backward pass.
    """
    step = recorded_step(of, make)
    if step is None:
        raise TraceError(
            "the optimizer lets gradients go in the backward pass, so its step cannot be put behind that of another. "
            "Record the whole step with it: sacplan.profile(..., optimizer=...)."
        )
    return with_optimizer(without_optimizer(of), step)


def program_with_optimizer(program: Program, step: OptimizerStep) -> Program:
    """Return a program without an optimizer, planned or not, with this step added after its backward pass."""
    return program.with_(_spliced(program, step, _end_of_backward(program)))


def _first_of_optimizer(program: Program) -> int | None:
    """Return the position of the event of the optimizer's first op; None if there is no optimizer."""
    return next(
        (
            at
            for at, (code, arg) in enumerate(program.events)
            if code == _OP and program.ops[arg].phase == Phase.OPTIMIZER
        ),
        None,
    )


def _end_of_backward(program: Program) -> int:
    """Return the position after the backward pass.

    That is the end of the events, or before the last one if it frees the loss, which the step holds until it is over.
    """
    # The storage that is freed last is the loss if an op of the forward pass made it.
    code, arg = program.events[-1]
    writer = program.writer.get(arg, -1) if code == _FREE else -1
    is_loss = writer >= 0 and program.ops[writer].phase == Phase.FORWARD
    return len(program.events) - is_loss


def _spliced(program: Program, step: OptimizerStep, at: int) -> Patch:
    """Return the patch that adds an optimizer's ops and state, on the program's own parameters and gradients."""
    # Storages of the recorded step are parameters and gradients, which this program has, or the optimizer's own, which
    # are added. ``strict``: both were listed in the order of the model's parameters.
    source = step.recorded.recorded
    known: dict[int, int] = {}
    for ours, theirs in zip(trained(program), step.parameters, strict=True):
        known[theirs] = ours
        their_gradient, our_gradient = source.gradients[theirs], program.gradients[ours]
        known[source.tensors[their_gradient].storage] = program.tensors[our_gradient].storage
    # The recording begins with a forward and a backward pass of its own. Only events from its first optimizer op on are
    # taken.
    first = _first_of_optimizer(source)
    assert first is not None
    tail = source.events[first:]
    made = {arg for code, arg in tail if code == _ALLOC}
    made |= {s for op in step.ops for s in op.writes}
    used = {s for op in step.ops for s in (*op.reads, *op.mutates)} | made
    state = {s for s, kind in enumerate(source.storage_kinds) if kind == StorageKind.OPTIMIZER_STATE}
    # State that no op of this step touches is alive all the same, so it is added, too.
    new = sorted((used | (state & set(source.initial))) - known.keys())
    draft, initial = PatchBuilder(program), set(source.initial)
    for s in new:
        known[s] = draft.new_storage(source.storage_bytes[s], source.storage_kinds[s])
    # State that was alive when the recorded step began is alive when this step begins.
    draft.initial += [known[s] for s in new if s in initial]
    # Tensors first, since ops refer to them.
    place: dict[int, int] = {}
    for t in sorted({t for op in step.ops for t in (*op.inputs, *op.outputs) if t >= 0}):
        tensor = source.tensors[t]
        place[t] = draft.tensors.add(replace(tensor, storage=known[tensor.storage]))
    # The program knows nothing of the recording's module calls and forward ops.
    ops = [replace(op, scope=-1, forward_of=-1) for op in source.ops]
    happened = [
        (code, arg)
        for code, arg in tail
        if (code == _OP and source.ops[arg].phase == Phase.OPTIMIZER)
        or (code in (_ALLOC, _FREE) and arg in made)
    ]
    events = draft.put(happened, ops, Indices(known.__getitem__, tensor=place.__getitem__))
    # Before the event that frees the loss; if there is none, at the very end.
    draft.events[at] = (*events, *program.events[at : at + 1])
    return draft.patch()
