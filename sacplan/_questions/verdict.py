"""What ``fit`` answers: whether a step fits a device, the ways that were tried, and which of them to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sacplan._profile.optimizers import BY_NAME
from sacplan._program.budget import format_bytes
from sacplan._questions.sweep import Row, frame

if TYPE_CHECKING:
    import pandas as pd

Way = Literal["as it is", "plan", "chunked loss", "plan + chunked loss", "plan + chunks"]

_SHOWN_DEVICES = 3  # of those that are larger

TECHNIQUES: dict[Way, tuple[str, ...]] = {
    "as it is": (),
    "plan": ("recompute",),
    "chunked loss": ("chunk",),
    "plan + chunked loss": ("recompute", "chunk"),
    "plan + chunks": ("recompute", "chunk"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow(Row):
    """One way to run the step.

    Attributes:
        optimizer: Its name.
        way: "as it is", "plan" (recomputation), "chunked loss", or both; "plan + chunks" where only modules in slices
            could help as well.
        peak_bytes: With the plan that ``sacplan.plan`` finds; where none holds the budget, the smallest that was found.
        largest_batch: At the asked sequence; 0 where one sample does not fit; None where it was not to be computed.
        longest_seq: At the asked batch, in multiples of 128 tokens where the asked one is; None for models without.
        same_as: The simpler way that this one is at the asked size, where a plan finds nothing to do.
    """

    shown: ClassVar = (
        "optimizer", "way", "peak_bytes", "fits", "step_ms", "largest_batch", "longest_seq", "same_as"
    )  # fmt: skip

    optimizer: str
    way: Way
    peak_bytes: int
    largest_batch: int | None = None
    longest_seq: int | None = None
    same_as: Way | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.optimizer}, {self.way}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step fits a device, and how.

    Attributes:
        model: its class, or the name that was given.
        parameters: how many numbers are trained or not.
        batch, seq: the asked size; ``seq`` is None for models without one.
        optimizer: name of the asked one.
        device, memory_bytes: the device, and what it has.
        budget_bytes: what the step may take of that.
        budget: as ``plan`` takes it; None where it is the default.
        rows: all ways that were tried, the asked optimizer's first.
        recommended: of those that fit, the one to take; None if nothing fits.
        headroom_bytes: what is left free of the device's memory; None where a budget was given.
        larger_devices: GPUs from the table on which the smallest row would fit, the smallest first; only where nothing
            fits here.
        computed: sentences on what was computed from recordings, and what was not.
    """

    model: str
    parameters: int
    batch: int
    seq: int | None
    optimizer: str
    device: str
    memory_bytes: int
    budget_bytes: int
    budget: str | None
    headroom_bytes: int | None
    rows: tuple[FitRow, ...]
    recommended: FitRow | None
    larger_devices: tuple[str, ...]
    computed: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the step fits as it is."""
        return self.rows[0].fits

    @property
    def sentence(self) -> str:
        """One sentence."""
        tokens = "" if self.seq is None else f", {self.seq} tokens"
        step = f"{self.model}, batch {self.batch}{tokens}, {self.optimizer}"
        device = f"{self.device} ({format_bytes(self.memory_bytes)})"
        peak = self.rows[0].peak_bytes
        left = f"the budget of {format_bytes(self.budget_bytes)}"
        if self.headroom_bytes is not None:
            free = self.headroom_bytes / self.memory_bytes
            left = f"the {format_bytes(self.budget_bytes)} that {free:.0%} headroom leaves"
        over = peak - self.budget_bytes
        if over <= 0:
            return f"{step} on {device}: fits. It needs {format_bytes(peak)} of {left}."
        if self.recommended is not None:
            best = self.recommended
            return (
                f"{step} on {device}: does not fit as it is ({format_bytes(peak)}, {format_bytes(over)} more than "
                f"{left}), but does with {best.name}: {format_bytes(best.peak_bytes)}."
            )
        smallest = self.smallest
        return (
            f"{step} on {device}: does not fit. It needs {format_bytes(peak)}, {format_bytes(over)} more than {left}; "
            f"the smallest found is {format_bytes(smallest.peak_bytes)}, with {smallest.name}."
        )

    @property
    def smallest(self) -> FitRow:
        """The row with the smallest peak."""
        return min(self.rows, key=lambda row: row.peak_bytes)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, a sentence each."""
        if self.recommended is None:
            names, more = self.larger_devices[:_SHOWN_DEVICES], len(self.larger_devices[_SHOWN_DEVICES:])
            larger = f"{', '.join(names)}{f' and {more} larger ones' if more else ''}"
            return (
                f"GPUs that hold the smallest of these: {larger}."
                if names
                else "No GPU in the table holds it.",
                "Over several devices: sacplan.layouts, or sacplan.plan(profile, budget, mesh=...).",
            )
        if self.recommended is self.rows[0]:
            return ("No plan is needed.",)
        return (f"Use {self.recommended.name}.",)

    @property
    def techniques(self) -> tuple[str, ...]:
        """Of the plan that is recommended."""
        return () if self.recommended is None else TECHNIQUES[self.recommended.way]

    @property
    def code(self) -> str:
        """Lines to paste; ``model``, ``batch`` and ``params`` stand for one's own."""
        best = self.recommended
        if best is None:
            return ""
        make = BY_NAME[best.optimizer].code if best.optimizer in BY_NAME else "..."
        lines = [f"optimizer = {make}"] if best.optimizer != self.optimizer else []
        if best.way != "as it is":
            techniques = TECHNIQUES[best.way]
            more = "" if self.budget is None else f', "{self.budget}"'
            more += "" if techniques == ("recompute",) else f", techniques={techniques!r}"
            lines += [
                f'profile = sacplan.profile(model, batch, optimizer=optimizer, device="{self.device}")',
                f"handle = sacplan.apply(model, sacplan.plan(profile{more}))",
            ]
        return "\n".join(lines)

    def to_frame(self) -> pd.DataFrame:
        """One row per way."""
        return frame(self.rows)

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {format_bytes(row.peak_bytes)}, {'fits' if row.fits else 'does not fit'}"
            for row in self.rows
            if row.same_as is None
        ]
        return "\n".join([self.sentence, *rows, *self.advice, *self.computed])


def recommended(rows: Sequence[FitRow]) -> FitRow | None:
    """As it is, if that fits; else the fastest that does, of the asked optimizer and of the same one fused, if any."""
    holding = [row for row in rows if row.fits]
    if not holding or holding[0] is rows[0]:
        return holding[0] if holding else None
    same = [row for row in holding if row.optimizer in (rows[0].optimizer, "adamw-fused")]
    return min(same or holding, key=lambda row: row.step_ms or 0.0)
