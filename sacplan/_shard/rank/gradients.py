"""When gradients are complete in a recorded backward pass: autograd then runs the hooks of their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from sacplan._program.program import Op, Phase, Program


class GradientHooks:
    """The gradients that are complete after each op.

    A hook of a parameter runs once its gradient is computed and the node that computed it is done: a node may run
    several ops, and holds its inputs until it is done.

    Args:
        program: the recorded step.
        parameters: their storages.

    Attributes:
        parameter_of: by gradient, a tensor, the storage of its parameter.
    """

    def __init__(self, program: Program, parameters: Collection[int]) -> None:
        self.parameter_of = {program.gradients[s]: s for s in parameters if s in program.gradients}
        self._complete = self._complete_after(program)
        self._due: tuple[Op, list[int]] | None = None

    def _complete_after(self, program: Program) -> dict[int, list[int]]:
        """Return, by op, the gradients that are complete when its node is done."""
        ops, last = program.ops, dict[int, int]()
        for index, op in enumerate(ops):
            # A detached gradient is no new value: AccumulateGrad detaches what it is given.
            if op.phase == Phase.BACKWARD and op.name != "aten.detach.default":
                last.update((t, index) for t in op.outputs if t in self.parameter_of)
        found: dict[int, list[int]] = defaultdict(list)
        for tensor, index in sorted(last.items(), key=lambda each: -each[1]):
            end = index
            # Autograd runs hooks between nodes, so not before the last op of this one.
            while end + 1 < len(ops) and _of_one_node(ops[index], ops[end + 1]):
                end += 1
            found[end].append(tensor)
        return found

    def has_run(self, index: int, op: Op) -> None:
        """Note that a recorded op has run."""
        gradients = self._complete.get(index)
        self._due = (op, gradients) if gradients else None

    def due(self) -> tuple[Op, list[int]] | None:
        """Return the gradients whose hooks run now, with the op that completed them; only once."""
        found, self._due = self._due, None
        return found


def _of_one_node(op: Op, following: Op) -> bool:
    return op.forward_of >= 0 and (op.phase, op.forward_of) == (following.phase, following.forward_of)
