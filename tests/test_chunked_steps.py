"""Steps whose loss runs in slices, against the plain step: losses, models, and what people do with logits and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sacplan._chunk.executor.install import InstalledChunks
from sacplan._program.decisions import Chunk
from sacplan._torch.allocations import allocation_events
from sacplan.errors import ChunkError
from tests.models import LM, tokens

VOCAB = 517
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=1, dim=32, heads=2, vocab=VOCAB)


@pytest.fixture
def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return tokens(2, 48, VOCAB)


@contextmanager
def chunked(model: nn.Module, unit: str = "head", slices: int = 8, **how: object) -> Iterator[InstalledChunks]:
    decision = Chunk(unit, how.pop("span", "rest"), slices, how.pop("dim", 1), **how)  # type: ignore[arg-type]
    installed = InstalledChunks(model, [decision])
    try:
        yield installed
    finally:
        installed.check_removable()
        installed.remove()


def step(model: nn.Module, batch: object, loss_fn: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = loss_fn(model, batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(type(g) is torch.Tensor for g in found.values())
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach() + 0, **found}


def close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], near: tuple[str, ...] = (), rtol: float = 1e-6
) -> None:
    """All bits are equal, but those of the loss and of what is near."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "loss":
            assert (got[name] - value).abs() <= 2e-6 * value.abs()
        elif name.startswith(near):
            assert (got[name] - value).norm() <= rtol * value.norm(), name
        else:
            assert torch.equal(got[name], value), name


def loops_of(model: nn.Module, unit: str = "head") -> int:
    region = model.get_submodule(unit).forward.region
    assert not region.whole
    return region.loops


# --- losses outside of the model


def logits_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def shifted(model: nn.Module, x: torch.Tensor, ignored: int = -100, **how: object) -> torch.Tensor:
    logits, labels = model(x)[:, :-1], x.masked_fill(x % 3 == 0, ignored)[:, 1:]
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.flatten(), ignore_index=ignored, **how)  # type: ignore[arg-type]


def transposed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), x)


def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, VOCAB)
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten(), weight=weight)


def with_z_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x).float()
    z = logits.logsumexp(-1)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten()) + 1e-3 * (z**2).mean()


def by_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = x % 4 != 0
    losses = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none").view_as(x)
    return (losses * mask).sum() / mask.sum()


def distilled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(9)
    teacher = torch.randn(*x.shape, VOCAB)
    student = F.log_softmax(model(x) / 2, -1)
    return F.kl_div(student, F.log_softmax(teacher / 2, -1), log_target=True, reduction="batchmean")


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(9)
    return F.mse_loss(model(x), torch.randn(*x.shape, VOCAB))


def smooth(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(9)
    return F.smooth_l1_loss(model(x), torch.randn(*x.shape, VOCAB))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def soft_capped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = 30 * torch.tanh(model(x) / 30)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten())


def picked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens, as in preference losses."""
    scores = model(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1)
    first, second = scores.sum(-1)
    return -F.logsigmoid(0.1 * (first - second))


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
    "shifted and ignored": shifted,
    "label smoothing": lambda m, x: shifted(m, x, label_smoothing=0.1),
    "smoothing and another ignored": lambda m, x: shifted(m, x, 5, label_smoothing=0.1),
    "sum": lambda m, x: shifted(m, x, reduction="sum"),
    "z-loss": with_z_loss,
    "by token": by_token,
    "distilled": distilled,
    "squared": squared,
    "mean square": mean_square,
    "soft-capped": soft_capped,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("slices", [3, 8])
def test_a_loss_outside_of_the_model(model: LM, batch: torch.Tensor, name: str, slices: int) -> None:
    plain = step(model, batch, LOSSES[name])
    with chunked(model, slices=slices):
        got = step(model, batch, LOSSES[name])
        assert loops_of(model) == 1
    close(got, plain, near=("head.",))


@pytest.mark.parametrize(("loss_fn", "loops"), [(weighted, 1), (picked, 2), (transposed, 1), (smooth, 1)])
def test_a_loss_whose_rows_are_only_close(model: LM, batch: torch.Tensor, loss_fn: Loss, loops: int) -> None:
    """A sum over all slices is a factor of the gradient, or a kernel goes along the sliced dimension."""
    plain = step(model, batch, loss_fn)
    with chunked(model):
        got = step(model, batch, loss_fn)
        assert loops_of(model) == loops
    close(got, plain, near=("",), rtol=2e-6)
