"""Fake kernels of our own: FakeTensorMode asks them for an op's outputs before it asks torch's.

Private PyTorch API, tried on 2.11 to 2.15 (``docs/versions.md``): ``FakeTensorMode.dispatch``, ``OpOverload._op_dk``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from sacplan.torch_compat.fake_tensors import CPU
from sacplan.torch_compat.ops import op_of_schema
from sacplan.torch_compat.private import PLAIN_TENSOR_TYPES

FakeKernel = Callable[..., Any]
"""(fake mode, op, *args, **kwargs) -> fake outputs, or NotImplemented for torch's own."""

_fake_kernels: dict[int, tuple[FakeKernel, ...]] = {}
"""By the op's ``id`` (hashing an op is slow): the kernels of the contexts that are entered, the last one first."""

_fake_kernels_lock = threading.Lock()

_torchs_own = FakeTensorMode.dispatch


@contextmanager
def fake_kernels(kernels: Mapping[torch._ops.OpOverload, FakeKernel]) -> Iterator[None]:
    """Have FakeTensorMode ask these kernels first for an op's outputs. For the whole process; contexts nest.

    ``register_op_impl`` would be too late, since FakeTensorMode looks in two other places first. Its cache of fake
    results makes outputs with no larger a storage than their elements need. And it prefers decompositions to
    registered implementations.
    """
    with _fake_kernels_lock:
        for op, kernel in kernels.items():
            _fake_kernels[id(op)] = (kernel, *_fake_kernels.get(id(op), ()))
        FakeTensorMode.dispatch = _dispatch  # type: ignore[method-assign,assignment]
    # Fake results are cached per process by op and shape, and would outlive the change of kernels.
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        with _fake_kernels_lock:
            for op, kernel in kernels.items():
                # By identity of the kernel: contexts of several threads may end in another order than they began.
                others = list(_fake_kernels.pop(id(op)))
                others.remove(kernel)
                if others:
                    _fake_kernels[id(op)] = tuple(others)
            # With the last context torch gets its own method back.
            if not _fake_kernels:
                FakeTensorMode.dispatch = _torchs_own  # type: ignore[method-assign]
        FakeTensorMode.cache_clear()


def forget_kernels(ops: Iterable[torch._ops.OpOverload]) -> None:
    """Have these ops look up their kernels again where Python dispatches, as in a trace of the compiler."""
    for op in ops:
        op._dispatch_cache.clear()


def entered_kernels() -> frozenset[tuple[int, tuple[FakeKernel, ...]]]:
    """Return all kernels that are entered now, as a value to compare: equal values mean equal fake outputs."""
    return frozenset(_fake_kernels.items())


def keep_to_this_thread(mode: FakeTensorMode, otherwise: Callable[[], Exception]) -> None:
    """Raise ``otherwise()`` where another thread runs an op on a tensor of the mode, inside ``fake_kernels``.

    Dispatch modes belong to a thread, so nothing that watches a step sees that op; and the mode itself, which is
    shared, cannot run two ops at a time.
    """
    vars(mode)[_KEEPS_TO] = threading.get_ident(), otherwise


_KEEPS_TO = "_sacplan_keeps_to"


def _dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    # Replaces FakeTensorMode's method for every op of the process: without a kernel of ours it must be fast.
    thread, otherwise = vars(mode).get(_KEEPS_TO, (None, None))
    if otherwise is not None and thread != threading.get_ident():
        raise otherwise()
    kernels = _fake_kernels.get(id(func))
    if kernels is not None:
        try:
            given = [_as_fake(mode, v) for v in args]
            named = {name: _as_fake(mode, v) for name, v in (kwargs or {}).items()}
        except _NotFake:
            kernels = ()  # torch's own says what is wrong with the argument, or follows its value
        else:
            # An op on Python numbers alone, torch.div(7, 2, rounding_mode="floor"), has a real result. A compiler may
            # trace with symbols for sizes, which C++ and our rules do not know; what it makes runs with numbers.
            if (not _has_fakes(given) and not _has_fakes(named.values())) or (
                mode.shape_env is not None and _has_symbols((*given, *named.values()))
            ):
                kernels = ()
        for kernel in kernels:
            out = kernel(mode, func, *given, **named)
            if out is not NotImplemented:
                return out
    # Long lists, as in foreach ops: see ``_MOST_REMEMBERED``.
    if args and isinstance(args[0], (list, tuple)) and len(args[0]) > _MOST_REMEMBERED:
        if _only_writes(mode, func, args, kwargs):
            return None
        with fake_tensor.disable_fake_tensor_cache(mode):
            return _torchs_own(mode, func, types, args, kwargs or {})
    return _torchs_own(mode, func, types, args, kwargs or {})


