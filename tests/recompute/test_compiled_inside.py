"""Code that is compiled inside of a unit does not have the executor compiled with it."""

from __future__ import annotations

import copy

import pytest
import torch._dynamo.utils

import sacplan
from sacplan.core.compilation import Compilation
from sacplan.errors import SacplanWarning
from tests.support.steps import bit_equal, grads_of, total
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction


def test_a_module_compiled_inside_of_a_unit_runs_eagerly_compiles_nothing_and_is_named() -> None:
    torch.manual_seed(0)
    model, batch = LM(layers=2, dim=32, heads=2, dropout=0.0), tokens(4, 16)
    profile = sacplan.profile(model, batch, cross_entropy, device="cpu")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, sacplan.policy("full", profile=profile))
    for layer in planned.layers:
        layer.mlp.compile(backend="aot_eager")  # after apply, which would refuse it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = grads_of(model, batch, cross_entropy)
    with pytest.warns(SacplanWarning, match=r"'layers\.0\.mlp'.*compiled.*unit 'layers\.0'") as seen:
        assert bit_equal(expected, grads_of(planned, batch, cross_entropy))
    assert sum("layers.0.mlp" in str(one.message) for one in seen) == 1  # not one for each unit
    assert torch._dynamo.utils.counters["frames"]["total"] <= 2 * len(
        planned.layers
    )  # of the modules themselves


def tower() -> FromFunction:
    """What the solvers discard here takes a unit around all layers, unless these are compiled."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.gelu(self.head(x)).exp().sigmoid()

    # Dynamo compiles no code of ``torch.nn``, such as the forward of a Sequential: each layer has one of its own.
    layers = torch.nn.ModuleList(
        FromFunction(
            lambda self, x: self.down(self.act(self.up(x))),
            up=torch.nn.Linear(32, 64), act=torch.nn.GELU(), down=torch.nn.Linear(64, 32),
        )
        for _ in range(4)
    )  # fmt: skip
    return FromFunction(forward, layers=layers, head=torch.nn.Linear(32, 100))


def compile_layers(model: FromFunction) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def test_layers_compiled_in_a_unit_that_is_the_whole_model_are_named() -> None:
    model, x = tower(), torch.randn(64, 32)
    plan = sacplan.plan(sacplan.profile(model, x, device="cpu"), "90%")
    assert list(plan.units) == [""]
    with sacplan.apply(model, plan):
        compile_layers(model)
        with pytest.warns(SacplanWarning, match=r"'layers\.0', 'layers\.1'.*the model.*Compile the whole"):
            total(model, x).backward()
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_plan_made_with_compiled_layers_lets_them_run_compiled() -> None:
    torch.manual_seed(0)
    model, x = tower(), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    compile_layers(model)
    profile = sacplan.profile(model, x, device="cpu")
    assert profile.fingerprint.setup.compiled == Compilation(
        tuple(f"layers.{i}" for i in range(4)), "aot_eager"
    )
    plan = sacplan.plan(profile, "70%")
    assert set(plan.units) <= {f"layers.{i}" for i in range(4)}
    assert sacplan.verify(model, x, plan).peak_bytes == plan.peak_bytes <= (plan.budget_bytes or 0)
    with sacplan.apply(model, plan):
        assert bit_equal(grads_of(plain, x, total), grads_of(model, x, total))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with pytest.raises(sacplan.InfeasibleBudget, match="keeps the compiled step"):
        sacplan.plan(profile, "55%")
