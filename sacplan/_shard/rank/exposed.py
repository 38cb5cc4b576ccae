"""Exposed communication of a rank: the time of collectives that computation does not hide.

The program runs a collective where it is needed. Its time is what it would be if parameters were prefetched and
gradients reduced in the background:

- The gather of a parameter may start as soon as the gather before it is over (one ahead), and the op that needs it
  waits for it. So it hides behind the computation between the two.
- The reduction of a gradient starts where the gradient is complete. Nothing waits for it before the optimizer does,
  or the end of the step.
- Every other collective, such as that of an activation, is waited for at once.

All of them share the links, one after the other (``overlap.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sacplan._program.program import Event, Phase
from sacplan._shard.costs import Costs
from sacplan._shard.overlap import Overlap
from sacplan._shard.rank.draft import RankDraft


@dataclass(frozen=True, slots=True)
class HiddenCollectives:
    """The collectives of a rank that may run beside computation.

    Attributes:
        gathers: ops that gather parameters, or what was made of them.
        reductions: ops that reduce gradients.
    """

    gathers: set[int] = field(default_factory=set)
    reductions: set[int] = field(default_factory=set)

    def expose(self, draft: RankDraft, costs: Costs) -> None:
        """Give these collectives the time that computation waits for them.

        The sum of all reductions that is not hidden becomes the time of the last one.
        """
        clock = Overlap(costs=costs)
        gathered_ms = reduced_ms = 0.0  # when the last gather was waited for; when the last reduction is over
        last = -1  # the last reduction that was not waited for
        # In the order in which the rank runs them, new ops included.
        order = [arg for code, arg in draft.builder.stream() if code == Event.OP]
        for index in order:
            op = draft.ops[index]
            if index in self.gathers:
                # One gather ahead: it may start when the one before was waited for.
                end_ms = clock.send(op.time_ms, gathered_ms)
                draft.change_op(index, time_ms=clock.wait(end_ms))
                gathered_ms = clock.now
            elif index in self.reductions:
                reduced_ms, last = clock.send(op.time_ms), index
                draft.change_op(index, time_ms=0.0)
            else:
                # The first op of the optimizer waits for all reductions.
                if op.phase == Phase.OPTIMIZER and last >= 0:
                    draft.change_op(last, time_ms=clock.wait(reduced_ms))
                    last = -1
                clock.compute(op.time_ms)
        # A step without an optimizer ends with its gradients reduced.
        if last >= 0:
            draft.change_op(last, time_ms=clock.wait(reduced_ms))
