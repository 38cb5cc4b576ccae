"""How large parameters, optimizer state and the optimizer's temporaries are on a rank that holds shards.

    sizes = sizes_of_a_rank(program, parameters, sharded, gradients, world_size=8, spec=spec)

A program says which storages are optimizer state, and not of which parameter. State comes in the order of the
parameters, as many tensors for each; where it does not (parameter groups in another order), and for temporaries
of many parameters, a tensor is identified by its size. Where two parameters of one size have shards of different
sizes, the larger counts, so the figures are never too small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from sacplan._device.devices import DeviceSpec
from sacplan._program.program import Op, Phase, Program, StorageKind
from sacplan._ranks.shards import Parameter

_ELEMENTS = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))  # as large as the parameter's, or of another type
_COUNTER_BYTES = 64  # what is as small as this counts steps, and is no quarter of a parameter


class _Sizes:
    """Whole to shard, by size, for some parameters."""

    def __init__(
        self, parameters: Sequence[Parameter], sharded: Collection[int], world_size: int, spec: DeviceSpec
    ) -> None:
        self.of: dict[int, int] = {}
        for numerator, denominator in _ELEMENTS:
            found: dict[int, int] = {}
            for p in parameters:
                held = p.shard_bytes(world_size) if p.storage in sharded else p.n_bytes
                whole = spec.round_up(p.n_bytes * numerator // denominator)
                if denominator == 1 or whole > max(_COUNTER_BYTES, spec.allocation_round_bytes):
                    part = spec.round_up(held * numerator // denominator)
                    found[whole] = max(part, found.get(whole, 0))
            self.of = found | self.of


def sizes_of_a_rank(
    program: Program,
    parameters: Sequence[Parameter],
    sharded: Collection[int],
    gradients: Set[int],
    world_size: int,
    spec: DeviceSpec,
) -> list[int]:
    """By storage, its size on the rank with the largest shards.

    Args:
        program: of the whole model.
        parameters: all of the model.
        sharded: storages of those that are sharded; the others are held whole.
        gradients: storages of gradients of which the optimizer sees shards. They keep their size: they are whole
            until they are reduced.
        world_size: ranks.
        spec: the device.
    """
    whole = program.storage_bytes
    sizes = list(whole)
    by_size = _Sizes(parameters, sharded, world_size, spec).of
    for p in parameters:
        if p.storage in sharded:
            sizes[p.storage] = spec.round_up(p.shard_bytes(world_size))
    state = [s for s, kind in enumerate(program.storage_kinds) if kind == StorageKind.OPTIMIZER_STATE]
    in_order = _state_in_order(
        whole, state, [p for p in parameters if p.trainable], sharded, world_size, spec
    )
    for s in state:
        sizes[s] = in_order[s] if in_order else by_size.get(whole[s], whole[s])
    seen = {*state, *(p.storage for p in parameters)}
    for op in program.ops:
        if op.phase == Phase.OPTIMIZER and not (seen.isdisjoint(op.reads) and gradients.isdisjoint(op.reads)):
            _resize_outputs(op, whole, sizes, seen, by_size)
            seen.update(op.writes)
    return sizes


def _state_in_order(
    whole: Sequence[int],
    state: Sequence[int],
    trained: Sequence[Parameter],
    sharded: Collection[int],
    world_size: int,
    spec: DeviceSpec,
) -> dict[int, int]:
    """State to its size on a rank, if it comes in the order of the parameters; else nothing."""
    if not trained or len(state) % len(trained):
        return {}
    each = len(state) // len(trained)
    found: dict[int, int] = {}
    for i, p in enumerate(trained):
        of = _Sizes([p], sharded, world_size, spec).of
        own = state[i * each : (i + 1) * each]
        if not any(whole[s] in of for s in own):
            return {}
        found.update((s, of.get(whole[s], whole[s])) for s in own)
    return found


def _resize_outputs(
    op: Op, whole: Sequence[int], sizes: list[int], seen: Collection[int], by_size: Mapping[int, int]
) -> None:
    """An output is a shard like the argument of its size; of lists, like the one at its place."""
    place: dict[int, int] = {}
    for s in op.writes:
        if s in seen:
            continue
        k = place[whole[s]] = place.get(whole[s], -1) + 1
        alike = [t for t in op.reads if t in seen and whole[t] == whole[s]]
        outputs = sum(whole[t] == whole[s] for t in op.writes)
        if alike and len(alike) % outputs == 0:
            sizes[s] = max(sizes[t] for t in alike[k::outputs])
        else:
            sizes[s] = by_size.get(whole[s], whole[s])
