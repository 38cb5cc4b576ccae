"""Over how many ranks a step is spread, and how: the step of one rank from that of the whole model.

rank = Ranks.of(8, ["layers.*", ""]).program(program, fingerprint.parameters, spec)
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from sacplan._device.devices import DeviceSpec
from sacplan._program.files import Positive
from sacplan._program.fingerprint import Entry
from sacplan._program.program import Program
from sacplan._ranks.replicas import replicated
from sacplan._ranks.sharding import sharded
from sacplan.errors import TraceError


class Ranks(Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is spread over devices.

    Attributes:
        world_size: ranks; 1: there is one device, and nothing is spread.
        fsdp_units: patterns for the modules on which ``fully_shard`` is called (see ``resolve_units``); None with
            several ranks: DistributedDataParallel.
    """

    world_size: Positive = 1
    fsdp_units: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.world_size == 1 and self.fsdp_units is not None:
            raise TraceError(
                "fsdp_units are given and world_size is 1: with one rank nothing is sharded. Say over how many "
                "ranks fully_shard shards, world_size=8."
            )

    @classmethod
    def of(cls, world_size: int = 1, fsdp_units: Sequence[str] | None = None) -> Ranks:
        """Checked: a ``TraceError`` if they do not go together."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise TraceError(f"world_size is {world_size!r}; it must be an int of at least 1.")
        if isinstance(fsdp_units, str):
            raise TraceError(f"fsdp_units is the string {fsdp_units!r}; give a list, [{fsdp_units!r}].")
        return cls(world_size, None if fsdp_units is None else tuple(fsdp_units))

    def program(self, whole: Program, parameters: Sequence[Entry], spec: DeviceSpec) -> Program:
        """The step of one rank; the given one if there is only one.

        Args:
            whole: the step of the whole model on one device.
            parameters: name, shape and dtype of each (``Fingerprint.parameters``).
            spec: the device of a rank.

        Raises:
            TraceError: unknown units, or a model that cannot be spread so.
        """
        if self.world_size == 1:
            return whole
        if self.fsdp_units is None:
            return whole.with_(replicated(whole, parameters, spec, self.world_size)).renumbered()
        patch = sharded(whole, parameters, spec, self.world_size, self.fsdp_units)
        return whole.with_(patch).renumbered()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the step of a rank takes for granted, a sentence each."""
        if self.world_size == 1:
            return ()
        if self.fsdp_units is None:
            return (
                f"one of {self.world_size} ranks of DistributedDataParallel(model) with its defaults: gradients are "
                "held twice; what NCCL allocates for itself is not counted; the time of a collective is what the "
                "rest of the backward pass does not hide, by the links of the device",
            )
        units = ", ".join(map(repr, self.fsdp_units))
        return (
            f"one of {self.world_size} ranks, that with the largest shards, under fully_shard(module) for the modules "
            f"{units}, with its defaults and no mixed-precision policy; what NCCL allocates for itself is not counted; "
            "the time of a collective is what the computation of a unit does not hide, by the links of the device",
        )


ONE_RANK = Ranks()
"""The whole step on one device."""
