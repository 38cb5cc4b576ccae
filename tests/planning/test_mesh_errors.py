"""Wrong meshes, budgets, ranks and files: errors that say what, where and what to try."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.distributed.ranks.ranks import Ranks
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.process_groups import pretended_ranks
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.plan import _digest
from tests.support.steps import mean_square
from tests.zoo.layers import MLP

BOTH = ("shard", "recompute")


@functools.cache
def profile(rows: int = 8) -> sacplan.Profile:
    torch.manual_seed(0)
    return sacplan.profile(MLP(32), torch.randn(rows, 32), mean_square, device="cpu")


@functools.cache
def planned(ranks: int = 4) -> sacplan.Plan:
    return sacplan.plan(profile(), "100%", mesh={"dp": ranks}, techniques=BOTH)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"dp": 7}, "batch of 8 cannot be cut for 7 ranks: give a batch that is a multiple of 7"),
        ([2, 2], r"mesh is \[2, 2\]; give the ranks of each axis"),
        ("foo", "cannot be read; give '8xcpu'"),
        (0, "has 0 ranks; it must be an int of at least 1"),
        (True, "give the ranks of each axis"),
        ({"dp": -2}, "-2 ranks; it must be an int"),
        ({"dp": 2.0}, "2.0 ranks; it must be an int"),
        ({}, "give the ranks of each axis"),
        ({"": 2}, "axis ''"),
        ("8xh100", "make a profile with device='h100'"),
    ],
    ids=str,
)
def test_wrong_meshes(mesh: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        sacplan.plan(profile(), "90%", mesh=mesh, techniques=BOTH)


def test_names_that_repeat() -> None:
    with pytest.raises(PlanError, match="names an axis twice: dp, dp"):
        Mesh((("dp", 2), ("dp", 2)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"techniques": BOTH}, "give a mesh"),
        ({"mesh": {"dp": 4}, "techniques": ("recompute",)}, '"shard" among the techniques'),
        ({"mesh": {"dp": 4}, "ranks": sacplan.DDP(4)}, "either a mesh, or ranks"),
        ({"mesh": {"dp": 4}, "budget": "smallest"}, "not for a mesh"),
        ({"mesh": {"dp": 4}, "techniques": (*BOTH, "chunk")}, '"chunk" does not go together with a mesh'),
    ],
    ids=["no mesh", "no technique", "both", "smallest", "chunk"],
)
def test_arguments_that_do_not_go_together(arguments: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        sacplan.plan(profile(), **{"budget": "90%", **arguments})


def test_the_profile_of_one_rank() -> None:
    with pytest.raises(PlanError, match="from a profile of the whole model"):
        sacplan.plan(profile().on_ranks(Ranks.of(4)), "90%", mesh={"dp": 4}, techniques=BOTH)


def test_an_infeasible_budget_says_what_binds_and_what_would_do() -> None:
    with pytest.raises(InfeasibleBudget, match=r"mesh dp 4 under 1\.00 KiB on each rank") as raised:
        sacplan.plan(profile(), "1KiB", mesh={"dp": 4}, techniques=BOTH)
    least = raised.value.smallest_feasible_bytes
    assert raised.value.binding
    plan = sacplan.plan(profile(), f"{least}B", mesh={"dp": 4}, techniques=BOTH)
    assert plan.peak_bytes <= least


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_budget_above_the_smallest_peak_is_not_refused(share: float) -> None:
    with pytest.raises(InfeasibleBudget) as raised:
        sacplan.plan(profile(), "1KiB", mesh={"tp": 4}, techniques=BOTH)
    least = raised.value.smallest_feasible_bytes
    budget = int(least + share * (profile().peak_bytes - least))
    assert sacplan.plan(profile(), f"{budget}B", mesh={"tp": 4}, techniques=BOTH).peak_bytes <= budget


def test_layouts_none_of_which_fits_say_what_binds() -> None:
    found = sacplan.layouts(MLP(32), torch.randn(8, 32), 2, "1KiB", "cpu", mean_square)
    assert not any(row.fits for row in found.rows)
    with pytest.raises(sacplan.InfeasibleBudget) as error:
        found.best  # noqa: B018
    least = min(found.rows, key=lambda row: row.peak_bytes)
    assert error.value.smallest_feasible_bytes == least.peak_bytes
    assert error.value.binding == least.binding != ""


def test_without_a_process_group() -> None:
    model = MLP(32)
    with pytest.raises(PlanError, match=r"no process group: start 4 processes with `torchrun"):
        sacplan.apply(model, planned())
    assert type(model.up.weight) is nn.Parameter


def test_with_another_number_of_ranks() -> None:
    with pretended_ranks(2), pytest.raises(PlanError, match="mesh of 4 ranks, and 2 run: start 4, or plan"):
        sacplan.apply(MLP(32), planned())


def test_a_real_run_of_one_rank() -> None:
    with pytest.raises(PlanError, match="run='fake'"):
        sacplan.verify(MLP(32), torch.randn(8, 32), planned(), mean_square, run="real")


Damage = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.update(mesh=4),
        lambda s: s["mesh"].update(axes=[["dp", 2], ["dp", 2]]),
        lambda s: s["mesh"].update(axes=[["a", 2], ["b", 3], ["c", 5]]),
        lambda s: s["mesh"].update(axes=[["dp", "4"]]),
        lambda s: s["mesh"].update(axes=[["dp", -4]]),
        lambda s: s.update(styles={"up": "Colwise()"}),
        lambda s: s.update(styles={"up": "ColwiseParallel(use_local_output=exit())"}),
        lambda s: s.update(styles={"up": 1}),
        lambda s: s.update(styles=[1]),
        lambda s: s.update(surprise=1),
    ],
    ids=range(10),
)
def test_damaged_files(damage: Damage, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned().save(file)
    content = json.loads(file.read_text())
    damage(content["ranks"]["sharding"])
    signed(content, file)

    with pytest.raises(sacplan.SacplanError) as raised:
        sacplan.Plan.load(file)
    assert "sha256" not in str(raised.value)


def signed(content: dict[str, Any], file: Path) -> None:
    """The file of a plan that was edited by one who knows how its checksum is made."""
    rest = {
        name: value for name, value in content.items() if name not in ("what", "schema_version", "sha256")
    }
    file.write_text(json.dumps({**content, "sha256": _digest(rest)}))


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (
            "2xa100",
            "'2xa100' is of a100, and the profile is of a step on cpu: make a profile with device='a100'",
        ),
        ("2xfoo", "'2xfoo' is of foo, and the profile is of a step on cpu"),
        ("2x", "'2x' cannot be read as a number of devices; give '8xcpu', or 8"),
        ("2xcpux3", "'2xcpux3' is of cpux3"),
        ("two", "devices is 'two'; give how many"),
    ],
)
def test_numbers_of_devices_that_are_not_the_profiles(devices: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        sacplan.layouts(profile(), devices=devices)
    with pytest.raises(PlanError, match=says if "x" in devices else "mesh 'two' cannot be read"):
        sacplan.plan(profile(), "100%", mesh=devices)


def test_devices_of_a_model_are_read_too() -> None:
    with pytest.raises(PlanError, match="devices is '2x'; give how many"):
        sacplan.layouts(MLP(32), torch.randn(8, 32), "2x", loss_fn=mean_square)
    assert sacplan.layouts(profile(), devices="2xcpu", budget="1GiB").devices == 2


def test_a_share_is_of_the_peak_of_a_rank_without_a_plan() -> None:
    plan = sacplan.plan(profile(64), "90%", mesh={"tp": 2}, techniques=BOTH)
    assert plan.baseline_peak_bytes < profile(64).peak_bytes
    assert plan.budget_bytes == int(0.9 * plan.baseline_peak_bytes)
    assert plan.peak_bytes <= plan.budget_bytes


def test_a_number_of_devices_cuts_tensors_on_the_axis_for_them() -> None:
    found = sacplan.plan(profile(), "100%", mesh=2, techniques=BOTH)
    name, axes = found.provenance.options["sharding"], found.ranks.sharding.mesh.names
    assert (name.split(" + ")[-1] in ("megatron", "sequence")) == ("tp" in axes)
