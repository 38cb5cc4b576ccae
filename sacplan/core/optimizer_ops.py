"""Optimizers that step while the backward pass still runs: what that means for a program and for plans."""

from __future__ import annotations

from sacplan.core.derived import derived
from sacplan.core.elements import Event, Phase
from sacplan.core.program import Program


@derived
def steps_in_backward(program: Program) -> bool:
    """Whether an op of an optimizer runs before one of the backward pass, as with optimizers in hooks of parameters."""
    stepped = False
    # In the order of events: in a rewritten program indices do not tell what runs first.
    for code, arg in program.events:
        if code == Event.OP:
            phase = program.ops[arg].phase
            if phase is Phase.BACKWARD and stepped:
                return True
            stepped = stepped or phase is Phase.OPTIMIZER
    return False


def recomputed_from_updated(program: Program) -> int | None:
    """Return an op that runs again from a parameter that has been updated in the meantime; None if none does.

    In one backward pass none does: autograd runs the nodes of later ops first, so that whatever reads the output of an
    op is done before the op's own node, and the parameter is updated after that. Several backward passes in a step may
    come in another order, and so may checkpoints of the model's own.
    """
    updated: dict[int, int] = {}
    ran: dict[int, int] = {}
    for moment, (code, arg) in enumerate(program.events):
        if code != Event.OP:
            continue
        op = program.ops[arg]
        # Only an update between an op and its recomputation matters, so the moments of both are kept.
        if op.phase is Phase.OPTIMIZER:
            updated.update(dict.fromkeys(op.mutates, moment))
        elif op.recomputes < 0:
            ran[arg] = moment
        elif any(updated.get(storage, -1) > ran[op.recomputes] for storage in op.reads):
            return op.recomputes
    return None


def why_not_again(program: Program) -> str:
    """Return a message about an op that runs again from a parameter updated in the meantime; ``""`` if none does."""
    index = recomputed_from_updated(program)
    if index is None:
        return ""
    op = program.ops[index]
    where = program.scopes[op.scope].fqn if op.scope >= 0 else ""
    return (
        f"{op.name} in {where or 'the model'!r} would run again after an optimizer has changed "
        f"a parameter that it reads. Keep what the module makes: keep=[{where!r}]."
    )
