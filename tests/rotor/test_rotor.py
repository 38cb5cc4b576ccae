"""Rotor: two engines in every cell, and the sequence against a simulator and a search that know no recurrence."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sacplan
from sacplan.solvers.rotor.rotor import (
    INFEASIBLE,
    KEEP_ALL,
    Operation,
    OperationKind,
    RotorResult,
)
from tests.support.rotor_reference import reference_tables, rotor_by_reference
from tests.support.slow import slow_after

K = OperationKind
DATA = Path(__file__).parents[1] / "data" / "rotor_chains"
ONE = sacplan.Chain([1], [2, 3], [1, 2], [1, 4], [1], [2, 5])  # small enough for the back of an envelope


def load(path: Path) -> sacplan.Chain:
    """A chain whose sizes are whole slots of a budget of 500 bytes in 500 slots."""
    fields = json.loads(path.read_text())
    return sacplan.Chain(*(fields[k] for k in ("ftime", "btime", "x", "xbar", "ftmp", "btmp")))


@st.composite
def chains(
    draw: st.DrawFn, max_stages: int = 7, times: Any = None, saved_any: bool = False, largest: int = 6
) -> sacplan.Chain:
    n = draw(st.integers(1, max_stages))
    if times is None:
        times = st.floats(0, 1e3) | st.sampled_from([0.0, 1.0, 2.0])

    def sizes(count: int) -> list[int]:
        return draw(st.lists(st.integers(0, largest), min_size=count, max_size=count))

    x = sizes(n + 1)
    xbar = [extra if saved_any else size + extra for size, extra in zip(x, sizes(n + 1), strict=True)]
    forward_ms = draw(st.lists(times, min_size=n, max_size=n))
    backward_ms = draw(st.lists(times, min_size=n + 1, max_size=n + 1))
    return sacplan.Chain(forward_ms, backward_ms, x, xbar, sizes(n), sizes(n + 1))


def equal(one: RotorResult, two: RotorResult) -> bool:
    return (
        np.array_equal(one.table, two.table)
        and np.array_equal(one.choices, two.choices)
        and one.operations == two.operations
        and (one.total_ms, one.peak_bytes, one.strict) == (two.total_ms, two.peak_bytes, two.strict)
    )


# A chain's memory as a set of named values, shared by the simulator and the search: ("x", i) the input of stage i,
# ("all", i) what stage i saved (x_{i+1} is in it), ("d", i) the gradient of x_i. x_0 stays, its gradient is not kept.


def has_input(held: frozenset[Any], i: int) -> bool:
    return ("x", i) in held or ("all", i - 1) in held


def value_size(sizes: Any, value: tuple[str, int]) -> int:
    kind, i = value
    return sizes.xbar[i + 1] if kind == "all" else sizes.x[i]


def run(
    sizes: Any, stages: int, held: frozenset[Any], operation: Operation
) -> tuple[frozenset[Any], int] | None:
    """The values after an operation and the memory while it ran; None where a value that it needs is missing."""
    kind, i = operation.kind, operation.stage
    if not has_input(held, i):
        return None
    made: set[Any] = set()
    dropped: set[Any] = set()
    extra = sizes.btmp[i] if kind in (K.LOSS, K.BACKWARD) else sizes.ftmp[i]
    if kind is K.LOSS:
        if i != stages:
            return None
    elif kind is K.BACKWARD:
        if ("d", i + 1) not in held or ("all", i) not in held:
            return None
        dropped |= {("d", i + 1), ("all", i)}
    elif kind is K.FORWARD_KEEP_ALL:
        made.add(("all", i))
    else:
        made.add(("x", i + 1))
        if kind is K.FORWARD_KEEP_NOTHING:
            if i == 0 or ("x", i) not in held:
                return None
            dropped.add(("x", i))
    if made & held:
        return None
    during = sum(value_size(sizes, v) for v in held | made) + extra
    if kind in (K.LOSS, K.BACKWARD) and i:
        made.add(("d", i))
        dropped |= {("x", i)} & held
    after = (held | made) - dropped
    return after, max(during, sum(value_size(sizes, v) for v in after))


def simulate(result: RotorResult, sizes: Any) -> tuple[float, int]:
    """Total time and peak of the sequence; fails on the first operation that cannot run."""
    chain = result.chain
    held: frozenset[Any] = frozenset({("x", 0)})
    total, peak = 0.0, sizes.x[0]
    for at, operation in enumerate(result.operations):
        step = run(sizes, len(chain), held, operation)
        assert step is not None, f"operation {at}, {operation}, misses a value; there are {sorted(held)}"
        held, memory = step
        peak = max(peak, memory)
        total += time_of(chain, operation)
    assert held == {("x", 0)}
    backwards = [o.stage for o in result.operations if o.kind in (K.BACKWARD, K.LOSS)]
    assert backwards == list(range(len(chain), -1, -1))
    return total, peak


def time_of(chain: sacplan.Chain, operation: Operation) -> float:
    back = operation.kind in (K.LOSS, K.BACKWARD)
    return (chain.backward_ms if back else chain.forward_ms)[operation.stage]


def cheapest_persistent(chain: sacplan.Chain, sizes: Any, slots: int) -> float:
    """Dijkstra over all sequences in which a value that a forward left behind stays until its backward; inf if none.

    The state adds to the values which of the ``x_i`` were kept: keeping nothing may drop only the others. As in the
    recurrence, forward keeping all takes room for the gradient of its own output too.
    """
    n = len(chain)
    start: Any = (frozenset({("x", 0)}), frozenset({0}), n + 1)
    heap: list[Any] = [(0.0, 0, start)]
    best = {start: 0.0}
    serial = 0
    if sizes.x[0] > slots:
        return float("inf")
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > best[state]:
            continue
        held, kept, back = state  # backward has come down to this stage
        if back == 0:
            return time
        for operation in all_operations(n, back):
            if operation.kind is K.FORWARD_KEEP_NOTHING and operation.stage in kept:
                continue
            step = run(sizes, n, held, operation)
            i = operation.stage
            if step is None or step[1] > slots:
                continue
            if operation.kind is K.FORWARD_KEEP_ALL:
                others = sum(value_size(sizes, v) for v in step[0] if v[0] != "d")
                if others + sizes.ftmp[i] + sizes.x[i + 1] > slots:
                    continue
            done = operation.kind in (K.BACKWARD, K.LOSS)
            now_kept = {k for k in kept if k < back} | (
                {i} if operation.kind in (K.FORWARD_KEEP_INPUT, K.FORWARD_KEEP_ALL) else set()
            )
            after = (step[0], frozenset(now_kept - ({i} if done else set())), i if done else back)
            total = time + time_of(chain, operation)
            if total < best.get(after, float("inf")):
                best[after] = total
                serial += 1
                heapq.heappush(heap, (total, serial, after))
    return float("inf")


def all_operations(stages: int, back: int) -> Iterator[Operation]:
    if back == stages + 1:
        yield Operation(K.LOSS, stages)
    else:
        yield Operation(K.BACKWARD, back - 1)
    for i in range(min(back, stages)):
        for kind in (K.FORWARD_KEEP_INPUT, K.FORWARD_KEEP_NOTHING, K.FORWARD_KEEP_ALL):
            yield Operation(kind, i)


@pytest.mark.parametrize("path", slow_after(4, sorted(DATA.glob("*.json"))), ids=lambda p: p.stem)
def test_engines_agree_on_real_chains(path: Path) -> None:
    chain = load(path)
    budget = 500
    try:
        fast = sacplan.rotor(chain, budget)
    except sacplan.InfeasibleBudget as error:  # three of the chains do not fit in their 500 slots
        budget = error.smallest_feasible_bytes
        assert budget > 500
        fast = sacplan.rotor(chain, budget)
    reference = rotor_by_reference(chain, budget)
    assert equal(fast, reference)
    total_ms, peak = simulate(fast, chain.in_slots(budget, 500))
    assert total_ms == fast.total_ms  # whole numbers below 2**53: any order of addition is exact
    assert peak <= 500
    assert simulate(fast, chain.sizes())[1] == fast.peak_bytes <= budget


@pytest.mark.parametrize(
    ("name", "total_ms"),
    [("resnet50_4000", 440), ("densenet121_8080", 990), ("resnet50_12000flop", 1587870299154)],
)
def test_known_totals(name: str, total_ms: float) -> None:
    """The first two cost what another implementation of the recurrence (in ColossalAI) says; the third fits whole."""
    chain = load(DATA / f"chain_{name}.json")
    assert sacplan.rotor(chain, 500).total_ms == total_ms
    assert chain.step_ms <= total_ms


@settings(max_examples=150)
@given(chains(), st.integers(4, 60), st.integers(1, 100))
def test_sequences_are_legal_and_within_the_budget(chain: sacplan.Chain, slots: int, budget: int) -> None:
    try:
        result = sacplan.rotor(chain, budget, slots)
    except sacplan.InfeasibleBudget as error:
        result = sacplan.rotor(chain, error.smallest_feasible_bytes, slots)
    except sacplan.errors.PlanError:  # too few slots
        return
    total_ms, peak = simulate(result, chain.in_slots(result.budget_bytes, slots))
    assert peak <= slots
    assert total_ms == pytest.approx(result.total_ms, rel=1e-12)
    assert simulate(result, chain.sizes())[1] == result.peak_bytes <= result.budget_bytes
    assert result.total_ms == result.table[slots - chain.in_slots(result.budget_bytes, slots).x[0], 0, -1]


@settings(max_examples=150)
@given(chains(max_stages=4, times=st.integers(0, 9), largest=4), st.integers(1, 40))
def test_optimal_among_persistent_sequences(chain: sacplan.Chain, slots: int) -> None:
    best = cheapest_persistent(chain, chain.in_slots(slots, slots), slots)
    if best == float("inf"):
        with pytest.raises((sacplan.InfeasibleBudget, sacplan.errors.PlanError)):
            sacplan.rotor(chain, slots, slots)
    else:
        assert sacplan.rotor(chain, slots, slots).total_ms == best


def test_gradient_that_waits_behind_a_segment_counts() -> None:
    """Stages 0 and 1 run again while the gradient of x_2 waits, and stage 0 needs much while it runs forward."""
    chain = sacplan.Chain([1, 3, 3], [1, 4, 4, 1], [1, 2, 3, 2], [1, 6, 3, 4], [4, 0, 2], [0, 0, 3, 2])
    result = sacplan.rotor(chain, 13, 13)
    assert result.strict
    assert equal(result, rotor_by_reference(chain, 13, 13))
    sizes = chain.in_slots(13, 13)
    assert simulate(result, sizes) == (result.total_ms, result.peak_bytes)
    assert result.peak_bytes <= 13
    assert result.total_ms == cheapest_persistent(chain, sizes, 13) == 22
    loose, _ = reference_tables(chain, sizes, 13, strict=False)
    assert loose[13 - 1, 0, 3] < 22  # a promise that no sequence keeps
    assert not sacplan.rotor(chain, 14, 14).strict


def test_by_hand() -> None:
    table, choices = sacplan.rotor(ONE, 10, 10).table, sacplan.rotor(ONE, 10, 10).choices
    inf = math.inf
    assert table[:, 0, 0].tolist() == [inf] * 8 + [3] * 3  # x_1 + xbar_1 + btmp_0 = 8
    assert table[:, 1, 1].tolist() == [inf] * 5 + [3] * 6  # the loss needs its 5
    assert table[:, 0, 1].tolist() == [inf] * 8 + [7, 6, 6]  # (a) from 8 on, (b) from 4 + 5 on
    assert choices[:, 0, 1].tolist() == [INFEASIBLE] * 8 + [1, KEEP_ALL, KEEP_ALL]
    assert choices[:, 0, 0].tolist() == [INFEASIBLE] * 8 + [KEEP_ALL] * 3
    assert np.isinf(table[:, 1, 0]).all()
    assert (choices[:, 1, 0] == INFEASIBLE).all()
    kept = [(K.FORWARD_KEEP_ALL, 0), (K.LOSS, 1), (K.BACKWARD, 0)]
    again = [(K.FORWARD_KEEP_INPUT, 0), (K.LOSS, 1), (K.FORWARD_KEEP_ALL, 0), (K.BACKWARD, 0)]
    for slots, total_ms, operations in ((10, 6, kept), (9, 7, again)):  # x_0 takes one
        result = sacplan.rotor(ONE, slots, slots)
        assert result.total_ms == total_ms
        assert [(o.kind, o.stage) for o in result.operations] == operations
        assert result.peak_bytes == slots


@given(st.integers(0, 10**13), st.integers(1, 10**13), st.integers(1, 2000))
def test_sizes_are_rounded_up_exactly(size: int, budget: int, slots: int) -> None:
    chain = sacplan.Chain([1], [1, 1], [size, 0], [0, size], [size], [0, size])
    exact = min(math.ceil(Fraction(size * slots, budget)), slots + 1)
    sizes = chain.in_slots(budget, slots)
    assert (sizes.x, sizes.xbar) == ((exact, 0, 0), (0, exact, 0))
    assert (sizes.ftmp, sizes.btmp) == ((exact, 0), (0, exact))


@settings(max_examples=100)
@given(chains(max_stages=5, saved_any=True), st.integers(8, 40), st.integers(-3, 10**6))
def test_the_named_budget_is_the_smallest_that_works(chain: sacplan.Chain, slots: int, scale: int) -> None:
    with pytest.raises((sacplan.InfeasibleBudget, sacplan.errors.PlanError)) as caught:
        sacplan.rotor(chain, min(0, scale), slots)
    if not isinstance(caught.value, sacplan.InfeasibleBudget):
        assert "too few" in str(caught.value)
        return
    smallest = caught.value.smallest_feasible_bytes
    assert caught.value.budget_bytes == min(0, scale)
    assert sacplan.rotor(chain, smallest, slots).peak_bytes <= smallest
    assert sacplan.rotor(chain, smallest + max(0, scale), slots).total_ms >= chain.step_ms * (1 - 1e-12)
    with pytest.raises(sacplan.InfeasibleBudget) as again:
        rotor_by_reference(chain, smallest - 1, slots)
    assert again.value.smallest_feasible_bytes == smallest


def test_an_infeasible_budget_says_what_binds() -> None:
    chain = load(DATA / "chain_resnet50_2000flop.json")
    with pytest.raises(
        sacplan.InfeasibleBudget, match=r"no sequence runs this chain of 22 stages.*\b901\b"
    ) as caught:
        sacplan.rotor(chain, 500)
    stage = int(caught.value.binding.rpartition(" ")[2])
    sizes = chain.sizes()
    alone = sizes.x[stage + 1] + sizes.xbar[stage + 1] + sizes.btmp[stage]
    assert caught.value.binding == f"backward, stage {stage}"
    assert alone > 500  # that stage alone is over the budget
    for tiny in (1, 0, -5, -(10**15), 10.5):
        with pytest.raises(sacplan.InfeasibleBudget) as caught:
            sacplan.rotor(chain, tiny)
        assert caught.value.smallest_feasible_bytes == 901


def test_sizes_of_any_magnitude() -> None:
    huge = sacplan.Chain(
        [1], [2, 3], [10**20, 2 * 10**20], [0, 4 * 10**20], [10**20], [2 * 10**20, 5 * 10**20]
    )
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.rotor(huge, 10**9, 9)
    assert caught.value.smallest_feasible_bytes == 9 * 10**20
    empty = sacplan.Chain([1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0], [0, 0, 0])
    assert sacplan.rotor(empty, 1, 1).total_ms == 5
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.rotor(empty, 0)
    assert caught.value.smallest_feasible_bytes == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_ms": []}, "forward_ms is empty"),
        ({"forward_ms": [1, 2]}, r"backward_ms has 2 entries, but forward_ms has 2 stages; give 3"),
        ({"backward_ms": [1]}, r"backward_ms has 1 entries, but forward_ms has 1 stages; give 2"),
        ({"output_bytes": [1, 2, 3]}, r"output_bytes has 3 entries.*give 2"),
        ({"saved_bytes": [1]}, r"saved_bytes has 1 entries.*give 2"),
        ({"forward_extra_bytes": [1, 2]}, r"forward_extra_bytes has 2 entries.*give 1"),
        ({"backward_extra_bytes": [1]}, r"backward_extra_bytes has 1 entries.*give 2"),
        ({"forward_ms": [-1.0]}, r"forward_ms\[0\] is -1.0"),
        ({"backward_ms": [1, math.nan]}, r"backward_ms\[1\] is nan"),
        ({"forward_ms": [math.inf]}, r"forward_ms\[0\] is inf"),
        ({"output_bytes": [1, -2]}, r"output_bytes\[1\] is -2"),
        ({"saved_bytes": [1.5, 2]}, r"saved_bytes\[0\] is 1.5"),
        ({"backward_extra_bytes": [0, math.nan]}, r"backward_extra_bytes\[1\] is nan"),
        ({"forward_extra_bytes": ["much"]}, "forward_extra_bytes must be a sequence of numbers"),
        ({"forward_extra_bytes": None}, "forward_extra_bytes must be a sequence of numbers"),
    ],
)
def test_bad_chains(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "forward_ms": [1], "backward_ms": [2, 3], "output_bytes": [1, 2],
        "saved_bytes": [1, 4], "forward_extra_bytes": [1], "backward_extra_bytes": [2, 5],
    }  # fmt: skip
    with pytest.raises(sacplan.errors.PlanError, match=message):
        sacplan.Chain(**(fields | change))


def test_chain_takes_arrays() -> None:
    chain = sacplan.Chain(
        np.ones(1), np.array([2, 3]), np.array([1, 2]), (1.0, 4), np.array([1]), range(2, 8, 3)
    )
    assert chain == ONE
    assert {type(v) for v in chain.output_bytes + chain.saved_bytes} == {int}
    assert (len(chain), chain.step_ms) == (1, 6)
    exact = sacplan.Chain([1], [1, 1], np.array([2**60 + 1, 0]), [0, 0], [0], [0, 0])
    assert exact.output_bytes == (2**60 + 1, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"slots": 0}, sacplan.errors.PlanError, "slots is 0"),
        ({"slots": 2.5}, sacplan.errors.PlanError, "slots is 2.5"),
        ({"slots": True}, sacplan.errors.PlanError, "slots is True"),
        ({"slots": 3}, sacplan.errors.PlanError, "slots=3 is too few"),
        ({"chain": [1, 2]}, sacplan.errors.PlanError, "chain is a list; give a sacplan.Chain"),
        ({"budget_bytes": "2GiB"}, sacplan.errors.BudgetError, "budget_bytes is '2GiB'"),
        ({"budget_bytes": math.nan}, sacplan.errors.BudgetError, "budget_bytes is nan"),
        ({"budget_bytes": math.inf}, sacplan.errors.BudgetError, "budget_bytes is inf"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sacplan.rotor(**({"chain": ONE, "budget_bytes": 3} | arguments))


def test_results_do_not_change() -> None:
    result = sacplan.rotor(ONE, 10, 10)
    for array in (result.table, result.choices):
        assert array.shape == (11, 2, 2)
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 0
    with pytest.raises(AttributeError):
        result.total_ms = 0.0  # type: ignore[misc]
    assert [str(o) for o in result.operations] == [
        "forward keeping all, stage 0",
        "loss",
        "backward, stage 0",
    ]
