"""``max_batch`` and ``throughput``: the largest batch under a budget, and the one with the most samples per second.

    found = sacplan.max_batch(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="h100")
    found.batch_size, found.unplanned_batch_size, found.plan

Each batch size that is tried gets a trace of its own. It fits if ``sacplan.plan`` finds a plan for it. Peaks are nearly
linear in the batch size, so a line through two sizes says which to try next, and bisection takes over if that does not
end the search. A handful of traces is enough, whatever the result; without a budget on a GPU up to twice as many, since
reserved memory grows by whole segments.

Memory need not grow with the batch: a model may work in chunks from some size on. So the claim is only about sizes that
were tried: the result fits, one sample more does not, and neither does any larger size that was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch.utils.data import DataLoader

from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes
from sacplan.core.progress import begins
from sacplan.core.sections import Section
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, resolve_device
from sacplan.device.outside_allocator import Outside, outside_text
from sacplan.errors import PlanError
from sacplan.planning.limits import limit_of_device
from sacplan.planning.plan import Plan
from sacplan.planning.request import Request, resolve_solver
from sacplan.profiling.tracing import Trace
from sacplan.questions.batch_sizes import BatchSizes, CapacityPoint, Recordings, batches_of
from sacplan.questions.sweep import frame
from sacplan.record.compiled import CompileModules
from sacplan.record.step import LossFn
from sacplan.solvers.solvers import Solver
from sacplan.techniques.registry import resolve_techniques

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

_ALL = 16  # if there are at most this many sizes, throughput tries all of them
_REFINEMENTS = 16  # sizes to try around the best one, at most


@dataclass(frozen=True, slots=True)
class Capacity:
    """A batch size, the plan for it, and all sizes that were tried on the way.

    Attributes:
        batch_size: The answer: number of samples.
        plan: The plan for that size. Its ``status`` is ``"unplanned"`` if the step fits as it is.
        samples_per_s, step_ms: Predicted, with recomputation and chunks.
        budget_bytes: Limit for the peak of the step. Without a budget on a GPU: what torch's allocator may reserve.
        device: Name of the device.
        unplanned_batch_size: The largest size that fits without a plan; 0 if one sample does not.
        largest_batch_size: The largest size that fits with a plan. For ``max_batch`` it is ``batch_size``.
        bounded_by: What keeps ``largest_batch_size`` from being larger: memory, or the argument ``at_most``.
        points: The sizes that were tried, by size. Each took one trace. Their figures are peaks.
        outside: What lies outside of torch's allocator, with the source of each figure. Empty if a budget was given,
            and on a CPU.
    """

    batch_size: int
    plan: Plan
    samples_per_s: float
    step_ms: float
    budget_bytes: int
    device: str
    unplanned_batch_size: int
    largest_batch_size: int
    bounded_by: Literal["memory", "at_most"]
    points: tuple[CapacityPoint, ...]
    outside: tuple[Outside, ...] = ()

    @property
    def fastest(self) -> CapacityPoint:
        """The size with the most samples per second, of those that were tried."""
        # Of two that are equally fast, the smaller one needs less memory.
        return max(self.points, key=lambda point: (point.samples_per_s or 0.0, -point.batch_size))

    @property
    def faster(self) -> str:
        """A phrase on the fastest of the sizes that were tried; ``""`` if that is the answer."""
        best = self.fastest
        if best.batch_size == self.batch_size or best.samples_per_s is None:
            return ""
        more = best.samples_per_s / self.samples_per_s - 1
        return f"fastest of those looked at: {best.batch_size}, {more:.1%} more samples/s"

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each size that was tried, by size."""
        return frame(self.points).set_index("batch_size")

    def in_words(self) -> Section:
        """Return the answer and its figures, for people."""
        limit = " (at_most)" if self.bounded_by == "at_most" else ""
        added = f", {self.plan.added_ms:.2f} ms for chunks" if self.plan.chunks else ""
        rest = ""
        if self.outside:
            rest = f", the rest is outside of torch's allocator: {outside_text(self.outside)}"
        memory = self.plan.device_memory
        reserved = "" if memory is None else f", {format_bytes(memory.reserved_bytes())} reserved"
        rows = [
            ("budget", f"{format_bytes(self.budget_bytes)}{rest}"),
            (
                "largest",
                f"{self.unplanned_batch_size} without a plan, {self.largest_batch_size} with one{limit}",
            ),
            ("samples/s", f"{self.samples_per_s:.2f} (predicted)"),
            ("faster", f"{self.faster}; see sacplan.throughput" if self.faster else ""),
            ("peak", f"{format_bytes(self.plan.peak_bytes)}{reserved}"),
            ("step", f"{self.step_ms:.2f} ms, {self.plan.recompute_ms:.2f} ms of it recomputation{added}"),
        ]
        title = f"Batch of {self.batch_size}: {self.plan.fingerprint.model_class} on {self.device}"
        return Section(title, tuple(row for row in rows if row[1]))

    def __repr__(self) -> str:
        told = self.in_words()
        figures = "; ".join(f"{label} {said}" for label, said in told.rows)
        return f"Capacity({told.title}; {figures})"


