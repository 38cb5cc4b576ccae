"""``Chain``: a model as stages in a row with the loss at the end, the input of the Rotor solver."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from sacplan.errors import PlanError

_LENGTHS = {
    "forward_ms": 0,
    "backward_ms": 1,
    "output_bytes": 1,
    "saved_bytes": 1,
    "forward_extra_bytes": 0,
    "backward_extra_bytes": 1,
}
"""Extra entries per field beyond one per stage."""


@dataclass(frozen=True, slots=True)
class ChainSizes:
    """The sizes of a chain in one unit, bytes or slots, under the names of the recurrence.

    With L stages, ``x``, ``xbar`` and ``ftmp`` end with a 0 for the loss, so that stage i (the loss is
    stage L) always has ``x[i + 1]``, ``xbar[i + 1]``, ``ftmp[i]`` and ``btmp[i]``.

    Attributes:
        x: ``x[i]`` is the input of stage i, L + 2 entries.
        xbar: ``xbar[i + 1]`` is all that stage i saves for its backward, its output included, L + 2 entries.
        ftmp: ``ftmp[i]`` is what forward of stage i needs in addition to these, L + 1 entries.
        btmp: the same for backward, L + 1 entries.
    """

    x: tuple[int, ...]
    xbar: tuple[int, ...]
    ftmp: tuple[int, ...]
    btmp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of L stages and the loss after them, such as ``profile.chain``.

    The fields are f, b, x, xbar, ftmp, btmp of the literature. Any sequences of numbers may be given; they are kept as
    tuples of float and int. Fields with L + 1 entries count the loss as the last stage, or the input as the first
    output.

        sacplan.Chain([1.0, 2.0], [2.0, 4.0, 0.5], [8, 16, 4], [8, 48, 12], [0, 0], [8, 16, 0])

    Attributes:
        forward_ms: forward time of each stage (L).
        backward_ms: backward time of each stage, then the time of the loss, forward and backward (L + 1).
        output_bytes: the input, then the output of each stage (L + 1).
        saved_bytes: everything that a stage saves for its backward, its output included, in the place of its
            output; the first entry, in the place of the input, is not read (L + 1).
        forward_extra_bytes: memory that forward needs only while it runs (L).
        backward_extra_bytes: memory that backward needs only while it runs, the gradient of the input that it
            makes included; then the loss's (L + 1).

    Raises:
        PlanError: lengths that do not agree; a time that is negative or not finite; a size that is negative or
            not whole.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    output_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_extra_bytes: tuple[int, ...]
    backward_extra_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        # The class is frozen; fields get their types once, before anybody reads them.
        for field in _LENGTHS:
            object.__setattr__(self, field, _numbers(field, getattr(self, field)))
        stages = len(self)
        if not stages:
            raise PlanError("Chain: forward_ms is empty; a chain has at least one stage before the loss")
        for field, more in _LENGTHS.items():
            if len(getattr(self, field)) != stages + more:
                why = {0: "one for each stage", 1: "one for each stage and one more"}[more]
                raise PlanError(
                    f"Chain: {field} has {len(getattr(self, field))} entries, but forward_ms has {stages} stages; "
                    f"give {stages + more}, {why} (see sacplan.Chain)"
                )

    def __len__(self) -> int:
        """Return the number of stages, without the loss."""
        return len(self.forward_ms)

    @property
    def step_ms(self) -> float:
        """The time of forward and backward of all stages and the loss, once each."""
        return math.fsum(self.forward_ms) + math.fsum(self.backward_ms)

    def sizes(self) -> ChainSizes:
        """Return the sizes in bytes."""
        return ChainSizes(
            (*self.output_bytes, 0),
            (*self.saved_bytes, 0),
            (*self.forward_extra_bytes, 0),
            self.backward_extra_bytes,
        )

    def in_slots(self, budget_bytes: int, slots: int) -> ChainSizes:
        """Return the sizes in slots of ``budget_bytes / slots`` bytes, rounded up in whole numbers.

        A size above the budget becomes ``slots + 1``: it fits nowhere, however large it is.
        """

        def rounded(sizes: tuple[int, ...]) -> tuple[int, ...]:
            # In integers and rounded up: a slot too few would let a sequence go over the budget.
            return tuple(min(-(-size * slots // budget_bytes), slots + 1) for size in sizes)

        own = self.sizes()
        return ChainSizes(rounded(own.x), rounded(own.xbar), rounded(own.ftmp), rounded(own.btmp))


def _numbers(field: str, values: Sequence[float]) -> tuple[float, ...]:
    """Return times as floats, and sizes as integers."""
    is_time = field.endswith("_ms")
    try:
        converted = [int(v) if isinstance(v, numbers.Integral) else float(v) for v in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"Chain: {field} must be a sequence of numbers, got {values!r} ({error})") from error
    needed = (
        "a time is finite and not negative, in milliseconds"
        if is_time
        else "a size is a whole number, 0 or more"
    )
    for i, value in enumerate(converted):
        if not (math.isfinite(value) and value >= 0 and (is_time or value == int(value))):
            raise PlanError(f"Chain: {field}[{i}] is {value}; {needed}")
    return tuple(float(value) if is_time else int(value) for value in converted)
