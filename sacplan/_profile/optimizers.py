"""A recorded step with another optimizer: its step is recorded on parameters alone, and takes the other's place.

The optimizer's step reads parameters and gradients, whatever made them. So it is recorded once for some parameters,
without the model that they belong to, and put behind the recorded backward pass. That is exact
(``tests/questions/test_advise.py`` compares it with a recording of the whole step), and quick where a model is large.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sacplan._profile.profile import Profile
from sacplan._profile.tracing import profile
from sacplan._program.program import Event, Op, Patch, Phase, Program, StorageKind, Tensor
from sacplan._program.rewriting import Indices, PatchBuilder

BLOCK = 256
"""Elements that share a scale in the 8-bit state of bitsandbytes."""
SMALLEST = 4096
"""Elements of a parameter from which on bitsandbytes keeps its state in 8 bits."""

_ALLOC, _FREE, _OP = int(Event.ALLOC), int(Event.FREE), int(Event.OP)

Factory = Callable[[Any], torch.optim.Optimizer]


_LIBRARY = torch.library.Library("sacplan", "FRAGMENT")
_LIBRARY.define("adamw_8bit_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] states) -> ()")


@torch.library.impl(_LIBRARY, "adamw_8bit_", "Meta")
def _no_update(parameters: Any, gradients: Any, states: Any) -> None:
    """Compute nothing and allocate nothing: the real kernel is fused."""


class AdamW8bitSizes(torch.optim.Optimizer):
    """The memory of ``bitsandbytes.optim.AdamW8bit``, for fake steps; it computes nothing.

    Two states of one byte an element with a float32 scale per block of 256, of parameters with at least 4096 elements;
    two of float32 of smaller ones. Two tables of 256 float32 values serve all parameters. Fused kernels, without
    temporaries.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state at the first call; touch it."""
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in with_gradient:
            if not self.state[p]:
                self._make(self.state[p], p)
        states = [t for p in with_gradient for t in self.state[p].values()]
        torch.ops.sacplan.adamw_8bit_(with_gradient, [p.grad for p in with_gradient], states)

    def _make(self, state: dict[str, Any], p: torch.Tensor) -> None:
        new = functools.partial(torch.empty, device=p.device)
        if p.numel() < SMALLEST:
            state |= {name: new(p.shape, dtype=torch.float32) for name in ("state1", "state2")}
            return
        tables = next((s for s in self.state.values() if "qmap1" in s), None)
        blocks = -(-p.numel() // BLOCK)
        for i in "12":
            # A float of one byte in the place of an integer: ``data_rules`` follows the values of integers, and would
            # compute them.
            state[f"state{i}"] = new(p.shape, dtype=torch.float8_e4m3fn)
            state[f"absmax{i}"] = new((blocks,), dtype=torch.float32)
            table = f"qmap{i}"
            state[table] = new((256,), dtype=torch.float32) if tables is None else tables[table]


@dataclass(frozen=True, slots=True)
class OptimizerCandidate:
    """An optimizer that a step may use.

    Attributes:
        name: of the option of ``sacplan``, and in tables.
        says: in a sentence.
        make: ``params -> optimizer``.
        code: what makes it.
        option: the same for ``hf:`` targets of the command line; ``""`` where it has none.
        modelled: its memory is modelled after a library that is not needed here.
    """

    name: str
    says: str
    make: Factory
    code: str
    option: str = ""
    modelled: bool = False


CANDIDATES = (
    OptimizerCandidate("adamw", "AdamW", torch.optim.AdamW, "torch.optim.AdamW(params)", "--optimizer adamw"),
    OptimizerCandidate(
        "adamw-fused",
        "AdamW with fused=True",
        functools.partial(torch.optim.AdamW, fused=True),
        "torch.optim.AdamW(params, fused=True)",
        "--optimizer adamw-fused",
    ),
    OptimizerCandidate(
        "adamw-8bit",
        "AdamW with 8-bit state (bitsandbytes)",
        AdamW8bitSizes,
        "bitsandbytes.optim.AdamW8bit(params)",
        modelled=True,
    ),
    OptimizerCandidate(
        "sgd", "SGD without momentum", torch.optim.SGD, "torch.optim.SGD(params)", "--optimizer sgd"
    ),
)
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


# --- recording an optimizer's step alone


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """An optimizer's step, recorded on parameters alone.

    Attributes:
        program: of the recording.
        parameters: their storages in it, in the order of the model's.
    """

    program: Program
    parameters: tuple[int, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """The optimizer's ops, in order."""
        return tuple(op for op in self.program.ops if op.phase == Phase.OPTIMIZER)

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps from step to step."""
        return state_bytes(self.program)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the optimizer's ops."""
        return tuple(op.name for op in self.ops)


def state_bytes(program: Program) -> int:
    """Return the bytes of the optimizer's state in a program."""
    sizes = program.storage_bytes
    return sum(sizes[s] for s in program.initial if program.storage_kinds[s] == StorageKind.OPTIMIZER_STATE)


