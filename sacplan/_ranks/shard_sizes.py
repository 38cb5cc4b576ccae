"""Sizes of parameters, optimizer state and temporaries of the optimizer on the rank with the largest shards."""

from __future__ import annotations

from collections.abc import Iterable

from sacplan._device.devices import DeviceSpec
from sacplan._program.program import Phase, Program, StorageKind
from sacplan._ranks.shards import Parameter, itemsize
from sacplan._shard.optimizer import like_parameters


def sizes_of_a_rank(
    program: Program, sharded: Iterable[Parameter], shards: int, spec: DeviceSpec
) -> list[int]:
    """Return, by storage, its size on the rank with the largest shards, as the device's allocator rounds it.

    Gradients keep their size: they are unsharded until they are reduced.

    Args:
        program: of the whole model.
        sharded: the parameters that are sharded; the others are replicated.
        shards: ranks that a parameter is cut over.
        spec: the device.
    """
    sizes = list(program.storage_bytes)
    for s, n_bytes in shards_of_a_rank(program, sharded, shards).items():
        sizes[s] = spec.round_up(n_bytes)
    return sizes


def shards_of_a_rank(program: Program, sharded: Iterable[Parameter], shards: int) -> dict[int, int]:
    """Return the bytes of the largest shard of each storage that a rank holds in shards, not rounded.

    These are the parameters, the optimizer's state of their shape, and temporaries of its step.
    """
    parameters = {p.storage: p for p in sharded}
    dtypes = {t.storage: t.dtype for t in program.tensors}
    found = {}
    for s, parameter in like_parameters(program, parameters).items():
        if _is_held_in_shards(program, s):
            p = parameters[parameter]
            # By elements and not by bytes: state may have another dtype than its parameter. A parameter itself may
            # have been seen in the type that its unit computes in, so its own dtype counts.
            found[s] = p.shard_elements(shards) * (p.itemsize if s == parameter else itemsize(dtypes[s]))
    return found


def _is_held_in_shards(program: Program, storage: int) -> bool:
    # There before the step, as shards.
    if program.storage_kinds[storage] in (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE):
        return True
    # A storage of a parameter's shape that an op of the optimizer makes is a temporary over shards. Any
    # other, such as a gradient, is made before the reduction and has the full size.
    writer = program.writer.get(storage)
    return writer is not None and program.ops[writer].phase == Phase.OPTIMIZER
