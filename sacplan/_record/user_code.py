"""What in a model's code would make a fake step differ from a real one: caches, and branches on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sacplan._torch.private import replaced


@contextlib.contextmanager
def cleared_caches(model: torch.nn.Module) -> Iterator[None]:
    """Clear ``functools`` caches in the code of the model's modules, before and after.

    Some hold tensors (the relative positions of transformers' BEiT): real ones must not get into a fake step,
    and fake ones must not stay for the real one.
    """
    caches = list(function_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


@contextlib.contextmanager
def branches_of_a_real_step() -> Iterator[None]:
    """Inside, transformers does not see that tensors are fake, and takes the branches it takes for real ones.

    It looks at an attention mask's values to leave a mask out that masks nothing, which decides the attention
    kernel, but not if the mask is a ``FakeTensor``. ``data_rules`` knows the values, or has a rule for them.
    Private API of transformers (4.57 to 5): ``utils.import_utils.is_fake_tensor``.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with replaced(module, is_fake_tensor=lambda tensor: False):
        yield


def function_caches(model: torch.nn.Module) -> Iterator[Any]:
    """The ``functools`` caches in the code of the model's modules."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    namespaces: dict[int, Any] = {}
    for cls in classes:
        if cls is not object and not cls.__module__.startswith(("torch.", "sacplan.")):
            for owner in (cls, sys.modules.get(cls.__module__)):
                if owner is not None:
                    namespaces[id(owner)] = vars(owner)
    seen: set[int] = set()
    for namespace in namespaces.values():
        for value in list(namespace.values()):
            function = getattr(value, "__func__", value)  # out of static and class methods
            for candidate in (function, *_closure(function)):
                if isinstance(candidate, functools._lru_cache_wrapper) and id(candidate) not in seen:
                    seen.add(id(candidate))
                    yield candidate


def plain_attributes(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The numbers, flags and texts that modules have as attributes, and the sizes of their containers."""
    return [
        {
            name: len(value) if isinstance(value, (dict, list, set)) else value
            for name, value in vars(module).items()
            if value is None or isinstance(value, (bool, int, float, str, dict, list, set))
        }
        for module in model.modules()
    ]


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
