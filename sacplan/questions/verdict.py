"""The answer of ``fit``: whether a step fits a device, the ways that were tried, and the recommended one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from sacplan.core.budget import format_bytes, format_difference
from sacplan.device.outside_allocator import Outside
from sacplan.planning.limits import EXPANDABLE_SEGMENTS, Room
from sacplan.profiling.optimizer_names import BY_NAME
from sacplan.questions.sweep import Row, frame
from sacplan.techniques.registry import DEFAULT_TECHNIQUES, TECHNIQUES

if TYPE_CHECKING:
    import pandas as pd

_SHOWN_DEVICES = 3  # larger devices to name; further ones are counted
_DEAR = 0.2  # if a plan adds this share to the step or more, longer searches and host memory are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow(Row):
    """One way to run the step.

    Attributes:
        optimizer: Name of the optimizer.
        way: "as it is", "plan" (what ``plan`` does by default), "chunked loss", or both; "plan + chunks" if only
            modules in slices could help as well; "plan + offload" and the like if memory of the host could.
        techniques: ``techniques=`` of ``sacplan.plan`` for this way; () for the step as it is.
        peak_bytes: With the plan that ``sacplan.plan`` finds; if no plan holds the budget, the smallest peak found.
        reserved_bytes: ``torch.cuda.max_memory_reserved()`` with this plan. None on a CPU, and if the tensors alone do
            not fit.
        room: Memory of the device that the step may take: the more communicators there are, the less.
        expandable_bytes: What expandable segments would reserve, if that fits and ``reserved_bytes`` does not.
        largest_batch: At the asked sequence; with a plan, a lower bound, since ``max_batch`` plans at each size. 0 if
            one sample does not fit; None if it was not computed, as for other optimizers where no plan is needed.
        longest_seq: At the asked batch, in multiples of 128 tokens if the asked length is one; None for models without.
        same_as: The simpler way with the same decisions at the asked size; None if there is none.
        spread: What runs the step on several devices: "DDP", "FSDP2", a mesh; empty on one. Peaks are those of a rank.
        options, flags: Arguments for ``spread``: of ``sacplan.profile`` (of ``sacplan.plan`` for a mesh), and on the
            command line. Empty if the command line has none.
        wrapping: Lines of Python that wrap the model for several devices; none on a mesh, where ``apply`` does.
        host_bytes: Memory of the host that the plan and the optimizer take.
        host_room_bytes: The host's budget.
    """

    shown: ClassVar = (
        "optimizer", "spread", "way", "peak_bytes", "reserved_bytes", "fits", "limit_bytes", "over_bytes",
        "expandable_bytes", "step_ms", "largest_batch", "longest_seq", "same_as", "host_bytes", "over_host_bytes",
        "techniques",
    )  # fmt: skip

    optimizer: str
    way: str
    techniques: tuple[str, ...] = ()
    peak_bytes: int
    reserved_bytes: int | None = None
    room: Room
    fits: bool = field(init=False)
    expandable_bytes: int | None = None
    largest_batch: int | None = None
    longest_seq: int | None = None
    same_as: str | None = None
    spread: str = ""
    options: str = ""
    flags: tuple[str, ...] = ()
    wrapping: tuple[str, ...] = ()
    host_bytes: int = 0
    host_room_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "fits", not self.over_bytes and not self.over_host_bytes)

    @property
    def limit_bytes(self) -> int:
        """Limit for the reserved bytes if these have to fit; else for the peak."""
        return self.room.n_bytes

    @property
    def _needs_bytes(self) -> int:
        """The figure that is compared with the limit: reserved bytes, or the peak."""
        reserved = self.reserved_bytes if self.room.is_reserved else None
        return self.peak_bytes if reserved is None else reserved

    @property
    def over_bytes(self) -> int:
        """Bytes by which the step exceeds the room on the device; 0 if it fits."""
        return max(0, self._needs_bytes - self.limit_bytes)

    @property
    def over_host_bytes(self) -> int:
        """Bytes by which the step exceeds the host's budget; 0 if it does not."""
        return max(0, self.host_bytes - self.host_room_bytes)

    @property
    def name(self) -> str:
        """The optimizer, what runs the step, and the way, in words."""
        return ", ".join(filter(None, (self.optimizer, self.spread, self.way)))

    @property
    def memory(self) -> str:
        """The peak, and what is reserved and on the host, in words."""
        reserved = "" if self.reserved_bytes is None else f", {format_bytes(self.reserved_bytes)} reserved"
        host = f", {format_bytes(self.host_bytes)} on the host" if self.host_bytes else ""
        return f"{format_bytes(self.peak_bytes)}{reserved}{host}"

    @property
    def over(self) -> str:
        """By how much the step exceeds the host's budget, or else the room, in words."""
        if self.over_host_bytes:
            more = format_difference(self.host_bytes, self.host_room_bytes)
            return f"{more} over the host's {format_bytes(self.host_room_bytes)}"
        return format_difference(self._needs_bytes, self.limit_bytes)

    @property
    def added_share(self) -> float:
        """Share of the step's time that the plan adds; 0 if the time is not known."""
        return ((self.recompute_ms or 0.0) + (self.added_ms or 0.0)) / self.step_ms if self.step_ms else 0.0

    @property
    def is_dear(self) -> bool:
        """Whether the plan adds so much time that longer searches and host memory are tried as well."""
        return self.added_share >= _DEAR

    def is_quicker(self, other: FitRow) -> bool:
        """Whether this row fits, and both times are known and this one is less."""
        return self.fits and None not in (self.step_ms, other.step_ms) and self.step_ms < other.step_ms  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step fits a device, and how.

    Attributes:
        model: Class name of the model, or the name that was given.
        parameters: Number of elements in all parameters, trained or not.
        batch, seq: The size that was asked for; ``seq`` is None for models without sequences.
        optimizer: Name of the optimizer that was asked for.
        device, memory_bytes: Name of the device, and its memory.
        budget_bytes: Limit for the peak of the step. Without a budget on a GPU: what torch's allocator may reserve, the
            memory less ``outside``.
        budget: The budget in the form that ``plan`` takes; None if the device is the limit.
        rows: All ways that were tried, those with the asked optimizer first.
        recommended: The row to choose; None if nothing fits.
        outside: What lies outside of torch's allocator, with the source of each figure. Empty if a budget was given,
            and on a CPU.
        larger_devices: Known GPUs on which the smallest row would fit, the smallest first. Empty if something fits
            here.
        computed: Sentences on which figures were computed from recordings, and which were not.
        remarks: Sentences on what is often taken for granted: how tokens are routed to experts, and what becomes of
            the types of adapters and frozen weights that ``fully_shard`` shards.
        devices: How many devices there are. With several, ``batch`` is for each device, and rows of DDP come first.
        accumulation_steps: Micro-batches of ``batch`` samples in a step. Largest batches are micro-batches, too.
        compiled: The argument ``compile=`` as text for ``code``; empty for none.
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
    rows: tuple[FitRow, ...]
    recommended: FitRow | None
    larger_devices: tuple[str, ...]
    computed: tuple[str, ...]
    outside: tuple[Outside, ...] = ()
    accumulation_steps: int = 1
    devices: int = 1
    compiled: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the step fits without a plan; on several devices, with any way to spread it."""
        return self._as_it_is.fits

    @property
    def _as_it_is(self) -> FitRow:
        """The first row with the asked optimizer that fits without a plan; if there is none, the first row."""
        plain = (row for row in self.rows if row.way == "as it is" and row.optimizer == self.optimizer)
        return next((row for row in plain if row.fits), self.rows[0])

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        tokens = "" if self.seq is None else f", {self.seq} tokens"
        times = f" x {self.accumulation_steps} accumulated" if self.accumulation_steps > 1 else ""
        step = f"{self.model}, batch {self.batch}{times}{tokens}, {self.optimizer}"
        many = f"{self.devices} x " if self.devices > 1 else ""
        device = f"{many}{self.device} ({format_bytes(self.memory_bytes)}{' each' if many else ''})"
        asked = self._as_it_is
        limit, outside = format_bytes(asked.limit_bytes), asked.room.outside
        left = f"the budget of {limit}"
        # Without a budget on a GPU, the limit is what others leave to the allocator.
        if outside:
            names = " and ".join(one.name for one in outside)
            left = f"the {limit} that the {names} {'leave' if len(outside) > 1 else 'leaves'}"
        if asked.fits:
            runs = f" with {asked.spread}" if asked.spread else ""
            return f"{step} on {device}: fits{runs}. It needs {asked.memory}, of {left}."
        over = asked.over if asked.over_host_bytes else f"{asked.over} more than {left}"
        if self.recommended is not None:
            best = self.recommended
            return (
                f"{step} on {device}: does not fit as it is ({asked.memory}, {over}), but does with {best.name}: "
                f"{best.memory}."
            )
        smallest = self.smallest
        return (
            f"{step} on {device}: does not fit. It needs {asked.memory}, {over}; the smallest found is "
            f"{smallest.memory}, with {smallest.name}."
        )

    @property
    def smallest(self) -> FitRow:
        """The row with the smallest peak."""
        return min(self.rows, key=lambda row: row.peak_bytes)

    @property
    def fits_plainly(self) -> bool:
        """Whether no plan is needed on a single device."""
        # The first row is the step as it is, with the optimizer that was asked for.
        return self.recommended is self.rows[0] and self.devices == 1

    @property
    def competing(self) -> tuple[FitRow, ...]:
        """The rows to choose from.

        If no plan is needed, no other optimizer is needed either. Then these are the step as it is, and the ways with
        most techniques, which hold the largest steps.
        """
        own = [row for row in self.rows if row.optimizer == self.optimizer]
        most = max(len(row.techniques) for row in own)
        asked = tuple(row for row in own if len(row.techniques) in (0, most))
        return asked if self.fits_plainly else self.rows

    def shown(self, sizes: bool) -> tuple[FitRow, ...]:
        """Return the rows to show, in a table with their largest sizes or without.

        If no plan is needed on a device, these are the step as it is, and the rows that hold the largest steps.
        """
        if self.fits_plainly:
            batch = max(self.competing, key=lambda row: row.largest_batch or 0)
            seq = max(self.competing, key=lambda row: row.longest_seq or 0)
            return tuple(dict.fromkeys((self.rows[0], batch, seq)))
        # A plan that finds nothing to do at this size may still hold larger ones.
        return tuple(row for row in self.rows if row.same_as is None or sizes)

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences on what to do."""
        needed = self.rows if self.recommended not in (None, self.rows[0]) else ()
        tried = {name for row in needed if row.fits for name in row.techniques}
        uncompiled = (one.uncompiled for name, one in TECHNIQUES.items() if name in tried)
        return (*self._other_allocator, *self._other_ways, *filter(None, uncompiled))

    @property
    def _other_allocator(self) -> tuple[str, ...]:
        """A sentence on the first row that fits only with expandable segments; () if there is none worth it."""
        rows = [row for row in self.rows if row.expandable_bytes is not None]
        # If something fits, only the step as it is (the first row) is worth a change of the environment.
        if not rows or (self.recommended is not None and rows[0] is not self.rows[0]):
            return ()
        first = rows[0]
        assert first.expandable_bytes is not None
        return (
            f"The tensors of {first.name} fit, only what is reserved for them does not: with {EXPANDABLE_SEGMENTS} it "
            f"is {format_bytes(first.expandable_bytes)}, which fits.",
        )

    @property
    def _other_ways(self) -> tuple[str, ...]:
        if self.recommended is None:
            names, more = self.larger_devices[:_SHOWN_DEVICES], len(self.larger_devices[_SHOWN_DEVICES:])
            larger = f"{', '.join(names)}{f' and {more} larger ones' if more else ''}"
            holding = f"GPUs that hold the smallest of these: {larger}."
            holding = holding if names else "No GPU in the table holds it."
            return holding, f"Over several devices: devices={2 * self.devices} of fit (--devices)."
        if self.fits_plainly:
            return ("No plan is needed.",)
        return (f"Use {self.recommended.name}.",)

    @property
    def code(self) -> str:
        """Lines of Python to paste. ``model``, ``batch`` and ``params`` stand for the user's own."""
        best = self.recommended
        if best is None:
            return ""
        # There is no code to paste for an optimizer of the user.
        make = BY_NAME[best.optimizer].written if best.optimizer in BY_NAME else "..."
        lines = [f"optimizer = {make}"] if best.optimizer != self.optimizer else []
        if best.spread:
            return "\n".join([*lines, *self._code_on_ranks(best)])
        if best.techniques:
            techniques = best.techniques
            more = "" if self.budget is None else f', "{self.budget}"'
            more += "" if techniques == DEFAULT_TECHNIQUES else f", techniques={techniques!r}"
            steps = f", accumulation_steps={self.accumulation_steps}" if self.accumulation_steps > 1 else ""
            lines += [
                f'profile = sacplan.profile(model, batch, optimizer=optimizer, device="{self.device}"{steps}'
                f"{self.compiled})",
                f"handle = sacplan.apply(model, sacplan.plan(profile{more}))",
            ]
        return "\n".join(lines)

    def _code_on_ranks(self, best: FitRow) -> list[str]:
        """Return the code of the best row for all ranks: the profile and plan, if any, and the wrapping."""
        budget = "" if self.budget is None else f', "{self.budget}"'
        lines = [f"# torchrun --nproc-per-node {self.devices}"]
        profile = f'profile = sacplan.profile(model, batch, optimizer=optimizer, device="{self.device}"'
        on_mesh = not best.wrapping
        # A mesh is an option of ``plan``, and ``apply`` spreads the model. DDP and FSDP2 are options of ``profile``,
        # and the user wraps the model.
        if on_mesh:
            plan = f"sacplan.plan(profile{budget}, {best.options})"
            lines += [f"{profile})  # of all ranks", f"handle = sacplan.apply(model, {plan})"]
        elif best.way == "plan":
            plan = f"sacplan.plan(profile{budget})"
            options = f"{' ' * 26}{best.options})"
            lines += [f"{profile},", options, f"handle = sacplan.apply(model, {plan})"]
        return [*lines, *best.wrapping]

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each way."""
        return frame(self.rows)

    def __str__(self) -> str:
        rows = [
            f"  {row.name}: {row.memory}, {'fits' if row.fits else 'does not fit'}"
            for row in self.shown(sizes=False)
        ]
        return "\n".join([self.sentence, *rows, *self.advice, *self.remarks, *self.computed])


def recommended(rows: Sequence[FitRow]) -> FitRow | None:
    """Return the row to choose, or None if nothing fits.

    The step as it is wins if it fits; else the fastest way that fits with the asked optimizer or its fused version.
    Another optimizer, which changes the training, is chosen only if nothing fits with these.
    """
    holding = [row for row in rows if row.fits]
    if not holding:
        return None
    # On several devices, the first row without a plan that fits: later ones change more, such as the precision.
    plain = [row for row in holding if row.way == "as it is" and row.optimizer == rows[0].optimizer]
    if plain:
        return plain[0]
    same = [row for row in holding if is_same_training(row.optimizer, rows[0].optimizer)]
    return min(same or holding, key=lambda row: math.inf if row.step_ms is None else row.step_ms)


def cheapest_of(rows: Sequence[FitRow]) -> FitRow | None:
    """Return the fastest row that fits with the optimizer of the first row or its fused version; None for none."""
    fitting = [row for row in rows if row.fits and is_same_training(row.optimizer, rows[0].optimizer)]
    return min(fitting, key=lambda row: row.step_ms or 0.0, default=None)


def is_same_training(name: str, optimizer: str) -> bool:
    """Whether an optimizer is the asked one, or its fused version."""
    # ``fit`` compares with the fused version only if a variant of Adam was asked for.
    return name in (optimizer, "adamw-fused")
