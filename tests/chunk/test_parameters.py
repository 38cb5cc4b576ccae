"""What code sees of a module's parameters while the module runs in slices: the parameters, and nothing else.

Gradients and losses are compared with those of the plain step.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.techniques.chunk.executor.install import InstalledChunks
from tests.support.chunks import VOCAB, chunked, close, loops_of, step
from tests.support.slow import slow_after
from tests.support.steps import assert_predicted
from tests.zoo.language_models import cross_entropy as plain_loss
from tests.zoo.language_models import tokens
from tests.zoo.layers import FromFunction

DIM, LENGTH = 16, 24
Forward = Callable[[FromFunction, torch.Tensor], torch.Tensor]


def language_model(forward: Forward, *, tied: bool = False, frozen: bool = False) -> nn.Module:
    """A model whose head, a module named "head", has parameters of its own and computes with them as it is told."""
    torch.manual_seed(0)
    head = FromFunction(
        forward,
        weight=nn.Parameter(torch.randn(VOCAB, DIM) / 4),
        other=nn.Parameter(torch.randn(VOCAB, DIM) / 4),
        bias=nn.Parameter(torch.zeros(VOCAB)),
        scale=nn.Parameter(torch.ones(DIM)),
        places=nn.Parameter(torch.randn(2, LENGTH, DIM)),
    )
    model = FromFunction(lambda self, x: self.head(self.embed(x)), embed=nn.Embedding(VOCAB, DIM), head=head)
    if tied:
        head.weight = model.embed.weight
    if frozen:
        model.embed.requires_grad_(False)
    return model


@functools.cache
def batch() -> torch.Tensor:
    return tokens(2, LENGTH, VOCAB)


# --- code that looks at its parameters


def hooks_once(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "handle"):
        self.handle = self.weight.register_hook(lambda gradient: gradient * 2)
    return F.linear(x, self.weight)


def asks_for_its_gradient(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight) * (1.0 if self.weight.grad is None else 0.5)


def bounds_its_norm(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.weight.renorm_(2, 0, 0.3)
        self.bias.clamp_(-0.1, 0.1)
    return F.linear(x, self.weight, self.bias)


def sets_another_one(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    self.weight.data = self.weight.data * 1.5
    return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("span", ["rest", "module"])
@pytest.mark.parametrize(
    "forward",
    [hooks_once, asks_for_its_gradient, bounds_its_norm, sets_another_one],
)
def test_code_that_looks_at_its_parameters(forward: Forward, span: str) -> None:
    def two_steps(model: nn.Module) -> dict[str, torch.Tensor]:
        plain_loss(model, batch()).backward()
        loss = plain_loss(model, batch())
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach() + 0, **found}

    plain = two_steps(language_model(forward))
    model = language_model(forward)
    with chunked(model, span=span):
        close(two_steps(model), plain, near=("head.", "embed."))


# --- gradients


class Product(torch.autograd.Function):
    """A product with formulas of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class Square(torch.autograd.Function):
    """Something that is computed from a weight alone."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return gradient * weight * 2


FORWARDS: dict[str, Forward] = {
    "as it is": lambda self, x: F.linear(x, self.weight, self.bias),
    "a view": lambda self, x: x @ self.weight.t(),
    "computed with": lambda self, x: x @ (self.weight * self.scale).t(),
    "two in one": lambda self, x: F.linear(x, torch.stack([self.weight, self.other]).sum(0)),
    "cast": lambda self, x: (x.double() @ self.weight.double().t()).float(),
    "twice": lambda self, x: F.linear(F.linear(x, self.weight), self.weight.t()) @ self.weight.t(),
    "by a function of one's own": lambda self, x: Product.apply(x, self.weight),
    "through a function of one's own": lambda self, x: F.linear(x, Square.apply(self.weight)),
    "looked up": lambda self, x: x @ F.embedding(torch.arange(VOCAB), self.weight).t(),
    "in a norm": lambda self, x: F.linear(F.layer_norm(x, (DIM,), self.scale), self.weight),
    # Autograd hands the gradient of the sum on to the parameter as it is, and no formula makes another.
    "of the activation's shape": lambda self, x: F.linear(x + self.places, self.weight),
    "without the input's gradient": lambda self, x: F.linear(x.detach(), self.weight) + self.bias,
}


@pytest.mark.parametrize("how", ["", "tied", "frozen"])
@pytest.mark.parametrize("forward", list(FORWARDS))
def test_one_loop_makes_all_gradients(forward: str, how: str) -> None:
    model = language_model(FORWARDS[forward], tied=how == "tied", frozen=how == "frozen")
    plain = step(model, batch(), plain_loss)
    for span, loops in (("rest", 1), ("module", 2)):
        with chunked(model, span=span):
            got = step(model, batch(), plain_loss)
            assert loops_of(model) == loops
        close(got, plain, near=("head.", "embed."), rtol=2e-6)


def test_a_cast_that_autocast_keeps() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.embed(x)  # type: ignore[operator]
            beside = F.linear(hidden, model.head.weight)  # type: ignore[union-attr, arg-type]
            return F.cross_entropy(model.head(hidden).flatten(0, 1), x.flatten()) + beside.mean()  # type: ignore[operator]

    model = language_model(FORWARDS["as it is"])
    plain = step(model, batch(), loss_fn)
    with chunked(model):
        got = step(model, batch(), loss_fn)
        assert loops_of(model) == 1
    close(got, plain, near=("head.", "embed."), rtol=1e-2)


def test_hooks_on_parameters_get_each_gradient_once_and_real() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x + self.places, (self.weight + self.other) * self.scale, self.bias)

    model = language_model(forward, tied=True)
    seen: Counter[str] = Counter()
    kinds = set()
    for name, p in model.named_parameters():

        def on_gradient(gradient: torch.Tensor, name: str = name) -> None:
            seen[name] += 1
            kinds.add(type(gradient))

        def on_sum(p: torch.Tensor, name: str = name) -> None:
            seen[f"{name} summed"] += 1
            kinds.add(type(p.grad))

        p.register_hook(on_gradient)
        p.register_post_accumulate_grad_hook(on_sum)
    step(model, batch(), plain_loss)
    plain, _ = seen.copy(), seen.clear()
    with chunked(model):
        step(model, batch(), plain_loss)
    assert seen == plain
    assert kinds == {torch.Tensor}


def test_gradients_that_are_asked_for_by_name() -> None:
    model = language_model(FORWARDS["as it is"])
    weight, bias = model.head.weight, model.head.bias  # type: ignore[union-attr]
    loss = plain_loss(model, batch())
    expected = torch.autograd.grad(loss, [weight, bias])  # type: ignore[list-item]
    with chunked(model):
        loss = plain_loss(model, batch())
        got = torch.autograd.grad(loss, [weight, bias], retain_graph=True)  # type: ignore[list-item]
        (alone,) = torch.autograd.grad(loss, [bias], retain_graph=True)  # type: ignore[list-item]
        loss.backward(inputs=[weight])  # type: ignore[list-item]
    assert torch.equal(alone, got[1])
    assert torch.equal(weight.grad, got[0])  # type: ignore[union-attr, arg-type]
    assert bias.grad is None  # type: ignore[union-attr]
    torch.testing.assert_close(got, expected)


def test_a_parameter_of_several_modules_in_slices() -> None:
    """Each module's loop gives its own part of the gradient."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(x)))) @ self.embed.weight.t()

    torch.manual_seed(0)
    names = ("first", "second", "head")
    model = FromFunction(
        forward, embed=nn.Embedding(VOCAB, DIM), **{name: nn.Linear(DIM, DIM) for name in names}
    )
    model.second.weight = model.head.weight = model.first.weight
    plain = step(model, batch(), plain_loss)
    chunks = [Chunk("first", "module", 4, 1), Chunk("second", "module", 3, 1), Chunk("head", "rest", 8, 1)]
    installed = InstalledChunks(model, chunks)
    for _ in range(2):
        close(step(model, batch(), plain_loss), plain, near=("",))
    installed.remove()


def test_logits_that_are_kept_and_written_to() -> None:
    """Of a model whose input gets no gradient: what is returned is what the module has kept."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        self.kept = F.linear(x, self.weight) + self.bias
        return self.kept

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        logits.mul_(2)
        return F.cross_entropy(model.head.kept.flatten(0, 1), x.flatten())  # type: ignore[union-attr, operator]

    model = language_model(forward, frozen=True)
    plain = step(model, batch(), loss_fn)
    with chunked(model):
        close(step(model, batch(), loss_fn), plain, near=("head.",))


@pytest.mark.parametrize(("forward", "how"), [("as it is", "tied"), ("in a norm", "frozen")])
@pytest.mark.parametrize("autocast", slow_after(1, [True, False]))
def test_the_peak_is_the_predicted_one(forward: str, how: str, autocast: bool) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return plain_loss(model, x)

    model = language_model(FORWARDS[forward], tied=how == "tied", frozen=how == "frozen")
    profile = sacplan.profile(model, batch(), loss_fn, device="cpu")
    plan = plan_with(profile, [Chunk("head", "rest", 8, 1)])
    assert_predicted(model, batch(), plan, loss_fn)