class _Gradients(torch.autograd.Function):
    """Gives each parameter a gradient of its own, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.parameters))


class _Parameters(torch.nn.Module):
    def __init__(self, like: Iterable[Tensor]) -> None:
        super().__init__()
        empty = functools.partial(torch.empty_strided, device="meta")
        self.all = torch.nn.ParameterList(
            torch.nn.Parameter(empty(t.shape, t.stride, dtype=getattr(torch, t.dtype))) for t in like
        )

    def forward(self, _: torch.Tensor) -> Any:
        return _Gradients.apply(*self.all)


def trained(program: Program) -> tuple[int, ...]:
    """Return the storages of the parameters that get a gradient, in the model's order."""
    return tuple(sorted(program.gradients))


def recorded_step(of: Profile, make: Factory) -> OptimizerStep:
    """Record an optimizer's step on the parameters of a profile that get a gradient."""
    like = [of.recorded.tensors[of.recorded.gradients[s]] for s in trained(of.recorded)]
    found = profile(_Parameters(like), torch.empty(1, device="meta"), None, make, of.spec).recorded
    return OptimizerStep(found, trained(found))


# --- taking one out of a step, and putting one in


def without_optimizer(of: Profile) -> Profile:
    """Return the step up to the end of the backward pass, without an optimizer and its state."""
    program = of.recorded
    tail = _first_of_optimizer(program)
    if tail is None:
        return of
    # Indices stay, so that nothing else has to change: the optimizer's events go, and its storages (state, what it
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
    return dataclasses.replace(of, recorded=program.with_(patch))


def with_optimizer(of: Profile, step: OptimizerStep) -> Profile:
    """Return a step without an optimizer with this one put behind its backward pass."""
    return dataclasses.replace(of, recorded=program_with_optimizer(of.recorded, step))


def program_with_optimizer(program: Program, step: OptimizerStep) -> Program:
    """Return a program without an optimizer, with a plan or without, with this one put behind its backward pass."""
    return program.with_(_spliced(program, step, _end_of_backward(program)))


def _first_of_optimizer(program: Program) -> int | None:
    """Return the position of the first event of the optimizer; None if there is no optimizer."""
    return next(
        (
            at
            for at, (code, arg) in enumerate(program.events)
            if code == _OP and program.ops[arg].phase == Phase.OPTIMIZER
        ),
        None,
    )


def _end_of_backward(program: Program) -> int:
    """Return the position behind the backward pass.

    That is the end, except for a last event that frees the loss, which the step holds until it is over.
    """
    code, arg = program.events[-1]
    writer = program.writer.get(arg, -1) if code == _FREE else -1
    is_loss = writer >= 0 and program.ops[writer].phase == Phase.FORWARD
    return len(program.events) - is_loss


def _spliced(program: Program, step: OptimizerStep, at: int) -> Patch:
    """Return the patch that puts an optimizer's ops and state into a program, on its parameters and gradients."""
    # Storages of the recorded step are parameters and gradients, which this program has, or the optimizer's own, which
    # are added. ``strict``: both were listed in the order of the model's parameters.
    source = step.program
    known: dict[int, int] = {}
    for ours, theirs in zip(trained(program), step.parameters, strict=True):
        known[theirs] = ours
        gradients = source.gradients[theirs], program.gradients[ours]
        known[source.tensors[gradients[0]].storage] = program.tensors[gradients[1]].storage
    first = _first_of_optimizer(source)
    assert first is not None
    tail = source.events[first:]
    made = {arg for code, arg in tail if code == _ALLOC}
    made |= {s for op in step.ops for s in op.writes}
    used = {s for op in step.ops for s in (*op.reads, *op.mutates)} | made
    state = {s for s, kind in enumerate(source.storage_kinds) if kind == StorageKind.OPTIMIZER_STATE}
    new = sorted((used | (state & set(source.initial))) - known.keys())
    draft, initial = PatchBuilder(program), set(source.initial)
    for s in new:
        known[s] = draft.new_storage(source.storage_bytes[s], source.storage_kinds[s])
    draft.initial += [known[s] for s in new if s in initial]
    # Tensors first, then ops that refer to them; module calls and forward ops of the recording mean nothing here.
    place: dict[int, int] = {}
    for t in sorted({t for op in step.ops for t in (*op.inputs, *op.outputs) if t >= 0}):
        tensor = source.tensors[t]
        place[t] = draft.tensors.add(msgspec.structs.replace(tensor, storage=known[tensor.storage]))
    ops = [msgspec.structs.replace(op, scope=-1, forward_of=-1) for op in source.ops]
    happened = [
        (code, arg)
        for code, arg in tail
        if (code == _OP and source.ops[arg].phase == Phase.OPTIMIZER)
        or (code in (_ALLOC, _FREE) and arg in made)
    ]
    events = draft.put(happened, ops, Indices(known.__getitem__, tensor=place.__getitem__))
    draft.events[at] = (*events, *program.events[at : at + 1])
    return draft.patch()
