"""The slots of one call of a unit: which storages hold what a discarded op made, and the nodes that make it again.

``SlotTable.note`` decides whether an op of the plan may really be discarded in this call. Its answer "no" is always
safe: autograd then packs the tensor itself, as for any op that the plan keeps, and the only price is memory. Its answer
"yes" is a promise that running the op again gives the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.techniques.recompute.executor.nodes import HeldArg, RecipeNode, Slot, tensors_of
from sacplan.techniques.runtime.saved import SavedOf
from sacplan.techniques.runtime.tensors import history_free_aliases, version_of, view_of
from sacplan.techniques.runtime.writes import last_writes, note_write
from sacplan.torch_compat.ops import ArgumentPlace, OpTraits, is_ordinary_tensor, op_traits, tensors_in
from sacplan.torch_compat.private import counts_writes_of, is_plain, storage_key

_RANDOM_DEVICES = ("cpu", "cuda", "meta")

_OnStorage = tuple[torch.Tensor, Any, int]
"""An argument or output of an op, its storage, and that storage's key."""


class SlotTable:
    """By storage, the slot of the discarded output on it, while the output is alive and nobody has written to it.

    Args:
        saved_of: gives what the call has saved on a storage; None where nothing is taken away.
    """

    def __init__(self, saved_of: SavedOf | None = None) -> None:
        self._saved_of = saved_of
        self._slots: dict[int, Slot] = {}

    def clear(self) -> None:
        """End the call: from now on only handles and nodes hold slots."""
        self._slots.clear()

    def slot_of(self, t: torch.Tensor) -> Slot | None:
        """Return the slot of a tensor's storage if the storage still holds what the discarded op wrote."""
        storage = t.untyped_storage()
        slot = self._slots.get(storage_key(storage))
        if slot is None or slot.storage() is not storage or slot.version != version_of(t):
            return None  # it was never discarded; or the address was reused; or the storage was written since
        return slot

    def note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the storages that an op is about to write in place; from here on their tensors are kept.

        A handle that autograd got before must not give the new contents for the old ones: unpacking it raises.
        """
        traits = op_traits(func)
        for t in tensors_in(traits.written(args, kwargs)):
            if is_plain(t):
                storage = t.untyped_storage()
                key = storage_key(storage)
                # Also where no slot is known: a node may hold a tensor on this storage as a kept argument.
                note_write(key)
                slot = self._slots.pop(key, None)
                if slot is not None and slot.storage() is storage:  # else the address was reused
                    slot.written = True

    def before_write(self, traits: OpTraits, args: Any, kwargs: Any) -> Slot | None:
        """Note what an op is about to write. Return the slot that it overwrites, if a node can overwrite it again.

        That needs the slot's own tensor, or a view of it: a write through an alias (``t.data``) may not bump the
        tensor's version.
        """
        slot = self.slot_of(args[0]) if traits.in_place and is_plain(args[0]) else None
        self.note_write(traits.func, args, kwargs)
        return slot if slot is not None and counts_writes_of(slot.tensor(), args[0]) else None

    def note(self, node: RecipeNode, args: Any, kwargs: Any, out: Any, overwritten: Slot | None) -> None:
        """Complete the node of an op that has run, and make slots for its outputs, unless the output must be kept.

        The cheap questions come first: this runs for every discarded op of every step.

        Args:
            node: a new node for the op, without its arguments.
            args, kwargs, out: of this call.
            overwritten: for an op that writes in place, what ``before_write`` returned.
        """
        traits = node.traits
        # Each ``return`` keeps the output: autograd then packs the tensor itself. The functions below say why.
        if _overwrites_a_kept_value(traits, overwritten):
            return
        # A batch norm writes its running statistics. It runs again without them, or they would be updated twice.
        left_out = traits.left_out(args)
        if left_out:
            args = [None if i in left_out else a for i, a in enumerate(args)]
        args, kwargs, places, inputs = traits.split(args, kwargs)
        outputs = tensors_of(out)
        if (
            not _views_describe_all(outputs, inputs)
            or _is_copy_that_nobody_awaits(kwargs)
            or _generator_is_ambiguous(traits, inputs)
        ):
            return
        taken, made = _on_storages(inputs), _on_storages(outputs)
        if _returns_an_input(traits, taken, made):
            return
        node.args, node.kwargs = args, kwargs
        # In place, there is one output, and the argument on its storage is the value before the write.
        self._take(node, places, taken, made[0][2] if traits.in_place else None, overwritten)
        self._give(node, made, overwritten)

    def _take(
        self,
        node: RecipeNode,
        places: Sequence[ArgumentPlace],
        taken: Sequence[_OnStorage],
        written_key: int | None,
        overwritten: Slot | None,
    ) -> None:
        """Give a node its arguments: slots where something is discarded, else aliases of the tensors."""
        held = []
        for place, (t, storage, key) in zip(places, taken, strict=True):
            slot = self._slots.get(key)
            # ``before_write`` has taken this slot out of the table already.
            if key == written_key:
                slot = overwritten
            elif slot is not None and (slot.storage() is not storage or slot.version != t._version):
                slot = None  # as in ``slot_of``, which would ask for the storage again
            if slot is None:
                held.append((place, t, key))
            else:
                # Nodes are counted, not arguments: ``x * x`` reads a slot once.
                slot.readers += all(slot is not arg[1] for arg in node.slot_args)
                node.slot_args.append((place, slot, slot.view_of(t), t.requires_grad))
        if held:
            aliases = history_free_aliases([t for _, t, _ in held])
            for alias, (place, t, key) in zip(aliases, held, strict=True):
                # Some kernels look at ``requires_grad`` (see ``RecipeNode.grad_mode``), which an alias without
                # history has lost.
                if t.requires_grad:
                    alias.requires_grad_()
                saved = self._saved_of(t) if self._saved_of is not None else None
                node.held.append(HeldArg(place, alias, t._version, last_writes.get(key, 0), saved))

    def _give(self, node: RecipeNode, made: Sequence[_OnStorage], overwritten: Slot | None) -> None:
        """Make the slots of a node's outputs."""
        slots: dict[int, Slot] = {}
        for t, storage, key in made:
            if key in slots:
                node.outputs.append(None)  # two outputs on one storage: the first has its slot
                continue
            if overwritten is None:
                view, version = view_of(t), t._version
            else:  # inside a dispatch mode PyTorch has not counted the write yet; it does when the op returns
                view, version = overwritten.view, t._version + 1
                t = t if t._base is None else t._base  # the whole, if a view of it was written
            slots[key] = slot = Slot(node, t, view, version, storage, key, self._slots)
            node.outputs.append(weakref.ref(slot))
        self._slots.update(slots)


