"""``benchmarks.modes``: the table of what the modes cost, on a model that is small."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from benchmarks import modes
from benchmarks.modes import DISTINCT, MODES, Case, check_different, markdown, rows_of
from tests.zoo.language_models import LM, tokens


@pytest.fixture(scope="module")
def case() -> Case:
    with torch.device("meta"):
        model, batch = LM(layers=4, dim=32, vocab=200), tokens(4, 64, 200)
    return Case("a small model", model, batch, functools.partial(torch.optim.SGD, lr=0.1))


@pytest.fixture(scope="module")
def rows(case: Case) -> list[dict[str, Any]]:
    return rows_of("small", case)


def test_every_mode_has_a_row_and_the_five_differ(rows: list[dict[str, Any]]) -> None:
    assert [row["mode"] for row in rows] == list(MODES)
    assert len({row["recompute_flops"] for row in rows if row["mode"] in DISTINCT}) == 5
    none = rows[0]
    assert (none["peak_bytes"], none["recompute_flops"]) == (none["unplanned_bytes"], 0)


def test_flops_are_those_that_torch_counts(case: Case, rows: list[dict[str, Any]]) -> None:
    with sacplan.fake_device(modes.DEVICE):
        model, batch = LM(layers=4, dim=32, vocab=200), tokens(4, 64, 200)
        profile = sacplan.profile(model, batch, device=modes.DEVICE, optimizer=case.optimizer)
        counts = []
        for mode in ("none", "every 2nd layer", "full"):
            kind, option = MODES[mode]
            with (
                sacplan.apply(model, sacplan.policy(kind, option, profile=profile)),
                FlopCounterMode(display=False) as counter,
            ):
                model(batch).float().sum().backward()
            counts.append(counter.get_total_flops())
    shown = {row["mode"]: row["recompute_flops"] for row in rows}
    assert [n - counts[0] for n in counts[1:]] == [shown["every 2nd layer"], shown["full"]]


def test_plans_take_no_more_bytes_and_cost_no_less_than_the_bound(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for solver in modes.SOLVERS:
            plan = row[solver]
            if plan is not None:
                assert plan["peak_bytes"] <= row["peak_bytes"]
                assert plan["recompute_share"] >= plan["lower_bound_share"]
        assert row["best"]["recompute_share"] <= row["recompute_share"]


def test_alike_modes_are_an_error(rows: list[dict[str, Any]]) -> None:
    check_different(rows, frozenset())
    full = next(row for row in rows if row["mode"] == "full")
    same = [
        row | {"recompute_flops": full["recompute_flops"]} if row["mode"] == "op" else row for row in rows
    ]
    check_different(same, frozenset({"op", "full"}))
    for wrong, alike in ((same, ()), (rows, ("op", "full")), (rows[:-1], ())):
        with pytest.raises(AssertionError, match="FLOPs of the modes"):
            check_different(wrong, frozenset(alike))


def test_the_table_is_markdown(rows: list[dict[str, Any]]) -> None:
    missing = [{**row, "rotor": None} for row in rows]
    title, _, *lines = markdown(missing).splitlines()
    assert title == "**a small model**"
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert all(line.endswith("| - | - |") for line in lines[2:])
