"""``sacplan.fit`` on several devices: its rows are what ``profile`` and ``plan`` say of each way to spread the step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import sacplan
from sacplan.core.budget import parse_budget
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.errors import PlanError
from sacplan.planning.meshes import spreads
from sacplan.profiling.optimizer_names import BY_NAME
from sacplan.questions.on_ranks import read_devices
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, cross_entropy, tokens

UNITS = ("layers.*", "")
BUDGET = "5MiB"
# DDP and FSDP2 do not fit in this one, so that another precision, and the host, are tried.
SMALLER = "2.5MiB"
NOTHING = "1.2MiB"
SPREADS = [
    ("FSDP2", BUDGET),
    ("DDP", "4.3MiB"),
    ("FSDP2, bfloat16", SMALLER),
    ("FSDP2, CPU offload", SMALLER),
]
DEVICE = "h100 without workspaces"  # the rest of the step is smaller than these


def model() -> LM:
    with torch.device("meta"):
        return LM(layers=2, dim=64, vocab=512, dropout=0.0)


def fitted(budget: str, optimizer: str = "adamw", **options: Any) -> sacplan.Verdict:
    options = {"batch": 4} | options
    return sacplan.fit(
        model(), lambda n: tokens(n, 64, 512), f"2x{DEVICE}", cross_entropy, optimizer, budget, **options
    )


@cache
def found(budget: str = BUDGET) -> sacplan.Verdict:
    return fitted(budget)


def profiled(batch: int = 4, **ranks: Any) -> sacplan.Profile:
    make = BY_NAME["adamw"].make
    return sacplan.profile(model(), tokens(batch, 64, 512), cross_entropy, make, DEVICE, **ranks)


WIDE = "8.5MiB"
"""Holds half of each parameter of ``wide``, with gradient and state, and not a whole layer beside the shards."""


def wide() -> LM:
    with torch.device("meta"):
        return LM(layers=1, dim=256, vocab=64, dropout=0.0)


@cache
def row_on_mesh() -> sacplan.FitRow:
    """A mesh is tried where FSDP2 does not fit, neither on the device nor with the host."""
    verdict = sacplan.fit(
        wide(), lambda n: tokens(n, 16, 64), f"2x{DEVICE}", cross_entropy, "adamw", WIDE, batch=2, host_budget="1MiB"
    )  # fmt: skip
    assert {row.spread for row in verdict.rows} >= {"DDP", "FSDP2", "FSDP2, CPU offload"}
    (row,) = [row for row in verdict.rows if row.spread == "tp 2, megatron" and row.way == "as it is"]
    return row


def wide_profile(batch: int) -> sacplan.Profile:
    return sacplan.profile(wide(), tokens(batch, 16, 64), cross_entropy, BY_NAME["adamw"].make, DEVICE)


def ranks_of(spread: str) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    policies: dict[str, Any] = {
        "FSDP2, bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "FSDP2, CPU offload": {"offload_policy": CPUOffloadPolicy()},
    }
    return {
        "ranks": sacplan.DDP(2) if spread == "DDP" else sacplan.FSDP2(2, UNITS, **policies.get(spread, {}))
    }


def test_layers_are_the_units() -> None:
    assert profiled(ranks=sacplan.FSDP2(2)).ranks.fsdp_units == UNITS
    alone = sacplan.profile(torch.nn.Linear(2, 2), torch.ones(2, 2), ranks=sacplan.FSDP2(2))
    assert alone.ranks.fsdp_units == ("",)


@pytest.mark.parametrize(("spread", "budget"), slow_after(2, SPREADS))
def test_rows_are_what_profile_and_plan_say(spread: str, budget: str) -> None:
    rows = [row for row in found(budget).rows if row.spread == spread]
    profile = profiled(**ranks_of(spread))
    assert rows[0].way == "as it is"
    assert rows[0].peak_bytes == profile.peak_bytes
    assert rows[0].step_ms == pytest.approx(profile.step_ms)
    assert rows[0].fits == (profile.peak_bytes <= parse_budget(budget, 0))
    assert [row.way for row in rows[1:]] == ([] if rows[0].fits else ["plan"])
    for row in rows[1:]:
        plan = sacplan.plan(profile, budget)
        assert row.fits
        assert (row.peak_bytes, row.plan.decisions) == (plan.peak_bytes, plan.decisions)
        assert row.step_ms == pytest.approx(plan.planned_ms)


@pytest.mark.slow
def test_a_mesh_gets_the_batch_of_all_devices() -> None:
    row = row_on_mesh()
    rank = sacplan.policy("megatron", profile=wide_profile(4), mesh={"tp": 2})
    assert row.unplanned_peak_bytes == row.peak_bytes == rank.peak_bytes
    assert row.options == "mesh={'tp': 2}"


@pytest.mark.parametrize(("spread", "budget"), slow_after(2, SPREADS))
def test_the_largest_batch_is_that_of_a_rank(spread: str, budget: str) -> None:
    row = next(row for row in found(budget).rows if row.spread == spread and row.way == "as it is")
    limit = parse_budget(budget, 0)
    n = row.largest_batch
    assert n
    assert (
        profiled(n, **ranks_of(spread)).peak_bytes <= limit < profiled(n + 1, **ranks_of(spread)).peak_bytes
    )


def test_no_other_batch_is_recorded_where_one_sample_cannot_fit() -> None:
    """Sixteen samples take at most sixteen times what one takes: that is over the limit, with any plan."""
    made = list[int]()

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(n)
        return tokens(n, 2048, 512)

    one = batch(1)
    rank = sacplan.profile(model(), one, cross_entropy, torch.optim.SGD, DEVICE, ranks=sacplan.DDP(2))
    budget = f"{sacplan.plan(rank, 'smallest').peak_bytes // 2}B"
    made.clear()
    verdict = sacplan.fit(model(), batch, f"2x{DEVICE}", cross_entropy, "sgd", budget, batch=16)
    assert {row.largest_batch for row in verdict.rows} == {0}
    assert set(made) == {16, 32}  # a mesh of two gets the batch of both


def test_the_largest_batch_of_a_mesh_is_that_of_a_device() -> None:
    n, limit = row_on_mesh().largest_batch, parse_budget(WIDE, 0)
    assert n

    def peak(batch: int) -> int:
        ways = spreads(wide_profile(2 * batch), Mesh((("tp", 2),)), ("megatron",))
        return next(way.profile.peak_bytes for way in ways if way.name == "megatron")

    assert peak(n) <= limit < peak(n + 1)


@pytest.mark.slow
def test_times_are_those_of_all_micro_steps() -> None:
    """Each runs forward, backward and its communication, and one of them the optimizer."""
    accumulated = fitted(BUDGET, accumulation_steps=3, sizes=False)
    for spread in ("DDP", "FSDP2"):
        row = next(row for row in accumulated.rows if row.spread == spread)
        ranks = {"accumulation_steps": 3, **ranks_of(spread)}
        with_it = profiled(**ranks).step_ms
        without = sacplan.profile(model(), tokens(4, 64, 512), cross_entropy, None, DEVICE, **ranks).step_ms
        assert row.step_ms == pytest.approx(2 * without + with_it, rel=1e-3)


@pytest.mark.slow
def test_another_training_is_tried_where_the_asked_one_does_not_fit() -> None:
    """The 8-bit one of bitsandbytes steps whole parameters: DDP has it, and shards have not."""
    small = fitted(NOTHING, sizes=False)
    by_spread: dict[str, list[sacplan.FitRow]] = {}
    for row in small.rows:
        by_spread.setdefault(row.spread, []).append(row)
    ddp = by_spread["DDP"]
    assert {row.optimizer for row in ddp} >= {"adamw", "adamw-8bit"}
    eight = next(row for row in ddp if row.optimizer == "adamw-8bit")
    make = BY_NAME["adamw-8bit"].make
    rank = sacplan.profile(model(), tokens(4, 64, 512), cross_entropy, make, DEVICE, ranks=sacplan.DDP(2))
    assert eight.peak_bytes == rank.peak_bytes
    assert {row.optimizer for row in small.rows if row.spread != "DDP"} <= {"adamw", "adamw-fused"}


@pytest.mark.slow
def test_the_verdict_names_what_runs_the_step() -> None:
    verdict = found()
    assert "2 x h100" in verdict.sentence
    assert verdict.fits == any(row.fits for row in verdict.rows if row.way == "as it is")
    best = verdict.recommended
    assert best.spread == "FSDP2"  # the first that fits as it is; in bfloat16 would be another training
    assert "fits with FSDP2. " in verdict.sentence
    assert verdict.code.startswith("# torchrun --nproc-per-node 2")
    compile(verdict.code, "code", "exec")


def test_how_many_devices() -> None:
    assert read_devices("8xh100", 1) == ("h100", 8)
    assert read_devices("8 x a100-80gb", 8) == ("a100-80gb", 8)
    assert read_devices("2x24GB", 1) == ("24GB", 2)
    assert read_devices("h100", "4") == ("h100", 4)
    assert read_devices("h100", "8xa100") == ("a100", 8)  # h100 is the default
    assert read_devices("a100", "8xa100-80gb") == ("a100-80gb", 8)
    for device, devices in (("8xh100", 4), ("a100", "8xh100"), ("h100", 0), ("h100", "many"), ("h100", True)):
        with pytest.raises(PlanError):
            read_devices(device, devices)


def _only_four(model: Any, batch: Any) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return loss if len(batch) == 4 else loss.detach()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"loss_fn": _only_four}, "does not require a gradient"),
        ({"make_batch": lambda n: tokens(4, 64, 512)}, "same"),
    ],
)
def test_an_error_at_another_size_is_a_note(asked: dict[str, Any], said: str) -> None:
    given = {"make_batch": lambda n: tokens(n, 64, 512), "loss_fn": cross_entropy, **asked}
    verdict = sacplan.fit(model(), device=f"2x{DEVICE}", optimizer="adamw", budget=BUDGET, batch=4, **given)
    (row,) = [row for row in verdict.rows if row.spread == "FSDP2"]
    assert row.fits
    assert row.largest_batch is None
    (note,) = [note for note in verdict.computed if note.startswith("FSDP2: ")]
    assert said in note


def noted_bytes(note: str) -> int:
    return parse_budget(note.split("least ")[1].split(" on")[0], 0)


def test_ddp_that_cannot_fit_is_not_recorded() -> None:
    """The step fits on one device, and not with DDP's copy of all gradients."""
    verdict = fitted("5.8MiB", sizes=False)
    assert {row.spread for row in verdict.rows} == {"FSDP2"}
    # What follows from FSDP2's rank lacks the gradients that DDP holds at its peak: some 4 KiB here.
    (note,) = [note for note in verdict.computed if note.startswith("DDP without a plan needs at least ")]
    least, peak = noted_bytes(note), profiled(ranks=sacplan.DDP(2)).peak_bytes
    assert 0.998 * peak < least <= peak


def test_ddp_that_no_plan_makes_fit_is_not_recorded() -> None:
    """FSDP2 fits with a plan; with whole parameters, what no plan lowers is too much already."""
    budget = "3.9MiB"
    verdict = fitted(budget, sizes=False)
    assert [(row.spread, row.way, row.fits) for row in verdict.rows] == [
        ("FSDP2", "as it is", False),
        ("FSDP2", "plan", True),
    ]
    (note,) = [note for note in verdict.computed if note.startswith("DDP with any plan needs at least ")]
    smallest = sacplan.plan(profiled(ranks=sacplan.DDP(2)), "smallest").peak_bytes
    assert parse_budget(budget, 0) < noted_bytes(note) <= smallest
