"""Fake tensors: how they are made below every dispatch mode, and which errors their ops raise.

Private PyTorch API, tried on 2.11 to 2.15 (``docs/versions.md``): ``torch._subclasses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)

from sacplan.torch_compat.private import replaced

_DEVICE_OF = torch.ops.prim.device.default


def fake_device_of(func: Any, args: Any) -> torch.device | None:
    """Answer as FakeTensorMode does if ``func`` asks for a fake tensor's device; return None for any other op.

    Two thirds of the calls that reach a dispatch mode above FakeTensorMode are this query.
    """
    if func is not _DEVICE_OF or type(args[0]) is not FakeTensor:
        return None
    tensor = args[0]
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def fake_empty_strided(
    mode: FakeTensorMode, size: Any, stride: Any, dtype: torch.dtype, storage: Any = None, offset: int = 0
) -> FakeTensor:
    """Make a fake CPU tensor, on a given meta storage or on a new one. No dispatch mode sees it being made."""
    # On the meta device, and wrapped: that is what FakeTensorMode does, but through the dispatcher and its cache.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if storage is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
        return _wrapped(mode, meta)


_MAKE_SUBCLASS: Any = torch.Tensor._make_subclass


@contextmanager
def fake_parameters() -> Iterator[None]:
    """Inside, ``_make_subclass`` of a fake tensor and a subclass of Parameter gives a plain, fake Parameter.

    bitsandbytes makes its parameters with it.
    """

    def made(kind: Any, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(data) is not FakeTensor or not issubclass(kind, torch.nn.Parameter):
            return _MAKE_SUBCLASS(kind, data, *args, **kwargs)
        # ``Parameter.__new__`` keeps the class of a tensor's subclass that it is given, here FakeTensor.
        return torch.nn.Parameter(data, *args, **kwargs)

    with replaced(torch.Tensor, _make_subclass=staticmethod(made)):
        yield


def _wrapped(mode: FakeTensorMode, meta: torch.Tensor) -> FakeTensor:
    """Return ``FakeTensor(mode, meta, CPU)``, in a third of the time, from attributes of the first one.

    ``meta`` must require no gradient.
    """
    attributes = vars(mode).get(_ATTRIBUTES)
    if attributes is None:
        first = FakeTensor(mode, meta, CPU)
        # Without the mode, which would then hold itself until the garbage collector runs.
        vars(mode)[_ATTRIBUTES] = {name: value for name, value in vars(first).items() if value is not mode}
        return first
    made: FakeTensor = _MAKE_SUBCLASS(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    made.fake_mode = mode
    return made


_ATTRIBUTES = "_sacplan_attributes"
"""Name in the mode under which the attributes of a new fake CPU tensor are kept."""


def meta_storage(nbytes: int) -> Any:
    """Make a storage that has a size and no data."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


CPU = torch.device("cpu")


def active_fake_mode() -> FakeTensorMode | None:
    """Return the innermost FakeTensorMode that is on; None if none is."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


# The op that makes a tensor without memory.
ZERO_TENSOR = torch.ops.aten._efficientzerotensor.default


def make_fake_zeros_ordinary(where: Callable[[], bool]) -> None:
    """Where ``where()`` is true, replace fake zero tensors by expanded ones of one element. For the whole process.

    Autograd's formulas make zero tensors, which have sizes and no memory. Ops on them run under the dispatch key
    ZeroTensor (``aten/src/ATen/ZeroTensorFallback.cpp``), above any dispatch mode. Those kernels fail on fake tensors,
    and an exception there ends the interpreter.
    """

    def zeros(
        mode: FakeTensorMode, func: Any, size: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        if not where():
            return NotImplemented
        # Strides of 0: one element stands for all, as close to no memory as an ordinary tensor comes.
        return fake_empty_strided(mode, size, [0] * len(size), dtype or torch.get_default_dtype())

    fake_impls.op_implementations_dict[ZERO_TENSOR] = zeros


_FALLBACK: CodeType = fake_tensor.run_fallback_kernel.__code__


def op_run_on_zeros(error: BaseException) -> Any:
    """Return the op that raised ``error`` while FakeTensorMode ran it for real on zeros; None if there is none.

    FakeTensorMode does so with ops that have no fake kernel (``run_fallback_kernel`` in ``fake_tensor.py``). The error
    then does not name the op, but the frame of that function holds it.
    """
    # From the outside in: the first frame of that function is the call that failed.
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is _FALLBACK:
            return at.tb_frame.f_locals["func"]
        at = at.tb_next
    return None
