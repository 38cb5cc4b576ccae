"""The answer of ``certify``: the most memory that a run takes, when that is, and what to do if it is too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from sacplan.core.budget import format_bytes
from sacplan.core.sections import Section
from sacplan.planning.limits import EXPANDABLE_SEGMENTS
from sacplan.planning.plan import Plan
from sacplan.questions.lengths import Shape, fits_in

if TYPE_CHECKING:
    import pandas as pd

Setting: TypeAlias = Literal["default", "expandable", "emptied", "none"]
"""How the allocator is set; "none" if the sum of the tensors decides.

"emptied" is "default" with ``torch.cuda.empty_cache()`` after each batch.
"""


class BatchAt(NamedTuple):
    """A batch of a run.

    Attributes:
        step: Number of batches before it; in an evaluation, index of the batch of training after which it runs.
        shape: Its samples, and the sizes of each: tokens, or several, such as height and width.
        evaluation: Whether it is a batch of an evaluation.
    """

    step: int
    shape: Shape
    evaluation: bool = False

    def __str__(self) -> str:
        where = "evaluation after " if self.evaluation else ""
        return f"{where}batch {self.step:,} ({' x '.join(f'{n:,}' for n in self.shape)})"


class ShapePlan(NamedTuple):
    """A plan, and the batches that it is for: those that are in no entry larger than one of ``shapes``."""

    shapes: tuple[Shape, ...]
    plan: Plan

    def holds(self, shape: Shape) -> bool:
        """Whether the plan is for a batch of this shape."""
        return any(fits_in(shape, one) for one in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A run, and the most memory that it takes.

    Attributes:
        way: "as it is", "one plan", or the number of plans, such as "3 plans".
        allocator: The setting of the allocator; "none" on a CPU, and if a budget limits the sum of the tensors.
        limit_bytes: Limit for the reserved bytes if there are any, else for the allocated ones.
        needs: The most of these bytes that a batch takes; if memory runs out, what that batch would have taken.
        allocated_bytes, allocated_at: The most that is allocated, and the first batch with which it is.
        reserved_bytes, reserved_at: The most that is reserved; None where there is no allocator.
        breaks_at: The batch at which memory runs out; None if it never does. With the default settings, torch finds no
            room there even after it has given cached segments back, and the run ends. With others, it is the first
            batch over the limit.
        left_share: Share of the device's memory that the run never reserves, rounded down; None if it does not fit, or
            the device is not the limit. An inference engine that stays on the device next to the trainer may have this
            share, as vLLM's ``gpu_memory_utilization``. If the cache is emptied: the share that is left between two
            batches, for an engine that sleeps while the trainer steps.
        retries: How often torch gives cached segments back, with the default settings. The run goes on, but each time
            costs a synchronization and new segments.
        run_ms, added_ms: Predicted time of all steps, evaluations included, and what the plans add to it.
        run_flops, recompute_flops: FLOPs of all steps without the plans, and of what these run a second time.
    """

    shown: ClassVar = (
        "way", "allocator", "reserved_bytes", "reserved_at", "allocated_bytes", "allocated_at", "fits", "breaks_at",
        "retries", "left_share", "run_ms", "added_ms", "run_flops", "recompute_flops",
    )  # fmt: skip

    way: str = "as it is"
    allocator: Setting
    limit_bytes: int
    needs: int
    allocated_bytes: int
    allocated_at: BatchAt
    reserved_bytes: int | None
    reserved_at: BatchAt | None
    breaks_at: BatchAt | None
    left_share: float | None = None
    retries: int = 0
    run_ms: float = 0.0
    added_ms: float = 0.0
    run_flops: int = 0
    recompute_flops: int = 0

    @property
    def fits(self) -> bool:
        """Whether memory never runs out."""
        return self.breaks_at is None

    def figures(self) -> dict[str, Any]:
        """Return the figures that tables and JSON show."""
        found = {name: getattr(self, name) for name in self.shown}
        return {k: v._asdict() if isinstance(v, BatchAt) else v for k, v in found.items()}

    @property
    def said(self) -> str:
        """The run in words."""
        at, n_bytes = self.reserved_at or self.allocated_at, self.reserved_bytes or self.allocated_bytes
        most = (
            f"{format_bytes(n_bytes)} {'allocated' if self.reserved_at is None else 'reserved'} from {at} on"
        )
        retries = f", {self.retries} allocation retries" if self.retries else ""
        added = f", {self.added_ms / self.run_ms:.1%} of the time added" if self.added_ms else ""
        if self.fits:
            return f"fits: {most}{retries}{added}"
        return f"runs out of memory at {self.breaks_at}, which needs {format_bytes(self.needs)}{retries}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether every batch of a run fits a device.

    Attributes:
        model: Class name of the model.
        device: Name of the device.
        steps, shapes: How many batches the run has, and of how many shapes.
        batch, tokens: What limits a batch: its samples or its tokens. Both are None if a ``DataLoader`` was given.
        rows: The run as it is, then with plans if it needs them; each with the setting of the allocator that this
            process has, and with the other one.
        largest: If the run does not fit as it is: the largest batch, or budget of tokens, with which it does; 0 if none
            does. None if it fits, and with a ``DataLoader``.
        plans: If the run does not fit as it is: plans with which it does, the cheapest first, and the batches that each
            is for. Empty if the run fits, or no plan is enough.
    """

    model: str
    device: str
    steps: int
    shapes: int
    batch: int | None
    tokens: int | None
    rows: tuple[WholeRun, ...]
    largest: int | None
    plans: tuple[ShapePlan, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits as it is, with the setting of the allocator that this process has."""
        return self.rows[0].fits

    @property
    def breaks_at(self) -> BatchAt | None:
        """The batch at which the run as it is runs out of memory; None if it does not."""
        return self.rows[0].breaks_at

    @property
    def plan(self) -> Plan | None:
        """The plan for the longest batches; None if the run needs none, or none is enough."""
        return self.plans[-1].plan if self.plans else None

    def plan_for(self, *shape: int) -> Plan | None:
        """Return the plan for a batch of this shape, ``(samples, *sizes)``; None if no plan is for one so large."""
        return next((one.plan for one in self.plans if one.holds(shape)), None)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, in sentences; empty if the run fits."""
        if self.fits:
            return ()
        found: list[str] = []
        fitting = {row.allocator for row in self.rows if row.fits and row.way == "as it is"}
        more = {"expandable": EXPANDABLE_SEGMENTS, "emptied": "torch.cuda.empty_cache() after each batch"}
        found += [f"It fits with {what}." for setting, what in more.items() if setting in fitting]
        if self.largest is not None:
            what = "batch" if self.tokens is None else "budget of tokens"
            found.append(
                f"The largest {what} that never breaks as it is: {self.largest:,}."
                if self.largest
                else f"No {what} fits without a plan."
            )
        return tuple(found) if self.plans else (*found, "No plan is enough.")

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each way and setting."""
        import pandas as pd

        return pd.DataFrame([{name: getattr(row, name) for name in row.shown} for row in self.rows])

    def in_words(self) -> Section:
        """Return the answer, for people."""
        settings = {"expandable": ", expandable segments", "emptied": ", cache emptied"}
        shown = (row for row in self.rows if row.allocator != "emptied" or not self.fits)
        rows = [(f"{row.way}{settings.get(row.allocator, '')}", row.said) for row in shown]
        rows.insert(0, ("limit", format_bytes(self.rows[0].limit_bytes)))
        title = f"{self.model} on {self.device}: {self.steps:,} batches of {self.shapes:,} shapes"
        return Section(title, (*rows, *(("", said) for said in self.advice)))

    def __str__(self) -> str:
        return self.in_words().text(100)
