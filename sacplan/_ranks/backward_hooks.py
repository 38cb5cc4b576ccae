"""When hooks of modules run in a recorded backward pass: before that of a call begins, and when it is over.

    hooks = hooks_of(program, around)
    hooks[position].begun    # calls whose backward begins before that event

A hook on a call's outputs runs before the first node of the call, so before that node asks for the tensors that
autograd keeps for it. A hook on its inputs runs when their gradients are there, so after the call's last op; if no
input needs a gradient it does not run at all, and the end of the backward pass stands in for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sacplan._program.program import Event, Phase, Program

_ENDS = (Event.FREE, Event.RELEASE, Event.DROP)


@dataclass(slots=True)
class Hooks:
    """The hooks that run before one event, in this order.

    Attributes:
        ended: calls whose inputs have their gradients now, the inner ones first.
        final: whether a backward pass is over.
        begun: calls whose backward begins now, the outer ones first.
    """

    ended: list[int] = field(default_factory=list)
    final: bool = False
    begun: list[int] = field(default_factory=list)


def hooks_of(program: Program, around: Mapping[int, Sequence[int]]) -> dict[int, Hooks]:
    """Return the hooks by position of the event that they run before (``len(events)``: after all).

    Args:
        program: the step.
        around: by scope, the calls that have hooks and that it is in or is, the innermost first.
    """
    ops = program.ops
    found: dict[int, Hooks] = defaultdict(Hooks)
    for run in backward_passes(program):
        last: dict[int, int] = {}  # call to the number of its last op
        made: dict[int, set[int]] = defaultdict(set)
        last_read: dict[int, int] = {}
        for number, (before, index) in enumerate(run):
            op = ops[index]
            # Outermost first: the output hook of an outer module runs before those of the modules inside of
            # it. A call begins with its first op; each further op only moves its end.
            for call in reversed(around[op.scope]):
                if call not in last:
                    found[before].begun.append(call)
                last[call] = number
                made[call].update(op.writes, op.mutates)
            last_read.update(dict.fromkeys(op.reads, number))
        # A child is called after its parent, so its number is higher: the inner calls of one event end first.
        for call, number in sorted(last.items(), reverse=True):
            # Something that the call made is read after its last op: that is the gradient of an input, and the hook
            # on the inputs runs when it is there. If nothing is read later, no input needed a gradient; autograd then
            # never reaches the hook, and ``final`` stands in for it.
            if any(last_read.get(s, -1) > number for s in made[call]):
                found[run[number + 1][0]].ended.append(call)
        found[_end_of(program, run)].final = True
    return found


def backward_passes(program: Program) -> Iterator[list[tuple[int, int]]]:
    """Yield the ops of each backward pass: the position where the node of the op begins, and the op."""
    run: list[tuple[int, int]] = []
    asked: int | None = None  # where the next op's node asks for its tensors
    for position, (code, arg) in enumerate(program.events):
        # A node first unpacks the tensors that it saved and then runs. A hook on its outputs precedes both,
        # so the op's position is that of its first unpacking.
        if code == Event.UNPACK and asked is None:
            asked = position
        elif code == Event.OP:
            if program.ops[arg].phase == Phase.BACKWARD:
                run.append((position if asked is None else asked, arg))
            # An op of the forward pass of the next micro-batch ends this backward pass.
            elif run and program.ops[arg].phase == Phase.FORWARD:
                yield run
                run = []
            # Any op ends the node to which the unpacked tensors so far belong.
            asked = None
    if run:
        yield run


def _end_of(program: Program, run: Sequence[tuple[int, int]]) -> int:
    """Return the position at which all that the last node held has been released."""
    events = program.events
    position = int(program.liveness.op_events[run[-1][1]]) + 1

    # The callback that autograd queues for the end of a pass runs when the graph is done, after the last node
    # has dropped its inputs and saved tensors.
    while position < len(events) and events[position][0] in _ENDS:
        position += 1
    return position
