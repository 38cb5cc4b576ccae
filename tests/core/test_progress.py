"""Progress of long calls: a bar where somebody watches, nothing where output goes elsewhere, or a person's function."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core import progress as module


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    return sacplan.profile(nn.Sequential(*layers), torch.randn(256, 8), device="cpu")


@pytest.mark.parametrize(
    ("where", "asked", "expected"),
    [
        (Terminal, None, True), (Terminal, True, True), (Terminal, False, False),
        (io.StringIO, None, False), (io.StringIO, True, True), (io.StringIO, False, False),
    ],
)  # fmt: skip
def test_a_bar_is_for_terminals(
    profile: sacplan.Profile, monkeypatch: pytest.MonkeyPatch, where: type, asked: bool | None, expected: bool
) -> None:
    seen = where()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    sacplan.frontier(profile, 2, ["greedy"], policies=False, progress=asked)
    assert ("frontier" in seen.getvalue()) == expected


def test_what_is_over_soon_shows_nothing(profile: sacplan.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", seen := Terminal())
    monkeypatch.setattr(module, "_PATIENCE_S", 1000.0)
    sacplan.frontier(profile, 2, ["greedy"], policies=False)
    assert seen.getvalue() == ""


def test_a_function_gets_each_result(profile: sacplan.Profile) -> None:
    rows: list[dict[str, object] | None] = []
    frame = sacplan.frontier(profile, 3, ["greedy"], policies=False, progress=rows.append)
    assert [row for row in rows if row] == frame.to_dict("records")
    assert len(rows) == 3

    points: list[sacplan.CapacityPoint] = []
    found = sacplan.max_batch(
        nn.Linear(8, 8),
        lambda n: torch.randn(n, 8),
        "1MiB",
        device="cpu",
        at_most=4,
        progress=points.append,
    )
    assert sorted(point.batch_size for point in points) == [point.batch_size for point in found.points]

    layouts: list[sacplan.Layout] = []
    spread = sacplan.layouts(nn.Linear(8, 8), torch.randn(8, 8), 1, device="cpu", progress=layouts.append)
    assert tuple(layouts) == spread.rows


@pytest.mark.parametrize("wrong", ["yes", 1, int])
def test_anything_else_is_refused(profile: sacplan.Profile, wrong: object) -> None:
    with pytest.raises(sacplan.errors.PlanError, match="progress"):
        sacplan.frontier(profile, 2, progress=wrong)
    with pytest.raises(sacplan.errors.PlanError, match="progress"):
        sacplan.max_batch(nn.Linear(8, 8), lambda n: torch.randn(n, 8), device="cpu", progress=wrong)
