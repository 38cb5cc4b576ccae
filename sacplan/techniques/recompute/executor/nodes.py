"""Nodes and slots: a discarded op that can run again, and its outputs.

A node holds the arguments of one op, each a kept tensor or a slot of another node; a slot gets a value when its
node has run. A node is pending until ``settle``: from then on the slots that are still referenced have their
values, and the arguments are released. Only ``RecipeNode.compute`` runs the op.

A plan may have a node run several times (``RecipeNode.times``). All runs but the last pass their outputs on to the
nodes that run in the same recomputation, and the outputs are dropped after the last of these has read them. So a long
chain is recomputed from its beginning, keeping little, each time the backward pass reaches an earlier part of it
(see ``solvers/rotor/rotor.py``).

A node that writes in place (``relu_``) overwrites the value of its first argument's slot if nothing else needs that
value, and otherwise a copy of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sacplan.core.elements import CallSite
from sacplan.errors import RecipeError
from sacplan.record.executor_notes import noted
from sacplan.techniques.recompute.executor.draws import Draw
from sacplan.techniques.runtime.recording import here
from sacplan.techniques.runtime.saved import SavedStorage
from sacplan.techniques.runtime.tensors import View, view_of
from sacplan.techniques.runtime.writes import last_write_to
from sacplan.torch_compat.kernel_settings import kernel_settings, set_kernel_settings
from sacplan.torch_compat.ops import ArgumentPlace, OpTraits, is_between_ranks, tensors_in, waited_for


class Slot:
    """One output of a discarded op, and its value once that has been recomputed.

    Made while the op's output is alive; leaves ``table`` when the output's storage dies.

    Attributes:
        tensor: the output itself, as long as it is alive.
        written: whether the storage has been written in place since.
        readers: how many nodes have it as an argument.
        lent: the custom ``autograd.Function`` whose backward got the value itself, and may write to it, and the version
            that the value had then; None if there is none.
    """

    def __init__(
        self,
        node: RecipeNode,
        tensor: torch.Tensor,
        view: View,
        version: int,
        storage: Any,
        key: int,
        table: dict[int, Slot],
    ) -> None:
        self.node = node
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage, lambda _: table.pop(key, None))
        self.version = version
        self.view = view
        self.value: torch.Tensor | None = None
        self.written = False
        self.readers = 0
        self.lent: tuple[str, int] | None = None

    def view_of(self, tensor: torch.Tensor) -> View:
        """Return how the tensor views the storage: the slot's own ``view`` object if it is the whole output."""
        view = view_of(tensor)
        return self.view if view == self.view else view

    def take(self, view: View) -> torch.Tensor:
        """Return the value, or a view of it.

        Raises:
            RecipeError: a custom function that borrowed the value has written to it.
        """
        assert self.value is not None
        if self.lent is not None and self.value._version != self.lent[1]:
            raise RecipeError(
                f"{self.lent[0]} wrote in its backward pass to a tensor of shape {tuple(self.view[0])} that it had "
                f"saved, made by {self.node}, and the plan needs it again. Write to a copy, tensor.clone(); or profile "
                "a step in which that happens, and plan again; or, to run this part as it runs without a plan, plan "
                f"with never=[{self.node.unit or '*'!r}]."
            )
        return self.view_on(self.value, view)

    def lend(self, function: str, view: View) -> torch.Tensor:
        """Return the value, or a view that shares its version counter, and note the function that may write to it."""
        tensor = self.take(view)
        assert self.value is not None
        if view is not self.view:
            with torch.no_grad():
                tensor = self.view_on(self.value, view)
        self.lent = self.lent or (function, self.value._version)
        return tensor

    def view_on(self, base: torch.Tensor, view: View) -> torch.Tensor:
        """Return a view of ``base``, a tensor with the value's memory layout."""
        if view is self.view:
            return base
        size, stride, offset, dtype = view
        if base.dtype != dtype:
            elements = base.untyped_storage().nbytes() // base.element_size()
            base = torch.as_strided(base, (elements,), (1,), 0).view(dtype)
        return torch.as_strided(base, size, stride, offset)


@dataclass(eq=False)
class HeldArg:
    """An argument that is a kept tensor.

    Attributes:
        place: where it stands.
        tensor: an alias; None where ``saved`` has the contents in another place.
        version, before: the tensor's version, and the number of the last write that a mode saw to its storage.
        saved: the storage, where its contents may be taken away; else None.
    """

    place: ArgumentPlace
    tensor: torch.Tensor | None
    version: int
    before: int
    saved: SavedStorage | None
    view: View | None = None
    requires_grad: bool = False

    def __post_init__(self) -> None:
        if self.saved is not None:
            self.saved.add(self)

    def let_go(self, version: int) -> bool:
        """Let go of the tensor, see ``Holder``."""
        tensor = self.tensor
        if (
            tensor is None
            or not tensor._version == self.version == version
            or last_write_to(tensor.untyped_storage()) != self.before
        ):
            return False  # already let go of; or written, which ``take`` reports when the op runs again
        self.view, self.requires_grad, self.tensor = view_of(tensor), tensor.requires_grad, None
        return True

    def take(self, node: RecipeNode) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RecipeError: it is not what it was in the forward pass.
        """
        tensor = self.tensor
        if tensor is None:
            assert self.saved is not None
            assert self.saved.stand is not None
            assert self.view is not None
            tensor = self.saved.stand.take(self.view)
            if self.requires_grad:
                tensor.requires_grad_()
        storage = tensor.untyped_storage()
        if self.tensor is not None and (
            tensor._version != self.version or last_write_to(storage) != self.before
        ):
            raise RecipeError(
                f"{node} has to run again in the backward pass, but an argument of shape "
                f"{tuple(tensor.shape)} was written in place since. Write to a copy; or, to keep the "
                f"op's output, {node.pin}."
            )
        if not storage.nbytes() and tensor.numel():
            raise RecipeError(
                f"{node} has to run again in the backward pass, but an argument of shape {tuple(tensor.shape)} "
                "has been freed: a parameter that fully_shard gathers only for its own module. Plan with "
                "sacplan.profile(..., ranks=sacplan.FSDP2(...)), so that no unit contains several such modules."
            )
        return tensor


SlotArg = tuple[ArgumentPlace, Slot, View, bool]
"""An argument that is a view of a slot: its place, slot and view, and whether it requires a gradient."""


@dataclass(eq=False)
class RecipeNode:
    """A discarded op, ready to run again.

    Attributes:
        args, kwargs: the op's arguments, with None for tensors.
        held, slot_args: the tensors among them: kept ones, and views of slots.
        rng: the draw of a random op.
        settings: the settings that chose its kernel; None if no setting does.
        outputs: its slots, as weak references; empty once it is settled.
        recorded: the index of the op in a recording; -1 where none was made.
        times: how many runs are left. The node settles after the last one.
    """

    unit: str
    traits: OpTraits
    site: CallSite
    times: int
    rng: Draw | None
    recorded: int
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)  # some kernels look at it
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    held: list[HeldArg] = field(default_factory=list)
    slot_args: list[SlotArg] = field(default_factory=list)
    outputs: list[weakref.ref[Slot] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = kernel_settings() if self.traits.chooses_kernel else None

    def __str__(self) -> str:
        name, occurrence, place = self.site
        where = f"unit {self.unit!r}, place {place!r}" if place else f"unit {self.unit!r}"
        return f"{name} #{occurrence} of {where}"

    @property
    def pin(self) -> str:
        """Advice for messages: how to make a plan that keeps the op's output."""
        op = self.traits.name.rpartition(".")[0]
        return f"plan with keep=[{op!r}] (this op everywhere) or keep=[{self.unit or '*'!r}] (the whole unit)"

    @property
    def pending(self) -> bool:
        """Whether the node may still have to run."""
        return bool(self.outputs)

    def compute(self) -> Sequence[torch.Tensor]:
        """Run the op on its arguments, whose slots have values, and return its outputs.

        Nothing is stored or released. The exception is an op that writes in place: it takes over its argument's value
        if nobody else needs that.

        Raises:
            RecipeError: an argument is not what it was in the forward pass (its version, or the last write that a mode
                saw), or the random numbers cannot be drawn again.
        """
        # Copies: a node may run several times, and must not keep the tensors that one run puts in.
        args, kwargs = self.args.copy(), self.kwargs.copy() if self.kwargs else self.kwargs
        for held in self.held:
            _put(args, kwargs, held.place, held.take(self))
        written: torch.Tensor | None = None  # what an op writes in place: the whole value of its slot
        taken: Slot | None = None
        for place, slot, view, requires_grad in self.slot_args:
            tensor = slot.take(view)
            if place == 0 and self.traits.in_place:
                written = slot.value
                assert written is not None
                # Write into the value itself only if nobody else reads it, and either this is the last run or the
                # slot's node can make the value again for the next one.
                if slot.readers == 1 and (self.times == 1 or slot.node.pending):
                    taken = slot
                else:
                    written = _copy(written)
                    tensor = slot.view_on(written, view)
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            _put(args, kwargs, place, tensor)
        # Only now, since the op may read the slot in another argument as well.
        if taken is not None:
            taken.value = None
        noted.again = self.recorded  # the op of the recording that runs now
        # ``OutsideForward`` puts the caller's mode back.
        torch._C._set_grad_enabled(self.grad_mode)
        if self.settings is not None and self.settings != (now := kernel_settings()):
            set_kernel_settings(self.settings)
            try:
                out = self.traits.func(*args, **kwargs)
            finally:
                set_kernel_settings(now)
        elif self.rng is None:
            out = self.traits.func(*args, **kwargs)
            if is_between_ranks(self.traits.func):
                out = waited_for(out)
        else:
            same, out = self.rng.again(self.traits.func, args, kwargs)
            if not same:
                raise RecipeError(
                    f"{self} has to run again in the backward pass, but which random numbers it drew is not known: "
                    "another thread drew from the same generator, when the op first ran or now. Give that thread a "
                    f"torch.Generator of its own; or, to keep the op's output, {self.pin}."
                )
        noted.again = -1
        return (written,) if written is not None else tensors_of(out)

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the slots that are still referenced their values, and release the arguments."""
        for slot, tensor in self._pairs(tensors):
            slot.value = tensor
        self.args, self.kwargs, self.rng = [], {}, None
        self.held, self.slot_args, self.outputs = [], [], []

    def pass_on(self, tensors: Sequence[torch.Tensor], passing: Mapping[Slot, int]) -> None:
        """Give only the slots in ``passing`` their values; the node will run again."""
        self.times -= 1
        for slot, tensor in self._pairs(tensors):
            if slot in passing:
                slot.value = tensor

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Yield the slots that are still referenced, each with the op's output for it."""
        for i, ref in enumerate(self.outputs):
            slot = ref() if ref is not None else None
            if slot is not None:
                # Views that autograd saved are sizes, strides and offsets that hold only for the same memory layout.
                if len(tensors) != len(self.outputs) or view_of(tensors[i]) != slot.view:
                    raise RecipeError(
                        f"output {i} of {self} has another shape or memory layout on recomputation than in the "
                        f"forward pass ({tuple(slot.view[0])}, strides {slot.view[1]}). To keep its output, {self.pin}."
                    )
                yield slot, tensors[i]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, with its storage's size and its memory layout."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    # The whole storage: other views of the slot may reach memory that this tensor leaves out.
    whole = torch.as_strided(tensor, (elements,), (1,), 0).clone()
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


def _put(args: list[Any], kwargs: dict[str, Any], place: Any, tensor: torch.Tensor) -> None:
    """Put an argument in its place. Lists among the node's arguments are tuples; one is copied before it is changed."""
    if type(place) is int:
        args[place] = tensor
        return
    where, index = place
    holder: Any = kwargs if isinstance(where, str) else args
    if index < 0:
        holder[where] = tensor
    else:
        if isinstance(holder[where], tuple):
            holder[where] = list(holder[where])
        holder[where][index] = tensor


def tensors_of(out: Any) -> Sequence[torch.Tensor]:
    """Return the tensors among an op's outputs."""
    return (out,) if isinstance(out, torch.Tensor) else tuple(tensors_in(out))


def compute(wanted: Slot, view: View) -> torch.Tensor:
    """Return a view of a slot's value, after running the nodes that it needs. Only inside an ``OutsideForward``.

    The nodes run in a depth-first post-order of the graph of pending nodes, so each runs once and after its arguments.
    Values of nodes that will run again are passed on (``_passing``), and dropped when the last reader has run.
    """
    order = _needed(wanted.node)
    # A node runs in the forward pass's gradient mode. Below autograd's dispatch keys, it is not recorded even so.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        passing = _passing(order, wanted)
        order.reverse()
        try:
            while order:  # nothing here may hold a node or a slot for longer than it is needed
                _run(order.pop(), passing)
            return wanted.take(view)
        finally:
            # Also after an error: a value left behind would be taken for one that may stay.
            for slot in passing:
                slot.value = None


