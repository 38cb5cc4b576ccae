"""What stands in for a module's forward, on the module and on copies of it.

A stand-in belongs to one module, but a shallow copy takes over the module's ``__dict__`` and would run it on the
original's weights. So the module also gets, on the instance, what ``copy`` and ``pickle`` ask for its state and what
``DataParallel`` asks for a replica:

- ``copy.deepcopy`` and ``pickle`` give a module with a plan of its own.
- ``copy.copy`` gives a module without a plan.
- A replica has the plan, on its own weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

_CARRIER = "_sacplan_plan"  # in a module's state


class StandIn(Protocol):
    """Takes the place of a module's forward.

    Attributes:
        module: the module.
        replaced: what somebody else had put in that place before.
    """

    module: torch.nn.Module
    replaced: Callable[..., Any] | None

    def for_replica(self, replica: torch.nn.Module) -> StandIn:
        """One for a replica, which may run on another thread."""


def put_on(module: torch.nn.Module, stand_in: StandIn) -> None:
    """Let the module run ``stand_in``."""
    module.__dict__["forward"] = stand_in
    module.__dict__["__getstate__"] = _State(module, stand_in)
    module.__dict__["_replicate_for_data_parallel"] = _Replicate(module, stand_in)


def take_off(module: torch.nn.Module, stand_in: StandIn) -> None:
    """Undo ``put_on``."""
    _clear(module.__dict__, stand_in)


def _clear(attributes: dict[str, Any], stand_in: StandIn) -> None:
    for name in ("__getstate__", "_replicate_for_data_parallel", _CARRIER):
        attributes.pop(name, None)
    if attributes.get("forward") is stand_in:
        del attributes["forward"]
        if stand_in.replaced is not None:
            attributes["forward"] = stand_in.replaced


class _Replicate:
    """The ``_replicate_for_data_parallel`` of a module."""

    def __init__(self, module: torch.nn.Module, stand_in: StandIn) -> None:
        self._module = module
        self._stand_in = stand_in

    def __call__(self) -> torch.nn.Module:
        replica: torch.nn.Module = type(self._module)._replicate_for_data_parallel(self._module)
        planned = replica.__dict__.get("forward") is self._stand_in
        _clear(replica.__dict__, self._stand_in)
        if planned and self._stand_in.replaced is None:
            put_on(replica, self._stand_in.for_replica(replica))
        return replica


class _State:
    """The ``__getstate__`` of a module."""

    def __init__(self, module: torch.nn.Module, stand_in: StandIn) -> None:
        self._module = module
        self._stand_in = stand_in

    def __call__(self) -> Any:
        own = getattr(type(self._module), "__getstate__", None)  # Python 3.10 has none for every object
        state = self._module.__dict__ if own is None else own(self._module)
        if not isinstance(state, dict):
            return state  # of a class with a format of its own
        state = dict(state)
        planned = state.get("forward") is self._stand_in
        _clear(state, self._stand_in)
        if planned and sys._getframe(1).f_code is not copy.copy.__code__:
            state["forward" if "forward" in state else _CARRIER] = _Carrier(self._module, self._stand_in)
        return state


class _Carrier:
    """In the state of a module: a copy that is made from the state gets a plan."""

    def __init__(self, module: torch.nn.Module, stand_in: StandIn) -> None:
        self._module = module
        self._stand_in = stand_in

    def __reduce__(self) -> Any:
        return _carried, (self._module, self._stand_in)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Where the state becomes a shallow copy."""
        assert self._stand_in.replaced is not None
        return self._stand_in.replaced(*args, **kwargs)


def _carried(module: torch.nn.Module, stand_in: StandIn) -> StandIn:
    put_on(module, stand_in)
    return stand_in
