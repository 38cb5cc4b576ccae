"""Rows of ``fit`` on several devices: what runs the step there, as it is and with a plan.

Each *arrangement* is a way to run one step on all devices: DDP, FSDP2 (also as Accelerate shards packed weights, with
mixed precision for a model in float32, and with ``CPUOffloadPolicy``), or a mesh with tensor parallelism. They process
the same samples: ``batch`` for each device. The step of one rank is recorded as PyTorch runs it, once for each
arrangement and optimizer.

Optimizers of bitsandbytes step whole parameters, so rows of shards have none of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sacplan.core.budget import format_bytes
from sacplan.device.device_memory import reserved_bytes
from sacplan.distributed.ranks.ranks import FSDP2, Ranks, layers_of
from sacplan.errors import BudgetError, PlanError, TraceError
from sacplan.planning.infeasible import OPTIMIZER_STEP
from sacplan.planning.limits import Limit
from sacplan.planning.make import Outcome, outcome_of
from sacplan.planning.meshes import names_on, resolve_mesh, way
from sacplan.planning.request import Request
from sacplan.profiling.optimizer_table import BY_NAME, Factory
from sacplan.profiling.optimizers import OptimizerStep, with_optimizer
from sacplan.profiling.profile import Profile
from sacplan.questions.largest import largest_that_fits, largest_within
from sacplan.questions.scaled import Peaks, Sized
from sacplan.questions.sweep import Row
from sacplan.questions.verdict import FitRow, cheapest_of, is_same_training
from sacplan.questions.ways import AS_IT_IS, PLAN

_LARGEST = 2**16  # the largest batch of a device to try
_MOST_DEVICES = 2**16  # more is a slip of the pen


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way to run a step on several devices.

    Attributes:
        name: In tables.
        options: Arguments of ``sacplan.profile`` for it, as Python.
        flags: The same on the command line.
        ranks: The devices. On a mesh, the batch is that of all of them, and ``options`` are those of ``plan``.
        has_whole_parameters: Whether each rank steps whole parameters, as optimizers of bitsandbytes have to.
    """

    name: str
    options: str
    flags: tuple[str, ...]
    ranks: Ranks
    has_whole_parameters: bool = False


