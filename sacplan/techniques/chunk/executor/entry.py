"""Where a region begins, and where it ends: two autograd nodes.

From ``enter`` on everything that is computed from a module's input stays lazy. The module computes with its own
parameters. The entry's node has edges to these, so that autograd gives them nothing before it has run the node, once;
their lazy gradients wait there (``Targets``). One loop over slices then computes the forward pass, the backward pass,
the scalars that are still referred to, such as the loss, and gradients that wait for nodes outside of the region, such
as that of a residual sum.

``leave`` makes a module's outputs real, unless the region goes on with the loss. Their gradients are lazy again, so the
inside of the module runs a second time, in the entry's loop, and is not kept. The outputs are computed in a loop, or on
whole tensors if only the backward pass runs in slices.

If the input gets no gradient, no op leads autograd from the loss to the entry's node. So there is a token: an output of
the entry, and an input of the exit's node, which there is even if the outputs stay lazy. Autograd runs the youngest
node first, so the entry's node is the last of the region.

Autograd keeps the region's input through saved-tensor hooks, which may discard it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sacplan.core.factors.axes import Axis
from sacplan.techniques.chunk.executor import losses as losses  # registers what it rewrites
from sacplan.techniques.chunk.executor.lazy import Lazy, Targets, keep_gradient_real, once, watch
from sacplan.techniques.chunk.executor.loop import compute_with_memory, viewed_by
from sacplan.techniques.chunk.executor.values import DeferredTensor, SlicedRegion
from sacplan.techniques.chunk.flow import Window
from sacplan.torch_compat.autograd import autograd_as_outside, set_version

Compute = Callable[[Sequence[DeferredTensor]], list[torch.Tensor]]


def enter(
    region: SlicedRegion, axis: Axis, tensor: torch.Tensor, others: Sequence[torch.Tensor]
) -> tuple[Lazy, Lazy]:
    """Begin a region: return its input as a lazy tensor, and the token.

    Args:
        region: the region.
        axis: the axis of the input that is sliced.
        tensor: the input.
        others: tensors that get their gradients in the same loop.
    """
    lazy, token = _ChunkEntryFunction.apply(region, axis, tensor, *others)
    node = token.grad_fn
    node.targets = Targets(node, others)
    region.targets = weakref.ref(node.targets)
    for t in others:
        keep_gradient_real(t, region)
    return lazy, token


def leave(
    start: Lazy, token: Lazy, tensor: torch.Tensor, lazies: Sequence[Lazy], run: Compute | None
) -> list[torch.Tensor]:
    """End the forward pass of a region: return its outputs, as tensors whose gradients will be lazy.

    Args:
        start, token: what ``enter`` returned for ``tensor``.
        tensor: the region's input.
        lazies: the outputs.
        run: computes them: ``compute``, or ``compute_whole`` as the module would. None if they stay lazy.
    """
    watch(lazies)
    start.value.data = tensor.detach()  # so that nobody asks autograd for it, which may have discarded it
    versions = [x._version for x in lazies]
    try:
        return list(_ChunkExitFunction.apply(start.value.region, run, token, *lazies))
    finally:
        start.value.data = None
        for x, version in zip(lazies, versions, strict=True):
            set_version(x, version)  # nothing was written, and autograd may have saved it


class _ChunkEntryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: SlicedRegion, axis: Axis, tensor: torch.Tensor, *others: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensor)

        def kept_input() -> torch.Tensor:
            with autograd_as_outside():  # saved-tensor hooks may run a forward pass again
                kept: torch.Tensor = ctx.saved_tensors[0]
            return kept.detach()

        root = DeferredTensor(region, tensor, window=Window(axis), source=kept_input)
        ctx.entered_region, ctx.root = region, weakref.ref(root)
        weakref.finalize(root, region.remove_hooks).atexit = False
        entered = Lazy(root)
        if not tensor.requires_grad:
            # Else the parameters would make it differentiable, and formulas would compute a gradient for a batch.
            ctx.mark_non_differentiable(entered)
        return entered, Lazy(root)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: None) -> Any:
        once(gradient)
        (tensor,) = ctx.saved_tensors
        root = ctx.root()
        if root is not None:
            root.data = tensor.detach()  # results may be read after autograd has let go of it
        ready = ctx.targets.take_all()
        # The input's gradient is left out if nobody asked for it: it would take time in every slice.
        asked = [gradient if ctx.needs_input_grad[2] else None, *ready]
        wanted = [g.value for g in asked if isinstance(g, Lazy)]
        region, given = ctx.entered_region, {g.value for g in (gradient, *ready) if isinstance(g, Lazy)}
        # Code that looks at the loss later, and nodes outside of the region, would need loops of their own.
        alive = dict.fromkeys(x.value for x in region.take_gradients() if x.value.data is None)
        # If nobody asked for the input's gradient, nobody waits for a gradient that it is a view of, and keeps alive.
        unasked = {viewed_by(value) for value in given.difference(wanted)}
        waiting = [value for value in alive if value not in given and value not in unasked]
        pending = [value for value in region.pending if value not in waiting]
        made = iter(compute_with_memory([*wanted, *pending, *waiting]))
        found = [next(made) if isinstance(g, Lazy) else g for g in asked]
        for value in pending:
            value.settle(next(made))
        for value in waiting:
            value.leave(next(made))
        return None, None, *found


class _ChunkExitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: SlicedRegion, run: Compute | None, token: Lazy, *lazies: Lazy) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.windows = region, [x.value.window for x in lazies]
        # Lazy outputs stay the same tensors, since code may have kept them; not views, whose history is their base's.
        stay = [Lazy(x.value) if x._is_view() else x for x in lazies]
        made = stay if run is None else run([x.value for x in lazies])
        ctx.mark_dirty(*(t for t, x in zip(made, lazies, strict=True) if t is x))
        # Outputs that get no gradient: the token would make them differentiable.
        ctx.mark_non_differentiable(*(t for t, x in zip(made, lazies, strict=True) if not x.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        def lazy(g: Any, window: Window | None) -> torch.Tensor | None:
            stays = g is None or isinstance(g, Lazy)
            return g if stays else Lazy(DeferredTensor(ctx.region, g, window=window, data=g))

        return None, None, None, *map(lazy, map(once, gradients), ctx.windows)
