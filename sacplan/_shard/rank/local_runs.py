"""The ops that run on one rank for a call or a redistribution, found by running the executor's code on fake tensors.

How large outputs, temporaries and workspaces are on a rank is not computed but observed. Many calls of a step are
alike, so what ran is kept under everything that it depends on, and put into the program each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.calls import Opaque, call_with, dtype_of
from sacplan._program.derived import derived
from sacplan._program.program import Op, Program, Tensor
from sacplan._record.rehearsal import Piece, Rehearsal
from sacplan._shard.choose import CallSharding, choose
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import Placements, WantedPlacements
from sacplan._shard.redistribute import kept, redistribute
from sacplan._shard.strategies import local_call
from sacplan._torch.autograd import below_autograd
from sacplan._torch.calls import Call
from sacplan._torch.collectives import all_reduce
from sacplan._torch.ops import RESHAPES, aten_names, op_named
from sacplan.errors import PlanError

_OF_UNKNOWN_SIZE = aten_names("mkldnn_rnn_layer")
"""Ops with an output whose size only the kernel knows."""


@dataclass(frozen=True, slots=True)
class _FullTensor:
    """The unsharded tensor of a call: strategies ask for no more than this.

    It is no tuple, since lists and tuples among the arguments of a call are searched for tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Cache:
    """Pieces that ran on a mesh. They do not depend on the sharding, so later shardings of the step use them too."""

    calls: dict[Any, tuple[CallSharding, Piece]]
    redistributions: dict[Any, Piece]


@derived
def _cache(program: Program, mesh: Mesh, device: DeviceSpec) -> _Cache:
    """Return the cache of a program on a mesh, empty at first; all shardings on the mesh share it."""
    return _Cache({}, {})


