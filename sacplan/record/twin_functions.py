"""Functions that refer to a model, for a copy of the model.

``copy.deepcopy`` does not copy functions. So a hook of a module whose closure holds the model, or a function that a
module has as an attribute, would run on the user's model while the copy runs. Here a function gets a twin of the same
code. In its closure, its defaults and the global variables that it names, what was copied with the model is replaced by
its copy, and anything else that leads to a module, a tensor or an optimizer is copied, too. All else stays the same
object: a function that counts writes to the user's counter.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from sacplan.record.state import reachable

_CONTAINERS = (dict, list, tuple, set)
_FUNCTIONS = (types.FunctionType, functools.partial)


class TwinFunctions:
    """Functions of a model, and their twins.

    Args:
        twins: ``id`` of what was copied with the model to its copy; the memo of ``copy.deepcopy``.
        copied: makes a deep copy with this memo.
    """

    def __init__(self, twins: MutableMapping[int, Any], copied: Callable[[Any], Any]) -> None:
        self._twins = twins
        self._copied = copied
        self._held: tuple[type, ...] = (torch.optim.Optimizer, torch.nn.Module, torch.Tensor)
        self._known: dict[int, Any] = {}  # a twin is its own twin
        self._keep: list[Any] = []  # alive, so that no other object gets an id that is known

    def put_into(self, twin: torch.nn.Module, own: Callable[[Any], bool]) -> None:
        """Replace functions in a copy of a model by their twins; ``own`` tells what is the user's, and stays."""
        holders = [v for v in reachable(twin) if not own(v)]
        self._keep += holders
        self._known.update((id(v), v) for v in holders if not isinstance(v, _FUNCTIONS))
        for holder in holders:
            if isinstance(holder, (dict, list)):
                items = dict.items(holder) if isinstance(holder, dict) else enumerate(holder)
                for key, value in [(k, v) for k, v in items if isinstance(v, _FUNCTIONS)]:
                    holder[key] = self.of(value)

    def of_loss(self, loss_fn: Any) -> Any:
        """Return a loss function that refers to the copy, and to what its hooks write to. To be called last.

        A teacher, or a trainer that holds the model, is not copied for it.
        """
        self._held = ()
        return self.of(loss_fn)

    def of(self, value: Any) -> Any:
        """Return a function, or what it refers to, with twins in place of what was copied with the model."""
        for known in (self._known, self._twins):
            if id(value) in known:
                return known[id(value)]
        if isinstance(value, functools.partial):
            keywords = {name: self.of(v) for name, v in value.keywords.items()}
            twin: Any = functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
            vars(twin).update(vars(value))
        elif isinstance(value, types.MethodType):
            twin = types.MethodType(self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, types.FunctionType):
            twin = self._of_function(value)
        elif isinstance(value, types.CellType):
            twin = self._of_cell(value)
        elif isinstance(value, weakref.ref):
            twin = weakref.ref(self.of(value())) if id(value()) in self._twins else value
        else:
            twin = self._copied(value) if self._leads_to_twins(value, self._held) else value
        self._known[id(value)] = self._known[id(twin)] = twin
        self._keep += (value, twin)
        return twin

    def _of_function(self, function: types.FunctionType) -> types.FunctionType:
        self._known[id(function)] = function  # for one that refers to itself
        changed = {
            name: self.of(value) for name, value in globals_of(function) if self._leads_to_twins(value)
        }
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        if not changed and all(self.of(v) is v for v in (*cells, *defaults, *named.values())):
            return function
        # New globals only if one of them leads to the model, since the function may write to the others.
        known = {**function.__globals__, **changed} if changed else function.__globals__
        twin = types.FunctionType(
            function.__code__,
            known,
            function.__name__,
            tuple(map(self.of, defaults)),
            tuple(map(self.of, cells)),
        )
        twin.__kwdefaults__ = {name: self.of(value) for name, value in named.items()} or None
        functools.update_wrapper(twin, function)
        return twin

    def _leads_to_twins(self, value: Any, held: tuple[type, ...] = ()) -> bool:
        if not self._held and not isinstance(value, _CONTAINERS):  # of a loss function, see ``of_loss``
            return False
        return any(isinstance(v, held) or id(v) in self._twins for v in reachable(value))

    def _of_cell(self, cell: types.CellType) -> types.CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # an empty one
            return cell
        # The same cell if nothing changes, since the function may write to it.
        twin = self.of(value)
        return cell if twin is value else types.CellType(twin)


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function, or one that is defined in it, refers to.

    Functions and classes of modules are left out, since a hook's helpers take what they need as arguments.
    """
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for name in code.co_names:
            value = function.__globals__.get(name)
            if value is not None and not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                yield name, value
