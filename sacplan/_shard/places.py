"""The few calls of a forward pass that a sharding asks for certain layouts of their inputs.

    Place(unit="model.layers.*.mlp", op="aten.mul.Tensor", occurrence=0, inputs=("S0,R", ""))

Everything else follows from the layouts of parameters (``choose.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache

from msgspec import Struct

from sacplan._program.files import Count, Name
from sacplan._shard.placements import WantedPlacements, parse_asked
from sacplan.errors import PlanError


class CallPattern(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One call of an op, in each of the modules of a pattern, and the layouts of its inputs.

    Attributes:
        unit: the fqn of the innermost module that runs; ``*`` stands for the number of a repeated layer.
        op: name of its overload, such as ``"aten.mm.default"``.
        occurrence: how many calls of this op came before it in one call of the module, leaving out modules inside
            and ops on plain tensors alone.
        inputs: the layout of each tensor argument; ``""`` where it may have any, as may those that are left out.
            ``"S0,*"``: any on the second axis.
    """

    unit: str
    op: Name
    occurrence: Count
    inputs: tuple[str, ...]

    @cached_property
    def layouts(self) -> tuple[WantedPlacements | None, ...]:
        """``inputs``, parsed."""
        return tuple(parse_asked(text) if text else None for text in self.inputs)

    def asked(self, tensors: int) -> list[WantedPlacements | None]:
        """Return the wanted layout of each tensor argument of a call; None where it may have any.

        Raises:
            PlanError: the call has fewer than the place.
        """
        # Fewer are fine: the inputs that are left out may have any layout.
        if len(self.layouts) > tensors:
            raise PlanError(
                f"{self} states {len(self.layouts)} inputs; the call has {tensors}. Plan again for this model."
            )
        return [*self.layouts, *[None] * (tensors - len(self.layouts))]

    def __str__(self) -> str:
        return f"place {self.op}, occurrence {self.occurrence} in {self.unit or 'the model'!s}"


@lru_cache(maxsize=4096)
def matches(pattern: str, fqn: str) -> bool:
    """Whether a name is one of a pattern: ``*`` stands for a number."""
    return re.fullmatch(r"\d+".join(map(re.escape, pattern.split("*"))), fqn) is not None


class CallPatterns:
    """Finds the place of a call, and counts the calls of each.

    Attributes:
        met: of each place, how many calls it was found for.
    """

    def __init__(self, places: Iterable[CallPattern]) -> None:
        self._by_op: dict[tuple[str, int], list[CallPattern]] = {}
        for place in places:
            self._by_op.setdefault((place.op, place.occurrence), []).append(place)
        self.met: Counter[CallPattern] = Counter()

    def find(self, unit: str, op: str, occurrence: int) -> CallPattern | None:
        """Return the first place whose pattern matches the module of a call.

        Args:
            unit: the fqn of the innermost module that runs.
            op: name of the overload.
            occurrence: of the op in this call of the module.
        """
        # By op and occurrence first: this runs at each op of each module, and patterns are regular
        # expressions.
        for place in self._by_op.get((op, occurrence), ()):
            if matches(place.unit, unit):
                self.met[place] += 1
                return place
        return None

    def __iter__(self) -> Iterator[CallPattern]:
        return (place for among in self._by_op.values() for place in among)

    def __len__(self) -> int:
        return sum(map(len, self._by_op.values()))

    def never_met(self) -> Sequence[CallPattern]:
        """Return the places that no call was found for."""
        return [place for place in self if not self.met[place]]