@dataclass
class RankRows:
    """The rows on several devices.

    Attributes:
        model: The model.
        devices: How many there are.
        optimizers: What makes them, by name: the one that was asked for, then those to try where it does not fit. None
            stands for no optimizer.
        step: Records the step of an optimizer by its name, on the whole model; None for no optimizer.
        limit: The limit on each device.
        host_budget_bytes: The memory of the host for each device.
        batch: Samples for each device.
        recorded: Makes the step of the whole model without an optimizer, from the samples in the batch and further
            arguments of ``profile``.
        notes: Sentences on what could not be spread. They are added here.
    """

    model: torch.nn.Module
    devices: int
    optimizers: Mapping[str, Factory | None]
    step: Callable[[str], OptimizerStep | None]
    limit: Limit
    host_budget_bytes: int
    batch: int
    recorded: Callable[[int, Mapping[str, Any]], Profile]
    notes: list[str]
    _known: dict[str, Arrangement] = field(default_factory=dict)
    _rows: list[FitRow] = field(default_factory=list)
    _refused: set[str] = field(default_factory=set)  # arrangements
    # Arrangements whose smallest peak is not in the optimizer's step.
    _bound_elsewhere: set[str] = field(default_factory=set)
    # By arrangement, optimizer and batch.
    _recorded: dict[tuple[str, str, int], Profile] = field(default_factory=dict)

    def rows(self) -> list[FitRow]:
        """Return the rows: for each arrangement as it is, and with a plan where it does not fit so.

        What changes more, or takes long to record, comes last and only where it could help: another training where
        nothing fits; the host's memory, another precision and then meshes where nothing else fits, or plans are dear.
        """
        asked = next(iter(self.optimizers))
        same = [name for name in self.optimizers if is_same_training(name, asked)]
        tried = list[Arrangement]()
        for tier in (self._on_data(), self._changing_more(), self._on_meshes()):
            here = list(tier)
            tried += here
            self._try(here, same)
            cheapest = cheapest_of(self._rows)
            if cheapest is not None and not cheapest.is_dear:
                break
        if not any(row.fits for row in self._rows):
            self._try(tried, [name for name in self.optimizers if name not in same])
        # Data parallelism comes first, as what is simplest.
        order = [one.name for one in sorted(tried, key=lambda one: not one.has_whole_parameters)]
        return sorted(self._rows, key=lambda row: order.index(row.spread))

    def _try(self, arrangements: Sequence[Arrangement], optimizers: Iterable[str]) -> None:
        """Add the rows of arrangements up to the first optimizer with which anything fits."""
        for name in optimizers:
            for one in arrangements:
                if one.name in self._refused or not self._may_help(one, name):
                    continue
                try:
                    self._rows += self._rows_with(one, name)
                except (TraceError, PlanError, BudgetError) as error:
                    self.notes.append(f"{one.name}: {error}")
                    self._refused.add(one.name)
            if any(row.fits for row in self._rows):
                return

    def _may_help(self, one: Arrangement, name: str) -> bool:
        """Whether an optimizer can lower a peak that is not in the optimizer's step: less state does, or none does."""
        if one.name not in self._bound_elsewhere:
            return True
        asked, other = self.step(next(iter(self.optimizers))), self.step(name)
        return asked is not None and other is not None and other.state_bytes < asked.state_bytes

    def _rows_with(self, one: Arrangement, name: str) -> list[FitRow]:
        if self.shards_whole(one, name) or (one.has_whole_parameters and self._is_hopeless(one, name)):
            return []
        rank = self._rank(one, name, self.batch)
        self._known[one.name] = one
        bare = self._row(one, name, rank, None)
        # No plan makes shards or an optimizer on the host smaller.
        if bare.fits or bare.over_host_bytes:
            return [bare]
        outcome = outcome_of(Request(self.limit, host_budget=f"{self.host_budget_bytes}B"), rank)
        if outcome.error is not None and outcome.error.binding != OPTIMIZER_STEP:
            self._bound_elsewhere.add(one.name)
        return [bare, self._row(one, name, rank, outcome)]

    def _is_hopeless(self, one: Arrangement, name: str) -> bool:
        """Whether something fits without a plan, and DDP needs more than there is: one device's step, and buckets."""
        if not any(row.fits and not row.techniques for row in self._rows):
            return False
        whole, step = self.recorded(self.batch, {}), self.step(name)
        needs = (whole if step is None else with_optimizer(whole, step)).peak_bytes
        # DDP holds a copy of all gradients during the whole step.
        needs += sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        room = self.limit.room(whole.spec, one.ranks.communicators)
        if needs <= room.n_bytes:
            return False
        self.notes.append(f"{one.name} without a plan needs at least {format_bytes(needs)} on each device.")
        return True

    def _rank(self, one: Arrangement, name: str, batch: int) -> Profile:
        """Return the step of a rank with so many samples for each device."""
        key, make = (one.name, name, batch), self.optimizers[name]
        if key not in self._recorded:
            samples = batch if one.ranks.sharding is None else batch * self.devices
            self._recorded[key] = self.recorded(samples, {"ranks": one.ranks, "optimizer": make})
        return self._recorded[key]

    @staticmethod
    def shards_whole(one: Arrangement, name: str) -> bool:
        """Whether an optimizer that steps whole parameters would get shards."""
        return not one.has_whole_parameters and name in BY_NAME and not BY_NAME[name].steps_shards

    @property
    def _units(self) -> tuple[str, ...]:
        return layers_of(name for name, _ in self.model.named_parameters())

    def _fsdp(self, name: str, written: str, flags: tuple[str, ...] = (), **more: Any) -> Arrangement:
        """Return an arrangement of FSDP2 with further arguments, and how these are written."""
        options = f"ranks=sacplan.FSDP2({self.devices}, {list(self._units)!r}{written})"
        return Arrangement(name, options, flags, FSDP2(self.devices, self._units, **more).of((), self.model))

    def _on_data(self) -> Iterator[Arrangement]:
        """Yield what spreads the batch alone, on the devices alone."""
        n, size = self.devices, ("--world-size", str(self.devices))
        yield self._fsdp(
            "FSDP2", "", (*size, *(word for unit in self._units for word in ("--fsdp-unit", unit)))
        )
        # Accelerate leaves frozen integers out of the shards, among them 4-bit weights that are stored as bytes
        # (``fsdp2_prepare_model``).
        packed = [p for p in self.model.parameters() if not p.requires_grad and not p.is_floating_point()]
        if packed:
            ignored = ", ignored_params={p for p in model.parameters() if not p.is_floating_point()}"
            yield self._fsdp("FSDP2 of Accelerate", ignored, ignored_params=packed)
        yield Arrangement("DDP", f"ranks=sacplan.DDP({n})", size, Ranks.of(n), has_whole_parameters=True)

    def _changing_more(self) -> Iterator[Arrangement]:
        """Yield what computes in another type, or takes the host's memory; the command line has no options for it."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        # Only a model in float32 gains from bfloat16.
        if all(p.dtype == torch.float32 for p in self.model.parameters()):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            written = ", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
            yield self._fsdp("FSDP2, bfloat16", written, mp_policy=policy)
        offloaded = CPUOffloadPolicy()
        yield self._fsdp(
            "FSDP2, CPU offload", ", offload_policy=CPUOffloadPolicy()", offload_policy=offloaded
        )

    def _on_meshes(self) -> Iterator[Arrangement]:
        """Yield the meshes with an axis for tensor parallelism; without one, DDP and FSDP2 do the same."""
        whole = self.recorded(self.batch * self.devices, {})
        for mesh in resolve_mesh(self.devices, whole.spec):
            if "tp" not in mesh.names:
                continue
            axes = dict(mesh.axes)
            flags = ("--mesh", ",".join(f"{name}={size}" for name, size in axes.items()))
            for how in names_on(mesh):
                try:
                    ranks = way(whole, mesh, how).ranks
                except PlanError as error:
                    self.notes.append(str(error))
                    continue
                name = f"{' x '.join(f'{axis} {size}' for axis, size in axes.items())}, {how}"
                yield Arrangement(name, f"mesh={axes!r}", flags, ranks)

    def _row(self, one: Arrangement, name: str, rank: Profile, outcome: Outcome | None) -> FitRow:
        """Return the row of a step as it is, or with what planning it has come to."""
        room = self.limit.room(rank.spec, rank.ranks.communicators)
        plan = None if outcome is None else outcome.plan
        # If the tensors alone do not fit, what would be reserved for them says nothing more.
        reserved = None
        taken: dict[str, Any] = dict.fromkeys(("peak_bytes", "unplanned_peak_bytes"), rank.peak_bytes)
        if outcome is not None:
            taken, reserved = Row.taken(outcome), outcome.reserved_bytes
            del taken["fits"]
        else:
            taken |= {"recompute_ms": 0.0, "added_ms": 0.0, "step_ms": rank.step_ms}
            if rank.spec.kind == "cuda" and rank.peak_bytes <= room.n_bytes:
                reserved = reserved_bytes(rank.program)
        return FitRow(
            **_of_all_micro_steps(rank, taken),
            optimizer=name,
            way=(AS_IT_IS if outcome is None else PLAN).name,
            techniques=() if outcome is None else PLAN.techniques,
            host_bytes=rank.unplanned_host_bytes + (0 if plan is None else plan.host_bytes),
            host_room_bytes=self.host_budget_bytes,
            spread=one.name,
            options=one.options,
            flags=one.flags,
            reserved_bytes=reserved,
            room=room,
        )

    def with_largest(self, row: FitRow, by_batch: Callable[..., Sized | None]) -> FitRow:
        """Return a row with the largest batch for each device that fits with its plan, or 0 if none does.

        ``by_batch`` is given what records a batch, and returns the step at any, or None if it runs other ops at others.
        """
        one = self._known[row.spread]
        # One sample does not fit, so no batch does.
        if not row.fits and self.batch == 1:
            return dataclasses.replace(row, largest_batch=0)
        planner = Request(solver="greedy").planner(self._rank(one, row.optimizer, self.batch))
        smallest = planner.smallest(0, quick=True).decisions if row.techniques else ()
        try:
            # Where one sample fits and two do not, no other batch has to be recorded.
            if self.batch == 1:
                two = self._rank(one, row.optimizer, 2).with_plan(smallest)
                if two.footprint.peak_bytes > row.limit_bytes:
                    return dataclasses.replace(row, largest_batch=1)
            steps = by_batch(lambda n: self._rank(one, row.optimizer, n))
            if steps is None:
                return row
            peaks = steps.peaks(smallest, 1)
        except (TraceError, PlanError) as error:  # the step or the plan is another one at another size
            self.notes.append(f"{one.name}: {error}")
            return row
        return dataclasses.replace(row, largest_batch=self._largest(steps, smallest, peaks, row))

    def _largest(self, steps: Sized, decisions: Any, peaks: Peaks, row: FitRow) -> int:
        def by_peak(left: int) -> int:
            return largest_within(lambda n: peaks.at(n) - left, _LARGEST)

        def at(n: int, left: int) -> tuple[int, int]:
            program = steps.at(n).with_plan(decisions)
            peak = program.footprint.peak_bytes
            return peak, reserved_bytes(program) if row.room.is_reserved else peak

        return largest_that_fits(row.room, row.limit_bytes, self.batch if row.fits else 0, by_peak, at)


def _of_all_micro_steps(rank: Profile, times: Mapping[str, Any]) -> dict[str, Any]:
    """Return times of all micro-steps, from those of the last one, which has the optimizer's step.

    Each communicates as the last one does: with ``no_sync`` the others would take less.
    """
    steps = rank.fingerprint.setup.accumulation_steps
    if steps == 1 or times["step_ms"] is None:
        return dict(times)
    once_ms = rank.update_ms
    return {
        **times,
        "step_ms": steps * (times["step_ms"] - once_ms) + once_ms,
        **{name: steps * times[name] for name in ("recompute_ms", "added_ms")},
    }


def read_devices(device: Any, devices: int | str) -> tuple[Any, int]:
    """Return a device and how many there are of it, from ``"8xh100"`` or a number beside the device.

    Raises:
        PlanError: The number is none, or two are given.
    """
    # In either place: ``devices="8xh100"`` names the device as well. Behind the x is a name or a memory size: 2x24GB.
    for given, other in ((device, devices), (devices, "1")):
        found = (
            re.fullmatch(r"(\d+)\s*x\s*(\D.*|\d+\s*[gG].*)", given.strip())
            if isinstance(given, str)
            else None
        )
        if found is not None:
            # 1 is the default, so it need not have been given. The same number twice is no contradiction.
            if str(other) not in ("1", found[1]):
                raise PlanError(
                    f"device={device!r} and devices={devices!r} are two numbers of devices; give one."
                )
            device, devices = found[2], found[1]
            break
    number = str(devices).strip()
    if isinstance(devices, bool) or not number.isdigit() or not 1 <= int(number) <= _MOST_DEVICES:
        raise PlanError(
            f"devices is {devices!r}; give how many, such as 8 (at most {_MOST_DEVICES}), or device='8xh100'."
        )
    return device, int(number)
