"""``layouts``: peak and time of a step on every mesh of a number of devices.

found = sacplan.layouts(model, batch, 8, device="h100", optimizer=torch.optim.AdamW)
found.best.plan, found.to_frame()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes
from sacplan.core.progress import begins
from sacplan.core.sections import Section
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec
from sacplan.distributed.sharding.sharding import Sharding
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.limits import limit_of_device
from sacplan.planning.make import Outcome, outcome_of
from sacplan.planning.meshes import Spread, devices_of, resolve_mesh, spreads, tried
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import Trace, profile
from sacplan.questions.on_ranks import read_devices
from sacplan.questions.sweep import Row, frame
from sacplan.record.step import LossFn
from sacplan.solvers.solvers import Solver

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Row):
    """One way to spread a step over a number of devices, as PyTorch runs it.

    Attributes:
        mesh: Ranks by axis; empty for a single device.
        name: ``"ddp"`` (DistributedDataParallel), ``"fsdp"`` (``fully_shard`` on the layers and on the model),
            ``"megatron"`` (``parallelize_module``), ``"sequence"`` (the same with sequence and loss parallelism),
            ``"fsdp + megatron"``, or ``"fsdp + sequence"``.
        sharding: The mesh, and the styles of modules; None for a single device.
        peak_bytes: Per rank, as ``unplanned_peak_bytes``.
        step_ms: With the plan; of the step without a plan if none holds the budget.
        recompute_ms, added_ms: As for ``Row``, but 0 if no plan holds the budget.
        collective_ms: Part of ``step_ms``: exposed communication.
        samples_per_s: Of all ranks together; 0 if no plan holds the budget.
        binding: The module or step at which the smallest peak is; ``""`` if a plan holds the budget.
    """

    shown: ClassVar = (
        "mesh", "layout", "fits", "unplanned_peak_bytes", "peak_bytes", "step_ms", "recompute_ms", "collective_ms",
        "samples_per_s",
    )  # fmt: skip

    mesh: dict[str, int]
    name: str
    sharding: Sharding | None
    peak_bytes: int
    step_ms: float
    recompute_ms: float
    added_ms: float
    collective_ms: float
    samples_per_s: float
    binding: str = ""

    @classmethod
    def of(cls, whole: Profile, outcome: Outcome, spread: Spread | None = None) -> Layout:
        """Return the row of a step that is spread over ranks; on a single device if ``spread`` is None."""
        rank = outcome.profile
        taken = Row.taken(outcome)
        # If no plan fits, the row has the times of the step without one, so that layouts can be compared.
        taken |= {name: taken[name] or 0.0 for name in ("recompute_ms", "added_ms")}
        taken["step_ms"] = step_ms = outcome.step_ms or rank.step_ms
        return cls(
            mesh={} if spread is None else dict(spread.mesh.axes),
            name="one device" if spread is None else spread.name,
            sharding=None if spread is None else spread.ranks.sharding,
            collective_ms=math.fsum(op.time_ms for op in rank.program.ops if "c10d" in op.name),
            samples_per_s=whole.fingerprint.rows / step_ms * 1e3 if taken["fits"] else 0.0, binding=outcome.binding,
            **taken,
        )  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """Return the figures that tables and JSON show, with the mesh in words."""
        words = {
            "mesh": " x ".join(f"{name} {n}" for name, n in self.mesh.items()) or "one device",
            "layout": self.name,
        }
        return {name: words[name] if name in words else getattr(self, name) for name in self.shown}


@dataclass(frozen=True)
class Layouts:
    """All layouts that were tried.

    Attributes:
        rows: The layouts: those that fit by time, then the others by peak.
        refused: The reasons why the step cannot be spread over some meshes, a sentence for each mesh.
        devices: Number of devices.
        device: Name of the device.
        batch_size: Samples in a step, of all ranks together.
        budget_bytes: Limit for the peak on each rank. Without a budget on a GPU: what torch's allocator may reserve
            there; less on a mesh of two axes, by the buffers of its second NCCL communicator.
    """

    rows: tuple[Layout, ...]
    refused: tuple[str, ...]
    devices: int
    device: str
    batch_size: int
    budget_bytes: int

    @property
    def best(self) -> Layout:
        """The fastest layout that fits.

        Raises:
            InfeasibleBudget: None fits. It carries the smallest peak that was reached.
        """
        # Rows that fit come first, the fastest one at the top.
        if self.rows and self.rows[0].fits:
            return self.rows[0]
        least = min(self.rows, key=lambda row: row.peak_bytes)
        raise InfeasibleBudget(
            f"no layout on {self.devices} x {self.device} keeps the step under {format_bytes(self.budget_bytes)} on "
            f"each rank. The smallest peak reached is {format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), "
            f"with {least.name} on {least.mesh}. "
            "Take more devices, or a smaller batch.",
            budget_bytes=self.budget_bytes,
            smallest_feasible_bytes=least.peak_bytes,
            binding=least.binding,
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each layout, in bytes and ms."""
        return frame(self.rows)

    def in_words(self) -> Section:
        """Return what was asked for, for people."""
        title = f"A batch of {self.batch_size}, of all ranks together, on {self.devices} x {self.device}"
        return Section(title, (("budget", f"{format_bytes(self.budget_bytes)} on each rank"),))

    def __repr__(self) -> str:
        """One line: how many layouts fit, and the fastest."""
        fitting = [row for row in self.rows if row.fits]
        best = f"fastest {fitting[0].name} on {fitting[0].mesh}" if fitting else "none fits"
        return (
            f"Layouts({self.devices} x {self.device}, batch {self.batch_size}, "
            f"budget {format_bytes(self.budget_bytes)} a rank: {len(fitting)} of {len(self.rows)} fit; {best})"
        )


