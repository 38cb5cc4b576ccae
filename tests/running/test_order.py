"""Apply, then compile, then shard: what comes in another order, or is somebody else's, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sacplan
from tests.zoo.language_models import LM, cross_entropy, tokens


def make_model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2)


@pytest.fixture(scope="module")
def plan() -> sacplan.Plan:
    profile = sacplan.profile(make_model(), tokens(4, 16), cross_entropy, device="cpu")
    return sacplan.policy("full", profile=profile)


def compiled_inside(model: LM) -> LM:
    model.layers[0].mlp.compile(backend="aot_eager")
    return model


def compiled_forward(model: LM) -> LM:
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="aot_eager")
    return model


@pytest.mark.parametrize("change", [compiled_inside, compiled_forward])
def test_compiled_code_inside_of_a_unit(plan: sacplan.Plan, change: Callable[[LM], LM]) -> None:
    with pytest.raises(sacplan.errors.PlanError, match=r"layers\.0.*compiled.*Apply the plan first"):
        sacplan.apply(change(make_model()), plan)


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        (torch.optim.swa_utils.AveragedModel, r"AveragedModel.*Apply the plan first.*\.module"),
        (nn.DataParallel, "replicates this model.*wrap the model in DistributedDataParallel"),
    ],
)
def test_wrappers(plan: sacplan.Plan, wrap: Callable[[nn.Module], nn.Module], what: str) -> None:
    with pytest.raises(sacplan.errors.PlanError, match=what):
        sacplan.apply(wrap(make_model()), plan)


def test_checkpoint_wrapper(plan: sacplan.Plan) -> None:
    model = make_model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    with pytest.raises(sacplan.errors.PlanError, match=r"layers\.0.*CheckpointWrapper"):
        sacplan.apply(model, plan)


def test_checkpointing_that_is_on(plan: sacplan.Plan) -> None:
    model = make_model()
    model.layers[0].gradient_checkpointing = True
    with pytest.raises(sacplan.errors.PlanError, match=r"layers\.0.*gradient_checkpointing"):
        sacplan.apply(model, plan)
    assert "forward" not in vars(model.layers[1])  # nothing was changed


def test_a_profile_of_a_planned_model_is_refused(plan: sacplan.Plan) -> None:
    model = make_model()
    with (
        sacplan.apply(model, plan),
        pytest.raises(sacplan.errors.TraceError, match=r"a plan is applied to 'layers\.0'.*remove"),
    ):
        sacplan.profile(model, tokens(4, 16), cross_entropy, device="cpu")
    again = sacplan.profile(model, tokens(4, 16), cross_entropy, device="cpu")
    assert again.peak_bytes == plan.baseline_peak_bytes


def test_a_profile_of_a_module_that_is_left_uncompiled_says_how() -> None:
    model: Any = make_model()
    model.layers[0] = torch.compiler.disable(model.layers[0])
    with pytest.raises(sacplan.errors.TraceError, match=r"module\.forward = torch\.compiler\.disable"):
        sacplan.profile(model, tokens(4, 16), cross_entropy, device="cpu")


def test_a_profile_of_a_model_for_another_backend_is_refused() -> None:
    model: nn.Module = torch.compile(make_model(), backend="eager")  # type: ignore[assignment]
    with pytest.raises(sacplan.errors.TraceError, match=r"backend .eager. of torch.compile is not modelled"):
        sacplan.profile(model, tokens(4, 16), cross_entropy, device="cpu")
