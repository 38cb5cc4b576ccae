"""Private PyTorch interfaces that tracing and recipes need, one function each.

Tried on torch 2.13; the names are present in 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

GENERATOR_STATE_BYTES: int = torch.default_generator.get_state().nbytes
"""State of a CPU generator, which lies where a CPU step's tensors lie; that of a GPU's lies on the host."""

PLAIN_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return torch.autograd._get_sequence_nr()


def current_node_sequence_number() -> int | None:
    """The number of the autograd node that runs now; None outside, and for gradient accumulation."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    return None if number >= 2**62 or number < 0 else number


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


def history_free_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage and version counter without autograd's history; inside of a dispatch mode too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        if type(tensor) is not torch.Tensor:
            return tensor.detach()
        with torch._C._DisableTorchDispatch():  # no mode needs to see it
            return tensor.detach()


def current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) hooks that are on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def active_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode that is on, if one is."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def storage_key(storage: Any) -> int:
    """Address of the storage's C++ object: unique while it lives."""
    return storage._cdata
