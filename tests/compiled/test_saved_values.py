"""What a compiled step saves costs least: compared with all choices of small graphs."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sacplan.planning.saved_values import bytes_of, cheapest_saved, with_unrepeatable_saved
from sacplan.torch_compat.partitioning import ForwardValue


def some_values(seed: int) -> list[ForwardValue]:
    draw = random.Random(seed)
    values = [ForwardValue("input", (), draw.randrange(8), False, True, 0.0, math.inf)]
    for i in range(1, 9):
        inputs = tuple(sorted(draw.sample(range(i), min(i, 2))))
        cost = draw.choice((math.inf, 0.0, 1.0, 2.0, 5.0, 9.0))
        values.append(
            ForwardValue(str(i), inputs, draw.randrange(1, 8) * 2**20, draw.random() < 0.5, True, 0.0, cost)
        )
    return values


def all_costs(values: list[ForwardValue], limit: float) -> list[float]:
    """The costs of all ways to save some values and run others again, within a limit."""
    found = []
    for states in itertools.product(("left", "saved", "again"), repeat=len(values)):
        may = all(
            (
                state != "again"
                or (value.rerun_ms < math.inf and all(states[i] != "left" for i in value.inputs))
            )
            and (state != "left" or not value.is_read)
            for state, value in zip(states, values, strict=True)
        )
        names = {value.name for state, value in zip(states, values, strict=True) if state == "saved"}
        if may and bytes_of(values, names) <= limit:
            again = (v.rerun_ms for state, v in zip(states, values, strict=True) if state == "again")
            found.append(math.fsum(again))
    return found


def rerun_ms(values: list[ForwardValue], names: frozenset[str]) -> float:
    """The time to make what the backward pass reads of these values."""
    again, missing = set[int](), [i for i, value in enumerate(values) if value.is_read]
    while missing:
        i = missing.pop()
        if values[i].name not in names and i not in again:
            again.add(i)
            missing += values[i].inputs
    return math.fsum(values[i].rerun_ms for i in again)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_within_the_limit_costs_less(seed: int) -> None:
    values = some_values(seed)
    most = bytes_of(values, {value.name for value in values if value.is_read})
    for share in (1.0, 0.6, 0.3, 0.0):
        costs = all_costs(values, share * most)
        found = cheapest_saved(values, share * most)
        if costs:
            assert bytes_of(values, found) <= share * most * (1 + 1e-6)
            assert rerun_ms(values, found) <= min(costs) * 1.01  # the solver's gap
        else:
            assert bytes_of(values, found) > share * most
            assert not all_costs(values, bytes_of(values, found) * (1 - 1e-6))  # nothing has fewer


@pytest.mark.parametrize("seed", range(4))
def test_what_must_not_run_again_is_saved(seed: int) -> None:
    values = some_values(seed)
    for names in itertools.combinations([value.name for value in values], 2):
        found = with_unrepeatable_saved(values, names)
        assert found >= set(names)
        assert rerun_ms(values, found) < math.inf
