"""Rows of ``fit`` on several devices: for each way to spread the step, as it is and with a plan.

Each *arrangement* is a way to run one step on all devices: DDP, FSDP2 (also as Accelerate shards packed weights, with
mixed precision for a model in float32, and with ``CPUOffloadPolicy``), or a mesh with tensor parallelism. They process
the same samples: ``batch`` for each device. The step of one rank is recorded as PyTorch runs it, once for each
arrangement and optimizer.

Optimizers of bitsandbytes step whole parameters, so there are no rows of sharded parameters with them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sacplan.core.budget import format_bytes
from sacplan.core.derived import derived
from sacplan.core.elements import StorageKind
from sacplan.core.program import Patch
from sacplan.device.devices import DEFAULT_DEVICE, resolve_device
from sacplan.distributed.ranks.ranks import FSDP2, Ranks, layers_of
from sacplan.errors import BudgetError, PlanError, TraceError
from sacplan.planning.meshes import names_on, resolve_mesh, way
from sacplan.profiling.optimizer_names import BY_NAME
from sacplan.profiling.optimizers import is_replaceable, recorded_on, state_bytes, with_other_optimizer
from sacplan.profiling.profile import Profile
from sacplan.questions.cases import Case
from sacplan.questions.fit_question import Asked
from sacplan.questions.verdict import FitRow, cheapest_of, is_same_training
from sacplan.questions.ways import AS_IT_IS, PLAN

_LARGEST = 2**16  # the largest batch of a device to try
_PLAN = dataclasses.replace(PLAN, long=True)  # searches as long as ``plan`` does
_OF_SHARDS = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
_MOST_DEVICES = 2**16  # a larger number is a slip


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """One way to run a step on several devices.

    Attributes:
        name: Its name in tables.
        options: Python text of its arguments of ``sacplan.profile``; on a mesh, of ``sacplan.plan``.
        flags: The same on the command line.
        wrapping: Lines of Python that wrap the model; none on a mesh, where ``apply`` does.
        ranks: The devices. On a mesh, the batch is that of all devices together.
        has_whole_parameters: Whether each rank steps whole parameters, as optimizers of bitsandbytes have to.
    """

    name: str
    options: str
    flags: tuple[str, ...]
    wrapping: tuple[str, ...]
    ranks: Ranks
    has_whole_parameters: bool = False


@dataclass
class RankRows:
    """Makes the rows on several devices. The batch and the limits of ``asked`` are for each device."""

    asked: Asked
    _rows: list[FitRow] = field(default_factory=list)
    _refused: set[str] = field(default_factory=set)  # names of arrangements
    # Names of arrangements whose smallest peak is not in the optimizer's step.
    _bound_elsewhere: set[str] = field(default_factory=set)
    _cases: dict[tuple[str, str], tuple[Arrangement, Case]] = field(default_factory=dict)  # and by optimizer

    def rows(self) -> list[FitRow]:
        """Return the rows: each arrangement as it is, and with a plan if it does not fit as it is.

        What changes more, or takes long to record, comes last and only if it could help: the host's memory, another
        precision and then meshes if nothing else fits, or plans are dear; other optimizers if nothing fits.
        """
        asked = next(iter(self.asked.makes))
        same = [name for name in self.asked.makes if is_same_training(name, asked)]
        tried = list[Arrangement]()
        for tier in (self._on_data(), self._changing_more(), self._on_meshes()):
            here = list(tier)
            tried += here
            self._try(here, same)
            cheapest = cheapest_of(self._rows)
            if cheapest is not None and not cheapest.is_dear:
                break
        if not any(row.fits for row in self._rows):
            self._try(tried, [name for name in self.asked.makes if name not in same])
        # DDP comes first, since it is the simplest.
        order = [one.name for one in sorted(tried, key=lambda one: not one.has_whole_parameters)]
        return sorted(self._rows, key=lambda row: order.index(row.spread))

    def _try(self, arrangements: Sequence[Arrangement], optimizers: Iterable[str]) -> None:
        """Add the rows of arrangements with each optimizer, up to the first one with which anything fits."""
        for name in optimizers:
            for one in arrangements:
                if one.name in self._refused or not self._may_help(one, name):
                    continue
                try:
                    self._rows += self._rows_with(one, name)
                except (TraceError, PlanError, BudgetError) as error:
                    self.asked.notes.append(f"{one.name}: {error}")
                    self._refused.add(one.name)
            if any(row.fits for row in self._rows):
                return

    def _may_help(self, one: Arrangement, name: str) -> bool:
        """Whether an optimizer may make an arrangement fit: if the peak is elsewhere, only less state helps."""
        if one.name not in self._bound_elsewhere:
            return True
        asked, other = self.asked.step_of(next(iter(self.asked.makes))), self.asked.step_of(name)
        return asked is not None and other is not None and other.state_bytes < asked.state_bytes

    def _rows_with(self, one: Arrangement, name: str) -> list[FitRow]:
        if self.shards_whole(one, name) or (one.has_whole_parameters and self._is_hopeless(one, name)):
            return []
        fields = {"spread": one.name, "options": one.options, "flags": one.flags, "wrapping": one.wrapping}
        rank = self._rank(one, name, self.asked.batch)
        case = Case(name, rank, None, self.asked.limit, self.asked.host_budget_bytes, fields)
        self._cases[one.name, name] = one, case
        bare = case.row(AS_IT_IS)
        # No plan helps if the host's memory is exceeded by shards or the optimizer.
        if bare.fits or bare.over_host_bytes:
            return [bare]
        planned = case.row(_PLAN)
        if not planned.fits and not case.is_bound_by_optimizer(_PLAN):
            self._bound_elsewhere.add(one.name)
        return [bare, planned]

    def _is_hopeless(self, one: Arrangement, name: str) -> bool:
        """Whether DDP cannot fit and another arrangement does; without a plan, if the other one fits without.

        The least that DDP needs follows from the recorded rank, without its shards and what it gathers and reduces. All
        else is alive with whole parameters, too, and a plan frees no more of that than autograd keeps.
        """
        fitting = [row for row in self._rows if row.fits]
        if not fitting:
            return False
        as_it_is = any(not row.techniques for row in fitting)
        program, make = self.any_step.recorded, self.asked.makes[name]
        shards = {s for s, kind in enumerate(program.storage_kinds) if kind in _OF_SHARDS}
        for op in program.ops:
            if op.name.startswith(("c10d.", "_c10d_functional.", "fsdp.")):
                shards.update((*op.reads, *op.writes, *op.mutates))
        rest = program.with_(Patch(resized=dict.fromkeys(shards, 0)))
        parameters = list(self.asked.recordings.model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        gradients = sum(p.nbytes for p in trained)
        needs = rest.footprint.peak_bytes if as_it_is else rest.liveness.floor_bytes
        # The optimizer is recorded only if all trained parameters get gradients.
        if make is not None and len(program.gradients) == len(trained):
            like = [(p.shape, p.stride(), p.dtype) for p in trained]
            update = recorded_on(like, make, self.asked.spec)
            temporary = update.peak_bytes - update.baseline.end_bytes
            needs = max(needs, gradients + rest.footprint.end_bytes + temporary) + state_bytes(
                update.recorded
            )
        # DDP holds a copy of all gradients during the whole step.
        needs += sum(p.nbytes for p in parameters) + gradients
        if needs <= self.asked.limit.room(self.asked.spec, one.ranks.communicators).n_bytes:
            return False
        plan = "without a plan" if as_it_is else "with any plan"
        self.asked.notes.append(f"{one.name} {plan} needs at least {format_bytes(needs)} on each device.")
        return True

    @property
    def any_step(self) -> Profile:
        """The step of the rank that was recorded first."""
        return next(iter(self._cases.values()))[1].step

    @derived
    def _rank(self, one: Arrangement, name: str, batch: int) -> Profile:
        """Return the step of a rank with ``batch`` samples for each device.

        Optimizers share the recording with the first one if its optimizer's step can be replaced.
        """
        given, first = self.asked, next(iter(self.asked.makes))
        make = given.makes[name]
        if make and name != first and (one.name, first) in self._cases:
            known = self._rank(one, first, batch)
            if is_replaceable(known):
                return with_other_optimizer(known, make)
        samples = batch if one.ranks.sharding is None else batch * given.devices
        return given.recordings.at(samples, given.seq, optimizer=make, ranks=one.ranks)

    @staticmethod
    def shards_whole(one: Arrangement, name: str) -> bool:
        """Whether an optimizer that can only step whole parameters would get shards."""
        return not one.has_whole_parameters and name in BY_NAME and not BY_NAME[name].steps_shards

    @property
    def _units(self) -> tuple[str, ...]:
        return layers_of(name for name, _ in self.asked.recordings.model.named_parameters())

    def _fsdp(self, name: str, written: str, flags: tuple[str, ...] = (), **more: Any) -> Arrangement:
        """Return an arrangement of FSDP2 with ``more`` arguments, which are ``written`` as Python text."""
        options = f"ranks=sacplan.FSDP2({self.asked.devices}, {list(self._units)!r}{written})"
        wrapping = [
            f"for layer in model.{unit.removesuffix('.*')}:\n    fully_shard(layer{written})"
            for unit in self._units
            if unit
        ]
        ranks = FSDP2(self.asked.devices, self._units, **more).of((), self.asked.recordings.model)
        return Arrangement(name, options, flags, (*wrapping, f"fully_shard(model{written})"), ranks)

    def _on_data(self) -> Iterator[Arrangement]:
        """Yield data parallelism in the same precision and without memory of the host."""
        n, size = self.asked.devices, ("--world-size", str(self.asked.devices))
        units = (word for unit in self._units for word in ("--fsdp-unit", unit))
        yield self._fsdp("FSDP2", "", (*size, *units))
        # Accelerate does not shard frozen integer parameters, such as 4-bit weights that are stored as bytes
        # (``fsdp2_prepare_model``).
        parameters = self.asked.recordings.model.parameters()
        packed = [p for p in parameters if not p.requires_grad and not p.is_floating_point()]
        if packed:
            ignored = ", ignored_params={p for p in model.parameters() if not p.is_floating_point()}"
            yield self._fsdp("FSDP2 of Accelerate", ignored, ignored_params=packed)
        wrapping = ("model = torch.nn.parallel.DistributedDataParallel(model)",)
        yield Arrangement(
            "DDP", f"ranks=sacplan.DDP({n})", size, wrapping, Ranks.of(n), has_whole_parameters=True
        )

    def _changing_more(self) -> Iterator[Arrangement]:
        """Yield arrangements with another type or the host's memory; the command line has no options for these."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        # Only a model in float32 gains from bfloat16.
        if all(p.dtype == torch.float32 for p in self.asked.recordings.model.parameters()):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            written = ", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
            yield self._fsdp("FSDP2, bfloat16", written, mp_policy=policy)
        written = ", offload_policy=CPUOffloadPolicy()"
        yield self._fsdp("FSDP2, CPU offload", written, offload_policy=CPUOffloadPolicy())

    def _on_meshes(self) -> Iterator[Arrangement]:
        """Yield the meshes with an axis for tensor parallelism; without one, DDP and FSDP2 do the same."""
        whole = self.asked.at(self.asked.batch * self.asked.devices, self.asked.seq, None)
        for mesh in resolve_mesh(self.asked.devices, whole.spec):
            if "tp" not in mesh.names:
                continue
            axes = dict(mesh.axes)
            flags = ("--mesh", ",".join(f"{name}={size}" for name, size in axes.items()))
            for how in names_on(mesh):
                try:
                    ranks = way(whole, mesh, how).ranks
                except PlanError as error:
                    self.asked.notes.append(str(error))
                    continue
                name = f"{' x '.join(f'{axis} {size}' for axis, size in axes.items())}, {how}"
                yield Arrangement(name, f"mesh={axes!r}", flags, (), ranks)

    def with_sizes(self, row: FitRow) -> FitRow:
        """Return a copy of the row with the largest batch for each device."""
        one, case = self._cases[row.spread, row.optimizer]
        axis = self.asked.batch_axis(lambda n: self._rank(one, row.optimizer, n), most=_LARGEST)
        try:
            return dataclasses.replace(row, largest_batch=case.largest(row, axis))
        except (TraceError, PlanError) as error:  # the step or the plan is another one at this size
            self.asked.notes.append(f"{one.name}: {error}")
            return row


