"""The memory of the device and of the host together, as of a step on a CPU, which has both in one place."""

from __future__ import annotations

from sacplan._program.liveness import Fold
from sacplan._program.program import Event, Program


def in_one_place(program: Program) -> int:
    """Return the peak of device and host together, as of a step on a CPU."""
    fold, most = Fold(program), 0
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP:
            most = max(most, fold.noted + fold.host)
    return most
