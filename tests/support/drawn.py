"""Shardings drawn at random: what holds for them holds for whichever one a search finds in its time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import sacplan
from sacplan._placing.answer import sharding_of
from sacplan._placing.search import ShardingSearch
from sacplan._shard.mesh import Mesh
from sacplan._shard.sharding import Sharding


def drawn_sharding(profile: sacplan.Profile, axes: Mapping[str, int], share: float, seed: int) -> Sharding:
    """Any strategies for a share of all ops and parameters; the others are replicated, or follow."""
    evaluation = ShardingSearch(profile.recorded, profile.parameters, Mesh.of(axes), profile.spec).evaluation
    choice, rng = evaluation.replicated(), random.Random(seed)
    for c in range(len(evaluation.graph.classes)):
        if rng.random() >= share:
            continue
        offered = [options.strategies[c] for options in evaluation.options]
        picks = itertools.product(*(range(len(strategies)) for strategies in offered))
        valid = [p for p in picks if evaluation.is_valid(c, [s[k] for s, k in zip(offered, p, strict=True)])]
        for axis, pick in enumerate(rng.choice(valid)):
            choice[axis][c] = pick
    return sharding_of(evaluation, choice)
