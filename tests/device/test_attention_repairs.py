"""Attention that no fused kernel runs: what is in the way is named, and the code that is given makes it fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sacplan
from sacplan.device.attention import AttentionCall, attention_backend
from sacplan.device.attention_repairs import repairs_of
from sacplan.device.devices import resolve_device
from sacplan.questions.advise import Remedy
from tests.support.steps import mean_square

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


class Attention(nn.Module):
    """Attention of random query, key and value, with a line of code before the call."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 4, dim: int = 16, dims: int = 4, strided: bool = False,
        mask: bool = False, line: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.dims, self.strided, self.mask, self.line = dims, strided, mask, line
        self.q, self.k, self.v = (nn.Linear(32, n * dim) for n in (heads, kv_heads, kv_heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        names: dict[str, Any] = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            t = getattr(self, name)(x).view(b, n, heads, self.dim).transpose(1, 2)
            if self.strided:
                t = t.transpose(2, 3).contiguous().transpose(2, 3)
            names[name] = t.reshape(b * heads, n, self.dim) if self.dims == 3 else t
        dtype = names["q"].dtype
        exec(self.line, {"F": F, "torch": torch}, names)
        q, k, v = (names[name] for name in "qkv")
        mask = torch.zeros(n, n, dtype=q.dtype, device=q.device) if self.mask else None
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=self.dim**-0.5, enable_gqa=q.dim() == 4 and k.shape[1] != q.shape[1]
        )
        return out[..., : self.dim].to(dtype)


def profile(model: nn.Module, x: torch.Tensor, device: str = "a100-80gb") -> sacplan.Profile:
    return sacplan.profile(model, x, mean_square, device=device)


def remedies(model: nn.Module, x: torch.Tensor, device: str = "a100-80gb") -> list[Remedy]:
    advice = sacplan.advise(profile(model, x, device), None, model, x, mean_square)
    return [remedy for remedy in advice.remedies if remedy.name == "fused-attention"]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"kv_heads": 2}, "key and value have fewer heads (2) than the query (4)"),
    "head size": ({"dim": 18, "mask": True}, "the head size (18) is not a multiple of 8"),
    "three dimensions": ({"dims": 3}, "query, key and value have 3 dimensions"),
    "strides": ({"strided": True}, "elements of the last dimension are not side by side"),
}


def mended(model: nn.Module, options: dict[str, Any], remedy: Remedy) -> Attention:
    """With the code of the remedy in its forward."""
    other = Attention(**options, line=remedy.code)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", CASES)
def test_the_code_makes_it_fused_and_saves_what_is_said(name: str) -> None:
    options, because = CASES[name]
    x, model = torch.randn(2, 128, 32), Attention(**options)
    (remedy,) = remedies(model, x)
    assert f"runs as separate ops because {because}: a fused kernel saves" in remedy.sentence
    other = mended(model, options, remedy)
    assert remedy.peak_bytes == profile(other, x).peak_bytes
    torch.testing.assert_close(other(x).reshape(model(x).shape), model(x))
    assert not remedies(other, x)


def test_a_type_that_no_kernel_takes() -> None:
    """The one change that is of the values; so it comes last, and says so."""
    x, model = torch.randn(2, 128, 32).double(), Attention().double()
    (remedy,) = remedies(model, x, "t4")
    assert "because it runs in float64" in remedy.sentence
    assert remedy.code.startswith("q, k, v = (t.to(torch.float16)")
    assert "less precise" in remedy.code
    other = mended(model, {}, remedy).double()
    assert remedy.peak_bytes == profile(other, x, "t4").peak_bytes


def test_what_the_user_has_switched_off() -> None:
    x, model = torch.randn(2, 128, 32), Attention()
    with sdpa_kernel(SDPBackend.MATH):
        (remedy,) = remedies(model, x)
    assert "because fused kernels are switched off" in remedy.sentence
    assert remedy.peak_bytes == profile(model, x).peak_bytes


def test_nothing_is_said_where_it_is_fused_or_cannot_be() -> None:
    x = torch.randn(2, 128, 32)
    assert not remedies(Attention(), x)
    assert not remedies(Attention(), x, "cpu")
    no_heads = AttentionCall((2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16), torch.float32, enable_gqa=True)
    assert repairs_of(resolve_device("h100"), no_heads) is None


HEADS = st.sampled_from([1, 2, 4])


@given(
    heads=HEADS, fewer=HEADS, dims=st.tuples(*[st.integers(1, 300)] * 2), length=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), mask=st.sampled_from([None, 2, 4]),
    dropout=st.sampled_from([0.0, 0.1]), is_flat=st.booleans(), is_strided=st.booleans(),
    device=st.sampled_from(["t4", "a100-80gb", "h100", "b200"]),
)  # fmt: skip
def test_repairs_end_where_a_kernel_is_fused(
    heads: int, fewer: int, dims: tuple[int, int], length: int, dtype: torch.dtype, mask: int | None,
    dropout: float, is_flat: bool, is_strided: bool, device: str,
) -> None:  # fmt: skip
    """The kernel is fused with the last of them, not before."""
    spec, (dim, dim_v) = resolve_device(device), dims
    shapes = ((2, heads, length, dim), (2, fewer, 8, dim), (2, fewer, 8, dim_v))
    query, key, value = (shape[1:] if is_flat else shape for shape in shapes)
    call = AttentionCall(
        query, key, value, dtype, mask_dim=mask, dropout_p=dropout, enable_gqa=fewer < heads,
        unit_last_stride=not is_strided, version=(2, 13),
    )  # fmt: skip
    assume(attention_backend(spec, call) == "math")
    repairs = repairs_of(spec, call)
    assume(repairs is not None)
    assert attention_backend(spec, repairs[-1].call) != "math"
    assert all(attention_backend(spec, repair.call) == "math" for repair in repairs[:-1])
    assert len({repair.because for repair in repairs}) == len(repairs)
