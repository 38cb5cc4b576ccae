"""``sacplan.testing``: what fits passes, what does not fails with a report, and wrong arguments are other errors."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.budget import format_bytes
from sacplan.device.devices import resolve_device
from sacplan.testing import assert_step_fits
from tests.support.steps import total as loss_fn
from tests.zoo.language_models import LM, cross_entropy
from tests.zoo.language_models import tokens as token_ids

DEVICE = "cpu"
STEP: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": torch.optim.AdamW}


def model() -> LM:
    return LM(layers=1, dim=32)


def with_other_ops() -> LM:
    """Has the same parameters."""
    changed = model()
    changed.layers[0].mlp[1] = nn.Sequential(nn.GELU(), nn.Tanh())
    return changed


def tokens(batch: int = 2) -> torch.Tensor:
    return token_ids(batch, 32)


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    return sacplan.profile(model(), tokens(), device=DEVICE, **STEP)


@pytest.fixture(scope="module")
def plan(profile: sacplan.Profile) -> sacplan.Plan:
    return sacplan.plan(profile, "smallest")


def failure(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        assert_step_fits(*args, **(STEP | kwargs))
    return str(raised.value)


@pytest.fixture(scope="module")
def message(profile: sacplan.Profile) -> str:
    """One byte less than it takes."""
    return failure(model(), tokens(), DEVICE, f"{profile.peak_bytes - 1}B")


@pytest.mark.slow
def test_the_budget_is_kept_to_the_byte(profile: sacplan.Profile, message: str) -> None:
    peak = profile.peak_bytes
    found = assert_step_fits(model(), tokens(), DEVICE, f"{peak}B", **STEP)
    assert isinstance(found, sacplan.Profile)
    assert found.peak_bytes == peak
    # What it is over by is the difference of the two sizes that are printed; the bytes are there besides.
    assert "0.01 KiB over the budget" in message
    assert f"({peak} bytes against {peak - 1})" in message.replace("\n  ", " ")


def test_nothing_of_the_model_changes() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batch = tokens()
    state = torch.get_rng_state()
    failure(net, batch, DEVICE, "64KiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_the_message_is_the_report(profile: sacplan.Profile, message: str) -> None:
    text = message.replace("\n  ", " ")
    for said in (f"LM takes {format_bytes(profile.peak_bytes)} on {DEVICE}", "int64 [2, 32]", "AdamW"):
        assert said in text
    assert (profile.program.footprint.peak_fqn or "(outside the model)") in text
    assert sacplan.Report(profile).peak in text


def test_advice_that_is_enough_is_enough(profile: sacplan.Profile, plan: sacplan.Plan) -> None:
    """What the message says would do does."""
    budget = f"{plan.peak_bytes}B"
    text = failure(model(), tokens(), DEVICE, budget).replace("\n  ", " ")
    assert f"sacplan.plan finds a plan that holds it: peak {format_bytes(plan.peak_bytes)}" in text
    assert_step_fits(model(), tokens(), DEVICE, budget, plan=plan, **STEP)
    less = failure(model(), tokens(), DEVICE, f"{plan.peak_bytes - 1}B").replace("\n  ", " ")
    assert "No plan helps: " in less
    assert f"{plan.peak_bytes} bytes" in less


def test_with_a_plan(plan: sacplan.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    seen = sacplan.verify(model(), tokens(), plan, **STEP)
    for given in (plan, tmp_path / "plan.json"):
        found = assert_step_fits(model(), tokens(), budget=f"{seen.peak_bytes}B", plan=given, **STEP)
        assert found.peak_bytes == plan.baseline_peak_bytes > seen.peak_bytes
    message = failure(model(), tokens(), budget=f"{seen.peak_bytes - 1}B", plan=plan)
    assert "This is with the plan; without it" in message


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model": LM(layers=2, dim=32)}, "layers.1"),
        ({"model": with_other_ops()}, "make the plan again"),
        ({"batch": tokens(3)}, "batch"),
        ({"device": "h100"}, "h100"),
    ],
)
def test_a_plan_of_another_step(plan: sacplan.Plan, other: dict[str, Any], said: str) -> None:
    with pytest.raises(sacplan.errors.PlanMismatch, match=said):
        assert_step_fits(**({"model": model(), "batch": tokens(), "plan": plan} | STEP | other))


def test_without_a_budget_it_is_the_memory_of_the_device(profile: sacplan.Profile) -> None:
    spec = resolve_device(DEVICE)
    large, small = (
        dataclasses.replace(spec, memory_bytes=int(profile.peak_bytes / 0.85) + more) for more in (2, -2000)
    )
    assert_step_fits(model(), tokens(), large, **STEP)
    assert "over the budget" in failure(model(), tokens(), small).replace("\n  ", " ")


def test_a_share_is_one_of_the_unplanned_peak(plan: sacplan.Plan) -> None:
    assert_step_fits(model(), tokens(), DEVICE, "100%", **STEP)
    share = plan.peak_bytes / plan.baseline_peak_bytes
    assert_step_fits(model(), tokens(), budget=f"{100 * share + 0.01}%", plan=plan, **STEP)
    with pytest.raises(AssertionError):
        assert_step_fits(model(), tokens(), budget=f"{100 * share - 0.01}%", plan=plan, **STEP)


def test_a_missing_optimizer_is_said() -> None:
    net, x = nn.Linear(4, 4), torch.ones(1, 4)

    with pytest.warns(sacplan.SacplanWarning, match="AdamW would add") as seen:
        assert_step_fits(net, x, DEVICE, loss_fn=loss_fn)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_step_fits(net, x, DEVICE, loss_fn=loss_fn, optimizer=torch.optim.SGD)
        assert_step_fits(net, x, DEVICE, mode="inference")


def test_a_missing_loss_is_said() -> None:
    net, x = nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.warns(sacplan.errors.SumOfOutputsWarning, match="loss_fn=lambda") as seen:
        assert_step_fits(net, x, DEVICE, optimizer=torch.optim.SGD)
    assert [warning.filename for warning in seen] == [__file__]


def test_in_inference() -> None:
    needed = assert_step_fits(model(), tokens(), DEVICE, mode="inference").peak_bytes
    with pytest.raises(AssertionError, match="in the forward pass"):
        assert_step_fits(model(), tokens(), DEVICE, f"{needed - 1}B", mode="inference")


def test_one_rank_of_several(profile: sacplan.Profile) -> None:
    spread = sacplan.profile(
        model(), tokens(), device=DEVICE, ranks=sacplan.FSDP2(2, ["layers.*", ""]), **STEP
    )
    plan = sacplan.plan(spread, "smallest")
    assert plan.peak_bytes != profile.peak_bytes
    assert_step_fits(model(), tokens(), budget=f"{plan.peak_bytes}B", plan=plan, **STEP)
    message = failure(model(), tokens(), budget=f"{plan.peak_bytes - 1}B", plan=plan)
    assert "on each rank" in message


def test_pytest_shows_the_line_of_the_test() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_step_fits(nn.Linear(64, 64), torch.ones(1, 64), DEVICE, "1KiB", optimizer=torch.optim.SGD)
    assert [Path(entry.path).name for entry in raised.traceback.filter(raised)] == [Path(__file__).name]
