"""A plan for the longest batch holds for every shorter one: random models, shapes and budgets."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sacplan
from sacplan._verify.verify import _verify_fake
from tests.zoo.language_models import LM, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

VOCAB = 96


@pytest.mark.slow
@settings(max_examples=12)
@given(
    layers=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 48]),
    longest=st.tuples(st.integers(1, 5), st.integers(2, 80)),
    shorter=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    share=st.floats(0, 1),
    device=st.sampled_from(["cpu", "h100"]),
    chunks=st.booleans(),
)
def test_a_shorter_batch_takes_no_more_and_nothing_is_said(
    layers: int,
    dim: int,
    longest: tuple[int, int],
    shorter: tuple[float, float],
    share: float,
    device: str,
    chunks: bool,
) -> None:
    """``share`` 0 is the smallest peak that a plan reaches, 1 the peak without a plan."""
    model = LM(layers=layers, dim=dim, heads=2, vocab=VOCAB)
    profile = sacplan.profile(model, tokens(*longest, VOCAB), cross_entropy, torch.optim.AdamW, device)
    techniques = ("recompute", "chunk") if chunks else ("recompute",)
    smallest = sacplan.plan(profile, "smallest", solver="greedy", techniques=techniques).peak_bytes
    budget = smallest + round(share * max(0, profile.peak_bytes - smallest))
    plan = sacplan.plan(profile, f"{budget}B", "greedy", techniques=techniques)
    rows, length = (max(1, round(part * most)) for part, most in zip(shorter, longest, strict=True))
    batch = tokens(rows, max(2, length), VOCAB)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*larger than the plan was made for")
        warnings.filterwarnings("ignore", category=sacplan.SacplanWarning)
        # ``verify`` itself refuses a batch of other shapes than the plan's.
        found = _verify_fake(model, batch, plan, cross_entropy, torch.optim.AdamW, 1)
    assert found.peak_bytes <= budget
