"""A mesh: ranks in a grid with named axes, the slowest link first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from sacplan.core.files import Name, Positive
from sacplan.errors import PlanError


class Mesh(Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks in a grid.

    Attributes:
        axes: name and number of ranks of each axis. Ranks are numbered in the order of a ``DeviceMesh``: those of the
            last axis follow each other, so that it has the fastest links.
    """

    axes: tuple[tuple[Name, Positive], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) < len(names):
            raise PlanError(f"mesh {dict(self.axes)} names an axis twice: {', '.join(names)}.")

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """Return the mesh of ``{"dp": 2, "tp": 4}``, a ``Mesh``, or a number of ranks on one axis named ``"ranks"``.

        Raises:
            PlanError: ``mesh`` is none of these.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, int) and not isinstance(mesh, bool):
            mesh = {"ranks": mesh}
        if not isinstance(mesh, Mapping) or not mesh:
            raise PlanError(f"mesh is {mesh!r}; give the ranks of each axis, such as {{'dp': 2, 'tp': 4}}.")
        for name, size in mesh.items():
            if not isinstance(name, str) or not name or type(size) is not int or size < 1:
                raise PlanError(
                    f"axis {name!r} of the mesh has {size!r} ranks; it must be an int of at least 1."
                )
        return cls(tuple(mesh.items()))

    @property
    def communicators(self) -> int:
        """The number of NCCL communicators that a rank takes part in: one for each axis of several ranks."""
        return sum(size > 1 for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of ranks of each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.ranks)

    def stride(self, axis: int) -> int:
        """Return how far apart neighbours on an axis are, in ranks: 1 for the last axis."""
        return math.prod(self.ranks[axis + 1 :])

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)
