"""What fits: the largest batch under a budget, and the batch and plan with the most samples per second.

    found = sacplan.max_batch(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="h100")
    found.batch_size, found.unplanned_batch_size, found.plan

A batch size is looked at by a trace of its own, and fits if ``sacplan.plan`` finds a plan for it. Peaks grow nearly
in a line with the batch, so a line through two sizes says where to look next, and bisection takes over where
it does not: a handful of traces, whatever the result.

Memory need not grow with the batch (a model may work in chunks from some size on). So what is claimed is what was
looked at: the result fits, one sample more does not, nor does any larger size that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._plan.limits import budget_of_device
from sacplan._plan.plan import Plan
from sacplan._plan.planning import resolve_solver
from sacplan._profile.tracing import Trace
from sacplan._program.arguments import checked
from sacplan._program.budget import format_bytes
from sacplan._program.notebook import Section, as_html, frame_html
from sacplan._program.progress import Progress, reported
from sacplan._questions.batch_sizes import BatchSizes, CapacityPoint
from sacplan._questions.sweep import frame
from sacplan._record.step import LossFn
from sacplan._solve.solvers import Solver
from sacplan._techniques import resolve_techniques
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

_ALL = 16  # up to this many sizes, throughput looks at each
_REFINEMENTS = 16  # looks around the best of those that are spread out


@dataclass(frozen=True, slots=True)
class Capacity:
    """A batch size, the plan for it, and all sizes that were looked at on the way.

    Attributes:
        batch_size: the answer.
        plan: for that size; ``status`` "unplanned" where it fits as it is.
        samples_per_s, step_ms: predicted, recomputation and chunks included.
        budget_bytes: for the peak of the step.
        headroom_bytes: what the device has besides.
        device: its name.
        unplanned_batch_size: the largest that fits without a plan; 0 where one sample does not.
        largest_batch_size: the largest that a plan holds. From ``max_batch`` it is ``batch_size``.
        bounded_by: what keeps ``largest_batch_size`` from being larger.
        points: the sizes that were looked at, in their order; each took one trace.
    """

    batch_size: int
    plan: Plan
    samples_per_s: float
    step_ms: float
    budget_bytes: int
    headroom_bytes: int
    device: str
    unplanned_batch_size: int
    largest_batch_size: int
    bounded_by: Literal["memory", "at_most"]
    points: tuple[CapacityPoint, ...]

    @property
    def fastest(self) -> CapacityPoint:
        """Of the sizes that were looked at, the one with the most samples per second."""
        return max(self.points, key=lambda point: (point.samples_per_s or 0.0, -point.batch_size))

    @property
    def faster(self) -> str:
        """That another size that was looked at is faster, in words; empty where the answer is the fastest."""
        best = self.fastest
        if best.batch_size == self.batch_size or best.samples_per_s is None:
            return ""
        more = best.samples_per_s / self.samples_per_s - 1
        return f"fastest of those looked at: {best.batch_size}, {more:.1%} more samples/s"

    def to_frame(self) -> pd.DataFrame:
        """One row per size that was looked at, in their order."""
        return frame(self.points).set_index("batch_size")

    def _repr_html_(self) -> str:
        rows = (
            ("budget", f"{format_bytes(self.budget_bytes)}, {format_bytes(self.headroom_bytes)} left free"),
            ("largest", f"{self.unplanned_batch_size} without a plan, {self.largest_batch_size} with one"),
            ("samples/s", f"{self.samples_per_s:.2f} (predicted)"),
        )
        title = f"Batch of {self.batch_size}: {self.plan.fingerprint.model_class} on {self.device}"
        return as_html([Section(title, rows)]) + frame_html(self.to_frame())

    def __repr__(self) -> str:
        at_most = " (at_most)" if self.bounded_by == "at_most" else ""
        chunked = f" and {self.plan.added_ms:+.2f} ms for slices" if self.plan.chunks else ""
        return (
            f"Capacity({self.plan.fingerprint.model_class} on {self.device}: batch size {self.batch_size}, "
            f"{self.samples_per_s:.2f} samples/s, step {self.step_ms:.2f} ms with {self.plan.recompute_ms:.2f} ms "
            f"recomputed{chunked}, peak {format_bytes(self.plan.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"headroom {format_bytes(self.headroom_bytes)}; largest without a plan {self.unplanned_batch_size}, with "
            f"one {self.largest_batch_size}{at_most}; {len(self.points)} sizes looked at"
            + (f"; {self.faster}, see sacplan.throughput" if self.faster else "")
            + ")"
        )


class SearchOptions(TypedDict, total=False):
    """What ``max_batch`` and ``throughput`` take besides; see there."""

    loss_fn: LossFn | None
    optimizer: Any
    trace: Trace
    headroom: float | str | None
    solver: str | Solver
    techniques: Sequence[str] | None
    at_most: int | None
    progress: Progress


@checked(PlanError, "model", "make_batch", "budget")
def max_batch(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any],
    budget: float | str | None = None,
    device: str | DeviceSpec | torch.device = "h100",
    **options: Unpack[SearchOptions],
) -> Capacity:
    """The largest batch size for which a plan holds the budget.

        found = sacplan.max_batch(model, lambda n: torch.empty(n, 3, 224, 224, device="meta"), device="rtx-4090")
        handle = sacplan.apply(model, found.plan)  # and train with batches of found.batch_size

    The plan is made for batches of just that size, so it discards what it has to. A smaller batch is often faster:
    ``found.fastest`` is the best of the sizes that were looked at, and ``throughput`` looks for the best of all.

    Args:
        model: as for ``sacplan.profile``.
        make_batch: ``make_batch(n)`` makes a batch of n samples, in any form that ``profile`` takes. It is also
            called with sizes that do not fit; tensors on the meta device take no memory here.
        budget: for the peak of the step. A number is GiB, a string has a unit (``"22GiB"``). None: the device's
            memory less the headroom. A share (``"90%"``) is refused: it would be one of the unplanned peak of a step,
            as elsewhere, and here are steps of many sizes.
        device: see ``sacplan.devices()``.
        **options: by keyword.

            - ``loss_fn``, ``optimizer``, ``trace``: as for ``profile``. A real trace runs each size that is looked
              at, without a plan: those have to fit here.
            - ``headroom``: what is left free of the device's memory where no budget is given: a share of it (``0.05``,
              ``"5%"``) or bytes (``"2GiB"``). By default ``DEFAULT_HEADROOM``, 15%. See below.
            - ``solver``, ``techniques``: as for ``sacplan.plan``.
            - ``at_most``: no larger size is looked at.
            - ``progress``: None shows a bar in a notebook and on a terminal, True anywhere, False never; a function is
              called with each ``CapacityPoint``, as soon as it is known.

    Headroom: the peak of a plan is the sum of what is alive, rounded as the allocator rounds it, with cuBLAS'
    workspaces. The headroom is for what takes memory besides:

    - Holes between blocks. Played through torch's default allocator (``benchmarks/allocator.py``, with free
      segments given back when memory runs out; not compared with a GPU), the plans of ``python -m
      benchmarks.capacity`` need 0.2 to 2.3% more memory than their peak, and up to 10% where the output holds the
      keys and values of all layers (``use_cache=True`` in transformers). 15% covers that. With
      ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` there are no holes of that kind: ``headroom=0.05``.
    - The CUDA context with its kernels: 0.3 to 0.5 GiB with lazy loading (pytorch #86509, #109888).

    It is not meant for workspaces of cuDNN, NCCL's buffers, other processes, or longer batches than were planned for.

    Raises:
        InfeasibleBudget: one sample does not fit; carries the smallest peak that it does with.
        BudgetError: a budget or headroom that cannot be read, or leaves nothing; a budget that is a share.
        PlanError: ``make_batch`` is not callable or does not follow n; a bad ``at_most``; an unknown solver.
        DeviceError: an unknown device.
    """
    with reported(options.pop("progress", None), "batch sizes") as step:
        sizes = _sizes(model, make_batch, budget, device, step, **options)
        return _capacity(sizes, sizes.edges()[1])


@checked(PlanError, "model", "make_batch", "budget")
def throughput(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any],
    budget: float | str | None = None,
    device: str | DeviceSpec | torch.device = "h100",
    **options: Unpack[SearchOptions],
) -> Capacity:
    """The batch size and the plan, together, that give the most samples per second under the budget.

        found = sacplan.throughput(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="h100")
        found.to_frame()["samples_per_s"]

    Larger batches use a device better (launches, the optimizer's step and reading the parameters are paid for once
    a batch), and from the largest unplanned one on they cost recomputation: so samples per second rise, then fall.
    Looked at are all sizes where they are few. Else powers of two, the largest with and without a plan, three
    between those; then, around the best, the middles of the gaps to its neighbours, until there are none or
    16 were looked at. So the result is the best of ``points``, and no more than that is claimed.

    Times are predictions of a cost model, the roofline of the device (``sacplan/_device/cost.py``): each kernel at a
    fixed share of the peak, whatever its shape. It knows no waves or tiles, so it cannot tell 63 from 64.

    Args and errors: as for ``max_batch``.
    """
    with reported(options.pop("progress", None), "batch sizes") as step:
        sizes = _sizes(model, make_batch, budget, device, step, **options)
        unplanned, largest = sizes.edges()
        for n in range(1, largest + 1) if largest <= _ALL else _spread(unplanned, largest):
            sizes.look(n)
        sizes.refine(_REFINEMENTS)
        return _capacity(sizes, sizes.fastest)


def _spread(unplanned: int, largest: int) -> list[int]:
    """Powers of two, both edges, and three sizes between them; multiples of eight where there is room."""
    sizes = {2**k for k in range(largest.bit_length()) if 2**k <= largest} | {unplanned, largest}
    for quarter in (1, 2, 3):
        n = unplanned + (largest - unplanned) * quarter // 4
        sizes.add(n // 8 * 8 if largest - unplanned >= 64 else n)
    return sorted(sizes - {0})


def _sizes(
    model: torch.nn.Module,
    make_batch: Callable[[int], Any],
    budget: float | str | None,
    device: str | DeviceSpec | torch.device,
    step: Callable[[CapacityPoint, str], None],
    *,
    headroom: float | str | None = None,
    solver: str | Solver = "best",
    techniques: Sequence[str] | None = None,
    at_most: int | None = None,
    **options: Any,
) -> BatchSizes:
    """Check what can be checked before anything is traced, and look at the first sizes."""
    if not callable(make_batch) or isinstance(make_batch, torch.nn.Module):
        raise PlanError(
            f"make_batch must be a function of the batch size, not {type(make_batch).__name__}. For example "
            "make_batch=lambda n: torch.randint(0, 50257, (n, 1024))."
        )
    if at_most is not None and (isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1):
        raise PlanError(f"at_most={at_most!r} must be a batch size, 1 or more, or None for no limit.")
    resolve_solver(solver)
    if techniques is not None:
        techniques = resolve_techniques(techniques)
    spec = resolve_device(device)
    budget_bytes = budget_of_device(budget, headroom, spec)
    return BatchSizes(
        model,
        make_batch,
        budget_bytes,
        spec,
        solver=solver,
        techniques=techniques,
        at_most=at_most,
        progress=step,
        **options,
    )


def _capacity(sizes: BatchSizes, n: int) -> Capacity:
    """The result, with the edges as all looks together show them."""
    unplanned, largest = sizes.edges()
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
        headroom_bytes=sizes.spec.memory_bytes - sizes.budget_bytes,
        device=sizes.spec.name,
        unplanned_batch_size=unplanned,
        largest_batch_size=largest,
        bounded_by="at_most" if largest == sizes.at_most else "memory",
        points=tuple(sizes.points[k] for k in sorted(sizes.points)),
    )
