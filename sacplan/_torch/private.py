"""Private PyTorch interfaces that tracing and recipes need, one function each.

Tried on torch 2.11 and 2.13; the names are present in 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch._C._dynamo.eval_frame as _dynamo
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

GENERATOR_STATE_BYTES: int = torch.default_generator.get_state().nbytes
"""State of a CPU generator. It counts as device memory in a CPU step; a GPU generator's state is on the host."""

PLAIN_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


_DEVICE_OF = torch.ops.prim.device.default


def fake_device_of(func: Any, args: Any) -> torch.device | None:
    """FakeTensorMode's answer if ``func`` asks for a fake tensor's device; None for any other op.

    Two thirds of the calls that reach a dispatch mode above FakeTensorMode are this query.
    """
    if func is not _DEVICE_OF or type(args[0]) is not FakeTensor:
        return None
    tensor = args[0]
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def fake_empty_strided(
    mode: FakeTensorMode, size: Any, stride: Any, dtype: torch.dtype, storage: Any = None, offset: int = 0
) -> FakeTensor:
    """A new fake CPU tensor, on a given meta storage or its own, created without any dispatch mode noticing."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if storage is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
        return FakeTensor(mode, meta, _CPU)


_CALL_IMPL: CodeType = torch.nn.Module._call_impl.__code__
_CALL_WITH_HOOKS = next(c for c in _CALL_IMPL.co_consts if isinstance(c, CodeType) and c.co_name == "inner")


def module_calls(
    outer: FrameType, known: Mapping[FrameType, torch.nn.Module]
) -> dict[FrameType, torch.nn.Module]:
    """The calls of modules that run inside a frame of this thread, outermost first: module by frame of the call.

    A call whose forward has returned, and whose hooks run, is over. ``known`` saves looking into a frame again.
    """
    found: list[tuple[FrameType, torch.nn.Module]] = []
    frame, callee = sys._getframe(1).f_back, None
    while frame is not None and frame is not outer:
        code = frame.f_code
        if code is _CALL_IMPL and not (callee is _CALL_WITH_HOOKS and frame.f_locals["result"] is not None):
            found.append((frame, known[frame] if frame in known else frame.f_locals["self"]))
        frame, callee = frame.f_back, code
    found.reverse()
    return dict(found)


FIRST_ARGUMENT = object()
"""Stands for an op's first argument among its outputs."""


def fake_tensors(mode: FakeTensorMode, outputs: Any, base: Any) -> list[Any]:
    """New fake CPU tensors of (is a view of ``base``, size, stride, offset, type); other values as they are."""
    made: list[Any] = []
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for spec in outputs:
            if type(spec) is not tuple:
                made.append(base if spec is FIRST_ARGUMENT else spec)
                continue
            is_view, size, stride, offset, dtype = spec
            if is_view:
                meta = torch.empty(0, dtype=dtype, device="meta")
                meta.set_(base.untyped_storage(), offset, size, stride)
            else:
                meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            made.append(FakeTensor(mode, meta, _CPU))
    return made


def meta_storage(nbytes: int) -> Any:
    """A storage without data."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


_CPU = torch.device("cpu")


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return torch._C._autograd._get_sequence_nr()


def current_node_sequence_number() -> int | None:
    """The number of the autograd node that runs now; None outside, and for gradient accumulation."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    return None if number >= 2**62 or number < 0 else number


