"""Small models that several test files use."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm transformer block with dropout."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    """A language model of a few blocks."""

    def __init__(
        self, layers: int = 3, dim: int = 64, heads: int = 4, vocab: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class TokenModel(nn.Module):
    """Token ids to logits, through the layers that a test hands in."""

    def __init__(self, layers: Iterable[nn.Module], dim: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def tokens(batch: int = 4, length: int = 64, vocab: int = 128) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, vocab, (batch, length))


def cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss outside of the model."""
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


class Tempered(LM):
    """With parameters behind the head."""

    def __init__(self, layers: int, dim: int, heads: int, vocab: int) -> None:
        super().__init__(layers, dim, heads, vocab)
        self.temperature, self.bias = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.randn(vocab) / 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature.exp() + self.bias
