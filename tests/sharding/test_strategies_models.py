"""Every strategy of every op of eight small models, on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sacplan.distributed.sharding.mesh import Mesh
from tests.support.placed import assert_all_right, assert_right, random_pairs

pytest.importorskip("transformers")

from tests.zoo.op_models import MODELS, calls_of_model


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_of_every_op(name: str) -> None:
    calls = calls_of_model(name)
    found = [assert_all_right(call, 2) for call in calls]
    assert sum(n > 1 for n in found) > 0.8 * len(calls)
    assert sum(found) > 140


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axes", [{"ranks": 4}, {"dp": 2, "tp": 2}])
def test_strategies_on_four_ranks(name: str, axes: dict[str, int]) -> None:
    mesh = Mesh.of(axes)
    for call in calls_of_model(name):
        if len(axes) == 1:
            assert_all_right(call, 4)
            continue
        for pair in random_pairs(call, mesh, most=40):
            assert_right(call, pair, mesh)
