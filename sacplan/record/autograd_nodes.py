"""Autograd's nodes: which one runs, which op made it, and the Python numbers that nodes keep.

Autograd numbers nodes as it makes them. While an op is dispatched, the number that the *next* node will get can be
read. Dispatch modes run below autograd, so the op's own node exists by then: the first op that is seen at next number
n made node n - 1. The tables here have the next number as key; node m is looked up at m + 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sacplan.core.program import Event, StorageKind
from sacplan.record.storages import Storages
from sacplan.torch_compat.autograd import autograd_sequence_number, current_node_sequence_number, keeps_graph
from sacplan.torch_compat.private import without_torch_functions

_ALLOC, _FREE = int(Event.ALLOC), int(Event.FREE)

_IN_PLACE = (torch.ops.aten.mul_.Tensor, torch.ops.aten.div_.Tensor)
_KEEP_THEIR_SECOND = frozenset((torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, *_IN_PLACE))
_NODE_LIVES = "sacplan: the node lives"
"""A key of the dictionary that autograd nodes have for anomaly detection."""


class _NodeLives:
    """An object in a node's dictionary, which dies with the node. C++ nodes take no weak references."""


def keeps_a_number(func: Any, args: Any) -> bool:
    """Whether autograd saves the second argument, a Python number, as a tensor, which no saved-tensor hook sees."""
    if func not in _KEEP_THEIR_SECOND or isinstance(args[1], torch.Tensor):
        return False
    return args[0].requires_grad and torch.is_grad_enabled()  # off in the forward of a custom function