def _run(node: RecipeNode, passing: dict[Slot, int]) -> None:
    """Run a node, and drop those of its arguments that no other node of this recomputation reads."""
    # Before the node settles and forgets its arguments.
    taken = [arg[1] for arg in node.slot_args if arg[1] in passing]
    if node.times > 1:
        node.pass_on(node.compute(), passing)
    else:
        node.settle(node.compute())
    for slot in taken:
        passing[slot] -= 1
        if not passing[slot]:
            slot.value = None
            del passing[slot]


def _needed(node: RecipeNode) -> list[RecipeNode]:
    """Return the nodes that have to run for this one, itself included, each after those that it needs."""
    # Most recomputations are of one op whose arguments are all there.
    if node.outputs and all(arg[1].value is not None for arg in node.slot_args):
        return [node]
    order: dict[RecipeNode, None] = {}
    # A stack of our own, since a chain of nodes may be longer than Python's recursion limit. True: all that the
    # node needs is in the order.
    stack = [(node, False)]
    while stack:
        current, ready = stack.pop()
        # Settled, so its values are there; or reached before, by another way.
        if not current.outputs or current in order:
            continue
        if not ready:
            missing = [a[1].node for a in reversed(current.slot_args) if a[1].value is None]
            if missing:
                stack.append((current, True))
                stack.extend((other, False) for other in missing)
                continue
        order[current] = None
    return list(order)


def _passing(order: Sequence[RecipeNode], wanted: Slot) -> dict[Slot, int]:
    """Return the slots whose values this recomputation drops again, each with its number of reads until then."""
    n_reads: dict[Slot, int] = {}
    for node in order:
        for _, slot, _, _ in node.slot_args:
            if slot.value is None and slot.node.times > 1:
                n_reads[slot] = n_reads.get(slot, 0) + 1
    if wanted.node.times > 1:
        n_reads[wanted] = n_reads.get(wanted, 0) + 1
    return n_reads


_lock = threading.RLock()  # autograd has a thread for each device, and recipes are shared


class OutsideForward:
    """A context for ops that belong to no forward pass, even if one is running. One thread at a time."""

    def __enter__(self) -> None:
        _lock.acquire()
        self._recorder = recorder = here.recorder
        if recorder is not None:
            self._paused = recorder.paused
            recorder.paused = True
        self._grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._autocast: Any = None
        if torch._C._is_any_autocast_enabled():
            self._autocast = torch._C._DisableAutocast()
            self._autocast.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*exc_info)
        torch._C._set_grad_enabled(self._grad_mode)
        if self._recorder is not None:
            self._recorder.paused = self._paused
        _lock.release()
