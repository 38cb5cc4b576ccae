"""Small models for ``benchmarks.compiled``: three by hand, 24 of ``hf_models``.

    case, blocks = MODELS["llama"]()

``blocks`` are patterns of the modules that are compiled one by one. Steps take 10 to 150 MiB, dropout on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import hf_models
from benchmarks.models.cases import Case
from tests.zoo.convnets import BasicBlock

Builder = Callable[[], tuple[Case, list[str]]]

_P = 0.1
_VOCABULARY, _ROWS, _LENGTH = 2048, 8, 128


class _Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.c_attn = nn.Linear(dim, 3 * dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.drop = nn.Dropout(_P)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """nanoGPT, which returns its loss."""

    def __init__(self, layers: int = 2, dim: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(_VOCABULARY, dim), nn.Embedding(_LENGTH, dim)
        self.h = nn.ModuleList([_Block(dim, heads) for _ in range(layers)])
        self.drop, self.ln_f = nn.Dropout(_P), nn.LayerNorm(dim, bias=False)
        self.lm_head = nn.Linear(dim, _VOCABULARY, bias=False)
        # As nanoGPT does. With torch's default, each token predicts itself, and the loss and its gradients are 0.
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), ids.flatten())


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.c1, self.c2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.drop = nn.Dropout(_P)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c2(self.drop(F.silu(self.n2(self.c1(F.silu(self.n1(x)))))))


class UNet(nn.Module):
    """Two levels down and up, with skip connections."""

    def __init__(self, c: int = 32) -> None:
        super().__init__()
        self.inp, self.out = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.down1, self.down2 = nn.Conv2d(c, 2 * c, 4, 2, 1), nn.Conv2d(2 * c, 2 * c, 4, 2, 1)
        self.up1, self.up2 = nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ConvTranspose2d(2 * c, 2 * c, 4, 2, 1)
        self.blocks = nn.ModuleList(_Residual(n) for n in (c, 2 * c, 2 * c, 2 * c, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = self.blocks[0](self.inp(x))
        inner = self.blocks[1](self.down1(outer))
        up = self.blocks[3](self.up2(self.blocks[2](self.down2(inner))) + inner)
        return F.mse_loss(self.out(self.blocks[4](self.up1(up) + outer)), x)


def _basic(i: int, o: int) -> BasicBlock:
    block = BasicBlock(i, o, 1 + (i != o), None, inplace=False)
    short = nn.Sequential(nn.Conv2d(i, o, 1, 2, bias=False), nn.BatchNorm2d(o))  # drawn for every block
    if i != o:
        block.downsample = short
    return block


class ResNet(nn.Module):
    """Four basic blocks, which return the loss of the class that the sign of the first pixel names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        widths = ((32, 32), (32, 64), (64, 64), (64, 128))
        self.layers = nn.ModuleList(_basic(i, o) for i, o in widths)
        self.drop, self.head = nn.Dropout(_P), nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.stem(x)))
        for layer in self.layers:
            y = layer(y)
        return F.cross_entropy(self.head(self.drop(y.mean((2, 3)))), (x[:, 0, 0, 0] > 0).long())


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch)
    return found


def _by_hand(make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], *blocks: str) -> Any:
    return Case(make(), batch(), _loss, torch.optim.AdamW), list(blocks)


def _tokens() -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (_ROWS, _LENGTH))


def _of_transformers(
    name: str, blocks: str, size: str = "compiled", copies: int = 1, dropout: float | None = None
) -> Any:
    model, batch, _ = hf_models.build(name, size, "cpu", dropout=dropout, copies=copies)
    # A draw of the host, by which code branches: another graph each step.
    for drawing in (model.config, *model.modules()):
        if hasattr(drawing, "layerdrop"):
            drawing.layerdrop = 0.0
    return Case(model, batch, optimizer=torch.optim.AdamW), blocks.split()


_make = functools.partial
SEVEN: dict[str, Builder] = {
    "nanogpt": _make(_by_hand, NanoGPT, _tokens, "h.*"),
    "gpt2": _make(_of_transformers, "gpt2", "transformer.h.*"),
    "llama": _make(_of_transformers, "llama", "model.layers.*"),
    "vit": _make(_of_transformers, "vit", "vit.layers.*"),
    "t5": _make(_of_transformers, "t5", "encoder.block.* decoder.block.*"),
    "unet": _make(_by_hand, UNet, lambda: torch.randn(4, 3, 96, 96), "blocks.*"),
    "resnet": _make(_by_hand, ResNet, lambda: torch.randn(16, 3, 64, 64), "layers.*"),
}

TWENTY: dict[str, Builder] = {
    name: _make(_of_transformers, name, blocks, "small", copies, _P)
    for name, copies, blocks in (
        *((name, 16, "model.layers.*") for name in ("mistral", "qwen2", "gemma2", "phi3")),
        ("opt", 16, "model.decoder.layers.*"),
        ("bloom", 16, "transformer.h.*"),
        ("gpt_neox", 16, "gpt_neox.layers.*"),
        ("falcon", 16, "transformer.h.*"),
        *((name, 32, f"{name}.encoder.layer.*") for name in ("bert", "roberta", "electra")),
        ("distilbert", 32, "distilbert.transformer.layer.*"),
        ("albert", 32, "albert.encoder.albert_layer_groups.*"),
        *((name, 16, "model.encoder.layers.* model.decoder.layers.*") for name in ("bart", "pegasus")),
        ("swin", 2, "swin.encoder.layers.*"),
        ("convnext", 2, "convnext.encoder.stages.*"),
        ("segformer", 2, "segformer.stages.*"),
        ("whisper", 8, "model.encoder.layers.* model.decoder.layers.*"),
        ("wav2vec2", 8, "wav2vec2.encoder.layers.*"),
    )
}


MODELS: dict[str, Builder] = SEVEN | TWENTY
