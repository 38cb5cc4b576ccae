"""``FlopCounterMode`` for a whole step, repaired where PyTorch's own fails or lacks an op."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)
from torch.utils.flop_counter import FlopCounterMode

from sacplan.torch_compat.local_tensors import Watching, is_deferred


# Takes the place of the module tracker. ``FlopCounterMode`` adds up what it counts under each of ``parents``, and has
# the total of the step under "Global".
class _NoModules:
    parents = frozenset(("Global",))

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _FlopCounter(FlopCounterMode):
    def __enter__(self) -> FlopCounterMode:
        super().__enter__()
        # ``FlopCounterMode`` makes its dispatch mode only when it is entered, so its class is changed here.
        mode: Any = self.mode
        mode.__class__ = _with_deferred(mode.__class__)
        return self


@functools.cache
def _with_deferred(kind: Any) -> type[TorchDispatchMode]:
    """Return a subclass of the mode that counts ops on deferred tensors when they run."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            return NotImplemented
        return kind.__torch_dispatch__(self, func, types, args, kwargs)

    return type(kind.__name__, (kind, Watching), {"__torch_dispatch__": dispatch})


def _product_flops(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    """Count 2 M N K FLOPs for ``c.addmm_(a, b)``, by the shapes of ``a`` and ``b``."""
    return 2 * prod(left) * right[-1]


def flop_counter() -> FlopCounterMode:
    """Return a ``FlopCounterMode`` for the whole step, without its module tracker.

    The tracker registers multi-grad hooks on what every module takes and returns (``torch/utils/module_tracker.py``).
    Autograd refuses these where the backward of a custom function calls a module and ``torch.autograd.grad``.
    """
    in_place = dict.fromkeys(
        (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_), _product_flops
    )  # torch lacks them
    counter = _FlopCounter(display=False, custom_mapping=in_place)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter
