"""The parts of the peak have the names that people use, and add up to it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import sacplan
from sacplan.questions.parts import parts_of
from tests.profiling.test_optimizers import language_step, wide
from tests.zoo.language_models import LM

language = functools.cache(language_step)


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_the_parts_are_the_peak(optimizer: Any) -> None:
    for profile in (language(optimizer), wide(optimizer)):
        for plan in (None, sacplan.plan(profile, "smallest")):
            program = profile.program if plan is None else profile.with_plan(plan)
            assert sum(part.n_bytes for part in parts_of(profile, program)) == program.footprint.peak_bytes


def test_parts_have_the_names_that_people_use() -> None:
    profile = language(torch.optim.AdamW)
    parts = {part.what: part.n_bytes for part in parts_of(profile, profile.program)}
    logits = 4 * 64 * 4096 * 4
    assert parts["one copy of the logits"] == logits
    parameters = sum(p.numel() for p in LM(layers=2, vocab=4096).parameters())
    assert parts["parameters"] == pytest.approx(4 * parameters, rel=0.02)
    assert parts["AdamW's state"] == pytest.approx(8 * parameters, rel=0.02)
    assert "saved activations of 2 layers (layers)" in parts
    said = sacplan.Report(profile).peak
    assert "is in the backward pass, at " in said
    assert "one copy of the logits 4.00 MiB" in said


def test_the_optimizers_step_is_named() -> None:
    report = sacplan.Report(wide(torch.optim.AdamW))
    assert "is in the optimizer's step. Alive then: " in report.peak
    assert "AdamW's temporaries" in report.peak
