"""The ops of a recorded step as a graph through which factors flow (``flow.py``): rules, makers and readers of tensors.

An op has no rule here, so that no factor flows through it, where a slice of the loop would read other values than the
step does:

- it writes to a storage in place, and no new version of that storage is known; or returns two tensors on one storage;
- it overwrites memory of which there are views, which would show the new values;
- it reads through a view what was written after the view was taken, so that the recording does not say which version.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import sacplan.core.factors  # noqa: F401  (registers the rules)
from sacplan.core.derived import derived
from sacplan.core.elements import Op
from sacplan.core.factors.rule import Rule, rule_of
from sacplan.core.program import Program
from sacplan.core.replayed_calls import Opaque, call_with, dtype_of
from sacplan.torch_compat.ops import is_alias, op_named


@dataclass(frozen=True, slots=True)
class ShapeAndDtype:
    """The part of a tensor that a rule looks at."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1 << 14)
def _rule(
    name: str, arguments: str, inputs: tuple[ShapeAndDtype, ...], outputs: tuple[ShapeAndDtype, ...]
) -> Rule | None:
    func = op_named(name)
    if func is None:
        return None  # a custom op that this process does not know
    try:
        args, kwargs = call_with(arguments, inputs)
    except Opaque:
        return None  # an argument that a recording cannot hold
    rule = rule_of(func, args, kwargs, list(outputs))
    if rule is not None and (len(rule.inputs), len(rule.outputs)) != (len(inputs), len(outputs)):
        return None  # it takes tensors that were not recorded, such as wrapped ones
    return rule


def rule_of_op(program: Program, op: Op) -> Rule | None:
    """Return the factor rule of a recorded op; None if the op must see whole tensors."""

    def layouts(tensors: Sequence[int]) -> tuple[ShapeAndDtype, ...]:
        return tuple(ShapeAndDtype(t.shape, dtype_of(t)) for t in map(program.tensors.__getitem__, tensors))

    return _rule(op.name, op.arguments, layouts(op.inputs), layouts(op.outputs))


class Dataflow:
    """The forward ops of a program.

    Args:
        program: the program.
        pinned: ops that must see whole tensors.

    Attributes:
        program: see above.
        rules, inputs, outputs: by op. An op that returns the tensor that it is given has no inputs and outputs.
        producer: by tensor, the op that returned it first; -1: it comes from outside.
        consumers: by tensor, the ops that read it.
        computes: by op, whether it is no view.
        first_use: by op, the first one that computes something from what it gives: itself, unless it is a view.
        storage: by tensor, its storage.
        origin: by storage, the one whose memory it is a version of.
        last_op: by storage, the last op at which it is alive; ``n_ops`` if it outlives the step.
    """

    def __init__(self, program: Program, pinned: Collection[int] = ()) -> None:
        ops, tensors, writer = program.ops, program.tensors, program.writer
        # By op, whether it only returns what it was given, so that nothing flows through it.
        noop = [bool(op.outputs) and set(op.outputs) <= set(op.inputs) and not op.mutates for op in ops]
        self.rules = [None if i in pinned else rule_of_op(program, op) for i, op in enumerate(ops)]
        self.inputs = [() if is_noop else op.inputs for op, is_noop in zip(ops, noop, strict=True)]
        self.outputs = [() if is_noop else op.outputs for op, is_noop in zip(ops, noop, strict=True)]
        self.producer = [-1] * len(tensors)
        self.consumers: list[list[int]] = [[] for _ in tensors]
        for i in range(len(ops)):
            for t in dict.fromkeys(self.inputs[i]):
                self.consumers[t].append(i)
            for t in self.outputs[i]:
                if self.producer[t] < 0:
                    self.producer[t] = i
        self.program = program
        self.n_ops = len(ops)
        self.storage = [t.storage for t in tensors]
        self.computes = [not is_alias(op.name) for op in ops]
        self.origin = list(range(len(program.storage_bytes)))
        self._last_read = {s: i for i, op in enumerate(ops) for s in op.reads}
        viewed: set[int] = set()
        for i, op in enumerate(ops):
            outputs = self.outputs[i]
            if op.replaces >= 0:
                self.origin[op.writes[0]] = self.origin[op.replaces]
            # It reads through a view what was written after the view was taken.
            late = any(
                not 0 <= self.producer[t] < i and writer.get(self.storage[t], i) < i for t in self.inputs[i]
            )
            # ``mutates``: no version says what it wrote. ``shared``: slices of two results would not share memory.
            # ``viewed``: a slice of the loop would write its own memory, and views of the old memory would not see it.
            shared = self.computes[i] and len({self.storage[t] for t in outputs}) < len(outputs)
            if late or op.mutates or shared or op.replaces in viewed:
                self.rules[i] = None
            if not self.computes[i]:
                viewed.update(self.storage[t] for t in outputs)
        self.first_use = self._first_uses()
        self.last_op = self._last_ops()

    def _first_uses(self) -> list[int]:
        """Return ``first_use``."""
        # Backwards, so that the readers of a view are known before the view.
        found = list(range(self.n_ops))
        for i in range(self.n_ops - 1, -1, -1):
            if not self.computes[i]:
                found[i] = min(
                    (found[c] for t in self.outputs[i] for c in self.consumers[t] if c > i),
                    default=self.n_ops,
                )
        return found

    def _last_ops(self) -> list[int]:
        program, n_events = self.program, len(self.program.events)
        freed = program.liveness.freed
        found = (np.searchsorted(program.liveness.op_events, freed) - 1).tolist()
        found = [op if at < n_events else self.n_ops for op, at in zip(found, freed, strict=True)]
        for i, op in enumerate(program.ops):
            if op.replaces >= 0:
                found[op.replaces] = i - 1  # its bytes are those of the new version from then on
        return found

    def inputs_of(self, ops: Sequence[int]) -> dict[int, None]:
        """Return the tensors that some ops read and do not make, in the order of first use."""
        made = {t for i in ops for t in self.outputs[i]}
        return dict.fromkeys(t for i in ops for t in self.inputs[i] if t not in made)

    def read_after(self, storage: int, op: int) -> bool:
        """Whether a storage is needed after an op: by a later one, or by whoever holds it when the step is over."""
        return self.last_op[storage] == self.n_ops or self._last_read.get(storage, -1) > op


@derived
def dataflow(program: Program) -> Dataflow:
    """Return the dataflow of a program, without pins; made once."""
    return Dataflow(program)
