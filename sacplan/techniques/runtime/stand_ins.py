"""Stand-ins for a module's forward, on the module and on deep copies of it.

``copy.deepcopy`` and ``pickle`` copy a stand-in with its module. A shallow copy takes over the module's ``__dict__``,
and would run on the original's weights. So the module also gets two methods on the instance: one gives ``copy.copy``
the state without the plan, the other refuses to make replicas for ``DataParallel``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch

from sacplan.core.call_sites import StepDifference
from sacplan.core.elements import is_inside
from sacplan.errors import PlanError
from sacplan.techniques.runtime.alignment import Differences, RecordedUnit


class _CannotBeScripted(PlanError, AttributeError):
    """An ``AttributeError`` too, so that ``hasattr`` and ``getattr`` with a default see no such attribute."""


class StandIn:
    """Takes the place of a module's ``forward`` on the instance; undone by ``Handle.remove``.

    Args:
        module: the module.
        fqn: its name in the model.

    Attributes:
        replaced: the ``forward`` that was on the instance before: somebody else's, or that of another technique of the
            same plan, since a module may run in slices and discard what they make; None if there was none.
        records: whether it notes what its module saves while the module runs.
    """

    records: ClassVar[bool] = False

    def __init__(self, module: torch.nn.Module, fqn: str) -> None:
        self.module = module
        self.fqn = fqn
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        self._is_method = isinstance(inspect.getattr_static(type(module), "forward"), FunctionType)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's own forward."""
        raise NotImplementedError

    @property
    def replaced_by_others(self) -> Callable[..., Any] | None:
        """The forward that somebody else had put there before the plan, below all of the plan's own stand-ins."""
        below = self.replaced
        return below.replaced_by_others if isinstance(below, StandIn) else below

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that this one stands in for."""
        if self.replaced is not None:
            return self.replaced
        # A function, or a static or class method, ... Bound by hand, since the instance's own ``forward`` is this.
        raw = inspect.getattr_static(type(self.module), "forward")
        bind = getattr(type(raw), "__get__", None)
        forward: Callable[..., Any] = raw if bind is None else bind(raw, self.module, type(self.module))
        return forward

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``original`` in a way that Dynamo of torch 2.11 can trace: it cannot trace the binding of a method."""
        if self._is_method and self.replaced is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original

    @property
    def __code__(self) -> Any:
        """``torch.export`` asks a forward where it is written."""
        return getattr(self.original, "__code__")  # noqa: B009  (a callable need not have one)

    @property
    def __globals__(self) -> dict[str, Any]:
        """``torch.jit.script`` asks a forward for this attribute. A plan cannot be scripted, so say that."""
        raise cannot_be_scripted(f"unit {self.fqn!r}")


class RecordedStandIn(StandIn):
    """Stands in for a unit whose calls were recorded.

    Args:
        module: the unit.
        recorded: its calls in the recorded step, with what the plan discards.
        elsewhere: names, relative to the unit, of modules in it that the recorded step knows under a name outside.
        differences: is told where a call does not do what was recorded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        recorded: RecordedUnit,
        elsewhere: frozenset[str] = frozenset(),
        differences: Differences | None = None,
    ) -> None:
        super().__init__(module, recorded.fqn)
        self.recorded = recorded
        self.differences = differences or Differences()
        self._elsewhere = elsewhere

    def names(self) -> dict[int, str]:
        """Return the names of the modules in it, by ``id``; read in each call, since modules may have been replaced."""
        return {id(m): n for n, m in self.module.named_modules() if n and n not in self._elsewhere}


def cannot_be_scripted(what: str) -> PlanError:
    """Return the error for ``torch.jit.script`` on a model with a plan."""
    return _CannotBeScripted(
        f"a plan is applied to {what}, and torch.jit.script cannot keep it. Script the model without the plan: call "
        "handle.remove() first."
    )


class InstalledStandIns:
    """The stand-ins of one technique on the modules of a model.

    Attributes:
        units: fqns of the modules whose forward is replaced.
    """

    def __init__(self) -> None:
        self._differences = Differences()
        self._planned: list[StandIn] = []

    def _put_on(self, planned: Iterable[StandIn]) -> None:
        self._planned = list(planned)
        for stand_in in self._planned:
            put_on(stand_in.module, stand_in)

    @staticmethod
    def _elsewhere(names: Mapping[int, str], unit: torch.nn.Module, fqn: str) -> frozenset[str]:
        """Return names of modules in a unit that are recorded under a name outside: the first name of a shared module.

        Args:
            names: of all modules of the model, by ``id``.
            unit, fqn: the unit.
        """
        return frozenset(n for n, m in unit.named_modules() if n and not is_inside(names[id(m)], fqn))

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the modules, in the order in which they were put on."""
        return tuple(planned.fqn for planned in self._planned)

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """For each unit that departed from the recorded step, its first difference."""
        return tuple(self._differences.by_unit.values())

    def forget_differences(self) -> None:
        """Start a new step: drop the differences so far."""
        self._differences.clear()

    def check_removable(self) -> None:
        """Raise ``PlanError`` if somebody replaced a forward again."""
        check_there(self._planned)

    def lift(self) -> Sequence[StandIn]:
        """Give every module its own forward back, and return the stand-ins, which can still run."""
        for planned in self._planned:
            take_off(planned.module, planned)
        return self._planned

    def remove(self) -> None:
        """Give every module its own forward back. Pending backward passes stay correct."""
        self.lift()
        self._planned = []


