"""The time of a step in eager mode on a GPU, where the CPU issues one op after the other.

    eager_ms(profile.program)    # at least profile.step_ms

The CPU issues ops ahead of the GPU, as long as it is faster. Where ops are small, the GPU runs out of work and waits.
Times of a program are those of the GPU alone, and a sum; this is what a stopwatch beside the training loop would show.
"""

from __future__ import annotations

from sacplan._program.elements import Event
from sacplan._program.program import Program

OP_US = 20.0
"""Microseconds that the CPU needs for an op in training, autograd included. Assumed: about 20 in eager mode.
The published steps here keep their GPUs busy, so that none of them tells more than that it is less than 100."""


def eager_ms(program: Program, op_us: float = OP_US) -> float:
    """Return the time of a step in ms, if the CPU needs ``op_us`` for each op that runs on the GPU."""
    issued = done = 0.0
    for code, arg in program.events:
        if code == Event.OP and program.ops[arg].time_ms:
            issued += 1e-3 * op_us
            done = max(done, issued) + program.ops[arg].time_ms
    return done
