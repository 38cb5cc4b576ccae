"""Bad input: a clear SacplanError that says what, where and what to try; nothing changed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.planning.search import PlanSearch
from tests.support.processes import run_python
from tests.zoo.language_models import LM, tokens
from tests.zoo.layers import FeedForward, FromFunction, Stack

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    return sacplan.profile(LM(), tokens(), device="h100")


def test_the_optimizer_step_binds() -> None:
    model = LM(layers=1, vocab=20_000)  # parameters and Adam's state and temporaries outweigh activations
    profile = sacplan.profile(model, tokens(1, 8), optimizer=torch.optim.Adam, device="h100")
    with pytest.raises(sacplan.InfeasibleBudget, match="optimizer step") as info:
        sacplan.plan(profile, "1MiB")
    assert info.value.binding == "optimizer step"


def test_no_module_called() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (next(model.parameters()) ** 2).sum()

    with pytest.raises(sacplan.errors.TraceError, match="no module of the model was called"):
        sacplan.profile(LM(), tokens(), loss_fn=loss_fn)


def test_no_gradient_anywhere() -> None:
    model = LM().requires_grad_(False)
    with pytest.raises(sacplan.errors.TraceError, match="does not require a gradient"):
        sacplan.profile(model, tokens())
    with torch.no_grad(), pytest.raises(sacplan.errors.TraceError, match="does not require a gradient"):
        sacplan.profile(LM(), tokens())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: m(b), "scalar"),
        (lambda m, b: 3.0, "scalar tensor, it returned float"),
        (lambda m, b: None, "NoneType"),
    ],
)
def test_a_loss_that_is_none(loss_fn, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(sacplan.errors.TraceError, match=message):
        sacplan.profile(LM(), tokens(), loss_fn=loss_fn)


def test_a_loss_that_uses_the_original_model_uses_the_copy() -> None:
    model, batch = LM(), tokens()
    found = sacplan.profile(model, batch, loss_fn=lambda m, b: model(b).sum())
    assert found.program == sacplan.profile(model, batch, loss_fn=lambda m, b: m(b).sum()).program


def test_a_batch_the_model_rejects_is_the_models_own_exception() -> None:
    model = LM()
    with pytest.raises(TypeError, match="unexpected keyword"):
        sacplan.profile(model, {"words": tokens()})
    with pytest.raises(Exception, match=r"(?i)shape|dim|size|expand|multiply|layer_norm"):
        sacplan.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), torch.randn(2, 4))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_rejected_batch_does_not_abort_the_interpreter() -> None:
    code = (
        "import torch, sacplan\n"
        "from torch import nn\n"
        "for model, batch in [(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), torch.randn(2, 4)),\n"
        "                     (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5)), torch.randn(2, 3, 8, 8)),\n"
        "                     (nn.Sequential(nn.Linear(4, 4), nn.Bilinear(3, 3, 2)), torch.randn(2, 4))]:\n"
        "    try: sacplan.profile(model, batch)\n"
        "    except Exception as e: print('caught', type(e).__name__)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("caught") == 3


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("grad_accum", "accumulation_steps"),
        ("gradient_accumulation_steps", "accumulation_steps"),
        ("batch_size", "batch"),
        ("lossfn", "loss_fn"),
        ("optim", "optimizer"),
    ],
)
def test_an_unknown_argument_names_the_one_that_is_meant(given: str, meant: str) -> None:
    unknown: dict[str, Any] = {given: 2}
    rest = {} if meant == "batch" else {"batch": tokens()}
    with pytest.raises(sacplan.errors.TraceError, match=f"Did you mean {meant}= rather than {given}="):
        sacplan.profile(LM(), **rest, **unknown)
    with pytest.raises(sacplan.errors.TraceError) as seen:
        sacplan.profile(LM(), tokens(), zzz=2)  # type: ignore[call-arg]
    assert "Did you mean" not in str(seen.value)


def test_a_step_that_differentiates_twice_says_what_no_plan_discards() -> None:
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    model, batch = Stack(FeedForward(16, dropout=0.0) for _ in range(2)), torch.randn(256, 16)
    profile = sacplan.profile(model, batch, penalty, device="cpu")
    said = "the step differentiates twice: its first backward pass keeps"
    with pytest.raises(sacplan.InfeasibleBudget, match=said.replace("the", "The", 1)):
        sacplan.plan(profile, "10%")
    assert said in " ".join(str(sacplan.plan(profile, "100%")).split())
    once = sacplan.profile(model, batch, lambda model, x: model(x).square().mean(), device="cpu")
    assert "differentiates" not in str(sacplan.plan(once, "100%"))


def test_an_optimizer_over_other_parameters() -> None:
    other = torch.optim.SGD(LM().parameters(), lr=0.1)
    with pytest.raises(sacplan.errors.TraceError, match="does not belong to the model"):
        sacplan.profile(LM(), tokens(), optimizer=other)
    with pytest.raises(sacplan.errors.TraceError, match="optimizer must be"):
        sacplan.profile(LM(), tokens(), optimizer=3)
    with pytest.raises(sacplan.errors.TraceError, match="returned int"):
        sacplan.profile(LM(), tokens(), optimizer=lambda params: 3)


def test_checkpointing_already_on() -> None:
    model = FromFunction(
        lambda self, x: torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False),
        inner=nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    )
    batch = torch.randn(2, 8)
    profile = sacplan.profile(model, batch, device="cpu")
    with pytest.raises(sacplan.InfeasibleBudget, match=r"checkpoints by itself \(inner\).*switch it off"):
        sacplan.plan(profile, "100B")
    flagged = LM()
    flagged.layers[1].gradient_checkpointing = True  # a flag that its forward does not look at
    plain = sacplan.profile(LM(), tokens(), device="cpu")
    assert sacplan.profile(flagged, tokens(), device="cpu").peak_bytes == plain.peak_bytes
    with pytest.raises(sacplan.errors.PlanError, match=r"layers\.1"):
        sacplan.apply(flagged, sacplan.plan(plain, "100%"))


def test_real_things_need_real_tensors(profile: sacplan.Profile) -> None:
    with torch.device("meta"):
        model = LM()
    with pytest.raises(sacplan.errors.TraceError, match="meta"):
        sacplan.profile(model, tokens(), device="cpu", trace="real")
    with pytest.raises(sacplan.errors.DeviceError, match="h100"):
        sacplan.profile(LM(), tokens(), device="h100", trace="real")


def test_a_plan_for_another_model_or_batch_names_the_first_difference(profile: sacplan.Profile) -> None:
    plan = sacplan.plan(profile, "80%")
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"'embed.weight' \(128, 64\).*\(128, 32\)"):
        sacplan.apply(LM(dim=32), plan)
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"'layers.2.norm1.weight'.*here 'norm.weight'"):
        sacplan.apply(LM(layers=2), plan)
    frozen = LM()
    frozen.head.weight.requires_grad_(False)
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"head.weight.*frozen"):
        sacplan.apply(frozen, plan)
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"\(4, 64\).*\(4, 65\)"):
        sacplan.verify(LM(), tokens(4, 65), plan)


def test_estimators_before_anything_was_seen() -> None:
    with pytest.raises(sacplan.errors.TraceError, match="recorded nothing yet"):
        _ = sacplan.MemTracker().program
    with pytest.raises(sacplan.errors.TraceError, match="estimate_mode_type"):
        sacplan.RuntimeEstimator()("quantum")


# --- the text of an error


def _family(base: type[sacplan.SacplanError]) -> Iterator[type[sacplan.SacplanError]]:
    yield base
    for below in base.__subclasses__():
        yield from _family(below)


def test_the_text_of_an_infeasible_budget_is_there(
    profile: sacplan.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(sacplan.InfeasibleBudget) as info:
        sacplan.plan(profile, "10KiB")
    monkeypatch.setattr(PlanSearch, "__post_init__", lambda self: pytest.fail("a search for a text"))
    assert "With techniques=('recompute', 'offload') a search reaches" in str(info.value)
    again = pickle.loads(pickle.dumps(info.value))
    assert str(again) == str(info.value)
    assert vars(again) == vars(info.value)
