"""The tensors that a model is called with, and whether another call takes more.

The batch of ``profile`` may have any form, and a ``loss_fn`` takes it apart. What the model itself is called with is
the same in every loop and every trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from msgspec import Struct

from sacplan.core.files import Count

Shapes: TypeAlias = tuple[tuple[str, tuple[Count, ...]], ...]
"""By path of a tensor among the arguments of a call, its shape."""


class ModelCall(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One call of the model in a step.

    Attributes:
        tensors: path and shape of each tensor among its arguments.
        with_gradients: whether parameters had gradients when it began.
    """

    tensors: Shapes
    with_gradients: bool = False


def shapes_of(args: Any, kwargs: Mapping[str, Any]) -> Shapes:
    """Return paths and shapes of the tensors in the arguments of a call, without those of single numbers."""
    found = (*tensor_paths(tuple(args)), *tensor_paths(kwargs))
    # A tensor of no dimension is a number, which is as large in every call.
    return tuple((path, tuple(tensor.shape)) for path, tensor in found if tensor.dim())


def tensor_paths(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in mappings, tuples and lists, each with its path: ``"['images'][1]"``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensor_paths(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensor_paths(item, f"{path}[{i}]")


class Larger(NamedTuple):
    """A tensor that is larger than planned for.

    Attributes:
        path: among the arguments of the call.
        shape, planned: its shape, and the one in the plan.
    """

    path: str
    shape: tuple[int, ...]
    planned: tuple[int, ...]

    @property
    def name(self) -> str:
        """The path in words: ``input_ids``, ``argument 0``, ``batch['images'][1]``."""
        # A bracket between the first and the last one means that the tensor is inside of an argument.
        inner = self.path[1:-1]
        if "[" in inner:
            return f"batch{self.path}"
        return f"argument {inner}" if inner.isdigit() else inner.strip("'\"")


def larger_than(here: Shapes, planned: Iterable[Shapes]) -> Larger | None:
    """Return the first tensor that is larger than in the first planned call; None if some call is as large in all.

    A tensor is larger if it is longer in any dimension. So more and shorter samples count, even with no more tokens
    together: kernels pad each of them. Tensors that only one of the two calls has are not compared. Nor are tensors
    with one dimension, such as the offsets of packed samples, where others have more.
    """
    deep = [(path, shape) for path, shape in here if len(shape) > 1]
    first = None
    # One planned call that is as large is enough. If there is none, the first difference is reported.
    for shapes in planned:
        known = dict(shapes)
        beyond = (
            Larger(path, shape, known[path])
            for path, shape in deep or here
            if len(known.get(path, ())) == len(shape) and _is_larger(shape, known[path])
        )
        found = next(beyond, None)
        if found is None:
            return None
        first = first or found
    return first


def _is_larger(shape: tuple[int, ...], planned: tuple[int, ...]) -> bool:
    return any(n > most for n, most in zip(shape, planned, strict=True))
