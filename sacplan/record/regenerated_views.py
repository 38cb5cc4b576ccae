"""The gradients of views whose memory was written after they were made, as the plain step takes them.

After a write in place autograd makes a new node for a view when the view is next used (``VariableHooks::grad_fn`` in
``torch/csrc/autograd/variable.cpp``). In the plain step that is one node, ``AsStridedBackward0``, which copies the
gradient into zeros as large as the base. For a tensor subclass, such as a fake tensor, autograd runs the views again
instead: the gradient passes through a node for each, and most of these take no memory.

So in a fake step those nodes run unrecorded, and the formula of ``as_strided`` runs in their place. A backward pass
that is differentiated itself stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from sacplan.torch_compat.autograd import autograd_sequence_number
from sacplan.torch_compat.fake_tensors import FakeTensor, fake_empty_strided

Paused = Callable[[], AbstractContextManager[None]]
"""Gives a context in which the recorder takes no note of ops."""


class RegeneratedViews:
    """Finds the views for which autograd makes new nodes in a fake step, and corrects their gradients."""

    def __init__(self, paused: Paused) -> None:
        self._paused = paused
        self._written = False  # before the first write no view gets a new node
        # By autograd's sequence number after a view op, the views that the op returned.
        self._returned: dict[int, Sequence[weakref.ref[torch.Tensor]]] = {}

    def saw(self, func: Any, taken: Sequence[Any], made: Sequence[torch.Tensor], *, writes: bool) -> None:
        """Note an op of the forward pass."""
        self._written |= writes
        if not self._written or not torch.is_grad_enabled():
            return
        for t in taken:
            # A parameter may be a view as well: it is a leaf, without a node.
            node = t.grad_fn if type(t) is FakeTensor and t._is_view() else None
            if node is None:
                continue
            number = node._sequence_nr() + 1
            views, self._returned[number] = self._returned.get(number, ()), ()  # each node is looked at once
            # The op that gave the view its node returned another tensor: so it was run by autograd, to make the node.
            if views and all(view() is not t for view in views):
                _correct(t, self._paused)
        if func.is_view:
            self._returned.setdefault(autograd_sequence_number(), [weakref.ref(t) for t in made])


def _correct(view: FakeTensor, paused: Paused) -> None:
    """Have the nodes from a view to its base give the gradient that ``as_strided`` gives."""
    base: Any = view._base
    node: Any = view.grad_fn
    nodes = []
    while (
        node is not base.grad_fn and node.next_functions
    ):  # a leaf has a node that accumulates, and no ``grad_fn``
        nodes.append(node)
        node = node.next_functions[0][0]
    # From the local part of a DTensor the gradient does not pass through the base: nothing to correct.
    if node is not base.grad_fn and getattr(node, "variable", None) is not base:
        return
    mode, of_base = view.fake_mode, (base.shape, base.stride(), base.dtype)
    of_view = view.shape, view.stride(), int(view.storage_offset() - base.storage_offset())
    gradient: list[torch.Tensor] = []
    unrecorded = ExitStack()

    # Only these nodes run unrecorded: each makes only the next one ready, and their numbers follow each other, so no
    # other node runs between the first and the last.
    def begin(gradients: Any) -> None:
        if gradients[0] is not None and not torch.is_grad_enabled():
            gradient.append(gradients[0])
            unrecorded.enter_context(paused())

    def end(*_: Any) -> Any:
        unrecorded.close()
        if not gradient:
            return None
        with paused(), torch.enable_grad():
            leaf = fake_empty_strided(mode, *of_base).requires_grad_()
            strided = leaf.as_strided(*of_view)
        return torch.autograd.grad(strided, leaf, gradient.pop())

    nodes[0].register_prehook(begin)
    nodes[-1].register_hook(end)