class SearchOptions(TypedDict, total=False):
    """The keyword arguments that ``max_batch`` and ``throughput`` share; see ``max_batch``."""

    loss_fn: LossFn | None
    optimizer: Any
    trace: Trace
    solver: str | Solver
    techniques: Sequence[str] | None
    accumulation_steps: int
    compile: CompileModules
    at_most: int | None


@checked(PlanError, "model", "make_batch", "budget")
def max_batch(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any] | DataLoader[Any],
    budget: float | str | None = None,
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    **options: Unpack[SearchOptions],
) -> Capacity:
    """Return the largest batch size for which a plan holds the budget, with that plan.

        found = sacplan.max_batch(model, lambda n: torch.empty(n, 3, 224, 224, device="meta"), device="rtx-4090")
        handle = sacplan.apply(model, found.plan)  # and train with batches of found.batch_size

    The largest batch needs the most recomputation, so a smaller one is often faster. ``found.fastest`` is the fastest
    of the sizes that were tried on the way; ``throughput`` searches for the fastest.

    Args:
        model: As for ``sacplan.profile``.
        make_batch: A function: ``make_batch(n)`` returns a batch of n samples, in any form that ``profile`` takes. It
            is also called with sizes that do not fit; tensors on the meta device take no memory here. Or a
            ``DataLoader``, whose longest samples are taken.
        budget: Limit for the peak of the step. A number is in GiB, a string has a unit (``"22GiB"``). None: the step
            has to fit the device, see below. A share (``"90%"``) is refused: it would be one of the peak without a
            plan, which differs from size to size.
        device: The target device, see ``sacplan.devices()``.
        **options: By keyword.

            - ``loss_fn``, ``optimizer``, ``trace``: As for ``profile``. A real trace runs each size that is tried,
              without a plan, so all of them have to fit here.
            - ``solver``, ``techniques``: As for ``sacplan.plan``.
            - ``accumulation_steps``: As for ``profile``; the batch that is looked for is one micro-batch.
            - ``compile``: As for ``profile``.
            - ``at_most``: The largest size to try.

    Without a budget, a step fits a GPU if two things together are at most its memory:

    - What torch's allocator reserves, ``torch.cuda.max_memory_reserved()``. It is predicted by playing the step through
      on the allocator's rules (``Plan.device_memory``), with the settings of ``PYTORCH_CUDA_ALLOC_CONF`` in the
      environment of this process.
    - What lies outside of the allocator, each with its source in ``Capacity.outside``: the CUDA context with its
      kernels.

    Not in it are workspaces of cuDNN, other processes, and batches longer than the planned one; a smaller budget leaves
    memory for them. On a CPU, the peak may take 85% of the machine's memory. A budget limits the peak: the sum of
    everything that is alive, rounded as the allocator rounds it, with the workspaces of cuBLAS.

    Raises:
        InfeasibleBudget: One sample does not fit. It carries the smallest peak that was reached for it.
        BudgetError: The budget cannot be read, is a share, or is more than the device has.
        PlanError: ``make_batch`` is not callable or makes batches of one size; ``at_most`` is not a size; or the solver
            is unknown.
        DeviceError: The device is unknown.
    """
    sizes = _sizes(model, make_batch, budget, device, **options)
    return _capacity(sizes, sizes.edges()[1])


