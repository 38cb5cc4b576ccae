"""Collect the trade-off curves of a model's modules: each distinct one once, with its fits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sacplan.classic.fit import Fit, fit_tradeoff
from sacplan.classic.units import UnitTradeoff
from sacplan.core.elements import pattern_of
from sacplan.core.names import pattern_over
from sacplan.profiling.profile import Profile


@dataclass(frozen=True, slots=True)
class Curve:
    """The trade-off of modules that are alike: recomputation time against memory.

    Attributes:
        name: their name, with ``*`` for numbers that differ.
        members: the modules.
        tradeoff: of one of them.
        points: the exact trade-offs (share discarded, ms of recomputation), with (0, 0).
        hull: the fit that plans are made on; it lies under no reachable point.
        pwlf: the fit by least squares, as PyTorch's prototype uses it.
    """

    name: str
    members: tuple[str, ...]
    tradeoff: UnitTradeoff
    points: tuple[tuple[float, float], ...]
    hull: Fit
    pwlf: Fit

    def line(self, fit: Fit) -> list[tuple[float, float]]:
        """Return the corners of a fit's graph, ms over share, up to the largest share that is reachable."""
        largest = self.points[-1][0]
        # Crossings below the maximum of the lines are points on the graph as well, and do no harm.
        corners = {0.0, largest, *(min(max(x, 0.0), largest) for x in fit.crossings())}
        return [(x, fit.at(x) * self.runtime_ms) for x in sorted(corners)]

    @property
    def runtime_ms(self) -> float:
        """Forward time of the module, which recompute shares are relative to; 1 if it takes no time."""
        return self.tradeoff.runtime_ms or 1.0


def distinct_curves(profile: Profile, most: int | None = 8) -> list[Curve]:
    """Return the curves of the modules that keep the most. Equal ones are joined.

    Args:
        profile: from ``sacplan.profile``.
        most: how many; None for all.
    """
    alike: dict[tuple[object, ...], list[UnitTradeoff]] = defaultdict(list)
    for fqn, tradeoff in profile.tradeoffs.items():
        # Modules that can discard nothing have no curve.
        if tradeoff.points:
            # Layers of one model are alike, and are drawn once.
            shape = tuple((p.discard_ratio, p.recompute_ms) for p in tradeoff.points)
            alike[pattern_of(fqn), tradeoff.saved_bytes, shape].append(tradeoff)
    # By what all of them keep together.
    chosen = sorted(alike.values(), key=lambda same: -len(same) * same[0].saved_bytes)[:most]
    return [_curve(same, profile.fingerprint.model_class) for same in chosen]


def _curve(same: list[UnitTradeoff], model: str) -> Curve:
    first = same[0]
    whole = first.runtime_ms or 1.0
    shares = [(p.discard_ratio, p.recompute_ms / whole) for p in first.points]
    return Curve(
        name=pattern_over(t.fqn for t in same) or model,
        members=tuple(t.fqn for t in same),
        tradeoff=first,
        points=((0.0, 0.0), *((p.discard_ratio, p.recompute_ms) for p in first.points)),
        hull=fit_tradeoff(shares, "hull"),
        pwlf=fit_tradeoff(shares, "pwlf"),
    )
