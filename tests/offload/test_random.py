"""Random programs with random plans that offload: no bit changes, and both peaks are those of the fake step.

The benchmark has more of them: ``python -m benchmarks.random_programs --offload``.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.harness.steps import on_one_thread
from benchmarks.random_programs import OFFLOADING, run
from tests.support.recomputing import fuzz


@fuzz(6)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("kind", OFFLOADING)
def test_random_programs(kind: str, seed: int) -> None:
    outcome = on_one_thread(run)(seed, kinds=(kind,), threads=False)
    assert not outcome.failures


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(750, id="a graph that is dropped, and its tensor sent again"),
        pytest.param(758, id="a copy that an inner gradient saves again"),
        pytest.param(866, id="sent at the op that writes it in place"),
        pytest.param(888, id="a unit that is called twice"),
        pytest.param(1713, id="sent at an op that writes another tensor in place"),
    ],
)
def test_programs_whose_peaks_were_off(seed: int) -> None:
    outcome = on_one_thread(run)(seed, kinds=OFFLOADING, threads=False)
    assert outcome.predicted == len(OFFLOADING)
    assert not outcome.failures


@pytest.mark.parametrize("kind", OFFLOADING)
def test_they_do_offload(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(14, 20):
        outcome = on_one_thread(run)(seed, kinds=(kind,), threads=False)
        seen.update(offloaded=outcome.offloaded, steps=outcome.steps, predicted=outcome.predicted)
    assert seen["offloaded"]
    assert seen["steps"] > 10
    assert seen["predicted"]