def called_by_autograd() -> bool:
    """Whether the op that a dispatch mode sees now was called by autograd's C++ code, with no Python code in between.

    Call it from the recorder's ``__torch_dispatch__``, or from functions of ``_record`` that it calls.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    # A device's thread has no Python frame below.
    return frame is None or frame.f_code is _RUN_BACKWARD


# The recorder, and what torch wraps around ``__torch_dispatch__`` to keep dynamo out.
_BETWEEN = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "_record", ""),
    os.path.join(os.path.dirname(torch.__file__), "_compile.py"),
    os.path.join(os.path.dirname(torch.__file__), "_dynamo", ""),
)
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def current_node_has_edges_to_one_node() -> bool:
    """Whether the autograd node that runs now sends two gradients to the same input of another one."""
    node = torch._C._current_autograd_node()
    edges = [e for e in node.next_functions if e[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def keep_dynamo_out(*modules: ModuleType) -> None:
    """Keep Dynamo from compiling the functions of these modules, which dispatch modes call.

    Otherwise code compiled inside a unit would be compiled together with the recorder that watches its ops: that
    takes seconds, recompiles, and gains nothing.
    """
    functions = [f for module in modules for f in _functions_of(module)]
    codes = [f.__code__ for f in functions]
    while codes:
        code = codes.pop()
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
        _dynamo.set_code_exec_strategy(
            code, _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
        )


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", member))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary strided one with a storage (fake ones included), not a wrapper subclass."""
    return (
        (
            type(tensor) in PLAIN_TENSOR_TYPES
            or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
        and tensor.layout == torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) hooks that are on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are on, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


def active_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode that is on, if one is."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def storage_key(storage: Any) -> int:
    """Address of the storage's C++ object: unique while it lives."""
    key: int = storage._cdata
    return key


# torch's own kernel for one key. Not ``op.decompose``: for dropout that is a Python decomposition.
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def run_composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own C++ kernel of a composite op, below any Python kernel that replaces it."""
    return op._op_dk(COMPOSITE, *args, **kwargs)


FakeKernel = Callable[..., Any]
"""(fake mode, op, *args, **kwargs) -> fake outputs, or NotImplemented for torch's own."""


@contextmanager
def fake_kernels(kernels: Mapping[torch._ops.OpOverload, FakeKernel]) -> Iterator[None]:
    """Inside, FakeTensorMode asks these for an op's outputs first. For the whole process; contexts nest."""
    table = fake_impls.op_implementations_dict
    before = {op: table.get(op) for op in kernels}
    for op, kernel in kernels.items():
        table[op] = _fake_kernel(kernel, before[op])
    # Fake results are cached per process by op and shape, and would outlive the change of kernels.
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        for op, previous in before.items():
            if previous is None:
                del table[op]
            else:
                table[op] = previous
        FakeTensorMode.cache_clear()


def _fake_kernel(ours: FakeKernel, previous: FakeKernel | None) -> FakeKernel:
    def fake(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        out = ours(mode, func, *args, **kwargs)
        if out is NotImplemented and previous is not None:
            return previous(mode, func, *args, **kwargs)
        return out

    return fake


def _switch(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")


def _precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return functools.partial(get, backend, op), functools.partial(put, backend, op)


# Of the process: what decides which kernel computes a matmul or a convolution, with which bits.
_KERNEL_SETTINGS = (
    *map(_switch, ("mkldnn_enabled", "mkldnn_deterministic")),
    *map(_switch, ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
)
_GET_KERNEL_SETTINGS = tuple(get for get, _ in _KERNEL_SETTINGS)


def kernel_settings() -> tuple[Any, ...]:
    """The settings of PyTorch that choose among the kernels of an op."""
    return tuple([get() for get in _GET_KERNEL_SETTINGS])


def set_kernel_settings(values: Sequence[Any]) -> None:
    """Set those that differ."""
    for (get, put), value in zip(_KERNEL_SETTINGS, values, strict=True):
        if get() != value:
            put(value)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, these attributes of a class or a module are others. For the whole process."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def with_outputs(mode: TorchDispatchMode, note: Callable[[Any], None]) -> TorchDispatchMode:
    """The same dispatch mode, which also hands each output to ``note``.

    For the mode behind selective checkpointing: from 2.13 on its policy sees an op's output, before it does not.
    """

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super(noting, self).__torch_dispatch__(func, types, args, kwargs)
        note(out)
        return out

    noting: Any = type(type(mode).__name__, (type(mode),), {"__torch_dispatch__": dispatch})
    mode.__class__ = noting
    return mode
