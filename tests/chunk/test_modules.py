"""Modules that run in slices, forward and backward, against the plain step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sacplan.core.decisions import Chunk
from sacplan.errors import ChunkError
from sacplan.techniques.chunk.executor.install import InstalledChunks
from tests.support.chunks import VOCAB, close, step
from tests.support.threads import at_once
from tests.zoo.language_models import LM, tokens
from tests.zoo.language_models import cross_entropy as plain_loss
from tests.zoo.layers import FromFunction

CHUNKS = [Chunk("layers.0.mlp", "module", 4, 1), Chunk("layers.1.mlp", "module", 5, 1)]
NEAR = ("layers.0.mlp", "layers.1.mlp")


@pytest.fixture
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB, dropout=0.0)


@pytest.fixture
def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return tokens(2, 48, VOCAB)


def test_gradients(model: LM, batch: torch.Tensor) -> None:
    plain = step(model, batch, plain_loss)
    installed = InstalledChunks(model, CHUNKS)
    got = step(model, batch, plain_loss)
    assert [model.layers[i].mlp.forward.tally.loops for i in range(2)] == [2, 2]  # type: ignore[attr-defined]
    assert not installed.differences
    close(got, plain, near=NEAR)
    installed.remove()
    assert all(torch.equal(t, plain[n]) for n, t in step(model, batch, plain_loss).items())


def gated(self: FromFunction, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """With two inputs, two outputs and a number among them."""
    h = F.silu(self.gate(x)) * self.up(x)
    return {"out": self.down(h) * scale, "share": (h > 0).float().mean(), "hidden": h[..., :2]}


def around(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    found = self.inner(x, scale=self.scale.exp())
    return found["out"].square().mean() + found["hidden"].mean() * found["share"]


def test_several_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    inner = FromFunction(gated, up=nn.Linear(16, 64), gate=nn.Linear(16, 64), down=nn.Linear(64, 16))
    model = FromFunction(around, inner=inner, scale=nn.Parameter(torch.ones(16)))
    x = torch.randn(3, 40, 16, requires_grad=True)
    plain = step(model, x, lambda m, x: m(x))
    expected, x.grad = x.grad, None
    installed = InstalledChunks(model, [Chunk("inner", "module", 4, 1)])
    got = step(model, x, lambda m, x: m(x))
    assert not installed.differences
    close(got, plain, near=("inner.", "scale"))
    assert x.grad is not None
    assert expected is not None
    torch.testing.assert_close(x.grad, expected)


def test_autocast_around_the_forward_pass_only(model: LM, batch: torch.Tensor) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain_loss(model, x)

    plain = step(model, batch, loss_fn)
    installed = InstalledChunks(model, [*CHUNKS, Chunk("head", "rest", 8, 1)])
    got = step(model, batch, loss_fn)
    for name, value in plain.items():
        assert got[name].dtype == value.dtype == torch.float32
        assert (got[name] - value).norm() <= 2e-2 * value.norm()

    def all_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain_loss(model, x)
            loss.backward()
        model.zero_grad()
        return loss_fn(model, x)

    again = step(model, batch, all_inside)
    assert all(torch.equal(again[n], t) for n, t in got.items())
    installed.remove()


def test_half_precision_over_many_slices() -> None:
    """Errors against float64, over those of the plain step in bfloat16."""
    torch.manual_seed(0)
    exact = LM(layers=1, dim=32, heads=2, vocab=VOCAB, dropout=0.0).bfloat16().double()
    batch = tokens(4, 128, VOCAB)
    truth = step(exact, batch, plain_loss)
    model = copy.deepcopy(exact).bfloat16()
    plain = step(model, batch, plain_loss)
    InstalledChunks(model, [Chunk("head", "rest", 64, 1)])
    got = step(model, batch, plain_loss)
    for name, value in truth.items():
        assert got[name].dtype == torch.bfloat16
        error, plain_error = (got[name] - value).norm(), (plain[name] - value).norm()
        assert error <= 1.1 * plain_error + 1e-9, (name, float(error / plain_error))


# --- on the instance


def test_names_and_state_do_not_change(model: LM, batch: torch.Tensor) -> None:
    names = [n for n, _ in model.named_parameters()], list(model.state_dict()), repr(model)
    installed = InstalledChunks(model, [*CHUNKS, Chunk("head", "rest", 8, 1)])
    step(model, batch, plain_loss)
    assert ([n for n, _ in model.named_parameters()], list(model.state_dict()), repr(model)) == names
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    installed.check_removable()
    installed.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_two_threads_share_a_module(model: LM, batch: torch.Tensor) -> None:
    InstalledChunks(model, [*CHUNKS, Chunk("head", "rest", 8, 1)])
    step(model, batch, plain_loss)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(plain_loss(model, batch), parameters)

    def run() -> list[tuple[torch.Tensor, ...]]:
        return [torch.autograd.grad(plain_loss(model, batch), parameters) for _ in range(3)]

    found = [grads for one in at_once(run, run) for grads in one]
    assert len(found) == 6
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected, strict=True))


def test_compiling_is_refused_by_name(model: LM, batch: torch.Tensor) -> None:
    InstalledChunks(model, [Chunk("head", "rest", 8, 1)])
    with pytest.raises(Exception, match="Compile the layers") as refusal:
        plain_loss(torch.compile(model, backend="eager"), batch)  # type: ignore[arg-type]
    assert isinstance(refusal.value, ChunkError)


def test_a_compiled_loss_runs_uncompiled(model: LM, batch: torch.Tensor) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def loss_of(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())

    plain = step(model, batch, plain_loss)
    InstalledChunks(model, [Chunk("head", "rest", 8, 1)])
    for _ in range(2):
        got = step(model, batch, lambda model, x: loss_of(model(x), x))
        assert model.head.forward.tally.loops == 1
        close(got, plain, near=("head.",))


def test_compiled_layers_below_a_chunked_head(model: LM, batch: torch.Tensor) -> None:
    plain = step(model, batch, plain_loss)
    for layer in model.layers:
        layer.compile(backend="eager")
    InstalledChunks(model, [Chunk("head", "rest", 8, 1)])
    close(step(model, batch, plain_loss), plain, near=("head.",))


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
def test_dropout_draws_what_the_whole_would_draw(batch: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = LM(layers=2, dim=32, heads=2, vocab=VOCAB, dropout=0.2)
    plain = step(model, batch, plain_loss)
    installed = InstalledChunks(model, CHUNKS)
    got = step(model, batch, plain_loss)
    assert "bernoulli" in str(installed.differences[0])
    close(got, plain, near=NEAR)


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
def test_checkpointing_around_a_module_in_slices(model: LM, batch: torch.Tensor) -> None:
    """Of PyTorch: it makes a second region, whose tensors do not match those of the first."""
    plain = step(model, batch, plain_loss)
    installed = InstalledChunks(model, CHUNKS)
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    close(step(model, batch, plain_loss), plain, near=NEAR)
    installed.remove()
