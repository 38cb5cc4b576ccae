"""Hooks and functions that refer to the model: a fake step runs them on its copy, and leaves the user's alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.torch_compat.fake_tensors import FakeTensor
from tests.support.steps import mean_square

X = torch.ones(32, 16)
FEATURES: dict[str, Any] = {}


class Net(nn.Module):
    """A loss over its output and over what a hook has kept of the layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.feature: Any = None
        self.features: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.feature = output


class Extractor:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.kept: list[torch.Tensor] = []
        layer.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        assert module is self.layer, "the hook of another model"
        self.kept[:] = [output]


Case = tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]
CASES: dict[str, Callable[[Any], Case]] = {
    "closure over the model": lambda net: (
        lambda m, i, o: setattr(net, "feature", o),
        lambda model: model.feature,
    ),
    "bound method": lambda net: (net.keep, lambda model: model.feature),
    "a partial": lambda net: (
        functools.partial(lambda owner, m, i, o: owner.features.update(a=o), net),
        lambda model: model.features["a"],
    ),
    "default argument": lambda net: (
        lambda m, i, o, owner=net: owner.features.update(a=o),
        lambda model: model.features["a"],
    ),
    "dictionary of the model": lambda net: _into(net.features, lambda model: model.features["a"]),
    "global variable": lambda net: (lambda m, i, o: FEATURES.update(a=o), lambda model: FEATURES["a"]),
}


def _into(features: dict[str, Any], feature: Callable[[Any], torch.Tensor]) -> Case:
    return lambda m, i, o: features.update(a=o), feature


def case(build: Callable[[Any], Case]) -> None:
    """Register a function of a model that returns a hook for its layer, and what reads what the hook keeps."""
    CASES[build.__name__] = build


@case
def weak_reference(net: Any) -> Case:
    ref = weakref.ref(net)
    return lambda m, i, o: setattr(ref(), "feature", o), lambda model: model.feature


@case
def a_dictionary(net: Any) -> Case:
    features: dict[str, torch.Tensor] = {}
    return _into(features, lambda model: features["a"])


@case
def a_list(net: Any) -> Case:
    features: list[torch.Tensor] = []
    return lambda m, i, o: features.__setitem__(slice(None), [o]), lambda model: features[0]


@case
def outer_variable(net: Any) -> Case:
    feature: Any = None

    def hook(m: nn.Module, i: Any, o: torch.Tensor) -> None:
        nonlocal feature
        feature = o

    return hook, lambda model: feature


@case
def several_objects(net: Any) -> Case:
    extractors = [Extractor(layer) for layer in (net.a, net.b)]
    return lambda m, i, o: None, lambda model: extractors[0].kept[0]


@case
def pre_hook_and_function(net: Any) -> Case:
    net.act = lambda x: net.b(x)
    net.b.register_forward_pre_hook(lambda m, args: setattr(net, "feature", args[0]))
    return lambda m, i, o: None, lambda model: model.feature + model.act(model.feature).mean()


def _fakes(net: nn.Module, loss: Any) -> list[Any]:
    """Fake tensors in what the loss and the hooks of a model can reach."""
    found, pending, seen = [], [net, loss, FEATURES], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FakeTensor):
            found.append(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif hasattr(value, "__closure__"):
            pending.extend(c.cell_contents for c in value.__closure__ or ())
        elif not isinstance(value, (torch.Tensor, type)):
            pending.extend(getattr(value, "__dict__", {}).values())
            pending.append(getattr(value, "__self__", None))
    return found


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_hooks_keep_is_the_copys(name: str, stepped: bool) -> None:
    """The fake step is the real one, whether the hook has kept something of a real step before or not."""
    net = Net()
    FEATURES.clear()
    hook, feature_of = CASES[name](net)
    net.a.register_forward_hook(hook)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, feature = model(x).square().mean(), feature_of(model)
        return y + (feature.tanh() * feature.sigmoid()).mean()

    if stepped:
        loss(net, X).backward()
        net.zero_grad()
    feature, kept = net.feature, dict(net.features)
    hooks = list(net.a._forward_hooks.values())
    fake = sacplan.profile(net, X, loss, device="cpu")
    assert net.feature is feature
    assert net.features.keys() == kept.keys()
    assert all(net.features[k] is kept[k] for k in kept)
    assert list(net.a._forward_hooks.values()) == hooks
    assert not _fakes(net, loss)
    real = sacplan.profile(net, X, loss, device="cpu", trace="real")
    assert [op.name for op in fake.recorded.ops] == [op.name for op in real.recorded.ops]
    assert fake.peak_bytes == real.peak_bytes
    plan = sacplan.plan(fake, "100%")
    assert sacplan.verify(net, X, plan, loss, run="real").peak_bytes == fake.peak_bytes


def test_what_was_kept_stays() -> None:
    """Also in containers that the hook's closure alone holds, and in variables."""
    net = Net()
    features, last = {"a": "what was there"}, None

    def hook(m: nn.Module, i: Any, o: Any) -> None:
        nonlocal last
        features["a"] = features["b"] = last = o

    net.a.register_forward_hook(hook)
    sacplan.profile(net, X, mean_square, device="cpu")
    assert features == {"a": "what was there"}
    assert last is None


def test_a_backward_hook_that_holds_the_model() -> None:
    """As in models that update their clusters when the backward pass comes to them."""
    net = Net()

    def update(m: nn.Module, gradients: Any, outputs: Any) -> None:
        assert net.feature is not None, "nothing was supplied"
        net.feature = None

    net.a.register_forward_hook(net.keep)
    net.a.register_full_backward_hook(update)
    profile = sacplan.profile(net, X, mean_square, device="cpu")
    assert net.feature is None
    assert profile.peak_bytes == sacplan.profile(net, X, mean_square, device="cpu", trace="real").peak_bytes


def test_hooks_of_a_parameters_gradient() -> None:
    net, mask = Net(), torch.ones(64, 16)
    net.register_buffer("mask", mask)
    net.a.weight.register_hook(lambda grad: (grad * net.mask).exp())
    fake = sacplan.profile(net, X, mean_square, device="cpu")
    real = sacplan.profile(net, X, mean_square, device="cpu", trace="real")
    assert [op.name for op in fake.recorded.ops] == [op.name for op in real.recorded.ops]
    assert "aten.exp.default" in [op.name for op in fake.recorded.ops]
    assert net.a.weight.grad is None


def test_a_loss_function_that_calls_the_model_by_its_variable() -> None:
    net = Net()
    held = sacplan.profile(net, X, lambda _, x: net(x).square().mean(), device="cpu")
    given = sacplan.profile(net, X, lambda model, x: model(x).square().mean(), device="cpu")
    assert held.peak_bytes == given.peak_bytes


def test_a_counter_of_the_users_counts() -> None:
    net, calls = Net(), 0

    def hook(m: nn.Module, i: Any, o: Any) -> None:
        nonlocal calls
        calls += 1

    net.a.register_forward_hook(hook)
    sacplan.profile(net, X, mean_square, device="cpu")
    assert calls == 1
