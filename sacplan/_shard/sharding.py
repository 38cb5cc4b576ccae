"""A sharding: a mesh, the layouts of parameters on it, and the layouts of the inputs of a few ops. Part of a plan.

Sharding.of({"dp": 2, "tp": 4}, {"layers.*.up.weight": "R,S0", "layers.*.down.weight": "R,S1"})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from sacplan._program.elements import by_pattern, pattern_of
from sacplan._program.files import Name
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import Placements, WantedPlacements, fits, format_layout, parse_layout
from sacplan._shard.places import CallPattern, matches
from sacplan.errors import PlanError


def cut_homes(homes: Mapping[str, Placements]) -> dict[str, Placements]:
    """Return the layouts of the parameters that are cut, by name, or by pattern where all that match are alike.

    Args:
        homes: of all parameters, by name.
    """
    cut = {name: home for name, home in homes.items() if any(p.is_cut for p in home)}
    return by_pattern(cut, homes, pattern_of)


class Sharding(Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is spread over a mesh.

    Attributes:
        mesh: the ranks.
        homes: the layouts of parameters, by name; ``*`` stands for the number of a repeated layer. A layout has a
            placement for each axis, ``"R,S0"``. Other parameters are replicated. Gradients and optimizer state have the
            layouts of their parameters.
        places: ops whose inputs are redistributed first. All others follow, see ``choose.py``.
    """

    mesh: Mesh
    homes: Mapping[Name, str] = {}
    places: tuple[CallPattern, ...] = ()

    def __post_init__(self) -> None:
        for pattern, layout in self.homes.items():
            self._check(parse_layout(layout), f"the home {layout!r} of {pattern!r}")
        for place in self.places:
            for wanted in filter(None, place.layouts):
                self._check(wanted, f"an input of {place}")

    def _check(self, layout: WantedPlacements, what: str) -> None:
        if len(layout) != len(self.mesh.axes):
            raise PlanError(
                f"{what} has {len(layout)} placements; mesh {self.mesh} has {len(self.mesh.axes)} axes."
            )

    @classmethod
    def of(
        cls,
        mesh: Any,
        homes: Mapping[str, str | Placements] | None = None,
        places: Iterable[CallPattern] = (),
    ) -> Sharding:
        """Return a checked sharding, with a mesh as ``Mesh.of`` takes it."""
        texts = {
            name: home if isinstance(home, str) else format_layout(home)
            for name, home in (homes or {}).items()
        }
        return cls(Mesh.of(mesh), texts, tuple(places))

    def layouts(self, parameters: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Placements]:
        """Return the layouts of the parameters that are not replicated, by name.

        Args:
            parameters: names and shapes.

        Raises:
            PlanError: a pattern matches none of them, or ranks do not divide a size.
        """
        found: dict[str, Placements] = {}
        for pattern, text in self.homes.items():
            layout, matched = parse_layout(text), False
            for name, shape in parameters:
                if not matches(pattern, name):
                    continue
                matched = True
                if not fits(shape, layout, self.mesh.ranks):
                    raise PlanError(
                        f"parameter {name!r} of shape {tuple(shape)} cannot lie as {text} on mesh {self.mesh}: its "
                        "ranks do not divide that dimension. Choose another dimension, or another mesh."
                    )
                # The first pattern that matches a name decides.
                found.setdefault(name, layout)
            # A pattern without a parameter is that of another model, or misspelt: it must not be ignored.
            if not matched:
                raise PlanError(
                    f"the sharding has a home for {pattern!r}, and the model has no such parameter."
                )
        return found
