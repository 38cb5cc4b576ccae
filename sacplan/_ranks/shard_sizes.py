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
    """Return, by storage, its size on the rank with the largest shards.

    Gradients keep their size: they are unsharded until they are reduced.

    Args:
        program: of the whole model.
        sharded: the parameters that are sharded; the others are replicated.
        shards: ranks that a parameter is cut over.
        spec: the device.
    """
    sizes = list(program.storage_bytes)
    parameters = {p.storage: p for p in sharded}
    dtypes = {t.storage: t.dtype for t in program.tensors}
    for s, parameter in like_parameters(program, parameters).items():
        if _is_held_in_shards(program, s):
            p = parameters[parameter]
            # By elements and not by bytes: state may have another dtype than its parameter. A parameter itself may
            # have been seen in the type that its unit computes in, so its own dtype counts.
            size = p.itemsize if s == parameter else itemsize(dtypes[s])
            sizes[s] = spec.round_up(p.shard_elements(shards) * size)
    return sizes


def _is_held_in_shards(program: Program, storage: int) -> bool:
    # There before the step, as shards.
    if program.storage_kinds[storage] in (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE):
        return True
    # A storage of a parameter's shape that an op of the optimizer makes is a temporary over shards. Any
    # other, such as a gradient, is made before the reduction and has the full size.
    writer = program.writer.get(storage)
    return writer is not None and program.ops[writer].phase == Phase.OPTIMIZER
