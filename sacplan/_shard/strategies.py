"""How an op may run on the ranks of one axis of a mesh: its strategies, from its factor rule.

An op that is spread along a factor takes inputs that are cut along the dimensions that carry it and gives outputs that
are cut likewise, or, where the factor is summed over, one summand on each rank. Strategies on a mesh of several axes
are tuples of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan._factors.axes import FactorAxis
from sacplan._shard.placements import Placement


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """How one call of an op runs on the ranks of one axis.

    Attributes:
        inputs: of each tensor argument, in the order of ``Op.inputs`` (positions, then keywords, lists flattened).
        outputs: of each tensor returned.
        cut: what each rank has a part of; None where all ranks do the same, or each has a summand of the inputs.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    cut: FactorAxis | None = None