def _has_symbols(values: Iterable[Any]) -> bool:
    return any(
        _has_symbols(v)
        if isinstance(v, (list, tuple))
        else isinstance(v, torch.SymInt) or (isinstance(v, torch.Tensor) and v._has_symbolic_sizes_strides)
        for v in values
    )


def _only_writes(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a foreach op writes tensors in place and can do nothing else: neither raise nor return any.

    Torch's own formula would run that of the single-tensor op for each tensor. That is not needed where all lists are
    of floating-point tensors of the same shapes and types, whose values FakeTensorMode does not know.
    """
    if not func._schema.name.startswith("aten::_foreach_") or func._schema.returns:
        return False
    first = args[0]
    for t in first:
        if type(t) is not FakeTensor or t.fake_mode is not mode or t.constant is not None:
            return False
        if not t.dtype.is_floating_point:
            return False
    for value in (*args[1:], *(kwargs or {}).values()):
        if isinstance(value, (list, tuple)):
            if len(value) != len(first) or not all(map(_goes_into, value, first)):
                return False
        elif type(value) not in (int, float):
            return False
    return True


def _goes_into(value: Any, into: FakeTensor) -> bool:
    if type(value) in (int, float):
        return True
    return (
        type(value) is FakeTensor
        and value.fake_mode is into.fake_mode
        and value.constant is None
        and value.dtype == into.dtype
        and value.shape == into.shape
        and value.fake_device == into.fake_device
    )


_MOST_REMEMBERED = 16
"""Calls with longer lists of tensors skip FakeTensorMode's cache: to hash them takes as long as to run the op."""


class _NotFake(Exception):
    """An argument is not, and cannot become, a fake CPU tensor of the mode, or has a value that torch follows."""


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    # A constant is a fake tensor whose value torch knows (``FakeTensor.constant``). Torch's own kernel uses the value,
    # and a result of ours would lose it.
    if isinstance(value, FakeTensor):
        if value.fake_mode is not mode or value.constant is not None or value.fake_device != CPU:
            raise _NotFake
    elif isinstance(value, torch.Tensor):
        if not mode.allow_non_fake_inputs or type(value) not in PLAIN_TENSOR_TYPES:
            raise _NotFake
        return mode.from_tensor(value)
    elif isinstance(value, (list, tuple)):
        return type(value)([_as_fake(mode, v) for v in value])
    return value


def _has_fakes(values: Iterable[Any]) -> bool:
    return any(isinstance(v, FakeTensor) or (isinstance(v, (list, tuple)) and _has_fakes(v)) for v in values)


def torchs_own_fake(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Return PyTorch's own fake outputs, for a fake kernel that changes a part of them."""
    return _torchs_own(mode, func, (FakeTensor,), args, kwargs)


_NON_FUNCTIONAL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


@functools.cache
def is_structured(op: torch._ops.OpOverload) -> bool:
    """Whether an op is structured: one function in C++ makes its outputs on every device."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _NON_FUNCTIONAL))


def run_in_cpp(mode: FakeTensorMode, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Make the fake outputs of a structured op, or of one with a single kernel, by the C++ code of every device.

    FakeTensorMode would use the Python formula that is registered over this code. For a structured op this calls the
    kernel of the key CompositeExplicitAutogradNonFunctional, which makes the outputs and runs the ``out`` variant.
    """
    key = _NON_FUNCTIONAL if is_structured(op) else _EXPLICIT
    with in_kernel_invocation_manager(mode):
        out = op._op_dk(key, *args, **kwargs)
        if isinstance(out, torch.Tensor):
            return FakeTensor(mode, out, CPU)
        return type(out)(FakeTensor(mode, t, CPU) for t in out)


def elementwise_ops() -> list[torch._ops.OpOverload]:
    """Return ATen's ops with the tag ``pointwise`` that write nothing and are not composites of other ops."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [
        op
        for op in map(op_of_schema, names)
        if op is not None
        and torch.Tag.pointwise in op.tags
        and not op._schema.is_mutable
        and not op._can_decompose()
    ]


def viewed(mode: FakeTensorMode, tensor: FakeTensor, shape: Sequence[int]) -> FakeTensor:
    """Return ``tensor.view(shape)`` with the strides of C++. The fake formula gives others to dimensions of size 1."""
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.ops.aten.view.default(tensor, shape), CPU)
