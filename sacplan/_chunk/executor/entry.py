"""Where a region begins, and where it ends: two autograd nodes.

From ``enter`` on everything that is computed from a module's input stays lazy. The module's parameters go through the
same node, so that autograd asks it once, with all gradients: one loop over slices then computes the forward pass, the
backward pass, the scalars that are still referred to, such as the loss, and gradients that wait for nodes outside of
the region, such as that of a residual sum.

``leave`` makes a module's outputs real. Their gradients are lazy again, so the inside of the module runs a second time,
in the entry's loop, and is not kept. They are computed in a loop, or on whole tensors if only the backward pass runs
in slices.

Autograd keeps the region's input through saved-tensor hooks, which may discard it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from sacplan._chunk.executor import losses as losses  # registers what it rewrites
from sacplan._chunk.executor.lazy import Lazy
from sacplan._chunk.executor.loop import compute, compute_whole, compute_with_memory, viewed_by
from sacplan._chunk.executor.values import DeferredTensor, SlicedRegion, Window
from sacplan._factors.axes import Axis
from sacplan._torch.autograd import autograd_as_outside
from sacplan.errors import ChunkError


def enter(
    region: SlicedRegion, axis: Axis, tensor: torch.Tensor, others: Sequence[torch.Tensor]
) -> tuple[Lazy, list[torch.Tensor]]:
    """Begin a region: return its input as a lazy tensor, and aliases of the other tensors that get gradients."""
    lazy, *aliases = _ChunkEntryFunction.apply(region, axis, tensor, *others)
    return lazy, aliases


def leave(
    start: Lazy, tensor: torch.Tensor, lazies: Sequence[Lazy], *, whole: bool = False
) -> list[torch.Tensor]:
    """Compute the outputs of a region, as tensors whose gradients will be lazy.

    Args:
        start: the lazy tensor that ``enter`` returned for ``tensor``.
        tensor: the region's input.
        lazies: the outputs.
        whole: compute them on whole tensors, as the module would.
    """
    start.value.data = tensor.detach()  # so that nobody asks autograd for it, which may have discarded it
    try:
        return list(_ChunkExitFunction.apply(start.value.region, whole, *lazies))
    finally:
        start.value.data = None


class _ChunkEntryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: SlicedRegion, axis: Axis, tensor: torch.Tensor, *others: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensor)
        root = DeferredTensor(region, tensor, window=Window(axis), source=_SavedInput(ctx))
        ctx.entered_region, ctx.root = region, weakref.ref(root)
        weakref.finalize(root, region.remove_hooks).atexit = False
        entered = Lazy(root)
        if not tensor.requires_grad:
            # Else the parameters would make it differentiable, and formulas would compute a gradient for a batch.
            ctx.mark_non_differentiable(entered)
        return (entered, *[t.view_as(t) for t in others])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ChunkError(
                "the backward pass through a chunk was asked for a graph of its own (create_graph=True), but a chunk "
                "can be differentiated once only. Leave this chunk out of the plan for second derivatives."
            )
        (tensor,) = ctx.saved_tensors
        root = ctx.root()
        if root is not None:
            root.data = tensor.detach()  # results may be read after autograd has let go of it
        needed = ctx.needs_input_grad[2:]
        # Nobody asked for the others, and to compute them would take time in every slice.
        asked = [g if n else None for g, n in zip(gradients, needed, strict=True)]
        lazies = [g.value for g in asked if isinstance(g, Lazy)]
        region, known = ctx.entered_region, {g.value for g in gradients if isinstance(g, Lazy)}
        # Code that looks at the loss afterwards would need another loop, and so would nodes outside of the region.
        left = dict.fromkeys(x.value for x in region.take_gradients() if x.value.data is None)
        # A view refers to what it is a view of, so that is alive, too. Both have the same memory; nobody waits for
        # those of gradients that nobody asked for.
        unasked = {viewed_by(value) for value in known.difference(lazies)}
        waiting = [value for value in left if value not in known and value not in unasked]
        pending = [value for value in region.pending if value not in waiting]
        made = iter(compute_with_memory([*lazies, *pending, *waiting]))
        found = [next(made) if isinstance(g, Lazy) else g for g in asked]
        for value in pending:
            value.settle(next(made))
        for value in waiting:
            value.leave(next(made))
        return None, None, *found


class _SavedInput:
    """The tensor that an entry node keeps for the backward pass."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __call__(self) -> torch.Tensor:
        with autograd_as_outside():  # saved-tensor hooks may run a forward pass again
            tensor: torch.Tensor = self._node.saved_tensors[0]
        return tensor.detach()


class _ChunkExitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: SlicedRegion, whole: bool, *lazies: Lazy) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.windows = region, [x.value.window for x in lazies]
        return tuple((compute_whole if whole else compute)([x.value for x in lazies]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (
            None,
            None,
            *(
                None if g is None else Lazy(DeferredTensor(ctx.region, g, window=window, data=g))
                for g, window in zip(gradients, ctx.windows, strict=True)
            ),
        )
