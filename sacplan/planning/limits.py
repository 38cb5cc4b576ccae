"""Limits: a budget, or the device itself; and the search for a plan that fits one.

Which figure a limit is about:

- A budget limits the *peak*: the sum of the tensors, which ``verify`` measures on any device.
- Without a budget, a GPU is the limit, and the question is whether the run fits its memory:

      max_memory_reserved + what lies outside of the allocator + a margin <= memory of the device

  ``max_memory_reserved`` does not follow from the peak alone (``device_memory.py``), so the limit for the peak differs
  from plan to plan: see ``Room.for_peak``, and ``within`` for the search.
- Without a budget on a CPU, the peak may take the machine's memory less ``LEFT_ON_CPU``: no allocator is played there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sacplan.core.budget import format_bytes, is_share, parse_budget
from sacplan.core.program import Program
from sacplan.device.device_memory import beyond_peak_bytes, reserved_bytes
from sacplan.device.devices import DeviceSpec
from sacplan.device.outside_allocator import Outside, outside_allocator, outside_text
from sacplan.errors import BudgetError
from sacplan.profiling.profile import Profile

LEFT_ON_CPU = 0.15
"""Share of the memory of a CPU that is left free when no budget is given. On a GPU, what fits is worked out."""

EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""The setting with which segments grow, so that the allocator usually reserves less."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes a step may take, and which of its figures is compared with them.

    Attributes:
        n_bytes: How many.
        is_reserved: Whether what the allocator of a GPU reserves has to fit; else the peak has to.
        outside: What lies on the GPU outside of the allocator; () unless ``is_reserved``.
    """

    n_bytes: int
    is_reserved: bool = False
    outside: tuple[Outside, ...] = ()

    def needs(self, program: Program) -> int:
        """Return the bytes to compare: the reserved ones if these have to fit and the tensors do; else the peak."""
        peak_bytes = program.footprint.peak_bytes
        # Playing the allocator takes long, and is pointless if the tensors alone do not fit.
        return reserved_bytes(program) if self.is_reserved and peak_bytes <= self.n_bytes else peak_bytes

    def for_peak(self, program: Program) -> int:
        """Return the limit for the peak of a program: the room less what the allocator reserves beyond the peak.

        peak <= room - (reserved - peak)    if and only if    reserved <= room
        """
        return self.n_bytes - (beyond_peak_bytes(program) if self.is_reserved else 0)


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one step as the user gave it: a budget, or none."""

    budget: float | str | None = None
    n_bytes: int | None = None
    """The budget in bytes if ``exactly`` made the limit; ``budget`` is the same as text."""

    @classmethod
    def exactly(cls, n_bytes: int) -> Limit:
        """Return the limit of exactly this many bytes."""
        return cls(f"{n_bytes}B", n_bytes=n_bytes)

    def room_of(self, profile: Profile) -> Room:
        """Return the room of a recorded step; a share (``"60%"``) is one of its peak. Errors are those of ``room``."""
        return self.room(profile.spec, profile.ranks.communicators, profile.peak_bytes)

    def room(self, spec: DeviceSpec, communicators: int = 0, unplanned_bytes: int = 0) -> Room:
        """Return the room of a step on a device. Only a budget that is a share needs ``unplanned_bytes``.

        Raises:
            BudgetError: The budget cannot be read, or what lies outside of the allocator leaves nothing.
        """
        if self.n_bytes is not None:
            return Room(self.n_bytes)
        # A budget limits the tensors, whatever the allocator reserves.
        if self.budget is not None:
            return Room(parse_budget(self.budget, unplanned_bytes))
        if spec.kind == "cuda":
            return allocator_room(spec, communicators)
        return Room(spec.memory_bytes - int(LEFT_ON_CPU * spec.memory_bytes))


OF_DEVICE = Limit()
"""The limit if no budget is given: the device has to hold the step."""


def limit_of_device(budget: float | str | None, spec: DeviceSpec) -> Limit:
    """Return a limit that does not depend on a step: a budget, or the device.

    Raises:
        BudgetError: The budget cannot be read, is a share, or exceeds the device's memory; or there is no budget, and
            other things take all of that memory.
    """
    if budget is None:
        OF_DEVICE.room(spec)  # for its error, before anything is recorded
        return OF_DEVICE
    # Refused before it is parsed: ``parse_budget`` would take it as a share of the device's memory.
    refuse_share(budget)
    found = parse_budget(budget, spec.memory_bytes)
    if found > spec.memory_bytes:
        raise BudgetError(
            f"budget {budget!r} is more than {spec.name} has, {format_bytes(spec.memory_bytes)}. Give less, or another "
            "device; dataclasses.replace(spec, memory_bytes=...) makes one."
        )
    return Limit.exactly(found)


def allocator_room(spec: DeviceSpec, communicators: int = 0) -> Room:
    """Return what the allocator of a GPU may reserve: the memory less what lies outside of it.

    Raises:
        BudgetError: Nothing is left.
    """
    room = beside_others(spec, communicators)
    if room.n_bytes <= 0:
        raise BudgetError(
            f"{spec.name} has {format_bytes(spec.memory_bytes)}, and outside of the allocator there are "
            f"{outside_text(room.outside)}: nothing is left. Give a budget, which limits the tensors alone."
        )
    return room


def beside_others(spec: DeviceSpec, communicators: int) -> Room:
    """Return what the allocator of a GPU may reserve; ``n_bytes`` is 0 or negative if nothing is left."""
    outside = outside_allocator(spec, communicators)
    return Room(spec.memory_bytes - sum(one.n_bytes for one in outside), is_reserved=True, outside=outside)


def refuse_share(budget: float | str | None) -> None:
    """Raise ``BudgetError`` for a share: with several steps there is no single peak to take a share of."""
    if is_share(budget):
        raise BudgetError(
            f"budget {budget!r}: a share is one of the unplanned peak of a step, and here are several. Give bytes, "
            'budget="20GiB".'
        )


# --- the search for a plan that fits ----------------------------------------------------------------------

ROUNDS = 6
"""The most plans that are tried. For large models, two are enough."""


Made = TypeVar("Made")


@dataclass(frozen=True)
class Try(Generic[Made]):
    """A plan that was tried for a room.

    Attributes:
        made: The plan. If no plan holds the budget, the one with the smallest peak.
        budget_bytes: The limit for the peak for which the plan was made.
        peak_bytes: Its peak.
        needs: What is compared with the room: what the allocator reserves if that has to fit and the tensors do; else
            the peak.
    """

    made: Made
    budget_bytes: int
    peak_bytes: int
    needs: int


def within(room: Room, make: Callable[[int], Made], takes: Callable[[Made], tuple[int, int]]) -> Try[Made]:
    """Return the first plan that fits a room; if none does, the one that comes nearest.

    Plan, play the allocator, lower the budget by the excess, and plan again:

        budget = room
        repeat: plan for the budget; needs <= room ends it; else budget = peak - (needs - room)

    A solver knows tensors and not segments, since where holes are depends on the whole order of allocations and frees.
    So the found plan is one that fits, and not always the cheapest that does: another plan with the same peak may leave
    fewer holes. A lower budget usually has fewer reserved bytes, but need not: what is reserved goes up and down by
    whole segments. So the steps grow, and their number is limited.

    Args:
        room: What a step may take.
        make: Makes a plan for a budget in bytes; if none holds the budget, the one with the smallest peak.
        takes: Returns the peak of a plan, and the bytes to compare with the room.
    """
    tries: list[Try[Made]] = []
    budget_bytes = room.n_bytes
    while True:
        made = make(budget_bytes)
        peak_bytes, needs = takes(made)
        tries.append(Try(made, budget_bytes, peak_bytes, needs))
        # It fits; or no plan holds this budget, so none holds a lower one; or enough were tried.
        if needs <= room.n_bytes or peak_bytes > budget_bytes or len(tries) == ROUNDS:
            return min(tries, key=lambda one: one.needs)
        # At first the budget falls by the excess, which is enough if the holes stay. If they have moved, it falls from
        # then on by at least 1/64 of the room for each plan so far.
        least = 0 if len(tries) == 1 else room.n_bytes * len(tries) // 64
        # Counted from the peak and not from the budget. A plan may be well below its budget, and a budget between the
        # two might give the same plan again.
        budget_bytes = max(1, peak_bytes - max(needs - room.n_bytes, least))
