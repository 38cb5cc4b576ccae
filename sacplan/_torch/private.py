"""Private PyTorch interfaces that tracing and recipes need, one function each.

Tried on torch 2.11 to 2.15 (``docs/versions.md``).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
import torch._C._dynamo.eval_frame as _dynamo
import torch.utils.checkpoint
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.flop_counter import FlopCounterMode

from sacplan._torch.local_tensors import Watching, is_deferred, local_part
from sacplan._torch.versions import torch_names

F = TypeVar("F", bound=Callable[..., Any])

GENERATOR_STATE_BYTES: int = torch.default_generator.get_state().nbytes
"""State of a CPU generator. It counts as device memory in a CPU step; a GPU generator's state is on the host."""

PLAIN_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})

FAKE_TENSORS_CANNOT = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)
"""What fake tensors raise for ops whose results only real data tells."""

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

    A call begins when the module's own hooks before its forward have run, and is over when its forward has returned,
    before those after it. ``known`` saves looking into a frame again.
    """
    found: list[tuple[FrameType, torch.nn.Module]] = []
    callee: FrameType = sys._getframe(1)
    frame = callee.f_back
    while frame is not None and frame is not outer:
        if frame.f_code is _CALL_IMPL and not (
            callee.f_code is _CALL_WITH_HOOKS and _in_hooks(frame, callee)
        ):
            found.append((frame, known[frame] if frame in known else frame.f_locals["self"]))
        callee = frame
        frame = callee.f_back
    found.reverse()
    return dict(found)


def _in_hooks(call: FrameType, inner: FrameType) -> bool:
    """Whether hooks run, and not the forward: ``bw_hook`` is set in between."""
    return call.f_locals["result"] is not None or "bw_hook" not in inner.f_locals


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


_K = torch._C.DispatchKey


@contextmanager
def autograd_as_outside() -> Iterator[None]:
    """Inside, ops are differentiated as in plain code: also from a dispatch mode, which runs below autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    below = exclude.remove(_K.AutogradFunctionality).remove(_K.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(include, below), torch.enable_grad():
        yield


def below_autograd() -> Any:
    """A context manager: ops inside are dispatched as those inside a ``__torch_dispatch__`` are."""
    return torch._C._AutoDispatchBelowAutograd()


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int:
    """Of the backward pass that runs on this thread; each has another."""
    number: int = torch._C._current_graph_task_id()
    return number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward pass that runs now is over."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


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


def keeps_graph() -> bool:
    """Whether the backward pass that runs now keeps what its nodes saved (``retain_graph``, ``create_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def called_by_autograd() -> bool:
    """Whether the op that a dispatch mode sees now was called by autograd's C++ code, with no Python code in between.

    Call it from the recorder's ``__torch_dispatch__``, or from functions of ``_record`` that it calls.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    # A device's thread has no Python frame below.
    return frame is None or frame.f_code is _RUN_BACKWARD


def called_by_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` runs a forward again now; a custom function, of a reversible net, may too."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


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


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """What ``Tensor::suggest_memory_format`` says in C++: channels last where the strides look like it."""
    return suggest_memory_format(tensor)


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


def stop_compiling(error: type[Exception], message: str) -> None:
    """Raise an error from code that Dynamo traces, which otherwise makes a graph break of any exception."""
    torch._dynamo.comptime.comptime(_raise_while_compiling)
    raise error(message)  # where something else than Dynamo traces


def _raise_while_compiling(context: Any) -> None:
    error, message = (context.get_local(name).as_python_constant() for name in ("error", "message"))
    raise _uncompilable(error, message)


def _uncompilable(error: type[Exception], message: str) -> Exception:
    """The same error as one that Dynamo neither swallows nor wraps."""
    with torch_names():
        from torch._dynamo.exc import UncapturedHigherOrderOpError

    found: Exception = type(error.__name__, (error, UncapturedHigherOrderOpError), {})(message)
    return found


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", member))
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def without_torch_functions(function: F) -> F:
    """Decorates what only looks at tensors: no ``__torch_function__`` of a mode or a class sees that."""

    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return cast(F, looking)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary strided one with a storage (fake ones included), not a wrapper subclass.

    The zero tensors of autograd's formulas (the gradient of ``sgn``) have sizes, and a storage without memory.
    """
    return (
        (
            type(tensor) in PLAIN_TENSOR_TYPES
            or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
        and tensor.layout == torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold what a tensor does: its local part, or a sparse one's indices and values."""
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return (tensor,)
    sparse = tensor.detach()
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return (tensor,)


def current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) hooks that are on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are on, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


def modes_off() -> Any:
    """A context without dispatch modes, fake ones included."""
    return _disable_current_modes()


@contextmanager
def fake_failures_unlogged() -> Iterator[None]:
    """Inside, FakeTensorMode does not log the traceback of an op that its formula refuses; it raises all the same."""
    logger, says_nothing = logging.getLogger(fake_tensor.__name__), logging.Filter()
    says_nothing.filter = lambda record: "failed while attempting" not in str(record.msg)  # type: ignore[method-assign]
    logger.addFilter(says_nothing)
    try:
        yield
    finally:
        logger.removeFilter(says_nothing)


def active_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode that is on, if one is."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set what autograd counts in-place writes with, after what was written has been put back."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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

_fake_kernels: dict[int, tuple[FakeKernel, ...]] = {}
"""By the op's identity (hashing one is slow): the kernels of the contexts that are entered, the last one first."""
_fake_kernels_lock = threading.Lock()
_torchs_own = FakeTensorMode.dispatch


@contextmanager
def fake_kernels(kernels: Mapping[torch._ops.OpOverload, FakeKernel]) -> Iterator[None]:
    """Inside, FakeTensorMode asks these for an op's outputs first. For the whole process; contexts nest.

    They are asked before torch's cache of fake results, which makes outputs whose storage is no larger than their
    elements need, and before the decompositions, which it prefers to what ``register_op_impl`` registers.
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
                left = list(_fake_kernels.pop(id(op)))
                left.remove(kernel)
                if left:
                    _fake_kernels[id(op)] = tuple(left)
            if not _fake_kernels:
                FakeTensorMode.dispatch = _torchs_own  # type: ignore[method-assign]
        FakeTensorMode.cache_clear()


def keep_to_this_thread(mode: FakeTensorMode, otherwise: Callable[[], Exception]) -> None:
    """Raise ``otherwise()`` where another thread runs an op on a tensor of the mode, inside ``fake_kernels``.

    Dispatch modes belong to a thread, so nothing that watches a step sees that op; and the mode itself, which is
    shared, takes no two ops at a time.
    """
    vars(mode)[_KEEPS_TO] = threading.get_ident(), otherwise


_KEEPS_TO = "_sacplan_keeps_to"


def _dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    thread, otherwise = vars(mode).get(_KEEPS_TO, (None, None))
    if otherwise is not None and thread != threading.get_ident():
        raise otherwise()
    kernels = _fake_kernels.get(id(func))
    if kernels is not None:
        try:
            given = [_as_fake(mode, v) for v in args]
            named = {name: _as_fake(mode, v) for name, v in (kwargs or {}).items()}
        except _NotFake:
            kernels = ()
        else:
            # An op on Python numbers alone, torch.div(7, 2, rounding_mode="floor"), has a real result.
            if not _has_fakes(given) and not _has_fakes(named.values()):
                kernels = ()
        for kernel in kernels:
            out = kernel(mode, func, *given, **named)
            if out is not NotImplemented:
                return out
    if args and isinstance(args[0], (list, tuple)) and len(args[0]) > _MOST_REMEMBERED:
        with fake_tensor.disable_fake_tensor_cache(mode):
            return _torchs_own(mode, func, types, args, kwargs or {})
    return _torchs_own(mode, func, types, args, kwargs or {})


_MOST_REMEMBERED = 16
"""Tensors of a call that FakeTensorMode is to remember: to look for a longer list takes as long as to answer."""


class _NotFake(Exception):
    """An argument is neither a fake tensor of the mode nor can be made one, or has a value that torch follows."""


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.fake_mode is not mode or value.constant is not None:
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
    """What torch itself answers: for a fake kernel that changes a part of it."""
    return _torchs_own(mode, func, (FakeTensor,), args, kwargs)


_NON_FUNCTIONAL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


def is_structured(op: torch._ops.OpOverload) -> bool:
    """Whether a function in C++ makes the outputs of an op, the same one for every device."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _NON_FUNCTIONAL))


@functools.cache
def _key_in_cpp(op: torch._ops.OpOverload) -> torch._C.DispatchKey:
    return _NON_FUNCTIONAL if is_structured(op) else _EXPLICIT


def run_in_cpp(mode: FakeTensorMode, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """The outputs of a structured op, or one that has a single kernel, as C++ makes them: the same for every device.

    torch itself prefers formulas in Python that are registered over that code. Of a structured op, what is called
    instead is the kernel that runs the function that makes its outputs, and then the op's ``out`` variant.
    """
    with in_kernel_invocation_manager(mode):
        out = op._op_dk(_key_in_cpp(op), *args, **kwargs)
        if isinstance(out, torch.Tensor):
            return FakeTensor(mode, out, _CPU)
        return type(out)(FakeTensor(mode, t, _CPU) for t in out)


def elementwise_ops() -> list[torch._ops.OpOverload]:
    """The ops of ATen that torch tags as elementwise and that write nothing, except those made of other ops."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten":
            continue
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None or torch.Tag.pointwise not in op.tags:
            continue
        if not op._schema.is_mutable and not op._can_decompose():
            found.append(op)
    return found


def viewed(mode: FakeTensorMode, tensor: FakeTensor, shape: Sequence[int]) -> FakeTensor:
    """``tensor.view(shape)`` with the strides of C++: torch's formula for fake tensors has others where sizes are 1."""
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.ops.aten.view.default(tensor, shape), _CPU)


def _ordinary_zeros(
    mode: FakeTensorMode, func: Any, size: Any, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    if not _ordinary_zeros_wanted():
        return NotImplemented
    dtype = dtype or torch.get_default_dtype()
    return fake_empty_strided(mode, size, [0] * len(size), dtype)


_ordinary_zeros_wanted: Callable[[], bool] = bool
_ZERO_TENSOR = torch.ops.aten._efficientzerotensor.default


def make_fake_zeros_ordinary(where: Callable[[], bool]) -> None:
    """Where ``where()``, make of fake zero tensors (no memory) expanded ones (one element), for the whole process.

    torch's own go through kernels of their own, above any dispatch mode, which fail on fake tensors; and an exception
    there ends the interpreter.
    """
    global _ordinary_zeros_wanted
    _ordinary_zeros_wanted = where
    fake_impls.op_implementations_dict[_ZERO_TENSOR] = _ordinary_zeros


_FALLBACK: CodeType = fake_tensor.run_fallback_kernel.__code__


def op_run_on_zeros(error: BaseException) -> Any:
    """The op that FakeTensorMode had no kernel for and ran for real, on zeros, when this was raised; None if none."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is _FALLBACK:
            return at.tb_frame.f_locals["func"]
        at = at.tb_next
    return None


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has been called on it."""
    room = sys.modules.get("torch.distributed.fsdp")
    return room is not None and isinstance(module, room.FSDPModule)


def ranks_of_group(group: Any) -> list[int] | None:
    """The global ranks of a process group, given itself or its name; None if there is none of that name."""
    from torch.distributed import distributed_c10d

    if isinstance(group, str):
        try:
            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
        except (RuntimeError, ValueError):
            return None
    return sorted(distributed_c10d.get_process_group_ranks(group))


class _NoModules:
    parents = frozenset(("Global",))

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _FlopCounter(FlopCounterMode):
    def __enter__(self) -> FlopCounterMode:
        super().__enter__()
        mode: Any = self.mode
        mode.__class__ = _with_deferred(mode.__class__)
        return self


@functools.cache
def _with_deferred(kind: Any) -> type[TorchDispatchMode]:
    """The same mode, which sees ops on deferred tensors when they run."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            return NotImplemented
        return kind.__torch_dispatch__(self, func, types, args, kwargs)

    return type(kind.__name__, (kind, Watching), {"__torch_dispatch__": dispatch})


def _product_flops(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    """Of a product that is added in place, by the shapes of its operands."""
    return 2 * prod(left) * right[-1]


def flop_counter() -> FlopCounterMode:
    """A ``FlopCounterMode`` for the whole step: its hooks on modules fail where a custom function calls some."""
    in_place = dict.fromkeys(
        (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_), _product_flops
    )  # torch lacks them
    counter = _FlopCounter(display=False, custom_mapping=in_place)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


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