def _on_storages(tensors: Sequence[torch.Tensor]) -> list[_OnStorage]:
    return [(t, storage := t.untyped_storage(), storage_key(storage)) for t in tensors]


# --- why an output is kept although the plan discards it -----------------------------------------------------


def _overwrites_a_kept_value(traits: OpTraits, overwritten: Slot | None) -> bool:
    """Whether an op wrote in place a value that no node can make again, so that the op cannot run again either."""
    return traits.in_place and overwritten is None


def _views_describe_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether there are outputs, and size, strides and storage say everything about all tensors.

    Slots and nodes record nothing else: a wrapper subclass, a quantized or a nested tensor would come back as a plain
    one, and an inference tensor has no version that shows a write. Without an output there is nothing that autograd
    could ask for.
    """
    return bool(outputs) and all(map(is_ordinary_tensor, (*outputs, *inputs)))


def _is_copy_that_nobody_awaits(kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is a ``non_blocking`` copy. The program synchronizes with it, but not with a copy made again."""
    return bool(kwargs.get("non_blocking"))


def _generator_is_ambiguous(traits: OpTraits, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the generator that a random op drew from is unknown: ``draw_of`` reads it from the tensors' device."""
    if not traits.random:
        return False
    return len({t.device for t in inputs}) != 1 or inputs[0].device.type not in _RANDOM_DEVICES


def _returns_an_input(traits: OpTraits, taken: Sequence[_OnStorage], made: Sequence[_OnStorage]) -> bool:
    """Whether an op returned memory of an input, as ``_unsafe_view`` does, though its schema declares no alias.

    The node would hold as an argument what it is meant to free. Ops that write in place are meant to return theirs.
    """
    return not traits.in_place and any(key == other for _, _, key in made for _, _, other in taken)
