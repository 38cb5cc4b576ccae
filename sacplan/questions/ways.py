"""The ways in which ``fit`` runs a step: as it is, and with sets of techniques that follow from the registry.

- "plan" is what ``plan`` does by default.
- A technique that may change the rounding of gradients is tried alone, and with a plan.
- A technique that takes memory of the host comes last, with all that helped before: only if the others do not fit, or
  are dear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sacplan.techniques.base.technique import Technique
from sacplan.techniques.registry import DEFAULT_TECHNIQUES, TECHNIQUES


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step.

    Attributes:
        name: Its name in rows.
        techniques: The techniques of the plan; () for the step as it is.
        long: Whether to search with everything that may lower the peak, which may take minutes.
        host_bytes: Memory of the host that a plan may take, if it may take any; None: all of it.
    """

    name: str
    techniques: tuple[str, ...] = ()
    long: bool = False
    host_bytes: int | None = None

    @property
    def takes_host(self) -> bool:
        """Whether a plan may take memory of the host."""
        return any(TECHNIQUES[name].takes_host for name in self.techniques)

    def within(self, host_bytes: int) -> Way:
        """Return the way with a limit for host memory; unchanged if its plans take none."""
        return replace(self, host_bytes=host_bytes) if self.takes_host else self

    @property
    def host_budget(self) -> str | None:
        """The ``host_budget`` of ``plan`` for this way; None: all of the host's memory."""
        return None if self.host_bytes is None else f"{self.host_bytes}B"


AS_IT_IS = Way("as it is")
PLAN = Way("plan", DEFAULT_TECHNIQUES)


def quick_ways(helps: Callable[[Way], bool]) -> list[Way]:
    """Return the ways that need no long search and no memory of the host.

    ``helps`` says whether a way changes anything.
    """
    # A technique that changes nothing alone is not worth a search together with a plan.
    alone = [Way(one.row, (one.name,)) for one in _rounding()]
    useful = [way for way in alone if helps(way)]
    return [AS_IT_IS, PLAN, *useful, *(_with_plan(way.name, way.techniques) for way in useful)]


def long_ways() -> list[Way]:
    """Return the ways with a long search for all that may lower the peak."""
    return [
        _with_plan(one.row_of_long_search, (one.name,), True) for one in _rounding() if one.row_of_long_search
    ]


def host_ways(tried: list[Way]) -> list[Way]:
    """Return the ways that take memory of the host, each with all techniques of the ways in ``tried``."""
    # Each technique once. The default ones are left out, since every plan has them.
    known = list(
        dict.fromkeys(name for way in tried for name in way.techniques if name not in DEFAULT_TECHNIQUES)
    )
    rows = [TECHNIQUES[name].row for name in known]
    return [
        _with_plan(" + ".join([*rows, one.row]), (*known, one.name))
        for one in TECHNIQUES.values()
        if one.takes_host
    ]


def _rounding() -> list[Technique]:
    """Return the techniques that may change bits of the gradients, and take no memory of the host."""
    return [one for one in TECHNIQUES.values() if not one.keeps_bits and not one.takes_host]


def _with_plan(row: str, techniques: tuple[str, ...], long: bool = False) -> Way:
    return Way(f"{PLAN.name} + {row}", (*DEFAULT_TECHNIQUES, *techniques), long)
