"""Code that is compiled inside of a unit does not have the executor compiled with it."""

from __future__ import annotations

import copy

import torch._dynamo.utils

import sacplan
from tests.models import LM, bit_equal, cross_entropy, grads_of, tokens


def test_a_module_compiled_inside_of_a_unit_runs_eagerly_and_compiles_nothing() -> None:
    torch.manual_seed(0)
    model, batch = LM(layers=2, dim=32, heads=2, dropout=0.0), tokens(4, 16)
    profile = sacplan.profile(model, batch, cross_entropy, device="cpu")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, sacplan.policy("full", profile=profile))
    for layer in planned.layers:
        layer.mlp.compile(backend="aot_eager")  # after apply, which would refuse it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert bit_equal(grads_of(model, batch, cross_entropy), grads_of(planned, batch, cross_entropy))
    assert torch._dynamo.utils.counters["frames"]["total"] <= 2 * len(
        planned.layers
    )  # of the modules themselves
