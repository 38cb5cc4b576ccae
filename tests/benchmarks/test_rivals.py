"""The rivals of ``benchmarks.rivals`` measure as they are known to, and sacplan's plans by the same means."""

from __future__ import annotations

import pytest
import torch

import sacplan

pytest.importorskip("transformers")
pytest.importorskip("pandas")

from benchmarks import frontier, rivals
from benchmarks.rivals import Point
from tests.zoo.language_models import LM, cross_entropy, tokens

GIB = 2**30
SEED = frontier.CASES["seed"]
SMALL = rivals.Case(
    name="small",
    title="a small language model",
    make_model=lambda: LM(layers=4, dim=32, dropout=0.0),
    make_batch=lambda: tokens(8, 64),
    loss_fn=cross_entropy,
    layers="layers",
)
# The peak in GiB and the recomputed share of the step's FLOPs, in percent, as measured elsewhere.
KNOWN = [
    ("full", 0.736, 20.0),
    (0.7, 1.371, 0.0),
    (0.3, 0.966, 9.38),
    (0.1, 0.757, 17.5),
]


@pytest.fixture(scope="module")
def plain() -> Point:
    return rivals.unplanned(SEED)


@pytest.fixture(scope="module")
def small() -> Point:
    return rivals.unplanned(SMALL)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="figures of torch 2.13's partitioner")
@pytest.mark.parametrize(("setting", "peak_gib", "percent"), KNOWN)
def test_known_figures(plain: Point, setting: float | str, peak_gib: float, percent: float) -> None:
    if isinstance(setting, str):
        seen = rivals.checkpoint_every(SEED, 1)
    else:
        seen = rivals.compiled(SEED, setting, loss_in_graph=False)
    assert seen.peak_bytes / GIB == pytest.approx(peak_gib, abs=6e-4)
    assert 100 * (seen.flops / plain.flops - 1) == pytest.approx(percent, abs=6e-3)


@pytest.mark.slow
def test_a_compiled_step_without_a_budget_is_the_plain_step(small: Point) -> None:
    seen = rivals.compiled(SMALL, 1.0)
    assert seen.flops == small.flops
    assert seen.peak_bytes == pytest.approx(
        small.peak_bytes, rel=0.05
    )  # cross entropy takes other temporaries


@pytest.mark.slow
def test_plans_are_measured_like_rivals(small: Point) -> None:
    profile = sacplan.profile(
        rivals.meta_model(SMALL), tokens(8, 64), loss_fn=cross_entropy, device=rivals.DEVICE
    )
    plan = sacplan.policy("full", profile=profile)
    seen = rivals.planned(SMALL, plan, "full")
    assert seen.flops - small.flops == plan.recompute_flops
    assert seen.flops == rivals.checkpoint_every(SMALL, 1).flops
    assert seen.peak_bytes < small.peak_bytes
