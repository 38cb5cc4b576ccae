"""CUDA's autocast on fake CPU tensors: its cast lists, and ``torch.autocast("cuda")`` where there is no CUDA.

While the kernels of a CUDA device are emulated, ``torch.autocast("cuda")`` and ``torch.autocast("cpu")`` are
the same: both switch on what CUDA's autocast does. Ops that torch's own CPU autocast casts as CUDA's does keep
their C++ kernel and its weight cache; the others get a Python kernel for ``AutocastCPU``, which caches the same
casts as C++ does: those of float32 leaves that need a gradient, until the outermost autocast is left.

``policies`` are the lists of ``ATen/autocast_mode.h`` and ``autocast_mode.cpp``; the tests compare them with
the header of the installed torch. They are in ``autocast.json``: to add an op, add its name to the list of its policy.
``binary_cross_entropy`` is banned by ``autocast_mode.cpp``; the recurrent kernel is cast by ``AutocastRNN.cpp``.

Not emulated: ``torch.autocast`` objects made earlier, in a build without CUDA (torch has disabled them with a
warning); ``GradScaler``.

Private PyTorch APIs, tried on 2.11 and 2.13: ``torch._C._ExcludeDispatchKeyGuard``,
``torch._C._dispatch_has_kernel_for_dispatch_key``, and ``torch.autocast.device``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.amp.autocast_mode import autocast

from sacplan.device.devices import torch_version
from sacplan.errors import DeviceError
from sacplan.torch_compat.ops import COMPOSITE, arguments_by_name, op_of_schema, run_composite, tensors_in
from sacplan.torch_compat.private import replaced

Policy = Literal["lower", "fp32", "fp32_dtype", "fp32_norm", "promote", "banned", "none"]
"""``lower``: tensors are cast to autocast's type. ``fp32``: to float32. ``fp32_dtype``: the op is asked for a
float32 result. ``fp32_norm``: the same, by another overload. ``promote``: to the widest type among the operands."""

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

_LISTS = msgspec.json.decode(
    Path(__file__).with_name("autocast.json").read_bytes(), type=dict[Policy, list[str]]
)

_SINCE = {"rms_norm": (2, 12)}
"""Ops that CUDA's list has only since a release."""


def policies(version: tuple[int, int] | None = None) -> dict[str, Policy]:
    """Return the policy of CUDA's autocast by op (without namespace), by default for the torch that runs."""
    version = torch_version() if version is None else version
    return {
        name: policy
        for policy, names in _LISTS.items()
        for name in names
        if version >= _SINCE.get(name, (0, 0))
    }


# Ops that torch's CPU autocast promotes and CUDA's does not list. Others that only the CPU's lists become float32.
_CPU_PROMOTES = frozenset(("cat", "stack", "index_copy"))
# Lower on the CPU's list and reached through ops that are lower on CUDA's: nothing to change.
_CPU_LOWER = frozenset(
    (
        "_addmm_activation",
        "_native_multi_head_attention",
        "conv1d.padding",
        "conv2d.padding",
        "conv3d.padding",
        "mkldnn_rnn_layer",
    )
)


@functools.cache
def _cpu_list() -> frozenset[str]:
    """Return the ops that PyTorch's CPU autocast has a kernel for. To be called before ours are registered."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return frozenset(n.removeprefix("aten::") for n in names if has(n, "AutocastCPU"))


@functools.cache
def differing() -> dict[str, tuple[Policy, Policy]]:
    """Return (CUDA's policy, the CPU's policy) by op, for the ops whose policies differ."""
    on_cuda, on_cpu = policies(), _cpu_list()
    result: dict[str, tuple[Policy, Policy]] = {}
    for name, policy in on_cuda.items():
        if name not in on_cpu:
            if op_of_schema(f"aten::{name}") is not None:
                result[name] = (policy, "none")
        # In both lists. What is "lower" or "fp32" on CUDA is the same on the CPU, which casts all others to float32.
        elif policy not in ("lower", "fp32"):
            result[name] = (policy, "fp32")
    for name in on_cpu - on_cuda.keys() - _CPU_LOWER:
        result[name] = ("none", "promote" if name in _CPU_PROMOTES else "fp32")
    return result


# ---------------------------------------------------------------------------------------------------------
# Casts


class _ThreadAutocast(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[autocast, str, tuple[bool, torch.dtype]]] = []
        self.cache: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


_local = _ThreadAutocast()


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == "cpu"
    )


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # Only weights are cached: float32 leaves that need a gradient, cast to the lower type. An activation is used up
    # soon, and a cache would keep it alive until autocast is left. These are the conditions of ``cached_cast`` in
    # ``autocast_mode.cpp``. Without the cache a weight that is used twice would be cast twice, and autograd would keep
    # both copies.
    cached = (
        dtype == torch.get_autocast_dtype("cpu")
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and bool(_local.entered)
    )
    if not cached:
        return tensor.to(dtype)
    key = (id(tensor), dtype)  # the entry holds the tensor, so that no other tensor gets its id
    if key not in _local.cache:
        _local.cache[key] = (tensor, tensor.to(dtype))
    return _local.cache[key][1]


def _cast_all(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _cast(value, dtype) if _eligible(value) else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast_all(v, dtype) for v in value])
    return value


def _apply(policy: Policy, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``op`` under ``policy``; the caller has excluded autocast's dispatch key."""
    if policy == "banned":
        raise DeviceError(
            f"{op} is unsafe to autocast on CUDA, where torch refuses it. Use binary_cross_entropy_with_logits, "
            "or call it under torch.autocast(enabled=False)."
        )
    # The next two leave the operands as they are, and ask the op for a float32 result: a cast would be one more tensor
    # of the input's size. Both look at the first argument only, as the C++ wrappers do.
    if policy == "fp32_dtype" and _eligible(args[0]):
        given = arguments_by_name(op, args, kwargs)
        if given["dtype"] is None:
            given["dtype"] = torch.float32
        return op(given.pop("self"), **given)
    if policy == "fp32_norm" and _eligible(args[0]):
        with_dtype = (
            torch.ops.aten.norm.ScalarOpt_dtype
            if op._schema.overload_name == "Scalar"
            else torch.ops.aten.norm.ScalarOpt_dim_dtype
        )
        return with_dtype(*arguments_by_name(op, args, kwargs).values(), dtype=torch.float32)
    dtype = None
    if policy == "lower":
        dtype = torch.get_autocast_dtype("cpu")
    elif policy == "fp32":
        dtype = torch.float32
    elif policy == "promote":
        eligible = [t for t in tensors_in((args, kwargs)) if _eligible(t)]
        wide = any(t.dtype == torch.float32 for t in eligible)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
    if dtype is None:
        return op(*args, **kwargs)
    return op(*_cast_all(args, dtype), **{k: _cast_all(v, dtype) for k, v in kwargs.items()})