class LocalRuns:
    """Runs calls and redistributions as one rank does, on fake tensors.

    Args:
        program: the recorded step of the whole model.
        mesh: the ranks.
        device: of each rank.

    Attributes:
        rehearsal: records what runs; ``call`` and ``redistribution`` want it to be running.
    """

    def __init__(self, program: Program, mesh: Mesh, device: DeviceSpec) -> None:
        self.rehearsal = Rehearsal(program, device)
        self._program = program
        self._mesh = mesh
        self._cache = _cache(program, mesh, device)
        self._full = [_FullTensor(t.shape, dtype_of(t)) for t in program.tensors]

    def call(
        self,
        op: Op,
        local: Sequence[Tensor],
        have: tuple[Placements, ...],
        asked: tuple[WantedPlacements | None, ...] | None,
        weights: tuple[bool, ...],
    ) -> tuple[CallSharding, Piece]:
        """Return how a call runs, and what runs for it once its inputs have been redistributed.

        Args:
            op: the recorded op.
            local: by input, this rank's part.
            have: by input, its layout.
            asked: by input, the layout that a place of the plan asks for.
            weights: by input, whether it is a parameter, or made of nothing else.

        Raises:
            PlanError: the op cannot run so.
        """
        recorded = self._program.tensors
        shapes = tuple(_layout_of(recorded[t]) for t in (*op.inputs, *op.outputs))
        key = (op.name, op.arguments, have, tuple(map(_layout_of, local)), shapes, asked, weights)
        # The key has all that the run depends on: arguments, layouts, and shapes and strides of local and
        # full tensors.
        if key not in self._cache.calls:
            self._cache.calls[key] = self._run_call(op, local, have, asked, weights)
        return self._cache.calls[key]

    def _run_call(
        self,
        op: Op,
        local: Sequence[Tensor],
        have: tuple[Placements, ...],
        asked: Sequence[WantedPlacements | None] | None,
        weights: Sequence[bool],
    ) -> tuple[CallSharding, Piece]:
        # Three steps, as in ``executor/prepare.py``: choose, redistribute the inputs, run the local call.
        full = self._full_call(op)
        try:
            choice = choose(full, have, self._mesh, asked, weights)
        except PlanError as error:
            raise PlanError(f"{module_of(self._program, op)} cannot be spread so: {error}") from error
        inputs = []
        # The redistribution itself is written by ``Moves``. Here only the result counts, as what the op is
        # run on.
        for t, part, source, target in zip(op.inputs, local, have, choice.inputs, strict=True):
            here = part
            if source != target:
                (here,) = self.redistribution(part, self._full[t].shape, source, target).made
            inputs.append(self.rehearsal.like(here))
        args, kwargs = call_with(op.arguments, inputs)
        call = local_call(full, choice.strategies, self._mesh)
        # Parts are of one size on all ranks, so the first stands for all.
        position = (0,) * len(self._mesh.axes)

        def run() -> Any:
            if full.func._schema.name in RESHAPES:  # a part may not have the strides that a view needs
                return inputs[0].reshape(call.args(args)[1])
            return call.run(args, kwargs, _reduce, position)

        piece = self._observed(inputs, run)
        # A damaged recording, or an op that returns other tensors in this version.
        if len(piece.made) != len(op.outputs):
            raise PlanError(
                f"{op.name} returned {len(piece.made)} tensors on a rank, and {len(op.outputs)} on one device."
            )
        return choice, piece

    def _full_call(self, op: Op) -> Call:
        """Return the recorded call on unsharded tensors.

        Raises:
            PlanError: this version of PyTorch has no such op, the recording lacks an argument, or only the kernel
                knows how large its workspace is.
        """
        func = op_named(op.name)
        if func is None:
            raise PlanError(f"op {op.name} of the recording is not there in this version of PyTorch.")
        try:
            args, kwargs = call_with(op.arguments, [self._full[t] for t in op.inputs])
        except Opaque as error:
            raise PlanError(f"{op.name} cannot run on a mesh: {error}") from error
        if func._schema.name in _OF_UNKNOWN_SIZE:
            raise PlanError(
                f"{module_of(self._program, op)} cannot be spread over mesh {self._mesh}: how large the workspace of "
                f"{op.name} is for a rank is not known. Plan for a GPU (device='h100'), which runs another op, or "
                "without a mesh."
            )
        return Call(func, args, kwargs, [self._full[t] for t in op.outputs])

    def redistribution(
        self,
        local: Tensor,
        shape: tuple[int, ...],
        source: Placements,
        target: Placements,
        *,
        keep: bool = False,
    ) -> Piece:
        """Return what runs when a tensor gets another layout.

        Args:
            local: this rank's part before it.
            shape: of the unsharded tensor.
            source, target: its layouts.
            keep: the result stays, as a gradient does, so it must not be a view of more memory than it needs.
        """
        key = (_layout_of(local), shape, source, target, keep)
        if key not in self._cache.redistributions:
            x = self.rehearsal.like(local)
            # There is no process group. The axis stands in its place, and ``RankDraft._time_ms`` reads it.
            groups = [str(axis) for axis in range(len(self._mesh.axes))]
            zero = (0,) * len(groups)

            def run() -> torch.Tensor:
                moved = redistribute(x, shape, source, target, self._mesh.ranks, groups, zero)
                return kept(moved) if keep else moved

            self._cache.redistributions[key] = self._observed([x], run)
        return self._cache.redistributions[key]

    def _observed(self, inputs: Sequence[torch.Tensor], run: Callable[[], Any]) -> Piece:
        with below_autograd():  # as in the dispatch of a placed tensor
            return self.rehearsal.piece(inputs, run)


def module_of(program: Program, op: Op) -> str:
    """Return words for the module that runs an op, for error messages."""
    fqn = program.scopes[op.scope].fqn if op.scope >= 0 else ""
    return f"module {fqn!r}" if fqn else "the model"


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride)


def _reduce(t: torch.Tensor, axis: int) -> torch.Tensor:
    # The fake collective is told apart by its "group", the number of the axis: see RankDraft._time_ms.
    return all_reduce(t, "sum", str(axis))
