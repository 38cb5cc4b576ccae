"""How a step is spread over ranks and what runs it: the step of one rank, from that of the whole model.

rank = Ranks.of(8, ["layers.*", ""]).program(program, fingerprint.local_parameters, spec)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType, structs

from sacplan._device.devices import DeviceSpec
from sacplan._program.files import Positive
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.mixed_precision import MixedUnits
from sacplan._program.optimizer_ops import steps_in_backward
from sacplan._program.program import Program
from sacplan._ranks.ddp import replicated
from sacplan._ranks.fully_shard import on_host, sharded
from sacplan._ranks.options import DEFAULTS, FullyShardOptions
from sacplan._shard.sharding import Sharding
from sacplan.errors import TraceError

RunBy: TypeAlias = Literal["FSDP2", "DDP", "DTensor"]
"""What runs a step on several ranks: ``fully_shard``, ``DistributedDataParallel``, or ``parallelize_module`` alone."""


class Ranks(Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is spread over devices.

    Attributes:
        world_size: ranks that have different parts of a batch; 1: there is one device, or tensors alone are spread.
        fsdp_units: for FSDP2, patterns for the modules on which ``fully_shard`` is called (see ``resolve_units``); the
            batch is that of one rank. None with several ranks and no sharding: DDP.
        sharding: for a plan on a mesh, which ``sacplan.apply`` carries out by PyTorch's calls; its axes for data have
            ``world_size`` ranks. None: the user makes these calls.
        fully_shard: for FSDP2, the other arguments of ``fully_shard``; absent where they are the defaults.
    """

    world_size: Positive = 1
    fsdp_units: tuple[str, ...] | None = None
    sharding: Sharding | None = None
    # Not None: the checksum of a profile that was saved before the field was there must stay the same.
    fully_shard: FullyShardOptions | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.fully_shard is not UNSET and self.fsdp_units is None:
            raise TraceError(
                f"{self.fully_shard} is given without fsdp_units: it says how fully_shard runs. Name the modules that "
                'it is called on, fsdp_units=["layers.*", ""].'
            )
        # 1: what the axes for data do is not a part of it.
        if self.sharding is not None and self.world_size not in (1, self.sharding.data.size):
            raise TraceError(
                f"world_size is {self.world_size}, and the axes for data of mesh {self.sharding.mesh} have "
                f"{self.sharding.data.size} ranks."
            )
        # No units with several ranks is valid: DDP.
        if self.world_size == 1 and self.fsdp_units is not None:
            raise TraceError(
                "fsdp_units are given and world_size is 1: with one rank nothing is sharded. Say over how many "
                "ranks fully_shard shards, world_size=8."
            )
        self.options.check(self.world_size)

    @classmethod
    def of(
        cls,
        world_size: int = 1,
        fsdp_units: Sequence[str] | None = None,
        options: FullyShardOptions = DEFAULTS,
    ) -> Ranks:
        """Return checked ranks; a ``TraceError`` if they do not go together."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise TraceError(f"world_size is {world_size!r}; it must be an int of at least 1.")
        if isinstance(fsdp_units, str):
            raise TraceError(f"fsdp_units is the string {fsdp_units!r}; give a list, [{fsdp_units!r}].")
        units = None if fsdp_units is None else tuple(fsdp_units)
        return cls(world_size, units, fully_shard=UNSET if options == DEFAULTS else options)

    @classmethod
    def on_mesh(cls, sharding: Sharding, fsdp_units: Sequence[str] | None) -> Ranks:
        """Return the ranks of a mesh, with ``fully_shard`` on these modules, or None: replicas."""
        data = sharding.data.ranks
        # Of two axes for data, ``fully_shard`` replicates over the first (``HSDPMeshInfo`` in ``_fsdp_init.py``).
        replicas = data[0] if fsdp_units is not None and len(data) > 1 else 1
        made = cls.of(math.prod(data), fsdp_units, FullyShardOptions.of(None, None, replicas, None, ()))
        return structs.replace(made, sharding=sharding)

    @property
    def devices(self) -> int:
        """The number of all ranks, those that share a part of a batch among them."""
        return self.world_size if self.sharding is None else self.sharding.mesh.size

    @property
    def options(self) -> FullyShardOptions:
        """The arguments of ``fully_shard`` beside the modules."""
        return DEFAULTS if self.fully_shard is UNSET else self.fully_shard

    @property
    def mixed(self) -> MixedUnits | None:
        """The units that compute in another type, as the step must be recorded for these ranks; None: none does."""
        policy = self.options.mp_policy
        recorded = None if policy is None else policy.recorded
        if recorded is None or self.fsdp_units is None:
            return None
        return MixedUnits(self.fsdp_units, recorded)

    @property
    def run_by(self) -> RunBy | None:
        """The name of what runs the step on several ranks; None on one device.

        The same parallelism has another peak with each of them, since they gather and reduce at other times, into
        other buffers.
        """
        if self.world_size == 1:
            return None if self.devices == 1 else "DTensor"
        return "DDP" if self.fsdp_units is None else "FSDP2"

    @property
    def communicators(self) -> int:
        """The number of NCCL communicators that a rank takes part in; 0 on one device."""
        if self.sharding is not None:
            return self.sharding.mesh.communicators
        return self.options.communicators if self.world_size > 1 else 0

    def program(self, whole: Program, parameters: Sequence[FingerprintEntry], spec: DeviceSpec) -> Program:
        """Return the step of one rank; the given one if there is only one.

        Args:
            whole: the step of the unsharded model on one device.
            parameters: name, shape and dtype of each (``Fingerprint.local_parameters``).
            spec: the device of a rank.

        Raises:
            TraceError: unknown units, or a model that cannot be spread so.
        """
        if self.world_size > 1 and steps_in_backward(whole):
            raise TraceError(
                "an optimizer steps in hooks during the backward pass, before gradients are reduced over ranks. Spread "
                "the model inside of sacplan.ranks(...), register the hooks there, and profile it: the step of a rank "
                "is then recorded. Or give an optimizer that steps after the backward pass."
            )
        if self.world_size == 1:
            return whole
        if self.fsdp_units is None:
            return whole.with_(replicated(whole, parameters, spec, self.world_size)).renumbered()
        patch = sharded(whole, parameters, spec, self.world_size, self.fsdp_units, self.options)
        return whole.with_(patch).renumbered()

    def host_bytes(self, whole: Program, parameters: Sequence[FingerprintEntry]) -> int:
        """Return the bytes of the host's memory that a rank takes with ``CPUOffloadPolicy``, see ``program``."""
        if self.fsdp_units is None:
            return 0
        return on_host(whole, parameters, self.world_size, self.fsdp_units, self.options).total_bytes

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind the step of a rank, a sentence each."""
        tensors = ""
        if self.sharding is not None and self.sharding.styles:
            axis, size = self.sharding.mesh.axes[-1]
            tensors = f", and parallelize_module over the {size} ranks of axis {axis!r}"
        if self.world_size == 1:
            return (f"one of {self.devices} ranks{tensors.replace(', and', ', run by')}",) if tensors else ()
        if self.fsdp_units is None:
            return (
                f"one of {self.world_size} ranks, run by DDP, DistributedDataParallel(model) with its defaults: "
                "gradients are held twice; what NCCL allocates for itself is not in the peak; the time of a collective "
                "is what the rest of the backward pass does not hide, by the links of the device",
            )
        units = ", ".join(map(repr, self.fsdp_units))
        return (
            f"one of {self.world_size} ranks, that with the largest shards, run by FSDP2, fully_shard(module) for the "
            f"modules {units}, with {self._with_options()}{tensors}; what NCCL allocates for itself is not in the "
            "peak; the time of a collective is what the computation of a unit does not hide, by the device's links",
        )

    def _with_options(self) -> str:
        options, policy = self.options, self.options.mp_policy
        rest = str(structs.replace(options, mp_policy=None))
        return f"{rest or 'its defaults'} and {policy or 'no mixed-precision policy'}"


@dataclass(frozen=True, slots=True)
class AskedRanks:
    """Arguments about ranks as a user gives them, torch's own objects among them; None: not given.

    Attributes:
        world_size, fsdp_units: see ``Ranks``.
        mesh: that of ``fully_shard``: a ``DeviceMesh``, or its sizes by name.
        mp_policy, reshard_after_forward, offload_policy: arguments of ``fully_shard``.
        ignored_params: likewise, by name.
    """

    world_size: int | None = None
    fsdp_units: Sequence[str] | None = None
    mesh: Any = None
    mp_policy: Any = None
    reshard_after_forward: Any = None
    offload_policy: Any = None
    ignored_params: Iterable[str] = ()

    def ranks(self) -> Ranks:
        """Return them checked.

        Raises:
            TraceError: an argument that ``fully_shard`` does not take, or some that do not go together.
        """
        world_size, replicas = self.world_size, 1
        if self.mesh is not None:
            shape = _mesh_shape(self.mesh)
            if self.fsdp_units is None:
                raise TraceError(
                    f"mesh {shape} is given without fsdp_units: here it is the mesh of fully_shard. Name the modules "
                    'that it is called on, fsdp_units=["layers.*", ""]. A step that sacplan itself spreads over a mesh '
                    "is planned with sacplan.plan(profile, mesh=...)."
                )
            if world_size is not None and world_size != math.prod(shape):
                raise TraceError(f"world_size is {world_size}, and the mesh has {math.prod(shape)} ranks.")
            world_size, replicas = math.prod(shape), math.prod(shape[:-1])
        options = FullyShardOptions.of(
            self.mp_policy, self.reshard_after_forward, replicas, self.offload_policy, self.ignored_params
        )
        return Ranks.of(1 if world_size is None else world_size, self.fsdp_units, options)

    def changing(self, now: Ranks) -> Ranks:
        """Return ranks with what is asked for changed; what is not given stays. Errors are those of ``ranks``."""
        if self == AskedRanks():
            return now
        units, world_size, mesh, options = self.fsdp_units, self.world_size, self.mesh, now.options
        # These arguments mean nothing without units, so they are about those that there are.
        of_units = (self.mp_policy, self.reshard_after_forward, self.offload_policy)
        if units is None and any(value is not None for value in of_units):
            units = now.fsdp_units
        # The mesh is rebuilt from its sizes: replicas and, within each of them, shards.
        if mesh is None and world_size is None:
            world_size = now.world_size
            if options.replicas > 1:
                mesh = {"replicate": options.replicas, "shard": world_size // options.replicas}
        return AskedRanks(
            world_size,
            units,
            mesh,
            options.mp_policy if self.mp_policy is None else self.mp_policy,
            options.reshard_after_forward
            if self.reshard_after_forward is None
            else self.reshard_after_forward,
            options.offload_policy if self.offload_policy is None else self.offload_policy,
            self.ignored_params or options.ignored_params,
        ).ranks()


def _mesh_shape(mesh: Any) -> tuple[int, ...]:
    """Return the ranks of the axes of a ``DeviceMesh``, or of sizes by name: the last one is that of the shards."""
    shape = tuple(mesh.values() if isinstance(mesh, Mapping) else getattr(mesh, "shape", ()))
    if len(shape) not in (1, 2) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise TraceError(
            f"mesh is {mesh!r:.100}; fully_shard takes a DeviceMesh of one axis, or of two: replicas, and shards. Give "
            'one, or its sizes, {"replicate": 2, "shard": 4}.'
        )
    return shape


ONE_RANK = Ranks()
"""The whole step on one device."""
