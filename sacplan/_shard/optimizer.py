"""Which tensors of an optimizer's step belong to one parameter, so that they lie alike on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sacplan._program.program import Op, Phase, Program, StorageKind
from sacplan._shard.placements import Layout


def together(op: Op) -> Iterator[list[int]]:
    """Tensors of one parameter in an op of an optimizer."""
    args, kwargs = op.call
    lists: list[list[int]] = []
    single: list[int] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and value and all(isinstance(x, dict) and "tensor" in x for x in value):
            lists.append([op.inputs[x["tensor"]] for x in value])
        elif isinstance(value, dict) and "tensor" in value:
            single.append(op.inputs[value["tensor"]])
    if lists:
        length = len(lists[0])
        lists.extend([list(op.outputs[i : i + length]) for i in range(0, len(op.outputs), length)])
        yield from map(list, zip(*(items for items in lists if len(items) == length), strict=True))
    elif single:
        yield [*single, *op.outputs]


def optimizer_state(program: Program, homes: Mapping[int, Layout]) -> dict[int, Layout]:
    """Where an optimizer's state lies: as its parameters.

    An optimizer's ops take a parameter, its gradient and its state together, or lists of these in one order.
    """
    found = dict(homes)
    for parameter, gradient in program.gradients.items():
        found[program.tensors[gradient].storage] = homes[parameter]
    state = {s for s in program.initial if program.storage_kinds[s] == StorageKind.OPTIMIZER_STATE}
    ops = [op for op in program.ops if op.phase == Phase.OPTIMIZER]
    known = 0
    while known < len(found):
        known = len(found)
        for op in ops:
            for group in together(op):
                shapes = {
                    t.shape: found[t.storage]
                    for t in map(program.tensors.__getitem__, group)
                    if t.storage in found
                }
                for t in map(program.tensors.__getitem__, group):
                    if t.shape in shapes:
                        found.setdefault(t.storage, shapes[t.shape])
    return {s: layout for s, layout in found.items() if s in state and s not in homes}