def check_there(planned: Iterable[StandIn]) -> None:
    """Raise ``PlanError`` if somebody replaced a forward again.

    The stand-in of another technique of the same plan may lie over one of these: plans are removed from the top.
    """
    for stand_in in planned:
        forward = stand_in.module.__dict__.get("forward")
        # Down through the stand-ins of the same plan; anything else in between was put there by others.
        while isinstance(forward, StandIn) and forward is not stand_in:
            forward = forward.replaced
        if forward is not stand_in:
            raise PlanError(
                f"the forward of module {stand_in.fqn!r} was replaced after the plan was applied. Undo that first, "
                "then remove the plan."
            )


def put_on(module: torch.nn.Module, stand_in: StandIn) -> None:
    """Make the module run ``stand_in``."""
    # On the instance, where Python looks before it asks the class, and past ``Module.__setattr__``.
    module.__dict__["forward"] = stand_in
    module.__dict__["__getstate__"] = _State(module, stand_in)
    module.__dict__["_replicate_for_data_parallel"] = functools.partial(_refuse_replica, stand_in.fqn)


def take_off(module: torch.nn.Module, stand_in: StandIn) -> None:
    """Undo ``put_on``."""
    _clear(module.__dict__, stand_in)
    # ``_clear`` goes down to the forward below the whole plan. A stand-in of the plan that was below comes back here.
    if isinstance(stand_in.replaced, StandIn):
        put_on(module, stand_in.replaced)


def _clear(attributes: dict[str, Any], stand_in: StandIn) -> None:
    """Remove the plan from the attributes of a module, or of a copy of it."""
    for name in ("__getstate__", "_replicate_for_data_parallel"):
        attributes.pop(name, None)
    if attributes.get("forward") is stand_in:
        del attributes["forward"]
        if stand_in.replaced_by_others is not None:
            attributes["forward"] = stand_in.replaced_by_others


@dataclass(eq=False)
class _State:
    """The ``__getstate__`` of a planned module: a deep or pickled copy has the plan, and a shallow one has none.

    Only the caller tells them apart: ``copy.copy`` and ``copy.deepcopy`` ask for the state in the same way.
    """

    module: torch.nn.Module
    stand_in: StandIn

    def __call__(self) -> Any:
        own = getattr(type(self.module), "__getstate__", None)  # Python 3.10 has none for every object
        state = self.module.__dict__ if own is None else own(self.module)
        if isinstance(state, dict) and sys._getframe(1).f_code is copy.copy.__code__:
            state = dict(state)
            _clear(state, self.stand_in)
        return state


def no_replicas(where: str) -> PlanError:
    """Return the error for ``nn.DataParallel`` around what ``where`` names."""
    return PlanError(
        f"nn.DataParallel replicates {where} in each step, and a plan does not go with that. Run one process for each "
        "GPU: apply the plan, and wrap the model in DistributedDataParallel, or shard it with fully_shard."
    )


def _refuse_replica(fqn: str) -> torch.nn.Module:
    """Stand in for the ``_replicate_for_data_parallel`` of a module: a replica would run on the original's weights."""
    raise no_replicas(f"module {fqn!r}, which has a plan,")
