"""``CPUOffloadPolicy`` of ``fully_shard``: what a rank has on the host, and the copies between host and device.

    host = HostShards.of(program, parameters, shards, spec)
    host.n_bytes[storage]            # of a shard that is on the host and takes nothing on the device
    host_memory(program, parameters, shards, pinned=True).total_bytes

Shards of parameters, reduced gradients and the optimizer's state lie on the host, where the optimizer steps. On the
device are copies of them (``_fsdp_param.py`` and ``_fsdp_collectives.py`` of torch 2.13):

- Before an all-gather each shard is copied to the device by itself, and then cast by itself. The copies live until they
  are in the buffer of the all-gather. Shards that a unit has kept from its forward (``reshard_after_forward=n``) are on
  the device already.
- The output of a reduce-scatter lives until its gradients are copied to the host, which is when the function returns
  that reduces them.

Pinned memory comes from an allocator that rounds up to powers of two (``ATen/core/CachingHostAllocator.h``).

Times: copies take the link to the host that the device's row names (``DeviceSpec.host_link``). Those of pinned memory
run behind computation, as the collectives do that they precede or follow. The optimizer's time is that of its bytes at
25 GB/s: a socket's memory, which four ranks share. Both are assumptions.

If the device is a CPU, there is no other memory: nothing is copied, and nothing moves. Only ``host_memory`` says then
what would be on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sacplan._device.devices import DeviceSpec
from sacplan._device.host_step import SOCKET_BYTES_PER_S
from sacplan._program.program import Op, Phase, Program, StorageKind
from sacplan._ranks.shard_sizes import shards_of_a_rank
from sacplan._ranks.shards import Parameter

_OPTIMIZER_BYTES_PER_S = SOCKET_BYTES_PER_S / 4
"""Of a socket, which four ranks share."""
_UNPINNED = 0.5
"""Share of the bandwidth of that link for memory that is not pinned: the driver copies it into pinned memory first."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of the host that a rank takes between two steps, in bytes.

    Attributes:
        parameter_bytes: shards of parameters.
        gradient_bytes: reduced gradients.
        state_bytes: the optimizer's state.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


def host_memory(
    program: Program, parameters: Sequence[Parameter], shards: int, *, pinned: bool
) -> HostMemory:
    """Return what a rank has on the host. Temporaries of the optimizer's step are not in it.

    Args:
        program: of the whole model.
        parameters: those of the units.
        shards: ranks that they are sharded over.
        pinned: whether parameters and gradients are in pinned memory.
    """

    def taken(n_bytes: int) -> int:
        # The power of two from ``n_bytes`` on.
        return 1 << (n_bytes - 1).bit_length() if pinned and n_bytes else n_bytes

    of_shards = {p.storage: taken(p.shard_bytes(shards)) for p in parameters}
    with_gradient = (p.storage for p in parameters if p.trainable and p.storage in program.gradients)
    found = shards_of_a_rank(program, parameters, shards)
    state = (s for s in program.initial if program.storage_kinds[s] == StorageKind.OPTIMIZER_STATE)
    return HostMemory(
        sum(of_shards.values()),
        sum(map(of_shards.__getitem__, with_gradient)),
        sum(found.get(s, program.storage_bytes[s]) for s in state),
    )


class HostShards:
    """The storages of a step that are on the host of a GPU, and the time of what happens there.

    Attributes:
        n_bytes: by storage of the program, its bytes on the host.
    """

    def __init__(self, n_bytes: dict[int, int], spec: DeviceSpec, *, pinned: bool) -> None:
        self.n_bytes = n_bytes
        self.pinned = pinned
        self._bytes_per_s = spec.host_link.bandwidth_bytes_per_s * (1.0 if pinned else _UNPINNED)

    @classmethod
    def of(
        cls, program: Program, owned: Sequence[Parameter], shards: int, spec: DeviceSpec, *, pinned: bool
    ) -> HostShards:
        """Return them for a step whose units hold the parameters ``owned``."""
        found = shards_of_a_rank(program, owned, shards)
        # A parameter outside of all units stays on the device, and so may what the optimizer makes for it. Without
        # any, the optimizer has nothing on the device at all.
        if program.gradients.keys() <= {p.storage for p in owned}:
            kinds = program.storage_kinds
            state = {s for s in program.initial if kinds[s] == StorageKind.OPTIMIZER_STATE}
            made = {s for op in program.ops if op.phase == Phase.OPTIMIZER for s in op.writes}
            for s in state | made:
                found.setdefault(s, program.storage_bytes[s])
        return cls(found, spec, pinned=pinned)

    def add(self, storage: int, n_bytes: int) -> None:
        """Enter a storage that is on the host."""
        self.n_bytes[storage] = n_bytes

    def copy_ms(self, n_bytes: float) -> float:
        """Return the time of a copy between host and device."""
        return 1e3 * n_bytes / self._bytes_per_s

    def steps(self, op: Op, storages: Iterable[int]) -> float | None:
        """Return the time of an op of the optimizer on the host; None if it touches nothing there."""
        touched = [self.n_bytes[s] for s in set(storages) if s in self.n_bytes]
        return 1e3 * sum(touched) / _OPTIMIZER_BYTES_PER_S if touched else None


def gather_inputs_bytes(
    parameters: Sequence[Parameter], shards: int, buffer_bytes: int, spec: DeviceSpec
) -> int:
    """Return what the inputs of an all-gather take on the device beside its buffer.

    Each shard is copied from the host and cast, one after the other. On a CPU a copy to the device is the shard itself.
    """
    inputs = most = 0
    for p in parameters:
        copied = 0 if spec.kind == "cpu" else spec.round_up(p.shard_bytes(shards))
        if p.is_cast:
            cast = spec.round_up(p.gathered_bytes(shards) // shards)
            most = max(most, inputs + copied + cast)
            inputs += cast
        else:
            inputs += copied
    # The buffer comes when all inputs are there.
    return max(inputs, most - buffer_bytes)


def host_bytes_of(parameters: Iterable[Parameter], shards: int) -> int:
    """Return the bytes that are copied to the device before an all-gather."""
    return sum(p.shard_bytes(shards) for p in parameters)
