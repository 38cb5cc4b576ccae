"""Budgets and headrooms in bytes, and the warning about a plan that takes more memory than its device has."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real

from sacplan._device.devices import DeviceSpec
from sacplan._plan.plan import Plan
from sacplan._program.budget import format_bytes, is_share, parse_budget
from sacplan.errors import BudgetError, SacplanWarning

DEFAULT_HEADROOM = 0.15
"""Share of a device's memory that is left free when no budget is given. ``max_batch`` says what for."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one step as the user gave it: a budget, a headroom, or neither."""

    budget: float | str | None = None
    headroom: float | str | None = None
    n_bytes: int | None = None
    """The budget if it is known in bytes. Then ``budget`` is the same as text."""

    @classmethod
    def exactly(cls, n_bytes: int) -> Limit:
        """Return the limit of exactly this many bytes."""
        return cls(f"{n_bytes}B", n_bytes=n_bytes)

    def bytes_of(self, spec: DeviceSpec, unplanned_bytes: int) -> int:
        """Return the limit in bytes: the budget, or without one the device's memory less the headroom.

        Args:
            spec: The device.
            unplanned_bytes: The peak without a plan. A budget that is a share (``"60%"``) is a share of this.

        Raises:
            BudgetError: The budget or headroom cannot be read, or both are given.
        """
        if self.n_bytes is not None:
            return self.n_bytes
        check_one_of(self.budget, self.headroom)
        if self.budget is None:
            return memory_less(self.headroom, spec)
        return parse_budget(self.budget, unplanned_bytes)


def budget_of_device(budget: float | str | None, headroom: float | str | None, spec: DeviceSpec) -> int:
    """Return a limit in bytes that does not depend on a step: the budget, or the device's memory less the headroom.

    Raises:
        BudgetError: The budget or headroom cannot be read, both are given, or the budget is a share or more than the
            device has.
    """
    check_one_of(budget, headroom)
    if budget is None:
        return memory_less(headroom, spec)
    refuse_share(budget)
    found = parse_budget(budget, spec.memory_bytes)
    if found > spec.memory_bytes:
        raise BudgetError(
            f"budget {budget!r} is more than {spec.name} has, {format_bytes(spec.memory_bytes)}. Give less, or another "
            "device; dataclasses.replace(spec, memory_bytes=...) makes one."
        )
    return found


def check_one_of(budget: float | str | None, headroom: float | str | None) -> None:
    """Raise ``BudgetError`` if both a budget and a headroom are given."""
    if budget is not None and headroom is not None:
        raise BudgetError(
            f"budget={budget!r} and headroom={headroom!r}: give one of them. A budget is kept as it is given; a "
            "headroom makes one of the device's memory."
        )


def refuse_share(budget: float | str | None) -> None:
    """Raise ``BudgetError`` for a share: with several steps there is no one peak that it could be a share of."""
    if is_share(budget):
        raise BudgetError(
            f"budget {budget!r}: a share is one of the unplanned peak of a step, and here are several. Give bytes, "
            'budget="20GiB", or a share of the device\'s memory to leave free, headroom="10%".'
        )


def memory_less(headroom: float | str | None, spec: DeviceSpec) -> int:
    """Return the device's memory less the headroom, which is a share of it or bytes. None is ``DEFAULT_HEADROOM``."""
    memory = spec.memory_bytes
    headroom = DEFAULT_HEADROOM if headroom is None else headroom
    if isinstance(headroom, str):
        try:
            found = parse_budget(headroom, memory)
        except BudgetError as error:
            raise BudgetError(f"headroom: {error}") from error
    elif isinstance(headroom, bool) or not isinstance(headroom, Real) or not 0 <= headroom < 1:
        raise BudgetError(
            f"headroom={headroom!r} must be a share of the device's memory, from 0 to below 1, or bytes such as "
            "'2GiB'."
        )
    else:
        found = int(float(headroom) * memory)
    if found >= memory:
        raise BudgetError(
            f"headroom {headroom!r} is all that {spec.name} has, {format_bytes(memory)}, or more."
        )
    return memory - found


# --- plans that do not fit the device ----------------------------------------------------------------------

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def looking_for_plans() -> Iterator[None]:
    """Suppress the warning of ``handed_out`` inside. Plans made there are compared, and the user never sees most."""
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


def handed_out(made: Plan, spec: DeviceSpec) -> Plan:
    """Return the plan, and warn if it takes more memory than the device has.

    The ``SacplanWarning`` points at the line of the user who called the public function.
    """
    if made.peak_bytes > spec.memory_bytes and not _quiet.get():
        rank = " on each rank" if made.ranks.world_size > 1 else ""
        warnings.warn(
            f"this plan does not fit: its step takes {format_bytes(made.peak_bytes)}{rank}, and {spec.name} has "
            f"{format_bytes(spec.memory_bytes)}. Without a budget, a plan is made for the device's memory less a "
            f"headroom, here {format_bytes(memory_less(None, spec))}. Else try a smaller batch, several devices, or a "
            "device with more memory.",
            SacplanWarning,
            stacklevel=4,  # skips this function, the public one, and the decorator that checks its arguments
        )
    return made
