"""Autograd's engine: whether a backward pass runs, which node runs, and what the graph keeps.

Private PyTorch API, tried on 2.11 to 2.15 (``docs/versions.md``): ``torch._C._autograd`` and dispatch keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

_K = torch._C.DispatchKey


@contextmanager
def autograd_as_outside() -> Iterator[None]:
    """Differentiate the ops inside as in plain code, even when called from a dispatch mode.

    A mode runs with autograd's dispatch keys excluded, so without this guard an op that it calls would record no node.
    """
    # Autograd's own key, and the one that counts versions and tracks views; a mode has excluded both.
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    below = exclude.remove(_K.AutogradFunctionality).remove(_K.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(include, below), torch.enable_grad():
        yield


why_no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
"""Why saved-tensor hooks are disabled (``torch.func``, ``disable_saved_tensors_hooks``); None if they are not."""


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int:
    """Return the number of the backward pass that runs on this thread. Each pass has its own."""
    number: int = torch._C._current_graph_task_id()
    return number


def runs_in_backward(node: Any) -> bool:
    """Whether the backward pass that runs on this thread has run a node of the graph, or will."""
    return bool(torch._C._will_engine_execute_node(node))


def autograd_sequence_number() -> int:
    """Return the sequence number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def current_node_sequence_number() -> int | None:
    """Return the sequence number of the running autograd node; None outside of one, and in gradient accumulation."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    # AccumulateGrad nodes have the largest 64-bit number, so that the engine runs them first ("NOTE [ Sequence
    # Number]" in the headers of ``torch/csrc/autograd``). Python may see it as a negative one.
    return None if number >= 2**62 or number < 0 else number


def running_custom_function() -> Any:
    """Return the running node if it is that of a custom ``autograd.Function``, its ``ctx``; else None."""
    node = torch._C._current_autograd_node()
    return node if isinstance(node, BackwardCFunction) else None


def custom_functions_since(number: int, outputs: Any) -> list[Any]:
    """Return the nodes of custom functions in the graph of some outputs, from this sequence number on."""
    waiting: list[Any] = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        # Next nodes are older, so none below one that is too old is wanted. Only ``AccumulateGrad`` has a number larger
        # than those above it, and it has no next nodes.
        if node is not None and node not in seen and node._sequence_nr() >= number:
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return [node for node in seen if isinstance(node, BackwardCFunction)]


def keeps_graph() -> bool:
    """Whether the running backward pass keeps saved tensors (``retain_graph``, ``create_graph``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def called_by_autograd() -> bool:
    """Whether the op that a dispatch mode sees now was called by autograd's C++ code, with no Python code in between.

    Call it from the recorder's ``__torch_dispatch__``, or from functions of ``record`` that it calls.
    """
    # Skip our own frames. The next one is that of the caller: the function that starts the engine if the engine or a
    # C++ formula called the op; another one if the backward of a custom function, a hook or a mode did.
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    # The engine's thread for a device has no Python frame of its own.
    return frame is None or frame.f_code is _RUN_BACKWARD


def called_by_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` is on the stack, and so runs a forward pass again.

    Another custom function, such as that of a reversible network, may recompute too; it is not recognized here.
    """
    frame = sys._getframe(1)
    while frame is not None:
        # Both variants, reentrant or not, are functions of that file.
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# The recorder, and what torch wraps around ``__torch_dispatch__`` to keep dynamo out.
_BETWEEN = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "record", ""),
    os.path.join(os.path.dirname(torch.__file__), "_compile.py"),
    os.path.join(os.path.dirname(torch.__file__), "_dynamo", ""),
)

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def current_node_has_edges_to_one_node() -> bool:
    """Whether the autograd node that runs now sends two gradients to the same input of another node."""
    node = torch._C._current_autograd_node()
    # The edge of an input that wants no gradient has no node.
    edges = [e for e in node.next_functions if e[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


def current_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the innermost (pack, unpack) hooks that are on; None if none are."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the counter by which autograd notices in-place writes, after the written values have been put back."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
