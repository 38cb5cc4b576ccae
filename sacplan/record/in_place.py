"""Put back the in-place writes that PyTorch leaves out under a dispatch mode, so that recordings are of plain steps.

Under any Python dispatch mode torch takes every tensor for a tensor subclass (``isTensorSubclassLike`` in
``ATen/TensorSubclassLikeUtils.h``), and its C++ code then avoids writing in place. Seen from a mode there is one more
temporary, as large as the result:

- The autograd engine adds up the gradients that several nodes send to one (``can_accumulate_inplace`` in
  ``torch/csrc/autograd/input_buffer.cpp``): in place, if gradients are off and it holds the last reference to the
  first one, which must be dense; ``old + new`` under a mode.
- Backward formulas fill an array of zeros: ``index_put``, ``scatter_add`` and others, where the plain step
  has ``index_put_`` and ``scatter_add_``.

So the recorder shows each op of the backward pass to :class:`InPlaceWrites`. When the step is over,
:meth:`InPlaceWrites.settle` rewrites the ops that the plain step does in place: the new storage takes over the identity
of the old one, and nothing is allocated. Whether the engine held the last reference shows in the events: then the old
storage is freed before the next op runs.

An addition of the engine's is told from one in a formula by three signs. The engine adds after a node has returned, so
no other op of the same node follows. The tensor that it adds to came from another node, unless the node has two edges
to the same one. And no Python code called it.

Found by comparing the ops of plain steps (``torch.profiler``) with those under an empty mode, torch 2.13, and by
reading ``input_buffer.cpp``, ``accumulate_grad.h`` and ``FunctionsManual.cpp`` in ``torch/csrc/autograd``.

Other formulas run altogether different ops under a mode (``prod``, ``cumprod``, the full reduction ``max()``, and
more). For a CPU the peak of the plain formula is measured (``device/workspace.py``), and :func:`plain_formulas` puts it
in place of the temporaries that were recorded. For a GPU the temporaries stay as recorded.

Not covered: in the forward pass, the mask that math attention adds and the bias that a linear layer adds for an
input that is not contiguous. Both stay out of place here, one temporary too many for a moment, since in a unit with a
plan they run out of place: the executor's own mode is on there. The backward pass of a planned step runs under no mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import torch

from sacplan.core.program import Event, Op, Phase, StorageKind, Tensor
from sacplan.torch_compat.autograd import called_by_autograd, current_node_has_edges_to_one_node
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.private import is_dense

_ADD = torch.ops.aten.add.Tensor
# Ops that backward formulas run on zeros that they have just made; the plain step has the op with an underscore.
_FILLS = {
    torch.ops.aten.index_put.default: "aten._index_put_impl_.default",
    torch.ops.aten.scatter_add.default: "aten.scatter_add_.default",
    torch.ops.aten.index_add.default: "aten.index_add_.default",
    torch.ops.aten.scatter.src: "aten.scatter_.src",
    torch.ops.aten.scatter.value: "aten.scatter_.value",
    torch.ops.aten.put.default: "aten.put_.default",
    torch.ops.aten.masked_scatter.default: "aten.masked_scatter_.default",
    torch.ops.aten.masked_fill.Scalar: "aten.masked_fill_.Scalar",
    torch.ops.aten.index_fill.int_Scalar: "aten.index_fill_.int_Scalar",
}
CANDIDATES = frozenset((_ADD, *_FILLS))
# The only formula whose masked fill depends on modes; ``xlogy`` and others fill out of place in every step.
_MASKED_FILLS_OF = "aten.atan2"
OUT_OF_PLACE = {"aten.add_.Tensor": "aten.add.Tensor"} | {
    name: f"aten.{func.overloadpacket.__name__}.{func._overloadname}" for func, name in _FILLS.items()
}
"""Name of an op in the plain step to the name of the op that was recorded for it."""


@dataclass(frozen=True, slots=True)
class _Write:
    """An op that the plain step may do in place, under the name that it has there."""

    op: int
    name: str
    old: int
    new: int


class InPlaceWrites:
    """Collects, while a step is recorded, the ops of the backward pass that the plain step does in place."""

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._sums: list[_Write] = []  # of the node that runs now: the engine's, if nothing else follows
        self._node: int | None = None
        self._clones: set[int] = (
            set()
        )  # that this node made: no zeros, but what ``CopySlices`` gives a formula
        self._first_storage = 0  # the first one that was made while this node ran
        self._deferred: Any = None  # the last op on a tensor that stands for its local part

    def restart(self) -> None:
        """Begin a new record."""
        self._writes.clear()
        self._sums.clear()
        self._node = None
        self._deferred = None

    def defers(self, func: Any) -> None:
        """Note an op on a DTensor. The op on local tensors that follows stays out of place in the plain step, too.

        In the plain step the DTensor is the subclass that keeps PyTorch from writing in place.
        """
        self._deferred = func

    def saw(self, node: int | None, call: Call, index: int, op: Op, n_storages: int) -> None:
        """Note one op of the backward pass.

        Args:
            node: sequence number of the autograd node that runs.
            call, index, op: the call, and the op that was recorded for it.
            n_storages: how many storages there were before the op.
        """
        # Sums wait until it is known whether the engine made them: they are dropped if another op of the same node
        # follows, and committed if another node begins.
        if node != self._node:
            self._commit()  # the node before has returned, so its last additions were the engine's
            self._node = node
            self._clones.clear()
            self._first_storage = n_storages
        if call.func is torch.ops.aten.clone.default:
            self._clones.update(op.writes)
        write = None
        if call.func is self._deferred:
            self._deferred = None
        elif call.func in CANDIDATES and len(op.writes) == 1 and op.reads and called_by_autograd():
            write = self._candidate(call, index, op)
        if write is None or call.func is not _ADD:
            self._sums.clear()  # they were the formula's
            if write is not None:
                self._writes.append(write)
        else:
            self._sums.append(write)

    def _commit(self) -> None:
        self._writes.extend(self._sums)
        self._sums.clear()

    def _candidate(self, call: Call, index: int, op: Op) -> _Write | None:
        """Return the write in place that an op may be in the plain step, by its arguments; None for none."""
        # None leaves the op as recorded, which may be one temporary too many; a wrong candidate would be a peak that is
        # too low. Whether anybody else holds the old storage, ``settle`` finds out from the events.
        func, args, out = call.func, call.args, call.returned
        first, old, new = args[0], op.reads[0], op.writes[0]
        # In place, the result has the layout of the first argument. The engine asks for a dense one (``accumulate`` in
        # input_buffer.cpp).
        if first.shape != out.shape or first.dtype != out.dtype or not is_dense(first.shape, first.stride()):
            return None
        own = old >= self._first_storage  # made by this node
        if func is not _ADD:  # a formula fills only zeros that it has made itself
            return _Write(index, _FILLS[func], old, new) if own and old not in self._clones else None
        if (
            len(args) != 2
            or not isinstance(args[1], torch.Tensor)
            or len(op.reads) != 2  # a tensor added to itself is referred to twice
            or torch.is_grad_enabled()  # create_graph: the engine then adds out of place
            or first._is_view()  # its base refers to the storage, too, and lives as long
            or (own and not current_node_has_edges_to_one_node())
        ):
            return None
        return _Write(index, "aten.add_.Tensor", old, new)

    def settle(
        self,
        ops: Sequence[Op],
        events: Sequence[tuple[int, int]],
        kinds: list[StorageKind | None],
        backward_born: Sequence[bool],
    ) -> tuple[list[Op], list[tuple[int, int]], list[int]]:
        """Return ops and events of the plain step, and for each storage the one that it is in the plain step.

        A candidate is written in place if its old storage is freed right after the op: nobody else held it. ``kinds``
        is changed: where the new storage is known to be a gradient, for example, the old one now is that gradient.
        """
        self._commit()
        same = list(range(len(kinds)))
        # Sums of gradients and zeros that a formula fills: both are made in the backward pass.
        candidates = {w.op: w for w in self._writes if backward_born[w.old] and _is_plain(w, ops)}
        if not candidates:
            return list(ops), list(events), same
        gone: set[int] = set()
        done: dict[int, _Write] = {}
        # ``awaited`` is the candidate whose op ran last. It is done if its old storage is freed before any other op.
        awaited: _Write | None = None
        for code, arg in events:
            if code == Event.OP:
                awaited = candidates.get(arg)
            elif code == Event.FREE and awaited is not None and arg == awaited.old:
                done[awaited.op] = awaited
                gone.add(awaited.old)
                # Through ``same``: several sums in a row all end up on the first storage.
                same[awaited.new] = same[awaited.old]
                if kinds[awaited.new] is not None:
                    kinds[same[awaited.old]] = kinds[awaited.new]
                awaited = None
        if not done:
            return list(ops), list(events), same
        first = min(done)
        settled = [op if i < first else _renamed(op, done.get(i), same) for i, op in enumerate(ops)]
        storage_events = (Event.ALLOC, Event.FREE)
        kept = [
            (code, same[arg]) if code in storage_events else (code, arg)
            for code, arg in events
            if not (code == Event.FREE and arg in gone)
        ]
        return settled, kept, same


def _is_plain(write: _Write, ops: Sequence[Op]) -> bool:
    """Whether the plain step writes in place: of masked fills only those of some formulas, told by the forward op."""
    forward = ops[write.op].forward_of
    if write.name != _FILLS[torch.ops.aten.masked_fill.Scalar]:
        return True
    return forward >= 0 and ops[forward].name.startswith(_MASKED_FILLS_OF)


def _renamed(op: Op, write: _Write | None, same: Sequence[int]) -> Op:
    reads, writes, mutates = (
        tuple(same[s] for s in storages) for storages in (op.reads, op.writes, op.mutates)
    )
    if write is not None:
        return msgspec.structs.replace(op, name=write.name, reads=reads, writes=(), mutates=writes)
    if (reads, writes, mutates) == (op.reads, op.writes, op.mutates):
        return op
    return msgspec.structs.replace(op, reads=reads, writes=writes, mutates=mutates)


_ENGINES_SUMS = ("aten.add.Tensor", "aten.add_.Tensor")  # no formula below ends with one


def plain_formulas(
    ops: Sequence[Op],
    events: Sequence[tuple[int, int]],
    formulas: Mapping[int, tuple[int, int]],
    tensors: Sequence[Tensor],
) -> tuple[list[Op], list[tuple[int, int]]]:
    """Correct the memory of backward formulas that run other ops in the plain step.

    The temporaries of such a formula become one workspace of known size. Its ops stay, without the storages that are
    freed before the formula returns, and the last one has the workspace.

    Args:
        ops, events: as settled.
        formulas: op of the forward pass to the bytes that its backward formula takes at its peak beyond its gradients:
            where the incoming gradient is contiguous, and where it is expanded.
        tensors: the program's.
    """
    if not formulas:
        return list(ops), list(events)
    # Ops of one formula follow each other. The engine's sum of gradients follows under the same node, and is left out.
    of_formula = (op.forward_of if op.phase is Phase.BACKWARD else -1 for op in ops)
    runs = []
    for forward, group in groupby(enumerate(of_formula), key=itemgetter(1)):
        run = [i for i, _ in group] if forward in formulas else []
        while run and ops[run[-1]].name in _ENGINES_SUMS:
            run.pop()
        runs.append(run)
    end_of: dict[int, int] = {}  # storage to the last op of its formula's run
    last_of: dict[int, int] = {}
    for run in runs:
        for i in run:
            last_of[i] = run[-1]
            end_of.update(dict.fromkeys(ops[i].writes, run[-1]))
    # A storage that is freed while its formula runs is a temporary. Those that outlive the formula are its results, or
    # gradients that are added up later.
    temporaries: set[int] = set()
    latest = -1
    kept: list[tuple[int, int]] = []
    for code, arg in events:
        if code == Event.OP:
            latest = arg
        elif code == Event.FREE and arg in end_of and last_of.get(latest) == end_of[arg]:
            temporaries.add(arg)
            continue
        kept.append((code, arg))
    settled = list(ops)
    for run in runs:
        for i in run:
            writes = tuple(s for s in ops[i].writes if s not in temporaries)
            settled[i] = msgspec.structs.replace(ops[i], writes=writes, workspace_bytes=0)
        if run:
            forward = ops[run[0]].forward_of
            inside = formulas[forward][_is_upstream_expanded(ops[forward], [ops[i] for i in run], tensors)]
            settled[run[-1]] = msgspec.structs.replace(settled[run[-1]], workspace_bytes=inside)
    return settled, kept


def _is_upstream_expanded(forward: Op, formula: Sequence[Op], tensors: Sequence[Tensor]) -> bool:
    """Whether the gradient that comes into a formula is expanded (has a stride of 0).

    This gradient has the shape of an output of the forward op, and no op of the formula made it.
    """
    shapes = {tensors[t].shape for t in forward.outputs if t >= 0}
    made = {s for op in formula for s in op.writes}
    return any(
        t.shape in shapes
        and t.storage not in made
        and any(not s for s, n in zip(t.stride, t.shape, strict=True) if n > 1)
        for op in formula
        for t in (tensors[i] for i in op.inputs if i >= 0)
    )
