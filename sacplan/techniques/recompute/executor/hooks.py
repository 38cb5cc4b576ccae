"""The saved-tensor hooks of one call of a unit, switched on and off as the call goes along.

Hooks cost a Python call for each tensor that autograd saves, so a call whose schedule is known has them on only where
autograd is about to save a discarded tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from sacplan.techniques.recompute.executor.handles import unpack
from sacplan.torch_compat.autograd import current_saved_tensors_hooks, why_no_hooks

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class UnitHooks:
    """Our hooks, on top of those around the unit.

    Attributes:
        around: the pack and the unpack hook that were there before; None if there were none.
        may_switch: whether the hooks may be off for a part of the call.
    """

    def __init__(self) -> None:
        self._pack: Any = None
        self.around: tuple[Any, Any] | None = None
        self.may_switch = False

    def begin(self, pack: Any, *, may_switch: bool) -> None:
        """Begin a call, with the hooks off. ``pack`` has to be one object throughout, so that it is recognized.

        With hooks around the unit ours stay on: theirs then see kept tensors through ours, and ops that run in these
        hooks are not taken for ops of the unit.
        """
        self._pack = pack
        self.around = current_saved_tensors_hooks()
        self.may_switch = may_switch and self.around is None

    def end(self) -> None:
        """End the call. The hooks of the caller, and the recorder that ``pack`` holds, are let go of."""
        self.switch(False)
        self._pack = self.around = None

    def on_top(self) -> bool:
        """Whether autograd uses our hooks now."""
        top = current_saved_tensors_hooks()
        return top is not None and top[0] is self._pack

    def switch(self, on: bool) -> None:
        """Switch the hooks, unless somebody else has changed them.

        Autograd's engine has its own set of hooks, and code in the unit may have pushed some: popping would take
        theirs. Where ours stay off, tensors are kept, which is always safe.
        """
        top = current_saved_tensors_hooks()
        ours = top is not None and top[0] is self._pack
        if ours and not on:
            _pop_hooks()
        # Only on top of the hooks that were there when the call began: others belong to code inside the unit.
        elif on and not ours and top == self.around and why_no_hooks() is None:
            _push_hooks(self._pack, unpack)
