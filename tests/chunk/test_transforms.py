"""Units in slices under PyTorch's other ways to run a model, and to differentiate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.errors import ChunkError
from tests.support.chunks import chunked
from tests.support.slow import slow_after
from tests.zoo.layers import Residual


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2)))


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).sum(0)
    return found


def of_parameters(model: nn.Module, x: torch.Tensor) -> Any:
    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, parameters, (x,)).square().mean()
        return found

    return torch.func.grad(loss_of)(dict(model.named_parameters()))


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
@pytest.mark.parametrize("span", slow_after(1, ["module", "rest"]))
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(of_parameters, id="grad"),
        pytest.param(lambda m, x: torch.func.jacrev(lambda x: summed(m, x))(x), id="jacrev"),
        pytest.param(lambda m, x: torch.func.jvp(lambda x: summed(m, x), (x,), (x,)), id="jvp"),
        pytest.param(lambda m, x: torch.vmap(m)(x.view(4, 6, 16)), id="vmap"),
        pytest.param(lambda m, x: torch.export.export(m, (x,)).module()(x), id="export"),
        pytest.param(lambda m, x: torch.export.export(m, (x,), strict=True).module()(x), id="strict export"),
        pytest.param(lambda m, x: torch.jit.trace(m, x)(x), id="trace"),
    ],
)
def test_a_unit_runs_as_a_whole(run: Callable[[nn.Module, torch.Tensor], Any], span: str) -> None:
    model, x = layers(), torch.randn(24, 16)
    expected = run(model, x)
    with chunked(model, "1", 4, span=span, dim=0):
        torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("span", ["module", "rest"])
def test_several_gradients_at_once_are_refused_by_name(span: str, frozen: bool) -> None:
    model, x = layers(), torch.randn(24, 16)
    model[0].requires_grad_(not frozen)  # type: ignore[operator]
    asked = [p for p in model.parameters() if p.requires_grad]
    with chunked(model, "1", 4, span=span, dim=0):
        for y in (summed(model, x), summed(model, x) * 2):
            with pytest.raises(ChunkError, match="several gradients at once"):
                torch.autograd.grad(y, asked, torch.eye(16), is_grads_batched=True)
        with pytest.raises(ChunkError, match="several gradients at once"):
            torch.autograd.functional.jacobian(lambda x: summed(model, x), x, vectorize=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_recomputes_is_exported(strict: bool) -> None:
    model, x = layers().eval(), torch.randn(24, 16)
    expected = model(x)
    profile = sacplan.profile(model, x, lambda model, x: model(x).square().mean(), device="cpu")
    with sacplan.apply(model, sacplan.plan(profile, "smallest", "greedy")):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), expected)
