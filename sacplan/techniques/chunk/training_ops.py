"""Which ops of a training step a chunk defers, and where its results leave it.

The walk goes through the recorded ops in order, as autograd will. What it keeps true: the engine holds a lazy tensor
for each tensor of the program that depends on what entered and is not reduced to numbers yet.

- A forward op is deferred if it reads a lazy tensor.
- A backward op is deferred if it reads one and belongs to the chunk: its forward op was deferred, or is one that the
  module runs on its parameters alone.
- Any other backward op that reads a lazy tensor is where a result leaves: the loop must have run by then.

A gradient leaves as a whole only if it is that of what entered or of a parameter, since the executor has one autograd
node, at the entry, which gets all of them at once. Everything that would differ from this in the executor is refused.
The checks are conservative: some chunks that they refuse could run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

from sacplan.core.program import Op, Phase, StorageKind, Tensor
from sacplan.techniques.base.step import backward_ops
from sacplan.techniques.chunk.chunk_entry import CannotChunk
from sacplan.techniques.chunk.deferral import DeferredRun
from sacplan.techniques.chunk.executor.lazy import Lazy
from sacplan.torch_compat.ops import is_computation

_ADDITIONS = ("aten.add.Tensor", "aten.add_.Tensor")


class ForwardWalk:
    """Defers the forward ops of a chunk.

    Attributes:
        own: ops that the module runs on its own parameters alone, such as casts. They run as in the plain step, but
            their backward belongs to the chunk.
        entry_read_outside: whether ops outside of the module also read what enters it, as a residual sum does.
    """

    def __init__(self, run: DeferredRun) -> None:
        self.run, self.span, self.program = run, run.span, run.program
        self.own: set[int] = set()
        self.entry_read_outside = False
        self._own_storages: set[int] = set()

    def walk(self) -> None:
        """Defer the forward ops.

        Raises:
            CannotChunk: an op cannot be deferred, or would not be computed as in the plain step.
        """
        span, run, tensors = self.span, self.run, self.run.tensors
        hands_on = False
        for i in span.forward:
            op = self.program.ops[i]
            if op.phase is not Phase.FORWARD:
                continue
            in_module = i < span.end_op
            known = tensors.known(op, in_module)
            if any(t in known for t in op.inputs):
                read = {t: known[t] for t in op.inputs if t in known}
                self._check_reads(op, known)
                if span.begins in op.reads:
                    self.entry_read_outside |= not in_module
                    hands_on |= in_module and self._hands_on_gradient(i, op, known)
                run.defer(i, op, known)
                tensors.saved[i] = read | {t: known[t] for t in op.outputs if t in known}
            elif tensors.storages.intersection(op.reads):
                # The memory is sliced, but no op made this view of it: a storage that is reinterpreted.
                raise CannotChunk(f"{op.name} reads what is sliced in another layout")
            elif in_module and op.reads and all(map(self._is_own, op.reads)):
                self.own.add(i)
                self._own_storages.update(op.writes)
            elif span.is_module and in_module and is_computation(op.name):
                # It may be an extra result of a kernel, such as a mask, that could differ for lazy tensors.
                raise CannotChunk(f"{op.name} in {span.unit!r} computes something that is not sliced")
        if hands_on and self.entry_read_outside:
            # The gradients that are added up may then be one tensor, or views of one, and the recording does not tell
            # which of them is the module's.
            raise CannotChunk(
                f"{span.unit!r} hands a gradient on to its input as it is, and others read that input, too"
            )

    def _hands_on_gradient(self, index: int, op: Op, known: Mapping[int, Lazy]) -> bool:
        """Whether the backward of ``op`` may hand on its output's gradient as it is, as that of an addition does.

        The gradient of what enters would then be the output's, or a view of it.
        """
        program, tensors = self.program, self.program.tensors
        if self.span.begins not in program.writer or not is_computation(op.name):
            return False  # a batch, which gets no gradient; or a view, whose readers are asked
        size = math.prod(tensors[self.span.tensor].shape)

        def of_that_size(found: Iterable[int]) -> list[int]:
            return [t for t in found if "float" in tensors[t].dtype and math.prod(tensors[t].shape) == size]

        # The formula makes a new gradient for each lazy or own input of that size. If it makes fewer, some input gets
        # the output's gradient itself. What the formula makes and reads again is a temporary and no gradient.
        inputs = [t for t in of_that_size(op.inputs) if t in known or self._is_own(tensors[t].storage)]
        ran = (program.ops[i] for i in backward_ops(program).get(index, ()))
        formula = [one for one in ran if is_computation(one.name) and one.name not in _ADDITIONS]
        gradients = {tensors[t].storage for one in formula for t in of_that_size(one.outputs)}
        gradients.difference_update(s for one in formula for s in one.reads)
        is_handed_on = len(gradients) < len(inputs)
        return is_handed_on and any("float" in tensors[t].dtype for t in op.outputs)

    def _is_own(self, storage: int) -> bool:
        return self.program.storage_kinds[storage] is StorageKind.PARAMETER or storage in self._own_storages

    def _check_reads(self, op: Op, known: Mapping[int, Lazy]) -> None:
        """Refuse an op that also reads something differentiable that did not come through the entry.

        The executor's node returns gradients for what entered and the module's parameters only. Any other gradient
        would be computed in a loop of its own, which the program does not show.
        """
        program, span = self.program, self.span
        sliced = any(known[t].value.sliced for t in op.inputs if t in known)
        for t in op.inputs:
            s = program.tensors[t].storage
            if t in known or s in self.run.tensors.storages or s in self._own_storages:
                continue
            if "float" not in program.tensors[t].dtype:
                continue  # such as targets: never differentiated
            # If all lazy tensors that are read are reduced, this is no obstacle: another loss that is added to one in
            # slices gets its gradient from the sum, as in the plain step.
            if sliced and program.writer.get(s, -1) in backward_ops(program):
                raise CannotChunk(f"{op.name} also reads an activation that did not enter {span.unit!r}")
            scopes = (op.scope, *program.ancestors(op.scope))
            if program.storage_kinds[s] is StorageKind.PARAMETER and span.scope not in scopes:
                raise CannotChunk(f"{op.name} reads a parameter outside of {span.unit!r}")


class BackwardWalk:
    """Defers the backward ops of a chunk, and finds its results.

    Args:
        forward: the walk through the forward ops, which is over; so is ``leave_module`` if the span is a module.
        outputs: tensors that the module returns.

    Attributes:
        exits: the results: lazy tensors that are read by an op that is not deferred.
        boundary: the ops that read them.
        copied: ops of ``boundary`` that add in place to a result that is not the module's. In the executor the result
            is a lazy tensor, to which autograd adds out of place.
        temporaries: by storage that a backward formula makes and frees again, the formula's forward op.
    """

    def __init__(self, forward: ForwardWalk, outputs: frozenset[int]) -> None:
        self.run, self.span, self.program = forward.run, forward.span, forward.program
        self.forward, self.outputs = forward, outputs
        self.exits: dict[int, Lazy] = {}
        self.boundary: list[int] = []
        self.copied: set[int] = set()
        self.temporaries: dict[int, int] = {}
        self._inner: set[int] = set()  # storages that backward ops of the module have made
        self._upstream: set[int] = set()  # storages made by backward ops that were not deferred
        self._expanded: set[int] = set()  # incoming gradients: lazy, but there as a whole
        # Those of ``_expanded`` that are, unchanged, also the gradient of a tensor inside: see ``_hands_on_gradient``.
        self._handed_on: set[int] = set()
        self._n_met = 0  # gradients of what entered that were added to one from elsewhere

    def walk(self) -> None:
        """Defer the backward ops.

        Raises:
            CannotChunk: an op cannot be deferred, a result leaves that the executor could not return there, or
                nothing is differentiated at all.
        """
        program, tensors, unit = self.program, self.run.tensors, self.span.unit
        for i in range(self.span.end_op, len(program.ops)):
            op = program.ops[i]
            if op.phase is Phase.OPTIMIZER:
                break
            if op.phase is not Phase.BACKWARD:
                continue
            # Four cases below: an op of the chunk that reads something lazy is deferred; one that makes a
            # temporary for such ops runs, but belongs to them; one that adds to the entry's gradient and all
            # others run where they ran.
            belongs = op.forward_of in self.run.ran or op.forward_of in self.forward.own
            in_module = belongs and op.forward_of < self.span.end_op
            if belongs and op.forward_of in self.run.expected:
                self._gradients_are_lazy(i, op, in_module)
            known = tensors.known(op, in_module)
            lazy = [t for t in op.inputs if t in known]
            meets = belongs and bool(lazy) and self._meets(op, known)
            if in_module:
                self._inner.update(op.writes)
            if belongs and lazy and not meets:
                self.run.defer(i, op, known)
                continue
            if belongs and not lazy and self._makes_temporary(i, op):
                # It runs where it ran, and what it makes is freed with the last op of its formula that is deferred.
                self.run.defer(i, op, known)
                self.temporaries.update((program.tensors[t].storage, op.forward_of) for t in op.outputs)
                continue
            if meets:
                self._n_met += 1
                if self._n_met > 1:
                    # The program adds these up one by one. In the executor they are added up first among themselves,
                    # by the entry's node, which is another sum.
                    raise CannotChunk(f"{unit!r} reads its input several times, and so do others")
            self._run_outside(i, op, known, [t for t in lazy if t not in self._expanded])
        if not self.exits:
            raise CannotChunk(f"nothing that is computed from the input of {unit!r} is differentiated")
        if program.ops[self.run.last].phase is not Phase.BACKWARD:
            raise CannotChunk(f"no backward op belongs to the forward pass behind {unit!r}")
        # A gradient inside a forward pass is asked for by name, torch.autograd.grad(energy, positions), and no formulas
        # of other gradients run. The entry's node has one formula for all gradients. It runs only once, but a loss
        # function may call ``backward`` itself, and return another loss of the same values.
        first = next(i for i in self.run.ran if program.ops[i].phase is Phase.BACKWARD)
        if any(op.phase is Phase.FORWARD for op in program.ops[first:]):
            raise CannotChunk(f"the gradient of what {unit!r} computes is taken inside a forward pass")

    def _run_outside(self, index: int, op: Op, known: Mapping[int, Lazy], lazy: Sequence[int]) -> None:
        """Leave an op where it ran. The lazy tensors that it reads leave the chunk."""
        self._upstream.update(op.writes)
        if lazy:
            self._check_exits(op, lazy)
            self.exits.update((t, known[t]) for t in lazy if t not in self.exits)
            self.boundary.append(index)
            if (
                op.mutates
                and op.inputs[0] in lazy
                and self.program.tensors[op.inputs[0]].storage not in self._inner
                # The module's own gradient may be a sum that the program adds up in the incoming one.
                and self.program.tensors[op.inputs[0]].storage not in self.run.tensors.given
            ):
                self.copied.add(index)
        for t in op.outputs:
            # An output may be a view of what has left: from here on others read it as a real tensor.
            self.run.tensors.lazy.pop(t, None)

    def _makes_temporary(self, index: int, op: Op) -> bool:
        """Whether an op computes what its backward formula frees again, in a formula that is deferred in part.

        In the program such a formula is one workspace at its last op (``plain_formulas``), which is gone with that op.
        """
        tensors, writer = self.program.tensors, self.program.writer
        made = {tensors[t].storage for t in op.outputs} - {tensors[t].storage for t in op.inputs}
        if not made or any(s in writer for s in made):
            return False  # a view, or a result that the program allocates by itself
        lazy = self.run.tensors.lazy
        saved = self.run.tensors.saved.get(op.forward_of, {})
        following = takewhile(lambda o: o.forward_of == op.forward_of, islice(self.program.ops, index, None))
        return any(t in saved or t in lazy for later in following for t in later.inputs)

    def _meets(self, op: Op, known: Mapping[int, Lazy]) -> bool:
        """Whether another gradient of the module's input is added to the one that the entry's node makes."""
        if op.name not in _ADDITIONS:
            return False
        tensors, like = self.program.tensors, self.program.tensors[self.span.tensor]
        outside = {t for t in op.inputs if t not in known or t in self._expanded}
        if self.forward.entry_read_outside and not outside:
            # The input's other readers are in the loop, too. Their gradient waits, lazy, for that of the entry's node,
            # and leaves the loop together with it.
            inner = {t for t in op.inputs if tensors[t].storage in self._inner}
            return len(inner) == 1 and all(tensors[t].shape == like.shape for t in op.inputs)
        inside = self._handed_on.intersection(op.inputs)
        if inside and len(set(op.inputs)) == len(op.inputs):
            # This adds up two gradients of a tensor in the module, in slices.
            self._handed_on -= inside
            outside -= inside
        return any(tensors[t].shape == like.shape and tensors[t].storage in self._upstream for t in outside)

    def _check_exits(self, op: Op, lazy: Sequence[int]) -> None:
        """Refuse a result that is the gradient of another activation: it would need a loop of its own.

        Shapes decide, since a recording does not say whose gradient a tensor is.
        """
        program, span = self.program, self.span
        tensors = (program.tensors[t] for i in program.ops_in(span.scope) for t in program.ops[i].inputs)
        shapes = {t.shape for t in tensors if program.storage_kinds[t.storage] is StorageKind.PARAMETER}
        shapes.add(program.tensors[span.tensor].shape)
        if any(program.tensors[t].shape not in shapes for t in lazy):
            raise CannotChunk(f"{op.name} reads a gradient of an activation that did not enter {span.unit!r}")

    def _gradients_are_lazy(self, index: int, op: Op, in_module: bool) -> None:
        """Let the gradients that come in be lazy, as the executor does.

        The gradient of something reduced is free, so that what autograd expands it to is sliced. Those of a module's
        outputs come in as a whole and are read in slices.
        """
        tensors = self.run.tensors
        shape, window = self.run.expected[op.forward_of]
        for t in op.inputs:
            tensor = self.program.tensors[t]
            known = t in tensors.known(op, in_module) or t in self.outputs
            if known or tensor.shape != shape or "float" not in tensor.dtype:
                continue
            self.run.gradient(index, op.forward_of, t)
            self._expanded.add(t)
            if window is not None and self._hands_on_gradient(op.forward_of):
                self._handed_on.add(t)

    def _hands_on_gradient(self, forward: int) -> bool:
        """Whether the gradient of what an op makes is that of one of its inputs, too: that of a residual sum is.

        Autograd then runs no op for that input. It may run one for another input, such as a cast.
        """
        program = self.program
        (like, *others) = (program.tensors[t] for t in program.ops[forward].outputs)
        alike = [t for t in self.run.tensors.saved[forward] if _is_like(program.tensors[t], like)]
        backward = (program.ops[i] for i in backward_ops(program).get(forward, ()))
        made = (t for op in backward if op.name not in _ADDITIONS for t in op.outputs)
        return not others and len(alike) > 1 and not any(_is_like(program.tensors[t], like) for t in made)


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype
