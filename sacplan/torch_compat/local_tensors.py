"""Tensors that stand for others: a DTensor for the part that this rank has, or what a collective sends.

Ops on them run as ops on plain tensors, and collectives: that is what a step consists of. A dispatch mode that watches
a step answers NotImplemented where ``is_deferred``, and sees these. What DTensor runs to find out how an op is spread
(sharding propagation: the op itself, on fake tensors of global shapes) is no part of the step, and hidden from
``Watching`` modes.

Tried on torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from sacplan.torch_compat.versions import torch_names

DEFERRED_TYPES: set[type] = set()
"""Tensors whose ops run later: a dispatch mode that sees one answers NotImplemented, and sees the ops when they run."""


class Watching(TorchDispatchMode):
    """A dispatch mode that watches a step, or changes what runs in it."""


def is_deferred(types: Sequence[type]) -> bool:
    """Whether a mode called with these types will see the plain ops that this op becomes, and should wait for them."""
    return any(kind in DEFERRED_TYPES or _stands_for_another(kind) or _is_jagged(kind) for kind in types)


def has_local_parts(types: Sequence[type]) -> bool:
    """As ``is_deferred``, for a mode that handles ``DEFERRED_TYPES`` itself."""
    return any(map(_stands_for_another, types))


@functools.cache
def _stands_for_another(kind: type) -> bool:
    if _is_dtensor(kind):
        # A mode that watches asks here before it passes on an op on a DTensor, so this is early enough.
        _hide_sharding_propagation()
        return True
    return _is_async(kind)


def _is_of(module: str, name: str, kind: type) -> bool:
    imported = sys.modules.get(module)  # if not imported, no tensor is of its class
    return imported is not None and issubclass(kind, getattr(imported, name))


_is_dtensor = functools.partial(_is_of, "torch.distributed.tensor", "DTensor")
_is_async = functools.partial(_is_of, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")
# Ops on jagged nested tensors run as ops on plain tensors.
_is_jagged = functools.cache(
    functools.partial(_is_of, "torch.nested._internal.nested_tensor", "NestedTensor")
)


def stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor (or of a subclass), or the pending result of a collective."""
    return _stands_for_another(type(tensor))


def local_part(tensor: torch.Tensor, *, waits: bool = False) -> torch.Tensor:
    """Return the plain tensor behind a DTensor or a pending collective, else the tensor itself.

    With ``waits``, a pending collective has finished; else nothing is waited for.
    """
    # A DTensor may have a pending collective as its local part, so both are taken off in turn.
    while stands_for_another(tensor):
        t: Any = tensor
        tensor = t._local_tensor if _is_dtensor(type(t)) else t.trigger_wait() if waits else t.elem
    return tensor


def held_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view if its class says (``holds_base``) that the base may lie on other memory, else None.

    Autograd holds the base as long as the view, so its memory counts with the view's.
    """
    return tensor._base if getattr(type(tensor), "holds_base", False) else None


Wrapping = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor of the same type, global shape and placements for another local part; a leaf without gradient."""


def _unchanged(local: torch.Tensor) -> torch.Tensor:
    return local


def wrapping_of(tensor: torch.Tensor) -> Wrapping:
    """Return how a tensor that ``stands_for_another`` is made around its local part.

    The pending result of a collective is its local part once it has arrived, so nothing is put around this part.
    """
    if not _is_dtensor(type(tensor)):
        return _unchanged
    dtensor: Any = tensor
    kind = type(dtensor)
    base = sys.modules["torch.distributed.tensor"].DTensor
    # A subclass that flattens itself differently has parts that ``_made`` knows nothing of.
    if kind.__tensor_unflatten__ is not base.__tensor_unflatten__:
        return functools.partial(_unflattened, *_flattened(dtensor))
    attributes = None if kind is base else dict(vars(dtensor))  # a copy, since they may change later
    return functools.partial(_made, kind, dtensor._spec, attributes)


def _made(kind: Any, spec: Any, attributes: dict[str, Any] | None, local: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=False)
    if attributes:
        vars(made).update(attributes)
    return made


def _flattened(dtensor: Any) -> tuple[Any, ...]:
    names, context = dtensor.__tensor_flatten__()
    # Without the local part, since another one takes its place.
    inner = {name: getattr(dtensor, name) for name in names if name != "_local_tensor"}
    return type(dtensor), inner, context, dtensor.shape, dtensor.stride()


def _unflattened(
    kind: Any, inner: dict[str, Any], context: Any, size: Any, stride: Any, local: torch.Tensor
) -> torch.Tensor:
    made: torch.Tensor = kind.__tensor_unflatten__({**inner, "_local_tensor": local}, context, size, stride)
    return made.requires_grad_(False)


@functools.cache
def _hide_sharding_propagation() -> None:
    """Hide DTensor's sharding propagation from ``Watching`` modes, for the whole process.

    To find an op's sharding, DTensor runs the op on fake tensors of global shapes
    (``torch/distributed/tensor/_sharding_prop.py``). A mode would record these as ops of the step. The cached method is
    made again, since its cache wraps the function that is replaced.
    """
    # The bound methods are replaced on the process's only propagator, and stay replaced.
    propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    propagator._propagate_tensor_meta_non_cached = _unseen(propagator._propagate_tensor_meta_non_cached)
    find = propagator.propagate_op_sharding_non_cached = _unseen(propagator.propagate_op_sharding_non_cached)
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(find)  # with a cache


def forget_meshes() -> None:
    """Let DTensor forget how ops are spread: a cached answer for one mesh would be given for any equal mesh.

    Meshes are equal if their ranks and names are, but the process groups of the answer may have ended.
    """
    if "torch.distributed.tensor" in sys.modules:
        with torch_names():
            from torch.distributed.tensor import debug

            debug._clear_python_sharding_prop_cache()
            debug._clear_fast_path_sharding_prop_cache()


def _unseen(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unseen(schema: Any) -> Any:
        # Only where a mode of sacplan watches: a user's own mode sees the same as without.
        if not any(isinstance(mode, Watching) for mode in _get_current_dispatch_mode_stack()):
            return find(schema)
        with _disable_current_modes():
            return _found_by_kind(find, schema)

    return unseen


def _found_by_kind(find: Callable[[Any], Any], schema: Any) -> Any:
    """Find the sharding of an op; for an op on lists, from the first tensors of each kind.

    Each place in the lists is sharded by itself. DTensor takes seconds for a list of all parameters: it goes through
    the whole list, on fake tensors, for each place.
    """
    lists = [value for value in schema.args_schema if isinstance(value, (list, tuple)) and value]
    on_lists = str(schema.op).startswith(("aten._foreach_", "aten._fused_"))
    # The list of ``_fused_rms_norm`` is one of sizes, and comes after a tensor.
    on_lists = on_lists and isinstance(schema.args_schema[0], (list, tuple))
    if not on_lists or len({len(values) for values in lists}) != 1:
        return find(schema)
    firsts: dict[Any, int] = {}
    kinds = [tuple(v for v in place if not isinstance(v, (int, float))) for place in zip(*lists, strict=True)]
    places = [firsts.setdefault(kind, i) for i, kind in enumerate(kinds)]
    few = (
        [value[i] for i in firsts.values()] if isinstance(value, (list, tuple)) and value else value
        for value in schema.args_schema
    )
    found = find(type(schema)(schema.op, tuple(few), schema.kwargs_schema, schema.schema_info))
    # An answer about the tensors themselves, or with parts to move first, holds for these tensors only.
    if not hasattr(found, "needs_redistribute") or found.needs_redistribute:
        return find(schema)
    if found.output_spec is None:
        return found
    specs = dict(zip(firsts.values(), found.output_spec, strict=True))
    return type(found)(tuple(specs[i] for i in places))
