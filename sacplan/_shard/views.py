"""Views of a recorded step: the tensors that are views for autograd, and how long code has them.

    views = Views(program)
    tensor in views, views.last_op_of(tensor, index)

Equal views, such as those that three projections make of one input, are one tensor of a program, made several times.
"""

from __future__ import annotations

from collections import defaultdict

from sacplan._program.program import Program

_NO_VIEWS = ("aten._unsafe_view.default", "aten.detach.default")
"""Ops whose outputs do not make autograd hold their base."""


class Views:
    """The views of one program.

    Args:
        program: as it was recorded.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._uses: dict[int, list[int]] = defaultdict(list)  # by tensor, ops that take it
        self._made: dict[int, list[int]] = defaultdict(list)  # by view, ops that make it
        self._on: dict[int, list[int]] = defaultdict(list)  # tensors by storage
        for index, op in enumerate(program.ops):
            for t in op.inputs:
                self._uses[t].append(index)
            if op.name in _NO_VIEWS:
                continue
            own = {*op.writes, *op.mutates}
            for t in op.outputs:
                if program.tensors[t].storage not in own:
                    self._made[t].append(index)
        for t, tensor in enumerate(program.tensors):
            self._on[tensor.storage].append(t)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._made

    def last_op_of(self, tensor: int, index: int) -> int | None:
        """Return the op of a phase after which no code has the view that op ``index`` takes.

        That is its last one, or the next, where one function calls both. What the backward pass needs of the forward
        pass autograd keeps, not the code.

        Returns:
            None: the code has it as long as its base, since no later op of the phase reads that storage.
        """
        ops, phase = self._program.ops, self._program.ops[index].phase
        # The tensor is made again there: later uses are of that other view.
        again = next((i for i in self._made[tensor] if i > index), len(ops))
        last = max(i for i in self._uses[tensor] if i < again and ops[i].phase == phase)
        others = self._on[self._program.tensors[tensor].storage]
        later = (i for t in others for i in (*self._uses[t], *self._made.get(t, ())))
        # No later op of the phase reads the storage: the view is freed with its base.
        if not any(i > last and ops[i].phase == phase for i in later):
            return None
        # The next op reads what this one made. Both may be calls of one function, which has the view until it
        # returns.
        if last + 1 < len(ops) and not set(ops[last].writes).isdisjoint(ops[last + 1].reads):
            return last + 1
        return last