@checked(PlanError, "model", "make_batch", "budget")
def throughput(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any] | DataLoader[Any],
    budget: float | str | None = None,
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    **options: Unpack[SearchOptions],
) -> Capacity:
    """Return the batch size with the most samples per second under the budget, with the plan for it.

        found = sacplan.throughput(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="h100")
        found.to_frame()["samples_per_s"]

    Launches, the optimizer's step and reading the parameters are paid for once per batch, so larger batches use a
    device better. From the largest unplanned batch on, they cost recomputation. So samples per second rise at first and
    then fall. If at most 16 sizes fit, all are tried. Otherwise powers of two, the largest sizes with and without a
    plan, and three between these two are tried; then the gaps next to the best size are halved, at most 16 times. The
    result is the best of ``points``, and no more than that is claimed.

    Times are predicted kernel by kernel (``sacplan/device/cost.py``). Products count rows in tiles of 64, but no
    waves of tiles over the multiprocessors, so that a few samples more or less hardly matter.

    Arguments and errors are those of ``max_batch``.
    """
    sizes = _sizes(model, make_batch, budget, device, **options)
    unplanned, largest = sizes.edges()
    # All sizes if these are few; else a coarse grid, which is then refined around its best size.
    for n in range(1, largest + 1) if largest <= _ALL else _spread(unplanned, largest):
        sizes.look(n)
    sizes.refine(_REFINEMENTS)
    return _capacity(sizes, sizes.fastest)


def _spread(unplanned: int, largest: int) -> list[int]:
    """Return powers of two, both edges, and three sizes between the edges, multiples of 8 if there is room."""
    # Costs per batch weigh most on small batches, so samples per second rise fast at first, and powers of two are
    # close enough. Beyond the largest unplanned batch recomputation works against this rise, so three more are tried.
    sizes = {2**k for k in range(largest.bit_length()) if 2**k <= largest} | {unplanned, largest}
    for quarter in (1, 2, 3):
        n = unplanned + (largest - unplanned) * quarter // 4
        sizes.add(n // 8 * 8 if largest - unplanned >= 64 else n)
    return sorted(sizes - {0})


def _sizes(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any] | DataLoader[Any],
    budget: float | str | None,
    device: str | DeviceSpec | torch.device,
    *,
    solver: str | Solver = "best",
    techniques: Sequence[str] | None = None,
    at_most: int | None = None,
    **recording: Any,
) -> BatchSizes:
    """Check the arguments before anything is traced, and return the sizes with the first ones tried."""
    batches = batches_of(make_batch)
    # True is an integer in Python, and would be taken for one sample.
    if at_most is not None and (isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1):
        raise PlanError(f"at_most={at_most!r} must be a batch size, 1 or more, or None for no limit.")
    # Only to check the name before anything is traced: each plan resolves it again.
    resolve_solver(solver)
    if techniques is not None:
        techniques = resolve_techniques(techniques)
    spec = resolve_device(device)
    request = Request(limit_of_device(budget, spec), solver, techniques=techniques)
    return BatchSizes(
        Recordings(model, batches, spec, recording), request, at_most, lambda _, said: begins(said)
    )


def _capacity(sizes: BatchSizes, n: int) -> Capacity:
    """Return the result for a size that fits."""
    unplanned, largest = sizes.edges()  # asked again, since ``refine`` may have found larger sizes that fit
    point = sizes.points[n]
    assert point.plan is not None  # n fits
    assert point.step_ms is not None
    assert point.samples_per_s is not None
    return Capacity(
        batch_size=n,
        plan=point.plan,
        samples_per_s=point.samples_per_s,
        step_ms=point.step_ms,
        budget_bytes=sizes.budget_bytes,
        device=sizes.spec.name,
        unplanned_batch_size=unplanned,
        largest_batch_size=largest,
        # Sizes above ``at_most`` were not tried, so it is not known whether memory is the limit.
        bounded_by="at_most" if largest == sizes.at_most else "memory",
        points=tuple(sizes.points[k] for k in sorted(sizes.points)),
        # With a budget, what lies outside of the allocator is not part of the limit.
        outside=sizes.request.limit.room(sizes.spec).outside,
    )
