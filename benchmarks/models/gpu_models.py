"""Models for ``benchmarks.gpu`` in torch alone: each saves for backward what its famous relative saves.

A function returns ``(model, batch, loss_fn)``, some GiB in a step: real tensors on the default device, the loss inside
``loss_fn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.layers import GatedMLP

Batch = dict[str, torch.Tensor]
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
Case = tuple[nn.Module, Batch, LossFn]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, by default those of the usual base model."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 8
    length: int = 1024
    vocab: int = 32000


class Attention(nn.Module):
    """Multi-head attention by ``scaled_dot_product_attention``; ``kv_heads`` for grouped queries."""

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dropout = heads, kv_heads or heads, dropout
        self.head = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, self.kv_heads * self.head, bias=bias)
        self.v = nn.Linear(width, self.kv_heads * self.head, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        q = self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k = self.k(memory).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        v = self.v(memory).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        if rotary is not None:
            q, k = _rotate(q, *rotary), _rotate(k, *rotary)
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, causal, enable_gqa=self.kv_heads != self.heads,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).flatten(2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class MLP(nn.Sequential):
    """Two products with GELU between."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )


def _gated(width: int) -> GatedMLP:
    return GatedMLP(width, 8 * width // 3 // 32 * 32 or 32)


class PreNorm(nn.Module):
    """GPT-2's and ViT's block."""

    def __init__(self, s: Sizes, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
        self.attention = Attention(s.width, s.heads, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.mlp = MLP(s.width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), causal=self.causal))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """Learned positions, tied embeddings, dropout."""

    def __init__(self, s: Sizes, dropout: float = 0.125) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(s.vocab, s.width), nn.Embedding(s.length, s.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PreNorm(s, causal=True, dropout=dropout) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width)
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """RMS norms, rotary grouped-query attention, SwiGLU (or whatever ``feed_forward`` is)."""

    def __init__(self, s: Sizes, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.attention = Attention(s.width, s.heads, kv_heads=max(1, s.heads // 3), bias=False)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), causal=True, rotary=rotary)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """A decoder of ``LlamaBlock``; ``experts`` makes it a mixture, two of them for each token."""

    def __init__(self, s: Sizes, experts: int = 0) -> None:
        super().__init__()
        self.head_dim = s.width // s.heads
        self.tokens = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(s, Mixture(s.width, experts) if experts else _gated(s.width)) for _ in range(s.layers)
        )
        self.norm = nn.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        time = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        rates = 10000 ** (-torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim)
        angles = torch.outer(time, rates).repeat(1, 2)
        rotary = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


class Mixture(nn.Module):
    """Mixtral's mixture of experts: each token goes to the two that the router likes best."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(_gated(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = torch.topk(F.softmax(self.router(flat), -1, dtype=torch.float32), 2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == i)
            out = out.index_add(0, rows, (expert(flat[rows]) * weights[rows, slot, None]).to(out.dtype))
        return out.view_as(x)


class Bert(nn.Module):
    """Post-norm encoder with a padding mask and dropout."""

    def __init__(self, s: Sizes, dropout: float = 0.125) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(s.vocab, s.width), nn.Embedding(s.length, s.width)
        self.norm, self.dropout = nn.LayerNorm(s.width), nn.Dropout(dropout)
        self.attentions = nn.ModuleList(Attention(s.width, s.heads, dropout=dropout) for _ in range(s.layers))
        self.mlps = nn.ModuleList(MLP(s.width, dropout) for _ in range(s.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(s.width) for _ in range(2 * s.layers))
        self.head = nn.Linear(s.width, s.vocab)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.norm(x))
        allowed = mask[:, None, None, :]
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = self.norms[2 * i](x + self.dropout(attention(x, mask=allowed)))
            x = self.norms[2 * i + 1](x + mlp(x))
        return self.head(x)


class T5(nn.Module):
    """Encoder and decoder with a learned relative bias, which is a mask that needs a gradient."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.length = s.length
        self.tokens = nn.Embedding(s.vocab, s.width)
        self.bias = nn.ModuleList(nn.Embedding(2 * s.length, s.heads) for _ in range(2))
        half = max(1, s.layers // 2)
        self.encoder = nn.ModuleList(T5Block(s, cross=False) for _ in range(half))
        self.decoder = nn.ModuleList(T5Block(s, cross=True) for _ in range(half))
        self.head = nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time = torch.arange(ids.shape[1], device=ids.device)
        distance = time[:, None] - time[None, :] + self.length
        biases = [table(distance).permute(2, 0, 1)[None] for table in self.bias]
        future = (time[None, :] > time[:, None])[None, None]
        memory = x = self.tokens(ids)
        for block in self.encoder:
            memory = block(memory, biases[0])
        for block in self.decoder:
            x = block(x, biases[1].masked_fill(future, float("-inf")), memory)
        return self.head(x)


class T5Block(nn.Module):
    """Self-attention with a bias, cross-attention where ``cross``, and ReLU feed-forward."""

    def __init__(self, s: Sizes, *, cross: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(s.width) for _ in range(3))
        self.own = Attention(s.width, s.heads, bias=False)
        self.cross = Attention(s.width, s.heads, bias=False) if cross else None
        self.mlp = nn.Sequential(nn.Linear(s.width, 4 * s.width), nn.ReLU(), nn.Linear(4 * s.width, s.width))

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.own(self.norms[0](x), mask=bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


class ViT(nn.Module):
    """Patches by a convolution, then pre-norm blocks."""

    def __init__(self, s: Sizes, patch: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, s.width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2, s.width))
        self.blocks = nn.ModuleList(PreNorm(s, causal=False, dropout=0.0) for _ in range(s.layers))
        self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Sequential):
    """Bottlenecks in four stages; ResNet-50 with ``blocks`` 3, 4, 6, 3 and ``width`` 64."""

    def __init__(self, blocks: tuple[int, ...], width: int) -> None:
        stages: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = width
        for i, count in enumerate(blocks):
            inner = width << i
            for j in range(count):
                stages.append(Bottleneck(inputs, inner, 2 if i and not j else 1))
                inputs = 4 * inner
        super().__init__(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Mamba(nn.Module):
    """Selective state-space blocks, scanned step by step as transformers does without its kernels."""

    def __init__(self, s: Sizes, states: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(MambaBlock(s.width, states) for _ in range(s.layers))
        self.head = nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MambaBlock(nn.Module):
    """A selective state-space block: [N, T, C] to the same."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.inside = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.mix = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select, self.rate = nn.Linear(inner, 2 * states, bias=False), nn.Linear(inner, inner)
        self.log_decay = nn.Parameter(torch.zeros(inner, states))
        self.outside = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.inside(self.norm(x)).chunk(2, -1)
        y = F.silu(self.mix(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        into, out_of = self.select(y).chunk(2, -1)
        rate = F.softplus(self.rate(y))
        decay = torch.exp(-rate[..., None] * torch.exp(self.log_decay))
        driven = (rate * y)[..., None] * into[:, :, None, :]
        state = driven[:, 0]
        seen = [(state * out_of[:, 0, None, :]).sum(-1)]
        for t in range(1, x.shape[1]):
            state = decay[:, t] * state + driven[:, t]
            seen.append((state * out_of[:, t, None, :]).sum(-1))
        scanned = torch.stack(seen, 1).to(gate.dtype)
        return x + self.outside(scanned * F.silu(gate))


class LSTMLanguageModel(nn.Module):
    """Two layers, dropout between: what cuDNN keeps for itself is an estimate, see ``cudnn_rnn.py``."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocab, s.width)
        self.lstm = nn.LSTM(s.width, s.width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(s.width, s.vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


# --- cases ------------------------------------------------------------------------------------------


def _language(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(**{k: v for k, v in batch.items() if k != "labels"})
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _text(s: Sizes, **more: torch.Tensor) -> Batch:
    ids = torch.randint(5, s.vocab, (s.batch, s.length))
    return {"ids": ids, "labels": ids.clone(), **more}


def _images(count: int, side: int) -> Batch:
    return {"images": torch.randn(count, 3, side, side), "labels": torch.randint(0, 1000, (count,))}


def _of_text(make: Callable[[Sizes], nn.Module], sizes: Sizes) -> Case:
    return make(sizes), _text(sizes), _language


def _bert() -> Case:
    s = Sizes(batch=16, length=512)
    mask = torch.ones(s.batch, s.length, dtype=torch.bool)
    mask[0, -s.length // 4 :] = False
    return Bert(s), _text(s, mask=mask), _language


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: _of_text(GPT2, Sizes()),
    "llama": lambda: _of_text(Llama, Sizes()),
    "bert": _bert,
    "t5": lambda: _of_text(T5, Sizes(length=512)),
    "vit": lambda: (ViT(Sizes(), 16, 224), _images(64, 224), _classes),
    "mixtral": lambda: _of_text(lambda s: Llama(s, experts=8), Sizes(layers=6, batch=4)),
    "resnet50": lambda: (ResNet((3, 4, 6, 3), 64), _images(64, 224), _classes),
    "mamba": lambda: _of_text(Mamba, Sizes(layers=4, length=96)),
    "lstm": lambda: _of_text(LSTMLanguageModel, Sizes(batch=32, length=256)),
}


def build(name: str, device: str, dtype: torch.dtype, autocast: bool) -> tuple[nn.Module, Any, Any]:
    """Build ``(model, batch, loss_fn)`` on ``device``; with ``autocast`` the model stays float32."""
    torch.manual_seed(0)
    with torch.device(device):
        model, batch, loss_fn = MODELS[name]()
    if not autocast:
        model = model.to(dtype)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        return model.train(), batch, loss_fn

    def under_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
        # On "meta" the step is planned for a GPU.
        with torch.autocast("cuda" if device == "meta" else torch.device(device).type, dtype=dtype):
            return loss_fn(model, batch)

    return model.train(), batch, under_autocast
