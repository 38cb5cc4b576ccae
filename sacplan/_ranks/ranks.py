"""How a step is spread over ranks and what runs it: the step of one rank, from that of the whole model.

rank = Ranks.of(8, ["layers.*", ""]).program(program, fingerprint.local_parameters, spec)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct, structs

from sacplan._device.devices import DeviceSpec
from sacplan._program.files import Positive
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.program import Program
from sacplan._ranks.ddp import replicated
from sacplan._ranks.fully_shard import sharded
from sacplan._ranks.shards import parameter_bytes, parameters_of
from sacplan._shard.program import on_one_rank
from sacplan._shard.sharding import Sharding
from sacplan.errors import TraceError

RunBy: TypeAlias = Literal["sacplan", "FSDP2", "DDP"]
"""What runs a step on several ranks: ``sacplan.apply``, or PyTorch's ``fully_shard`` or ``DistributedDataParallel``."""


class Ranks(Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is spread over devices.

    Attributes:
        world_size: ranks; 1: there is one device, and nothing is spread.
        fsdp_units: for FSDP2, patterns for the modules on which ``fully_shard`` is called (see ``resolve_units``); the
            batch is that of one rank. None with several ranks and no sharding: DDP.
        sharding: for sacplan, the placements of parameters on a mesh of these ranks; the batch is that of all of them.
    """

    world_size: Positive = 1
    fsdp_units: tuple[str, ...] | None = None
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        if self.sharding is not None:
            if self.fsdp_units is not None:
                raise TraceError("fsdp_units and a sharding are given; a sharding says where parameters lie.")
            if self.sharding.mesh.size != self.world_size:
                raise TraceError(
                    f"world_size is {self.world_size}, and mesh {self.sharding.mesh} has {self.sharding.mesh.size}."
                )
            return
        # No units with several ranks is valid: DDP.
        if self.world_size == 1 and self.fsdp_units is not None:
            raise TraceError(
                "fsdp_units are given and world_size is 1: with one rank nothing is sharded. Say over how many "
                "ranks fully_shard shards, world_size=8."
            )

    @classmethod
    def of(cls, world_size: int = 1, fsdp_units: Sequence[str] | None = None) -> Ranks:
        """Return checked ranks; a ``TraceError`` if the two do not go together."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise TraceError(f"world_size is {world_size!r}; it must be an int of at least 1.")
        if isinstance(fsdp_units, str):
            raise TraceError(f"fsdp_units is the string {fsdp_units!r}; give a list, [{fsdp_units!r}].")
        return cls(world_size, None if fsdp_units is None else tuple(fsdp_units))

    @classmethod
    def spread(cls, sharding: Sharding) -> Ranks:
        """Return the ranks of the mesh of a sharding."""
        return cls(sharding.mesh.size, None, sharding)

    @property
    def run_by(self) -> RunBy | None:
        """The name of what runs the step on several ranks; None on one device.

        The same parallelism has another peak with each of them, since they gather and reduce at other times, into
        other buffers.
        """
        if self.sharding is not None:
            return "sacplan"
        if self.world_size == 1:
            return None
        return "DDP" if self.fsdp_units is None else "FSDP2"

    @property
    def communicators(self) -> int:
        """The number of NCCL communicators that a rank takes part in; 0 on one device."""
        if self.sharding is not None:
            return self.sharding.mesh.communicators
        return int(self.world_size > 1)

    def program(self, whole: Program, parameters: Sequence[FingerprintEntry], spec: DeviceSpec) -> Program:
        """Return the step of one rank; the given one if there is only one.

        Args:
            whole: the step of the unsharded model on one device.
            parameters: name, shape and dtype of each (``Fingerprint.local_parameters``).
            spec: the device of a rank.

        Raises:
            TraceError: unknown units, or a model that cannot be spread so.
        """
        if self.sharding is not None:
            return self._spread(self.sharding, whole, parameters, spec)
        if self.world_size == 1:
            return whole
        if self.fsdp_units is None:
            return whole.with_(replicated(whole, parameters, spec, self.world_size)).renumbered()
        patch = sharded(whole, parameters, spec, self.world_size, self.fsdp_units)
        return whole.with_(patch).renumbered()

    @staticmethod
    def _spread(
        sharding: Sharding, whole: Program, parameters: Sequence[FingerprintEntry], spec: DeviceSpec
    ) -> Program:
        found = parameters_of(whole, parameters)
        # From names to storages: ``_shard`` knows parameters by their storage only.
        layouts = sharding.layouts([(p.name, p.shape) for p in found])
        homes = {p.storage: layouts[p.name] for p in found if p.name in layouts}
        rank = on_one_rank(whole, homes, sharding.places, sharding.mesh, spec)
        of_rank = parameter_bytes(whole, found, rank.storage_bytes, spec)
        return structs.replace(rank, parameter_bytes=of_rank)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind the step of a rank, a sentence each."""
        if self.sharding is not None:
            return (
                f"one of {self.world_size} ranks of mesh {self.sharding.mesh}, run by sacplan.apply: an op gathers the "
                "parameter that it reads, and the copy lives until the next is gathered; the time of a collective is "
                "what computation would not hide if parameters were gathered one op ahead and gradients reduced behind "
                "the backward pass; what NCCL allocates for itself is not in the peak",
            )
        if self.world_size == 1:
            return ()
        if self.fsdp_units is None:
            return (
                f"one of {self.world_size} ranks, run by DDP, DistributedDataParallel(model) with its defaults: "
                "gradients are held twice; what NCCL allocates for itself is not in the peak; the time of a collective "
                "is what the rest of the backward pass does not hide, by the links of the device",
            )
        units = ", ".join(map(repr, self.fsdp_units))
        return (
            f"one of {self.world_size} ranks, that with the largest shards, run by FSDP2, fully_shard(module) for the "
            f"modules {units}, with its defaults and no mixed-precision policy; what NCCL allocates for itself is not "
            "in the peak; the time of a collective is what the computation of a unit does not hide, by the links of "
            "the device",
        )


ONE_RANK = Ranks()
"""The whole step on one device."""
