"""What a budget is where none is given, what a share is one of, and plans that take more than their device has."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sacplan
from sacplan.cli.app import app
from sacplan.device.devices import resolve_device
from sacplan.device.outside_allocator import CUDA_CONTEXT
from tests.support.devices import left_of, memory_with_room

MIB = 2**20
CONTEXT = CUDA_CONTEXT.n_bytes
H100 = dataclasses.replace(resolve_device("h100"), matmul_workspace_bytes=0)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )


def batch(n: int = 4096) -> torch.Tensor:
    return torch.empty(n, 64, device="meta")


@functools.cache
def recorded() -> sacplan.Profile:
    return sacplan.profile(model(), batch(), lambda model, x: model(x).sum(), device=H100)


def profile_on(memory_bytes: int) -> sacplan.Profile:
    """One recording for all sizes of the device: a step is the same however much memory is beside it."""
    return dataclasses.replace(recorded(), spec=dataclasses.replace(H100, memory_bytes=memory_bytes))


@pytest.fixture(scope="module")
def unplanned() -> int:
    """Peak without a plan, in bytes."""
    return sacplan.profile(model(), batch(), device=H100).peak_bytes


# --- without a budget ---------------------------------------------------------------------------------------


def test_on_a_cpu_it_is_the_memory_of_the_machine() -> None:
    profile = sacplan.profile(model(), batch(), device="cpu")
    memory = resolve_device("cpu").memory_bytes
    assert sacplan.plan(profile).budget_bytes == memory - int(memory * 0.15)


def test_on_a_mesh_it_is_that_of_each_rank(unplanned: int) -> None:
    room = int(unplanned * 0.7)
    plan = sacplan.plan(profile_on(memory_with_room(room, communicators=1)), mesh={"dp": 2})
    assert plan.ranks.world_size == 2
    assert plan.ranks.communicators == 1
    assert plan.device_memory.reserved_bytes() <= room
    assert plan.budget_bytes is not None
    assert plan.budget_bytes <= room
    assert plan.provenance.budget is None


def test_no_plan_fits_the_device() -> None:
    profile = profile_on(memory_with_room(MIB))
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.plan(profile)
    assert caught.value.budget_bytes == MIB
    assert f"Unplanned it takes {profile.peak_bytes / MIB:.2f} MiB" in str(caught.value)


def test_verify_compares_a_plan_without_a_budget_with_the_device() -> None:
    plan = sacplan.policy("full", profile=sacplan.profile(model(), batch()))
    seen = sacplan.verify(model(), batch(), plan)
    assert plan.budget_bytes is None
    beyond = plan.device_memory.reserved_bytes() - plan.peak_bytes
    assert seen.budget_bytes == left_of(H100.memory_bytes) - beyond
    assert seen.within_budget
    assert not dataclasses.replace(seen, peak_bytes=seen.budget_bytes + 1).within_budget


# --- plans above what there is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda profile: sacplan.plan(profile, "80%"),
        lambda profile: sacplan.plan(profile, "smallest"),
        lambda profile: sacplan.policy("full", profile=profile),
        lambda profile: sacplan.policy("ddp", profile=profile, mesh={"dp": 2}),
        lambda profile: sacplan.plan(profile, "80%", mesh={"dp": 2}),
    ],
    ids=["plan", "smallest", "policy", "policy on a mesh", "plan on a mesh"],
)
def test_a_plan_that_the_device_has_not_the_memory_for_warns_once(
    make: Callable[[sacplan.Profile], sacplan.Plan],
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = make(profile_on(MIB))
    assert plan.peak_bytes > MIB
    said = [w for w in caught if issubclass(w.category, sacplan.SacplanWarning)]
    assert len(said) == 1
    assert "h100 has 1.00 MiB" in str(said[0].message)
    assert f"takes {plan.peak_bytes / MIB:.2f} MiB" in str(said[0].message)
    if "lambda" in make.__name__:
        assert said[0].filename == __file__


def test_a_plan_that_fits_does_not_warn(unplanned: int) -> None:
    sacplan.plan(profile_on(2 * CONTEXT), "80%")  # a SacplanWarning would be an error here


def test_plans_that_are_only_looked_at_do_not_warn(unplanned: int) -> None:
    sacplan.frontier(profile_on(unplanned // 2), 2, ("greedy",))
    sacplan.layouts(profile_on(unplanned // 2), devices=2, budget=f"{unplanned // 3}B")


# --- shares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        lambda: sacplan.max_batch(model(), batch, "90%"),
        lambda: sacplan.throughput(model(), batch, "90 %"),
        lambda: sacplan.layouts(model(), batch(), 2, "90%"),
    ],
    ids=["max_batch", "throughput", "layouts"],
)
def test_a_share_of_several_steps_is_refused(look: Callable[[], object]) -> None:
    with pytest.raises(sacplan.errors.BudgetError, match=r"'90 ?%'.*unplanned peak.*budget=\"20GiB\""):
        look()


# --- on the command line ------------------------------------------------------------------------------------

TRAIN = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(4096, 64)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    (tmp_path / "train.py").write_text(TRAIN)
    dataclasses.replace(H100, name="tiny", memory_bytes=MIB).save(tmp_path / "tiny.json")
    dataclasses.replace(H100, name="small", memory_bytes=memory_with_room(MIB)).save(tmp_path / "small.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", sacplan.cli.output.show_warning)
    return lambda words: CliRunner().invoke(app, words.split())


def test_plan_without_a_budget(run: Callable[[str], Any]) -> None:
    said = json.loads(run("plan train.py:make --device h100 --json").stdout)
    assert said["device_memory_bytes"] == H100.memory_bytes
    said_so = "the memory of h100 less CUDA context 512.00 MiB"
    assert said_so in " ".join(run("plan train.py:make").stdout.split())


def test_plan_that_does_not_fit_is_one_line_on_stderr(run: Callable[[str], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("plan train.py:make --device tiny.json --budget 100% --json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["peak_bytes"] > MIB
    assert [
        line for line in result.stderr.splitlines() if "tiny has 1.00 MiB" in line
    ] == result.stderr.splitlines()
    assert result.stderr.startswith("warning: ")


@pytest.mark.parametrize("command", ["max-batch", "throughput", "layouts"])
def test_shares_are_refused(run: Callable[[str], Any], command: str) -> None:
    result = run(f"{command} train.py:make --budget 90%")
    assert result.exit_code == 2
    assert "Give bytes, --budget 20GiB" in result.stderr
