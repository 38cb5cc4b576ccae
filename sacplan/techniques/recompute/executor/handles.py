"""Handles: the objects that autograd keeps in place of a unit's tensors.

A discarded tensor leaves a handle on its slot. A kept one is packed with its version.

A saved-tensor hook disables autograd's own check for in-place writes (``torch/csrc/autograd/saved_variable.cpp``), so
handles check for such writes themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from sacplan.errors import RecipeError
from sacplan.techniques.recompute.executor.nodes import OutsideForward, Slot, compute
from sacplan.techniques.runtime.saved import SavedStorage
from sacplan.techniques.runtime.tensors import View, checksum, history_free_aliases, version_of, view_of
from sacplan.torch_compat.local_tensors import Wrapping, held_base, local_part


@dataclass(slots=True)
class FirstStep:
    """Whether a unit's discarded tensors leave checksums: ``pending`` until the first has been compared."""

    pending: bool


class RecipeHandle:
    """The handle of a discarded tensor."""

    def __init__(
        self, slot: Slot, tensor: torch.Tensor, first_step: FirstStep, saved: SavedStorage | None = None
    ) -> None:
        self.saved = saved
        self.slot = slot
        self.view = slot.view_of(tensor)
        self.original = weakref.ref(tensor)
        self.first_step = first_step
        self.checksum: tuple[int, ...] | None = None
        if first_step.pending and get_proxy_mode() is None:  # else the checksum would have to be in the graph
            with OutsideForward():
                self.checksum = checksum(tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, recomputed unless its slot has the value already.

        Raises:
            RecipeError: the tensor was written after autograd saved it, or comes out with other bits.
        """
        if self.saved is not None:
            self.saved.asked()
        slot, original = self.slot, self.original()
        # ``written`` tells of writes that the recorder saw. While the original is alive, its version and storage
        # tell of those after the forward pass, too.
        if slot.written or (
            original is not None
            and (original._version != slot.version or original.untyped_storage() is not slot.storage())
        ):
            raise RecipeError(
                f"a tensor of shape {tuple(self.view[0])}, made by {slot.node}, was written in place after autograd "
                "saved it for the backward pass. Write to a copy; or, to run this part as it runs without a plan, "
                f"{slot.node.pin}."
            )
        # A custom function may write in its backward to what it saved, so it gets the slot's own value, and the slot
        # notes to whom it was lent. Everybody else takes the quick way below, if there is nothing to compare.
        asking = torch._C._current_autograd_node()
        custom = isinstance(asking, BackwardCFunction)
        if (
            slot.value is not None
            and self.view is slot.view
            and self.checksum is None
            and not custom
            and slot.lent is None
        ):
            return slot.value
        with OutsideForward():
            tensor = compute(slot, self.view) if slot.value is None else slot.take(self.view)
            if self.checksum is not None:
                self._compare(tensor)
        return slot.lend(type(asking).__name__, self.view) if custom and slot.value is not None else tensor

    def _compare(self, tensor: torch.Tensor) -> None:
        if checksum(tensor) != self.checksum:
            raise RecipeError(
                f"{self.slot.node} gives other bits when it runs again than autograd saved in the forward "
                "pass. Its kernel, or an earlier one, is not deterministic; or something wrote to its output "
                "or an argument where PyTorch cannot see it (a Triton kernel, numpy). To "
                f"keep its output, {self.slot.node.pin}."
            )
        self.checksum = None
        self.first_step.pending = False


class Kept:
    """A kept tensor, and the version that it had when autograd saved it.

    Attributes:
        base: what autograd without hooks would hold along with the tensor.
        saved: its storage, where the contents may be taken away; ``tensor`` is None once they are.
    """

    def __init__(
        self, tensor: torch.Tensor, plain: bool, unit: str, saved: SavedStorage | None = None
    ) -> None:
        self.saved = saved
        self.view: View | None = None
        if saved is not None:
            saved.add(self)
        self.unit = unit
        self.original: weakref.ref[torch.Tensor] | None = None
        self.tensor: torch.Tensor | None = tensor
        self.version = version_of(tensor)
        self.base: torch.Tensor | None = None
        if tensor.grad_fn is not None:  # avoids a cycle: an op's output holds the op's node, which holds this
            (self.tensor,) = history_free_aliases((tensor,))
            self.base = base_without_history(tensor)
            self.original = weakref.ref(tensor) if plain else None

    def let_go(self, version: int) -> bool:
        """Let go of the tensor and its base, see ``Holder``."""
        tensor, base = self.tensor, self.base
        if (
            tensor is None
            or not version_of(tensor) == self.version == version
            or (base is not None and base.untyped_storage() is not tensor.untyped_storage())
        ):
            return False  # already let go of; written, which ``unpack`` reports; or a part of something else
        self.view, self.tensor, self.base = view_of(tensor), None, None
        return True

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RecipeError: it was written since. Autograd would say so itself, if there were no hooks.
        """
        if self.saved is not None:
            self.saved.asked()
        if self.tensor is None:
            return self._from_elsewhere()
        original = self.original() if self.original is not None else None
        if version_of(self.tensor) != self.version or (
            original is not None and original.untyped_storage() is not self.tensor.untyped_storage()
        ):
            raise RecipeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass of unit {self.unit!r} needs, and "
                "the plan keeps, was written in place after autograd saved it. Write to a copy; or, to leave it to "
                f"autograd's own rules, plan with never=[{self.unit or '*'!r}]."
            )
        return self.tensor

    def _from_elsewhere(self) -> torch.Tensor:
        assert self.saved is not None
        assert self.saved.stand is not None
        assert self.view is not None
        with OutsideForward():
            return self.saved.stand.take(self.view)


def base_without_history(tensor: torch.Tensor, discarded: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return ``held_base`` without its history; None if there is none, or it lies on the memory of ``discarded``."""
    base = held_base(tensor)
    if base is None:
        return None
    if discarded is not None and local_part(base).untyped_storage() is discarded.untyped_storage():
        return None
    return history_free_aliases((base,))[0]


@dataclass(slots=True)
class Wrapped:
    """A DTensor whose local part is discarded."""

    local: RecipeHandle
    wrapping: Wrapping
    base: torch.Tensor | None

    def unpack(self) -> torch.Tensor:
        """Return a tensor of the same class around the recomputed part."""
        return self.wrapping(self.local.unpack())


@dataclass(slots=True)
class PassedOn:
    """A kept tensor, packed by the saved-tensor hooks around the unit."""

    packed: Any
    unpack_hook: Callable[[Any], torch.Tensor]

    def unpack(self) -> torch.Tensor:
        """Return the tensor as those hooks unpack it."""
        return self.unpack_hook(self.packed)


def unpack(packed: RecipeHandle | Wrapped | Kept | PassedOn) -> torch.Tensor:
    """Unpack what ``UnitRecorder`` packed; the unpack hook."""
    return packed.unpack()