@checked(PlanError, "model", "batch", "optimizer")
def layouts(
    model: torch.nn.Module | Profile,
    batch: Any = None,
    devices: int | str = 8,
    budget: float | str | None = None,
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    *,
    trace: Trace = "fake",
    solver: str | Solver = "best",
    techniques: Sequence[str] | None = None,
) -> Layouts:
    """Plan a step on each mesh of a number of devices, to see which parallelism to use.

        found = sacplan.layouts(model, batch, 8, device="h100", optimizer=torch.optim.AdamW)
        print(found.to_frame())

    Args:
        model: The model to train, or a profile of it.
        batch: The batch of all ranks together, as for ``sacplan.profile``. Leave it out with a profile.
        devices: Number of devices, or ``"8xh100"``. 1 means no mesh.
        budget: Limit for the peak on each rank. A number is in GiB, a string has a unit (``"22GiB"``); a share is
            refused. None: the step has to fit the device, with the buffers of NCCL; see ``sacplan.max_batch``.
        device: The device of each rank, see ``sacplan.devices()``.
        loss_fn, optimizer, trace: As for ``sacplan.profile``.
        solver, techniques: As for ``sacplan.plan``, on each rank.

    Returns:
        The layouts, the fastest that fits first: peaks in bytes per rank, times in ms.

    Raises:
        BudgetError: The budget cannot be read.
        PlanError: The step cannot be spread over any mesh of this many devices.
    """
    if isinstance(model, Profile):  # a profile has its device: a name in ``devices`` is only checked
        n = devices_of(str(devices), model.spec) if "x" in str(devices) else read_devices("", devices)[1]
    else:
        device, n = read_devices(device, devices)
    whole = (
        model
        if isinstance(model, Profile)
        else profile(model, batch, loss_fn, optimizer, device, trace=trace)
    )
    limit = limit_of_device(budget, whole.spec)
    budget_bytes = limit.room(whole.spec, int(n > 1)).n_bytes

    request = Request(limit, solver, techniques=techniques)
    rows: list[Layout] = []
    refused: list[str] = []

    if n == 1:
        rows.append(Layout.of(whole, outcome_of(request, whole)))
    for mesh in resolve_mesh(n, whole.spec) if n > 1 else ():
        begins(f"mesh {mesh}")
        try:
            ways = list(spreads(whole, mesh))
        except PlanError as error:
            # The step may still be spread over other meshes.
            refused.append(str(error))
            continue
        found = tried(ways, request, all_of_them=True)
        rows += [Layout.of(whole, one.outcome, one.spread) for one in found]
    if not rows:
        raise PlanError(" ".join(refused))
    # Rows that fit by time; the others by peak, since the time of a step that cannot run says little.
    rows.sort(key=lambda row: (not row.fits, row.step_ms if row.fits else row.peak_bytes))
    return Layouts(tuple(rows), tuple(refused), n, whole.device, whole.fingerprint.rows, budget_bytes)