def _counted(given: Any) -> re.Match[str] | None:
    """Match a number of devices, an x, and their name or size: ``"8xh100"``, ``"2 x 24GB"``."""
    return re.fullmatch(r"(\d+)\s*x\s*(\D.*|\d+\s*[gG].*)", given.strip()) if isinstance(given, str) else None


def read_devices(device: Any, devices: int | str) -> tuple[Any, int]:
    """Return a device and how many of it there are, from ``"8xh100"`` or from a device and a number.

    Raises:
        PlanError: ``devices`` is no such number, or two different numbers or devices are given.
        DeviceError: ``devices`` names a device as well, and one of the two is unknown.
    """
    # Either argument may have both. The other one may be its default, or say the same.
    in_device, in_devices = _counted(device), _counted(devices)
    if in_device and str(devices) not in ("1", in_device[1]):
        raise PlanError(f"device={device!r} and devices={devices!r} are two numbers; give one.")
    if in_devices and device != DEFAULT_DEVICE and resolve_device(device) != resolve_device(in_devices[2]):
        raise PlanError(f"device={device!r} and devices={devices!r} are two devices; give one.")
    if counted := in_device or in_devices:
        devices, device = counted.groups()
    number = str(devices).strip()
    if isinstance(devices, bool) or not number.isdigit() or not 1 <= int(number) <= _MOST_DEVICES:
        raise PlanError(
            f"devices is {devices!r}; give how many, such as 8 (at most {_MOST_DEVICES}), or device='8xh100'."
        )
    return device, int(number)
