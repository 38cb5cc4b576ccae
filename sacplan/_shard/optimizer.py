"""The tensors of an optimizer's step that belong to one parameter. They have its layout, whatever runs the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sacplan._program.program import Op, Phase, Program


def together(op: Op) -> Iterator[list[int]]:
    """Yield the tensors of each parameter in an op of an optimizer."""
    args, kwargs = op.call
    lists: list[list[int]] = []
    single: list[int] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and value and all(isinstance(x, dict) and "tensor" in x for x in value):
            lists.append([op.inputs[x["tensor"]] for x in value])
        elif isinstance(value, dict) and "tensor" in value:
            single.append(op.inputs[value["tensor"]])
    # ``foreach`` and fused optimizers: one op for all parameters, with lists in one order. Outputs come as
    # lists of the same length, one after the other.
    if lists:
        length = len(lists[0])
        lists.extend([list(op.outputs[i : i + length]) for i in range(0, len(op.outputs), length)])
        yield from map(list, zip(*(items for items in lists if len(items) == length), strict=True))
    elif single:
        yield [*single, *op.outputs]


def like_parameters(program: Program, parameters: Collection[int]) -> dict[int, int]:
    """Return, by storage that an optimizer's step touches, the parameter that it belongs to and has the shape of.

    These are the parameters themselves, gradients, state, and temporaries. An optimizer's ops take a parameter, its
    gradient and its state together, or lists of these in one order. So if the owner of one tensor of an op is known,
    tensors of its shape beside it have the same owner. This is repeated until nothing is added. Tensors of another
    shape, such as step counts and the factors of Adafactor, are left out.

    Args:
        program: with an optimizer's step.
        parameters: their storages.
    """
    found = {s: s for s in parameters}
    for parameter, gradient in program.gradients.items():
        if parameter in found:
            found[program.tensors[gradient].storage] = parameter
    groups = [
        [program.tensors[t] for t in group]
        for op in program.ops
        if op.phase == Phase.OPTIMIZER
        for group in together(op)
    ]
    known = 0
    # A fixed point: it ends, since ``found`` only grows.
    while known < len(found):
        known = len(found)
        for group in groups:
            # By shape: a step count in the same group belongs to the parameter, and does not have its layout.
            shapes = {t.shape: found[t.storage] for t in group if t.storage in found}
            for t in group:
                if t.shape in shapes:
                    found.setdefault(t.storage, shapes[t.shape])
    return found
