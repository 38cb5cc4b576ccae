"""What a custom function marks as dirty is written once more than ops tell."""

from __future__ import annotations

import pytest

import sacplan
from benchmarks.models.random_blocks import Net, net_of
from tests.support.recomputing import assert_peak_is_replayed, random_plan
from tests.zoo.units import batch


@pytest.fixture(scope="module")
def model() -> Net:
    return net_of(["in_place_function"], ["in_place_function"])


@pytest.fixture(scope="module")
def profile(model: Net) -> sacplan.Profile:
    return sacplan.profile(model, batch(), device="cpu")


def test_neither_the_marked_value_nor_the_one_before_may_run_again(profile: sacplan.Profile) -> None:
    written = [op for op in profile.program.ops if op.name == "aten.mul_.Tensor"]
    assert len(written) == 2
    for op in written:
        assert not op.recomputable
        maker = profile.program.ops[profile.program.writer[op.mutates[0]]]
        assert maker.name == "aten.mul.Tensor"
        assert not maker.recomputable
    assert all(op.recomputable for op in profile.program.ops if op.name == "aten.sin.default")


@pytest.mark.parametrize("seed", range(8))
def test_plans_drawn_at_random(model: Net, profile: sacplan.Profile, seed: int) -> None:
    assert_peak_is_replayed(model, random_plan(profile, seed, fitting=True))