def register(library: torch.library.Library, is_emulated: Callable[[Any], bool]) -> None:
    """Register the kernels; ``is_emulated(args)`` says whether a call should behave as on CUDA."""
    for name, (cuda, cpu) in differing().items():
        op = op_of_schema(f"aten::{name}")
        assert op is not None
        library.impl(name, _kernel(op, cuda, cpu, is_emulated), "AutocastCPU")


def _kernel(
    op: torch._ops.OpOverload, cuda: Policy, cpu: Policy, is_emulated: Callable[[Any], bool]
) -> Callable[..., Any]:
    is_composite = op.has_kernel_for_dispatch_key(COMPOSITE)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        policy = cuda if is_emulated((args, kwargs)) else cpu
        # Autocast's key stays on here, so that the composite's inner ops are cast.
        if policy == "none" and is_composite:
            return run_composite(op, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
            return _apply(policy, op, args, kwargs)

    return kernel


# ---------------------------------------------------------------------------------------------------------
# torch.autocast itself


@contextmanager
def cuda_autocast_on_cpu(is_active: Callable[[], object]) -> Iterator[None]:
    """Make ``torch.autocast`` treat "cuda" and "cpu" alike where ``is_active()``, which is asked in each thread.

    The methods of the class are replaced, so that subclasses and decorators have them too.
    """
    own: Any = autocast
    init, enter, leave = own.__init__, own.__enter__, own.__exit__

    @functools.wraps(init)
    def patched_init(
        this: autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda" and is_active():
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
        init(this, device_type, dtype, enabled, cache_enabled)

    @functools.wraps(enter)
    def patched_enter(this: autocast) -> Any:
        # An autocast for another device, or while none is emulated: torch's own, and nothing to undo on exit.
        if this.device not in ("cpu", "cuda") or not is_active():
            return enter(this)
        # One object may be entered twice, so what is to be restored lies on a stack and not on the object.
        _local.entered.append((this, this.device, _cuda_state()))
        this.device = "cpu"
        result = enter(this)
        # Code that asks for CUDA's state gets what it would get on a GPU. No kernel of a CPU tensor reads it.
        _set_state("cuda", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return result

    @functools.wraps(leave)
    def patched_exit(this: autocast, *error: Any) -> Any:
        # Entered by torch's own method (for another device, or before the emulation), so left by torch's own, too.
        if not _local.entered or _local.entered[-1][0] is not this:
            return leave(this, *error)
        _, device, state = _local.entered.pop()
        # As in C++, casts of weights live until the outermost autocast is left. Weights may change after that.
        if not _local.entered:
            _local.cache.clear()
        _set_state("cuda", state)
        try:
            return leave(this, *error)
        finally:
            this.device = device

    with replaced(autocast, __init__=patched_init, __enter__=patched_enter, __exit__=patched_exit):
        yield


def _cuda_state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _set_state(device: str, state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, state[0])
    torch.set_autocast_dtype(device, state[1])


@contextmanager
def outer_autocast() -> Iterator[None]:
    """Apply a CUDA autocast that was entered before the emulated device to the fake CPU tensors inside."""
    enabled, dtype = _cuda_state()
    # No CUDA autocast is on, or the CPU's is on already, whose kernels are the emulated ones.
    if not enabled or torch.is_autocast_enabled("cpu"):
        yield
        return
    before = torch.get_autocast_dtype("cpu")
    _set_state("cpu", (True, dtype))
    try:
        yield
    finally:
        _set_state("cpu", (False, before))
