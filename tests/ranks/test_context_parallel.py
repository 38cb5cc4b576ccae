"""Context parallelism on two gloo ranks, to the byte: keys gathered by hand, and PyTorch's own ring.

PyTorch's ring (``context_parallel``) knows attention kernels of GPUs only: that of a CPU has no sharding strategy. So
the test runs it with a kernel of GPUs that NumPy computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sacplan
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.support.steps import bit_equal

pytestmark = [needs_gloo, pytest.mark.slow]

RANKS, DIM, HEADS, LENGTH = 2, 64, 4, 256
aten = torch.ops.aten


class Gathered(nn.Module):
    """Attention of a part of the sequence on the keys of all ranks, as Llama 3 was trained."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as collectives

        newer = hasattr(collectives, "all_gather_single_autograd")
        gather = getattr(collectives, "all_gather_single_autograd" if newer else "all_gather_tensor_autograd")
        keys, values = (gather(t.contiguous(), 2, dist.group.WORLD) for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)


class Causal(nn.Module):
    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.up, self.down = (
            nn.Linear(DIM, 3 * DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        x = x + self.attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(kind()), Layer(kind()))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@contextmanager
def spread(kind: type[nn.Module], x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the part of a sequence that this rank has."""
    from torch.distributed.tensor.experimental import context_parallel

    if kind is Gathered:
        yield x.chunk(RANKS, 1)[dist.get_rank()].clone()
        return
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_scaled_dot_product_flash_attention", flash, "CPU")
        kernels.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
        patch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            yield x


def scaled_dot_product_attention(*qkv: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """In the kernel of a GPU."""
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal)[0]
    return out


def scores(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> tuple[np.ndarray, float]:
    scale = q.shape[-1] ** -0.5
    found = q.detach().numpy() @ k.detach().numpy().swapaxes(2, 3) * scale
    return (np.where(np.tri(*found.shape[2:], dtype=bool), found, -np.inf) if is_causal else found), scale


def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any) -> Any:
    found, _ = scores(q, k, is_causal)
    out, lse = torch.empty_like(q.detach()), torch.empty(q.shape[:3])
    lse.numpy()[:] = np.log(np.exp(found).sum(3))
    out.numpy()[:] = np.exp(found - lse.numpy()[..., None]) @ v.detach().numpy()
    random = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], *random, torch.empty(0)


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any, **_: Any) -> Any:
    found, scale = scores(q, k, others[5])
    p, g = np.exp(found - lse.numpy()[..., None]), grad.numpy()
    inner = p * (g @ v.numpy().swapaxes(2, 3) - (g * out.numpy()).sum(3, keepdims=True)) * scale
    grads = [torch.empty_like(t) for t in (q, k, v)]
    for t, value in zip(
        grads, (inner @ k.numpy(), inner.swapaxes(2, 3) @ q.numpy(), p.swapaxes(2, 3) @ g), strict=True
    ):
        t.numpy()[:] = value
    return grads


def sequence() -> torch.Tensor:
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1))


def on_rank(rank: int, directory: str, kind: type[nn.Module]) -> None:
    expected: list[torch.Tensor] = []
    plan = sacplan.Plan.load(Path(directory, f"{rank}.json"))
    with gloo(rank, RANKS, directory):
        for predicted in (plan.baseline_peak_bytes, plan.peak_bytes):
            with spread(kind, sequence()) as x:
                model = made(kind)
                if expected:
                    sacplan.apply(model, plan)
                loss_fn(model, x).backward()
                found = [p.grad for p in model.parameters()]
                assert not expected or bit_equal(found, expected)
                expected = found
                with patient_collectives():
                    measured = RankMemory(model, x, loss_fn).peak_bytes()
                assert measured == predicted, (rank, measured - predicted)
        if kind is Causal:  # and the mean over ranks is what one process finds
            whole = made(kind)
            loss_fn(whole, sequence()).backward()
            for g, p in zip(expected, whole.parameters(), strict=True):
                dist.all_reduce(g)
                torch.testing.assert_close(g / RANKS, p.grad)


@pytest.mark.parametrize("kind", [Gathered, Causal], ids=["gathered", "ring"])
def test_parts_of_a_sequence_are_the_real_ones(kind: type[nn.Module], tmp_path: Path) -> None:
    for rank in range(RANKS):
        with sacplan.ranks(RANKS, rank, "cpu"), spread(kind, sequence()) as x:
            plan = sacplan.plan(sacplan.profile(made(kind), x, loss_fn, OPTIMIZER), "85%", "greedy")
        assert plan.units
        plan.save(tmp_path / f"{rank}.json")
    run_ranks(on_rank, (str(tmp_path), kind), RANKS)
