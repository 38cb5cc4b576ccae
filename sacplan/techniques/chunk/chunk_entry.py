"""Where a chunk of a training step begins, and which part of the step belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

from sacplan.core.decisions import Chunk
from sacplan.core.factors.axes import Axis
from sacplan.core.program import Program, StorageKind

_OF_MODEL = (StorageKind.PARAMETER, StorageKind.BUFFER)


class CannotChunk(Exception):
    """Something cannot be computed in slices; the message says why."""


def entry_of(program: Program, unit: str) -> tuple[int, int]:
    """Return the call of a module that is called once, and the activation that enters: a scope and a tensor.

    Raises:
        CannotChunk: it is called several times, or reads no activation.
    """
    calls = program.calls.get(unit, ())
    if len(calls) != 1:
        raise CannotChunk(f"module {unit!r} is called {len(calls)} times in a step, and it must be once")
    inside = program.ops_in(calls[0])
    read = (t for i in inside for t in program.ops[i].inputs)
    for t in read:
        tensor = program.tensors[t]
        # Passed over are the model's own tensors, and scalars. The first other tensor that is read decides,
        # since the executor slices the module's first floating-point argument.
        if program.storage_kinds[tensor.storage] in _OF_MODEL or not tensor.shape:
            continue
        if "float" in tensor.dtype and program.writer.get(tensor.storage, -1) not in inside:
            return calls[0], t
        break  # only the first activation that it reads may be sliced
    raise CannotChunk(f"what module {unit!r} reads first is no floating-point activation from outside")


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The part of a step that a decision is about.

    Attributes:
        program: the recorded step.
        chunk: the decision.
        scope: the call of its module.
        tensor: the activation that enters, a tensor of the program; ``begins`` is its storage.
        axis: the axis of that tensor that is sliced.
        first_op, end_op: the first op of the module's call, and the one after its last.
        forward: ops whose backward belongs to the chunk if they are deferred: those of the module, or all from it on.
    """

    program: Program
    chunk: Chunk
    scope: int
    tensor: int
    axis: Axis
    begins: int
    first_op: int
    end_op: int
    forward: range

    @staticmethod
    def of(program: Program, chunk: Chunk) -> ChunkSpan:
        """Return the span of a decision.

        Raises:
            CannotChunk: its module is not called once, or what enters has no such dimension.
        """
        call, tensor = entry_of(program, chunk.unit)
        like, scope = program.tensors[tensor], program.scopes[call]
        if chunk.dim >= len(like.shape) or (chunk.outer, chunk.inner) != (1, 1):
            raise CannotChunk(
                f"what enters {chunk.unit!r} has shape {like.shape}, and only a whole dimension of it is sliced"
            )
        axis = Axis(chunk.dim, 1, like.shape[chunk.dim], 1)
        first, end = scope.first_op, scope.end_op
        # With span "rest", all after the module belongs to the chunk. Users of ``forward`` skip what is no forward op,
        # so the chunk ends at the loss.
        forward = range(first, end if chunk.span != "rest" else len(program.ops))
        return ChunkSpan(program, chunk, call, tensor, axis, like.storage, first, end, forward)

    @property
    def unit(self) -> str:
        """The fqn of the module."""
        return self.chunk.unit

    @property
    def is_module(self) -> bool:
        """Whether the chunk ends with the module's outputs, not with the loss."""
        return self.chunk.span != "rest"

    @property
    def runs_whole(self) -> bool:
        """Whether the forward pass of the module runs on whole tensors, as it is recorded."""
        return self.chunk.span == "backward"
