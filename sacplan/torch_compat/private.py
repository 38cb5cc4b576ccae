"""Private PyTorch interfaces around tensors, module calls and dispatch modes, one function each.

Fake tensors, autograd, Dynamo, FLOPs and kernel settings have modules of their own. Tried on torch 2.11 to 2.15
(``docs/versions.md``).
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from sacplan.torch_compat.local_tensors import local_part

F = TypeVar("F", bound=Callable[..., Any])

GENERATOR_STATE_BYTES: int = torch.default_generator.get_state().nbytes
"""State of a CPU generator. It counts as device memory in a CPU step; a GPU generator's state is on the host."""

PLAIN_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})

_CALL_IMPL: CodeType = torch.nn.Module._call_impl.__code__

# The function in ``_call_impl`` that runs the hooks and the forward of a module that has hooks.
_CALL_WITH_HOOKS = next(c for c in _CALL_IMPL.co_consts if isinstance(c, CodeType) and c.co_name == "inner")


def module_calls(
    outer: FrameType, known: Mapping[FrameType, torch.nn.Module]
) -> dict[FrameType, torch.nn.Module]:
    """Return the module calls that run inside a frame of this thread, outermost first, as module by frame of the call.

    A call begins after the module's own forward pre-hooks, and is over when its forward has returned, before the
    forward hooks. ``known`` saves looking into a frame again.
    """
    # Walks the stack outwards. ``callee`` is the frame that the current one called, which tells whether the call is in
    # its hooks: ``_call_impl`` runs them in a function of its own, ``inner``.
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
    """Whether a call is still in its hooks: ``_call_impl`` sets ``bw_hook`` between the pre-hooks and the forward.

    ``result`` is set when the forward has returned, so from then on the forward hooks run.
    """
    return call.f_locals["result"] is not None or "bw_hook" not in inner.f_locals


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor fill memory without gaps or overlaps, in any order."""
    # From the innermost dimension outwards each stride must be the number of elements inside of it.
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        # The stride of a dimension of size 1 moves nowhere, so any value will do.
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the format of ``Tensor::suggest_memory_format`` in C++: channels last if the strides look like it."""
    return suggest_memory_format(tensor)


def without_torch_functions(function: F) -> F:
    """Decorate a function that only inspects tensors, so that no ``__torch_function__`` sees what it does."""

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


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, inside ``torch.vmap`` or a backward pass with ``is_grads_batched``."""
    found: bool = torch._C._functorch.is_batchedtensor(tensor)
    return found or torch._C._functorch.is_legacy_batchedtensor(tensor)


def is_transforming() -> bool:
    """Whether ops run under a transform of ``torch.func``, such as ``torch.func.grad``, or in forward mode."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold a tensor's data: its local part, or a sparse one's indices and values."""
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return (tensor,)
    # Sparse tensors are real ones even in a fake step, and its modes would refuse them. Detached, since ``indices`` and
    # ``values`` are differentiable ops.
    with modes_off():
        sparse = tensor.detach()
        if sparse.layout is torch.sparse_coo:
            return sparse._indices(), sparse._values()
        if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
            return sparse.crow_indices(), sparse.col_indices(), sparse.values()
        if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
            return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return (tensor,)  # mkldnn, whose memory no tensor shows


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are on, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


def modes_off() -> Any:
    """Return a context in which no dispatch mode is on, fake ones included."""
    return _disable_current_modes()


@contextmanager
def function_modes_off() -> Iterator[None]:
    """Leave the innermost torch function modes, as far as they are sacplan's. Dynamo would trace them."""
    stacked = torch.overrides._get_current_function_mode_stack()
    with ExitStack() as stack:
        while stacked and type(stacked.pop()).__module__.startswith("sacplan."):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


def storage_key(storage: Any) -> int:
    """Return the address of the storage's C++ object, which is unique while the storage lives."""
    key: int = storage._cdata
    return key


def counts_writes_of(whole: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Whether a tensor is ``whole`` or a view of it, so that both have the same version counter; False for None."""
    return whole is not None and (tensor is whole or tensor._base is whole)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` has been called on the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def ranks_of_group(group: Any) -> list[int] | None:
    """Return the global ranks of a process group, given the group or its name; None if no group has that name."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    if isinstance(group, str):
        try:
            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
        except (RuntimeError, ValueError):
            return None
    return sorted(distributed_c10d.get_process_group_ranks(group))


def group_of(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the global ranks of the group that a collective speaks to; None if the group does not exist."""
    # Functional collectives name their group last. Others take it before any other object of C++.
    last = kwargs.get("group_name", args[-1])
    found = ranks_of_group(next((v for v in args if isinstance(v, torch.ScriptObject)), last))
    return None if found is None else tuple(found)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class or a module inside the context, for the whole process."""
    # All old values are read before the first new one is set, so that a missing name leaves everything as it was.
    before = {name: inspect.getattr_static(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def noted_generator_states(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, ``torch.get_rng_state``, as checkpointing and ``fork_rng`` call it, hands each state to ``note``.

    No op makes such a tensor, so no dispatch mode sees it.
    """
    plain = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = plain()
        note(state)
        return state

    with replaced(torch, get_rng_state=get_rng_state), replaced(torch.random, get_rng_state=get_rng_state):
        yield


@contextmanager
def storage_resizes(note: Callable[[Any], None]) -> Iterator[None]:
    """Inside, ``UntypedStorage.resize_``, as Python code calls it, hands each storage to ``note``: no op shows that."""
    plain: Any = torch.UntypedStorage.resize_

    def resize_(storage: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(storage, *args, **kwargs)
        note(storage)
        return out

    with replaced(torch.UntypedStorage, resize_=resize_):
        yield


def with_outputs(mode: TorchDispatchMode, note: Callable[[Any], None]) -> TorchDispatchMode:
    """Make a dispatch mode also hand each output to ``note``, and return it.

    The mode behind selective checkpointing needs this: its policy sees an op's output only from torch 2.13 on.
    """

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super(noting, self).__torch_dispatch__(func, types, args, kwargs)
        note(out)
        return out

    noting: Any = type(type(mode).__name__, (type(mode),), {"__torch_dispatch__": dispatch})
    mode.__class__ = noting
    return mode


def replicate(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel run a model, in place: its modules keep their names."""
    from torch.distributed._composable.replicate import replicate as of_torch

    of_torch(model)


@contextmanager
def without_a_log(name: str) -> Iterator[None]:
    """Silence a logger."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
