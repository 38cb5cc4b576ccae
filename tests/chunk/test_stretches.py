"""Inference in slices: what a plan says is what happens, and a step that is another is never wrong."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.core.pins import resolve_pins
from sacplan.techniques.chunk.search import stretch_search
from sacplan.techniques.registry import rewritten
from tests.support.slow import slow_after
from tests.support.steps import assert_predicted, bit_equal, grads_of, total
from tests.zoo.layers import FromFunction, Residual
from tests.zoo.wide import EagerAttention, Evoformer, Transformer, UNet

Make = Callable[[], tuple[nn.Module, Any]]


def profile_of(model: nn.Module, batch: Any, device: str = "cpu") -> sacplan.Profile:
    return sacplan.profile(model, batch, device=device, mode="inference")


def base_of(profile: sacplan.Profile) -> int:
    """Bytes of parameters and batch."""
    return profile.program.liveness.initial_bytes


def share(profile: sacplan.Profile, share_of_step: float) -> str:
    """A budget: a share of what the step allocates."""
    base = base_of(profile)
    return f"{base + int(share_of_step * (profile.peak_bytes - base))}B"


def outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        out = model(*batch) if isinstance(batch, tuple) else model(batch)
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert type(a) is torch.Tensor
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.stride() == b.stride()


def attention() -> tuple[nn.Module, Any]:
    return EagerAttention(32, 4), torch.randn(1, 64, 32)


def transformer() -> tuple[nn.Module, Any]:
    return Transformer(32, 4, 2), torch.randn(2, 48, 32)


def evoformer() -> tuple[nn.Module, Any]:
    return Evoformer(16, 8), (torch.randn(1, 4, 12, 16), torch.randn(1, 12, 12, 8))


def unet() -> tuple[nn.Module, Any]:
    return UNet((32, 64), 1), (torch.randn(1, 3, 32, 32), torch.tensor([7]))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


SLOW_EVOFORMER = pytest.param(evoformer, marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.parametrize("make", [attention, SLOW_EVOFORMER, *slow_after(0, [transformer, unet])])
def test_a_plan_is_what_happens(make: Make) -> None:
    model, batch = make()
    model.eval()
    profile = profile_of(model, batch)
    expected = outputs(model, batch)
    smallest = sacplan.plan(profile, "smallest")
    assert smallest.peak_bytes - base_of(profile) < 0.8 * (profile.peak_bytes - base_of(profile))
    for budget in (share(profile, 0.8), f"{smallest.peak_bytes}B"):
        plan = sacplan.plan(profile, budget)
        assert plan.peak_bytes <= plan.budget_bytes
        assert {type(d) for d in plan.decisions} == {Chunk}
        assert sacplan.verify(model, batch, plan).peak_bytes == plan.peak_bytes
        real = sacplan.verify(model, batch, plan, run="real")
        assert real.within_budget
        assert real.differences == ()
        assert real.peak_bytes == pytest.approx(plan.peak_bytes, rel=5e-3)
        with sacplan.apply(model, plan):
            assert_close(outputs(model, batch), expected)
    with pytest.raises(sacplan.InfeasibleBudget) as refused:
        sacplan.plan(profile, f"{smallest.peak_bytes - 1}B")
    assert refused.value.smallest_feasible_bytes == smallest.peak_bytes


def fused() -> tuple[nn.Module, Any]:
    """The attention kernel that the device would choose, on what is not computed yet."""
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 64, 32)


@pytest.mark.parametrize("make", slow_after(1, [fused, transformer]))
def test_on_a_gpu_a_plan_is_the_fake_step(make: Make) -> None:
    model, batch = make()
    profile = profile_of(model.eval(), batch, "h100")
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < profile.peak_bytes
    seen = sacplan.verify(model, batch, plan)
    assert seen.differences == ()
    assert seen.peak_bytes == plan.peak_bytes


def test_time_and_flops_are_those_of_the_fake_step() -> None:
    model, batch = attention()
    profile = profile_of(model.eval(), batch)
    plan = sacplan.plan(profile, "smallest")
    program = rewritten(profile.program, plan.decisions, profile.spec)
    seen = sacplan.verify(model, batch, plan)
    assert program.flops == profile.program.flops == seen.recompute_flops + plan.step_flops
    assert program.step_ms == pytest.approx(seen.step_ms, rel=1e-6)
    assert program.step_ms > profile.step_ms


def test_pins() -> None:
    model, batch = transformer()
    profile = profile_of(model.eval(), batch)
    pins = resolve_pins(profile.program, profile.fingerprint, (), ["1"])
    search = stretch_search(profile.program, profile.spec, pins)
    units = {search.decision(one, 2).unit for one in search.candidates}
    assert units
    assert not any(unit in ("", "1") or unit.startswith("1.") for unit in units)
    kept = sacplan.plan(profile, "smallest", keep=["aten._softmax"])
    assert not any(site.op.startswith("aten._softmax") for d in kept.decisions for site in d.sites)
    assert sacplan.verify(model, batch, kept).peak_bytes == kept.peak_bytes > plan_bytes(profile)


def plan_bytes(profile: sacplan.Profile) -> int:
    return sacplan.plan(profile, "smallest").peak_bytes


# --- other steps than the recorded one ------------------------------------------------------------------


@pytest.fixture
def planned() -> tuple[nn.Module, sacplan.Plan]:
    model = Transformer(32, 4, 2).eval()
    profile = profile_of(model, torch.randn(1, 48, 32))
    return model, sacplan.plan(profile, share(profile, 0.5))


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")  # of views that several samples copy
@pytest.mark.parametrize("shape", [(3, 48, 32), (2, 7, 32), (1, 1, 32)])
def test_other_sizes(planned: tuple[nn.Module, sacplan.Plan], shape: tuple[int, ...]) -> None:
    model, plan = planned
    x = torch.randn(shape)
    expected = outputs(model, x)
    with sacplan.apply(model, plan):
        assert_close(outputs(model, x), expected)


def test_a_larger_batch_is_sliced_too() -> None:
    model = Transformer(32, 4, 2).eval()
    profile = profile_of(model, torch.randn(2, 48, 32))
    plan = sacplan.plan(profile, share(profile, 0.5))
    x = torch.randn(5, 64, 32)
    expected = outputs(model, x)
    with sacplan.apply(model, plan) as handle:
        assert_close(outputs(model, x), expected)
        assert handle.differences == ()


def test_with_gradients_it_runs_as_without_a_plan(planned: tuple[nn.Module, sacplan.Plan]) -> None:
    model, plan = planned
    x = torch.randn(1, 48, 32)
    expected = grads_of(model, x, total)
    with sacplan.apply(model, plan) as handle:
        assert bit_equal(grads_of(model, x, total), expected)
        assert handle.differences == ()


def test_inference_mode(planned: tuple[nn.Module, sacplan.Plan]) -> None:
    model, plan = planned
    x = torch.randn(1, 48, 32)
    expected = outputs(model, x)
    with sacplan.apply(model, plan) as handle, torch.inference_mode():
        torch.testing.assert_close(model(x), expected[0])
        assert handle.differences == ()


def test_copies_and_removal(planned: tuple[nn.Module, sacplan.Plan]) -> None:
    model, plan = planned
    x = torch.randn(1, 48, 32)
    expected = outputs(model, x)
    handle = sacplan.apply(model, plan)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(outputs(other, x), expected)
    handle.remove()
    assert "forward" not in model.__dict__
    assert "forward" not in model[0].__dict__
    assert_close(outputs(model, x), expected)


def peeking(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """Attention whose scores somebody may look at, or write to what it reads, in the middle."""
    x = x + 1
    scores = torch.softmax(x @ x.transpose(-1, -2), -1)
    if self.mode == "item":
        self.seen = scores.sum().item()
    elif self.mode == "keep":
        self.seen = scores
    elif self.mode == "write":
        x.mul_(2)
    elif self.mode == "return":
        return scores
    elif self.mode == "raise":
        raise ValueError("in the middle")
    elif self.mode == "numpy":
        self.seen = scores.clone().numpy()
    elif self.mode == "memory":  # which no op reads, and of two versions
        before = scores.tolist()
        self.seen = torch.tensor([before, scores.mul_(2).tolist()])
    y = scores @ x
    return torch.relu(y) + 1


@pytest.mark.parametrize("mode", ["item", "keep", "write", "return", "numpy", "memory"])
def test_a_step_that_differs_is_right_and_is_told(mode: str) -> None:
    model, x = FromFunction(peeking, mode="plain", seen=None), torch.randn(1, 64, 32)
    profile = profile_of(model, x)
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes - base_of(profile) < 0.6 * (profile.peak_bytes - base_of(profile))
    model.mode = mode
    expected, seen = outputs(model, x), model.seen
    model.seen = None
    told = pytest.warns(sacplan.SacplanWarning) if mode != "keep" else nullcontext()
    with sacplan.apply(model, plan) as handle:
        with told:
            found = outputs(model, x)
        if mode == "keep":  # nothing shows that it was different: a look at what is gone is an error
            with pytest.raises(sacplan.errors.RecipeError, match="computed in slices"):
                model.seen.sum()
        else:
            assert handle.differences
            if seen is not None:
                torch.testing.assert_close(model.seen, seen)
    assert_close([torch.as_tensor(t + 0) for t in found], expected)


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    model, x = FromFunction(peeking, mode="plain", seen=None), torch.randn(1, 64, 32)
    plan = sacplan.plan(profile_of(model, x), "smallest")
    expected = outputs(model, x)
    with sacplan.apply(model, plan) as handle:
        model.mode = "raise"
        with pytest.raises(ValueError, match="in the middle"):
            outputs(model, x)
        model.mode = "plain"
        assert_close(outputs(model, x), expected)
        assert handle.differences == ()


def test_a_unit_is_a_graph_break() -> None:
    model, x = transformer()
    plan = sacplan.plan(profile_of(model.eval(), x), "smallest")
    expected = outputs(model, x)
    torch._dynamo.reset()
    with sacplan.apply(model, plan) as handle:
        assert_close(outputs(torch.compile(model, backend="eager"), x), expected)
        assert handle.differences == ()


# --- what ends in a loop -----------------------------------------------------------------------------


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda h: h.sum(0),
    "amax": lambda h: h.amax(0),
    "mean": lambda h: h.mean(0),
    "both": lambda h: torch.stack([h.sum(0), h.amin(0)]),
}


@pytest.mark.parametrize("how", REDUCTIONS)
def test_reductions(how: str) -> None:
    """Wide values that end in reductions over what is sliced."""
    model = FromFunction(
        lambda self, x: REDUCTIONS[how](F.relu(self.up(x), inplace=True)), up=nn.Linear(16, 256)
    )
    x = torch.randn(301, 16)
    profile = profile_of(model, x)
    plan = sacplan.plan(profile, share(profile, 0.2))
    assert sacplan.verify(model, x, plan).peak_bytes == plan.peak_bytes
    expected = outputs(model, x)
    with sacplan.apply(model, plan) as handle:
        torch.testing.assert_close(outputs(model, x), expected)
        assert handle.differences == ()


def branching() -> nn.Module:
    """Written in place, in several outputs, with dropout that draws."""

    def forward(self: FromFunction, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x)
        h.add_(1).mul_(h.sigmoid())
        a, b = self.norm(h).chunk(2, -1)
        wide = torch.cat([a * b, F.gelu(b)], -1)
        return self.down(F.dropout(wide, 0.5, self.training)), (a + b).t().contiguous().t()

    return FromFunction(forward, up=nn.Linear(16, 128), down=nn.Linear(128, 16), norm=nn.LayerNorm(128))


def test_random_ops_are_in_no_loop() -> None:
    model, x = branching(), torch.randn(200, 16)
    profile = profile_of(model, x)
    plan = sacplan.plan(profile, "smallest")
    assert not any("dropout" in site.op or "bernoulli" in site.op for d in plan.decisions for site in d.sites)
    torch.manual_seed(3)
    expected = outputs(model, x)
    with sacplan.apply(model, plan):
        torch.manual_seed(3)
        assert_close(outputs(model, x), expected)


def small_branching() -> tuple[nn.Module, Any]:
    return branching(), torch.randn(40, 16)


@pytest.mark.parametrize("make", [SLOW_EVOFORMER, *slow_after(1, [small_branching, attention])])
def test_every_candidate_is_what_happens(make: Make) -> None:
    """One by one, in slices that do not come out even: a plain step is the ground truth."""
    model, batch = make()
    profile = profile_of(model.eval(), batch)
    search = stretch_search(profile.program, profile.spec)
    expected = outputs(model, batch)
    tried = 0
    for one in search.candidates[:: max(1, len(search.candidates) // 9)]:
        decision = search.decision(one, min(3, one.shape.axis.size))
        plan = plan_with(profile, [decision])
        assert sacplan.verify(model, batch, plan).peak_bytes == plan.peak_bytes
        with sacplan.apply(model, plan) as handle:
            assert_close(outputs(model, batch), expected)
            assert handle.differences == ()
        tried += 1
    assert tried > 5


def test_stretches_that_interleave_are_refused() -> None:
    """The executor collects the ops of one stretch at a time."""
    model, batch = attention()
    profile = profile_of(model, batch)
    search = stretch_search(profile.program, profile.spec)
    one, other = sorted(search.candidates, key=lambda each: each.start - each.end)[:2]
    assert max(one.start, other.start) < min(one.end, other.end)
    with pytest.raises(sacplan.errors.PlanError, match="two stretches interleave"):
        profile.footprint([search.decision(one, 2), search.decision(other, 4)])


@pytest.mark.parametrize("affine", slow_after(1, [True, False]))
def test_an_instance_norm_without_statistics(affine: bool) -> None:
    """It is a batch norm that trains, and writes no statistics: it runs in slices like another."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        wide, narrow = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)
        return Residual(wide, nn.InstanceNorm2d(32, affine=affine), nn.ReLU(), narrow)

    model = nn.Sequential(block(), block()).eval()
    batch = torch.randn(2, 8, 32, 32)
    expected, profile = outputs(model, batch), profile_of(model, batch)
    for plan in (sacplan.plan(profile, "smallest"), sacplan.plan(profile, "90%")):
        assert plan.chunks
        assert_predicted(model, batch, plan)
        with sacplan.apply(model, plan):
            assert_close(outputs(model, batch), expected)
