"""Pairs of linear layers that tensor parallelism cuts by columns and by rows, found in the recorded forward pass.

After columns (dimension 0 of the weight) each rank has a part of the features; rows (dimension 1) read such parts,
and their sum is whole. ``parallelize_module`` runs all that is between on the part of a rank. Shapes often fit where
the result is wrong: a softmax over the features would be one over a part of them. So it has to be shown that each op
between runs on parts and needs nothing of other ranks. The factor rules of the ops say that (``axis_strategies``):

1. Each linear layer whose input is whole is taken for columns. Its output is cut along the last dimension.
2. An op that reads parts has to have a strategy with its inputs just as they are, that exchanges nothing and whose
   outputs are whole or cut. Otherwise the columns that its inputs come from are no columns.
3. A linear layer whose input is cut along the dimension that it sums over is rows of the columns that these come from.
4. Columns that end in no rows are no columns. Then the rest is gone through again, until nothing changes.

A norm between the two, such as one of queries and keys by heads, may have a whole weight: each rank has a summand of
its gradient, which ``SequenceParallel`` adds up. No style does so for other parameters there, or for whole activations
that depend on parameters: linear layers around these are no pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sacplan.core.derived import derived
from sacplan.core.fingerprint import FingerprintEntry
from sacplan.core.program import ROOT_SCOPE, Op, Phase, Program, StorageKind, Tensor
from sacplan.core.replayed_calls import Opaque, call_with, dtype_of
from sacplan.distributed.sharding.placements import REPLICATED, Placement, cut
from sacplan.distributed.sharding.strategies import axis_strategies
from sacplan.errors import TraceError
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import is_computation, op_named


@dataclass
class Pairs:
    """The modules that one pass finds.

    Attributes:
        columns, rows: names of linear layers.
        norms: of modules that run on parts with a whole weight, and the dimension in which their input is cut.
    """

    columns: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    norms: dict[str, int] = field(default_factory=dict)


class _Part(NamedTuple):
    """A tensor of which each rank has a part: its placement, and the columns that it comes from."""

    placement: Placement
    columns: frozenset[str]


@derived
def pairs_of(
    program: Program, parameters: tuple[FingerprintEntry, ...], kinds: tuple[tuple[str, str], ...], ranks: int
) -> Pairs:
    """Return the columns and rows of a recorded step.

    Args:
        program: of the whole model.
        parameters: of the model, ``Fingerprint.parameters``; a tied one goes by its first name.
        kinds: of modules, by name: ``"Linear"``, ``"Norm"``, or another.
        ranks: of the axis.

    Raises:
        TraceError: parameters share storages without being the same parameter.
    """
    # The recorder takes the storages of parameters before all others, in the order of ``named_parameters()``.
    storages = sorted(s for s in program.initial if program.storage_kinds[s] == StorageKind.PARAMETER)
    # Paired by position, so there must be as many.
    if len(storages) != len(parameters):
        raise TraceError(
            f"the recording has {len(storages)} storages of parameters and the model {len(parameters)} parameters. "
            "Parameters that are views of one storage cannot be spread; give each its own, or plan for one device."
        )
    walk = _Walk(program, dict(zip(storages, parameters, strict=True)), dict(kinds), ranks)
    # Each pass takes some candidates away, or is the last one.
    while not walk.is_settled():
        pass
    return walk.found


class _Walk:
    """Goes through the forward pass with parts."""

    def __init__(
        self,
        program: Program,
        parameters: Mapping[int, FingerprintEntry],
        kinds: Mapping[str, str],
        ranks: int,
    ) -> None:
        self.program, self.kinds, self.ranks = program, kinds, ranks
        self._module_of = {s: name.rpartition(".")[0] for s, (name, *_) in parameters.items()}
        self._shape_of = {
            name.rpartition(".")[0]: shape
            for name, shape, _ in parameters.values()
            if name.endswith("weight")
        }
        self._candidates = {
            m for m, kind in kinds.items() if kind == "Linear" and self._shape_of[m][0] % ranks == 0
        }
        self._known: dict[Any, tuple[Placement, ...] | None] = {}
        self.found = Pairs()

    def is_settled(self) -> bool:
        """Make one pass; return whether it has ruled out no candidate."""
        self.found, self._parts = Pairs(), dict[int, _Part]()
        self._wrong: set[str] = set()
        self._paired: set[str] = set()
        # Weights, and what is computed from weights alone, such as casts: by storage, the module.
        self._weights = dict(self._module_of)
        self._trained: set[int] = set()
        for op in self.program.ops:
            if op.phase == Phase.FORWARD:
                self._run(op)
        wrong = (self.found.columns - self._paired) | self._wrong | (self.found.columns & self.found.rows)
        self._candidates -= wrong
        return not wrong

    def _run(self, op: Op) -> None:
        tensors = self.program.tensors
        owners = [self._weights.get(tensors[t].storage) for t in op.inputs]
        if op.inputs and all(owner is not None for owner in owners) and len(set(owners)) == 1:
            self._weights.update((tensors[t].storage, str(owners[0])) for t in op.outputs)
            return
        parts = [self._parts.get(t) for t in op.inputs]
        # What depends on weights, and is whole where parts are read, has a summand of its gradient on each rank, and
        # nobody adds these up.
        trained = [tensors[t].storage in self._trained for t in op.inputs]
        if any(trained) or any(owner is not None for owner in owners):
            self._trained.update(op.writes)
        module = self.program.scopes[op.scope].fqn if op.scope != ROOT_SCOPE else ""
        is_linear = self.kinds.get(module) == "Linear" and module in owners and is_computation(op.name)
        if is_linear and not any(parts):
            if module in self._candidates:
                self.found.columns.add(module)
                last = len(tensors[op.outputs[0]].shape) - 1
                self._parts[op.outputs[0]] = _Part(cut(last), frozenset({module}))
            return
        if not any(parts):
            return
        columns = frozenset[str]().union(*(part.columns for part in parts if part is not None))
        if is_linear:
            self._end(op, module, parts, columns)
            return
        outputs = self._outputs(op, [REPLICATED if part is None else part.placement for part in parts])
        # A whole parameter meets parts: only for norms a style adds up its gradient.
        if any(owner is not None for owner in owners):
            if self.kinds.get(module) != "Norm":
                outputs = None
            first = next(part for part in parts if part is not None)
            self.found.norms[module] = first.placement.dim
        if outputs is None or any(t and part is None for t, part in zip(trained, parts, strict=True)):
            self._wrong |= columns
            return
        for t, placement in zip(op.outputs, outputs, strict=True):
            if placement.is_cut:
                self._parts[t] = _Part(placement, columns)

    def _end(self, op: Op, module: str, parts: list[_Part | None], columns: frozenset[str]) -> None:
        """Let a linear layer read parts: rows, if it sums over what is cut."""
        read = [
            part is not None and part.placement == cut(len(self.program.tensors[t].shape) - 1)
            for t, part in zip(op.inputs, parts, strict=True)
            if self.program.tensors[t].storage not in self._weights
        ]
        if all(read) and self._shape_of[module][1] % self.ranks == 0:
            self.found.rows.add(module)
            self._paired |= columns
        else:
            self._wrong |= columns

    def _outputs(self, op: Op, have: list[Placement]) -> tuple[Placement, ...] | None:
        """Return the placements of an op's outputs, given its inputs'; None if the op needs other ranks."""
        tensors = [self.program.tensors[t] for t in (*op.inputs, *op.outputs)]
        shapes = tuple((t.shape, t.stride, t.dtype) for t in tensors)
        key = op.name, op.arguments, shapes, tuple(have)
        if key not in self._known:
            self._known[key] = self._worked_out(op, have)
        return self._known[key]

    def _worked_out(self, op: Op, have: list[Placement]) -> tuple[Placement, ...] | None:
        func = op_named(op.name)
        inputs, outputs = ([_meta(self.program.tensors[t]) for t in ids] for ids in (op.inputs, op.outputs))
        if func is None:
            return None
        try:
            call = Call(func, *call_with(op.arguments, inputs), outputs)
        except Opaque:
            return None
        for strategy in axis_strategies(call, self.ranks, [{placement} for placement in have]):
            if strategy.inputs == tuple(have) and not strategy.inside_bytes:
                return None if any(p.is_partial for p in strategy.outputs) else strategy.outputs
        return None


def _meta(tensor: Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype_of(tensor), device="meta")
