"""The backward pass of a norm in slices, its forward pass recomputed: memory, bits, and one decision for all layers."""

from __future__ import annotations

import copy
import functools

import msgspec
import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.decisions import Chunk, Decision, as_decisions
from sacplan.core.pins import NO_PINS, resolve_pins
from sacplan.planning.make import plan_by_hand
from sacplan.planning.policies import _discarded_by
from sacplan.record.host_state import CPUOffloadSizes
from sacplan.techniques.chunk.entries import backward_chunks
from sacplan.techniques.chunk.executor.install import InstalledChunks
from sacplan.techniques.registry import rewritten
from tests.chunk.test_module_plans import assert_is_the_fake_step
from tests.support.chunks import step
from tests.support.slow import slow_after
from tests.support.steps import assert_predicted
from tests.zoo.language_models import TokenModel
from tests.zoo.language_models import cross_entropy as loss_fn

VOCAB, DIM = 64, 32


class RMSNorm(nn.Module):
    """As models of the Llama family write it: in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), nn.LayerNorm(dim)
        self.mix, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(self.norm1(x)))
        return x + self.out(self.norm2(x))


def make_case(layers: int = 2, batch: tuple[int, int] = (2, 96)) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = TokenModel((Layer(DIM) for _ in range(layers)), DIM, VOCAB).to(torch.bfloat16)
    return model, torch.randint(0, VOCAB, batch)


@functools.cache
def profile_on(device: str) -> sacplan.Profile:
    return sacplan.profile(*make_case(), loss_fn, device=device)


NORMS = tuple(Chunk(f"layers.{i}.norm{k}", "backward", 4, 1) for i in range(2) for k in (1, 2))


def with_recomputation(profile: sacplan.Profile) -> tuple[Decision, ...]:
    """All norms in slices, and all of each layer recomputed, what the norms return included."""
    program = rewritten(profile.program, NORMS, profile.spec).renumbered()
    return (*NORMS, *as_decisions(_discarded_by("full", None, program, "layers.*", NO_PINS)))


def planned(profile: sacplan.Profile) -> sacplan.Plan:
    return plan_by_hand(profile, with_recomputation(profile), "by hand")


@pytest.mark.parametrize("device", slow_after(1, ["h100", "cpu"]))
def test_the_rewritten_step_is_the_fake_one(device: str) -> None:
    assert plan_by_hand(profile_on(device), NORMS, "by hand").peak_bytes < profile_on(device).peak_bytes
    assert_is_the_fake_step(profile_on(device), *make_case(), NORMS)


def test_what_a_norm_returns_is_recomputed() -> None:
    model, batch = make_case()
    profile = profile_on("cpu")
    plan = planned(profile)
    assert "aten.mul.Tensor" in {site.op for site in plan.discarded["layers.1"] if site.place == "norm1"}
    ops_kept = rewritten(profile.program, NORMS, profile.spec).footprint
    assert plan.peak_bytes < ops_kept.peak_bytes
    assert_predicted(model, batch, plan, loss_fn)


def test_gradients_are_the_same_bits_but_for_the_weights_of_norms() -> None:
    model, batch = make_case()
    expected = step(model, batch, loss_fn)
    truth = step(copy.deepcopy(model).double(), batch, loss_fn)
    with sacplan.apply(model, planned(profile_on("cpu"))) as handle:
        for _ in range(2):
            found = step(model, batch, loss_fn)
        assert not handle.differences
    errors: list[float] = []
    for name, value in expected.items():
        if "norm" in name:  # a slice's sum is rounded once, and they are added in float32
            error, plain = (float((grads[name] - truth[name]).norm()) for grads in (found, expected))
            assert error <= 1.3 * plain, name
            errors.append(error / plain)
        else:
            assert torch.equal(found[name], value), name
    assert sum(errors) <= len(errors)


def test_the_gradient_of_the_input_of_a_norm() -> None:
    norm = nn.Sequential(RMSNorm(DIM))
    x = torch.randn(2, 50, DIM, dtype=torch.bfloat16, requires_grad=True)
    seed = torch.randn(2, 50, DIM)
    norm(x).backward(seed)
    expected, x.grad = x.grad, None
    weight = norm[0].weight.grad.clone()  # type: ignore[union-attr]
    norm.zero_grad()
    with_slices = InstalledChunks(norm, [Chunk("0", "backward", 7, 1)])
    norm(x).backward(seed)
    assert norm[0].forward.tally.loops == 1  # type: ignore[union-attr]
    assert not with_slices.differences
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    torch.testing.assert_close(norm[0].weight.grad, weight)


def test_all_that_are_alike_get_one_decision() -> None:
    profile = profile_on("cpu")
    program, spec = profile.program, profile.spec
    scope = program.calls["layers.1.norm1"][0]
    found = backward_chunks(program, scope, spec, NO_PINS, ())
    assert [chunk.unit for chunk in found] == [f"layers.{i}.norm1" for i in range(2)]
    more = backward_chunks(program, scope, spec, NO_PINS, found)
    assert more == tuple(msgspec.structs.replace(chunk, slices=2 * chunk.slices) for chunk in found)
    most = tuple(msgspec.structs.replace(chunk, slices=64) for chunk in found)
    assert backward_chunks(program, scope, spec, NO_PINS, most) == ()
    pins = resolve_pins(program, profile.fingerprint, ("layers.0.norm1",), ())
    assert [c.unit for c in backward_chunks(program, scope, spec, pins, ())] == ["layers.1.norm1"]


def test_gradients_that_are_let_go_of_at_once() -> None:
    """A hook of the optimizer moves each gradient to the host as soon as it is there, which is behind the loop."""
    optimizer = functools.partial(CPUOffloadSizes, offload_gradients=True, minimal_size=16)
    model, batch = make_case()
    profile = sacplan.profile(model, batch, loss_fn, optimizer, device="h100 without workspaces")
    expected = rewritten(profile.program, NORMS, profile.spec)
    plan = plan_by_hand(profile, NORMS, "by hand")
    assert expected.footprint.end_bytes == profile.program.footprint.end_bytes
    assert sacplan.verify(model, batch, plan, loss_fn, optimizer).peak_bytes == plan.peak_bytes