class KeptNumbers:
    """The tensors that autograd makes of Python numbers and keeps for the backward pass.

    ``x * 2.0`` saves the 2.0 as a tensor of eight bytes. On a CPU these are in the memory that is measured, and no
    saved-tensor hook sees them. So each is entered as a storage here, and freed when its node has run or has died.

    Args:
        nbytes: size of such a tensor; 0 if it is not in the device's memory.
        events, storages: the recorder's.
    """

    def __init__(self, nbytes: int, events: list[tuple[int, int]], storages: Storages) -> None:
        self._nbytes = nbytes
        self._events = events
        self._storages = storages
        self._kept: dict[int, list[int]] = {}  # autograd's next sequence number to storages
        self._ends: dict[int, weakref.ref[_NodeLives]] = {}  # kept storage to the object in its node
        self._awaited: Any = None  # the op on a local tensor that has the number of one on a DTensor
        # The latest kept storage: the output of its op, the next sequence number, and the storage.
        self.latest: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def keep(self, func: Any, args: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Enter the number that autograd keeps for an op of the forward pass, if there is one."""
        if not self._nbytes:
            return  # on a GPU these tensors lie on the host
        awaited, self._awaited = self._awaited, None
        if func is not awaited and not keeps_a_number(func, args):
            return
        # For a write to a view the engine runs ``CopySlices``, which is made next, around the op's own node.
        next_node = autograd_sequence_number() + (func in _IN_PLACE and args[0]._is_view())
        nbytes = self._nbytes << isinstance(args[1], complex)  # a complex number has two parts
        storage = self._storages.add_unseen(nbytes, StorageKind.OTHER)
        self._events.append((_ALLOC, storage))
        self._kept.setdefault(next_node, []).append(storage)
        if outputs:
            self.latest = weakref.ref(outputs[0]), next_node, storage

    def await_local(self, func: Any, args: Any) -> None:
        """Have the op on local tensors, which follows this op on a DTensor, enter the number that its node keeps."""
        if keeps_a_number(func, args):
            self._awaited = func

    def given_bytes(self, node: int | None, func: Any, args: Any) -> int:
        """Return the bytes of the kept number that a backward op reads, or 0 if it reads none.

        The node hands the op the tensor that it has kept, but a dispatch mode sees a Python number, as if the op made
        a tensor of it. The caller takes these bytes off the workspace of the op.
        """
        if node is None or func not in _KEEP_THEIR_SECOND or isinstance(args[1], torch.Tensor):
            return 0
        return self._nbytes if self._kept.get(node + 1) else 0

    @without_torch_functions
    def follow_latest(self) -> None:
        """Watch the node that keeps the latest number: the node of a branch that the loss does not need never runs.

        To be called at the next op, because autograd gives an output its node (``grad_fn``) only when the dispatch
        mode has returned.
        """
        assert self.latest is not None
        latest = ref, next_node, storage = self.latest
        self.latest = None
        if storage not in self._kept.get(next_node, ()):
            return  # freed already
        output = ref()
        if output is None:
            # No other op took the output, so nothing refers to its node.
            self._free(next_node, storage)
            return
        if output._is_view():
            return  # the node is inside another one; and autograd may be in the view's lock now
        node: Any = output.grad_fn
        if node is None or node._sequence_nr() + 1 != next_node:
            # Not the node of this op. A mode around this one, as an executor's, may run ops of its own before it
            # returns: they make no node, so look again at the next op. If one was made, the number stays until it ran.
            if autograd_sequence_number() == next_node:
                self.latest = latest
            return
        lives = node.metadata.setdefault(_NODE_LIVES, _NodeLives())
        self._ends[storage] = weakref.ref(lives, lambda _: self._free(next_node, storage))

    def node_ran(self, number: int) -> None:
        """Free the numbers of a node: autograd releases what a node saved once it has run."""
        for storage in tuple(self._kept.get(number + 1, ())):
            self._free(number + 1, storage)

    def _free(self, next_node: int, storage: int) -> None:
        self._ends.pop(storage, None)
        kept = self._kept.get(next_node, [])
        if storage in kept:
            kept.remove(storage)
            self._events.append((_FREE, storage))

    def stop(self) -> None:
        """Watch no node any more: what a graph frees after the step is not part of the step."""
        self._ends.clear()
        self.latest = None

    def restart(self) -> None:
        """Begin a new record."""
        self._kept.clear()
        self.stop()


class AutogradNodes:
    """Which node runs, and by node the op that made it.

    Args:
        numbers: freed when their node has run.

    Attributes:
        running: sequence number of the node that runs; None outside of the backward pass and while gradients are
            accumulated.
        runs: called when another node begins to run, with the op of the forward pass that made it, or -1.
    """

    def __init__(self, numbers: KeptNumbers) -> None:
        self.running: int | None = None
        self.runs: Callable[[int], None] = lambda op: None
        self._keeps = False  # whether the backward pass of ``running`` keeps its graph
        self._numbers = numbers
        self._ops: dict[int, int] = {}  # autograd's next sequence number to the first op run at it
        self._detached = set[int]()  # ops that make no node

    def note_op(self, func: Any, op: int) -> None:
        """Note an op. The first one at a number made the node, or is the first inside of a custom function.

        ``detach`` makes no node. An executor's pack hook may run detaches before the op that makes the node, so the
        next op overwrites a detach's entry.
        """
        number = autograd_sequence_number()
        first = self._ops.get(number)
        if first is None or first in self._detached:
            self._ops[number] = op
        if func is torch.ops.aten.detach.default:
            self._detached.add(op)

    def op_at(self, next_number: int) -> int:
        """Return the op that ran when autograd's next sequence number was this, or -1."""
        return self._ops.get(next_number, -1)

    def forward_op(self) -> int:
        """Return the op of the forward pass whose gradient the running node computes, or -1."""
        return -1 if self.running is None else self._ops.get(self.running + 1, -1)

    def follow(self) -> int | None:
        """Note which autograd node runs, and return its number (see ``running``).

        Also to be called before a tensor is unpacked: the node before is done when the tensor is recomputed.
        """
        number = current_node_sequence_number()
        if number != self.running:
            # With ``retain_graph`` the numbers stay until the graph goes. ``_keeps`` is of the node's own pass.
            if self.running is not None and not self._keeps:
                self._numbers.node_ran(self.running)
            self.running, self._keeps = number, keeps_graph()
            self.runs(self.forward_op())
        return number

    def restart(self) -> None:
        """Begin a new record."""
        self._ops.clear()
        self._detached = set()
