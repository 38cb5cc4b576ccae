"""Models of the published steps, in plain PyTorch.

They are written anew after what each project's model computes. What decides memory is the same: which ops run, in which
types, what autograd saves, and which local variables hold a tensor until a function returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- minGPT -----------------------------------------------------------------------------------------------


class TanhGELU(nn.Module):
    """GELU by the tanh formula, op by op: five tensors of the size of its input for each call."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MaskedAttention(nn.Module):
    """Causal self-attention of matmuls, a mask and a softmax, with dropout."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.ones(length, length).tril().view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        weights = weights.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        weights = self.attn_dropout(F.softmax(weights, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.resid_dropout(self.c_proj(y))


class MinGPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = MaskedAttention(width, heads, length)
        self.mlp = nn.Sequential()
        self.mlp.c_fc, self.mlp.act = nn.Linear(width, 4 * width), TanhGELU()
        self.mlp.c_proj, self.mlp.dropout = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class MinGPT(nn.Module):
    """minGPT's model; it returns logits and loss, as there."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(MinGPTBlock(width, heads, length) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(0, tokens.shape[1], device=tokens.device).unsqueeze(0)
        # Both embeddings are local variables there, too, so they are alive until the model returns.
        embedded, placed = self.wte(tokens), self.wpe(positions)
        x = self.drop(embedded + placed)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)
        return logits, loss


# --- Llama, as torchtitan and torchtune write it ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The shape of a Llama, and whose code it follows.

    Attributes:
        length: rows of the table of rotary angles.
        style: ``"torchtitan"``: rotary embeddings on complex numbers, an output layer of its own. ``"torchtune"``: on
            pairs of floats, and the output layer shares the embedding.
        chunks: the number of chunks of the sequence that the output layer is applied to; 1: none.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    style: Literal["torchtitan", "torchtune"] = "torchtitan"
    chunks: int = 1


LLAMA_2_7B = LlamaShape(32, 4096, 32, 32, 11008, 32000, 65536)
LLAMA_3_8B = LlamaShape(32, 4096, 32, 8, 14336, 128256, 8192)
LLAMA_32_3B = LlamaShape(28, 3072, 24, 8, 8192, 128256, 4096, "torchtune")


class RMSNorm(nn.Module):
    """RMSNorm of several ops in float32, as PyTorch ran it up to 2.8 and torchtune wrote it up to 0.4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        upcast = x.float()
        normed = (upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.weight


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape, self.head_width = shape, shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.heads * self.head_width, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(shape.heads * self.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, self.head_width) for each in (self.wq, self.wk, self.wv))
        rotate = _rotated_complex if self.shape.style == "torchtitan" else _rotated_pairs
        q, k = rotate(q, rotary[:length]), rotate(k, rotary[:length])
        k, v = self._for_all_heads(k), self._for_all_heads(v)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """Repeat keys or values for the query heads that share them, in a copy."""
        batch, length, heads, width = x.shape
        times = self.shape.heads // self.shape.kv_heads
        if times == 1:
            return x
        return x.unsqueeze(3).expand(batch, length, heads, times, width).reshape(batch, length, -1, width)


def _rotated_complex(x: Tensor, rotary: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * rotary[None, :, None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


def _rotated_pairs(x: Tensor, rotary: Tensor) -> Tensor:
    pairs, angle = x.float().reshape(*x.shape[:-1], -1, 2), rotary[None, :, None]
    cos, sin = angle[..., 0], angle[..., 1]
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 1] * cos + pairs[..., 0] * sin
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention, self.feed_forward = LlamaAttention(shape), SwiGLU(shape)
        self.attention_norm, self.ffn_norm = RMSNorm(shape.width), RMSNorm(shape.width)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A Llama; it returns logits, or a list of them for each chunk of the sequence."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        if shape.style == "torchtitan":
            self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        titan = shape.style == "torchtitan"
        angles = torch.empty(shape.length, half, *(() if titan else (2,)))
        self.register_buffer("rotary", angles.to(torch.complex64) if titan else angles)

    def in_bfloat16(self) -> Llama:
        """Return the model with parameters in bfloat16; rotary angles stay in float32."""
        for p in self.parameters():
            p.data = p.data.to(torch.bfloat16)
        return self

    def forward(self, tokens: Tensor) -> Tensor | list[Tensor]:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        x = self.norm(x)
        if self.shape.style == "torchtitan":
            return self.output(x)
        # The embedding is the output layer, too. torchtune's model casts logits to float32 unless they are in chunks.
        weight = self.tok_embeddings.weight
        if self.shape.chunks == 1:
            return F.linear(x, weight).float()
        return [F.linear(chunk, weight) for chunk in x.chunk(self.shape.chunks, dim=1)]


# --- QLoRA ------------------------------------------------------------------------------------------------


class QuantizedLinear(nn.Module):
    """A frozen linear layer in NF4 with double quantization, with an adapter (torchtune's ``LoRALinear``) or without.

    bitsandbytes' layer takes the place of torchao's ``linear_nf4``: both keep the packed weight for the backward pass,
    and dequantize it to bfloat16 in each pass. Both have blocks of 64 and 256.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        import bitsandbytes

        width, out = linear.in_features, linear.out_features
        kind: Any = bitsandbytes.nn.Linear4bit
        self.frozen = kind(width, out, False, torch.bfloat16, True, "nf4", device=linear.weight.device)
        weight = bitsandbytes.nn.Params4bit(linear.weight.data, **vars(self.frozen.weight))
        weight._quantize(linear.weight.device)
        self.frozen.weight = weight
        self.rank, like = rank, {"bias": False, "device": linear.weight.device, "dtype": torch.bfloat16}
        if rank:
            self.lora_a, self.lora_b = nn.Linear(width, rank, **like), nn.Linear(rank, out, **like)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x)
        return out + 2.0 * self.lora_b(self.lora_a(x)) if self.rank else out


def with_qlora(model: Llama, rank: int) -> Llama:
    """Freeze a model, and quantize the linear layers of its blocks. All but the keys' get adapters of this rank."""
    model.requires_grad_(False)
    for name, layer in list(model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            model.layers.set_submodule(name, QuantizedLinear(layer, 0 if name.endswith("wk") else rank))
    return model


# --- a vision transformer ---------------------------------------------------------------------------------


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class ViT(nn.Module):
    """A vision transformer on images of 224 x 224, with a class token."""

    def __init__(self, layers: int, width: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, (224 // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(ViTBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class GiantBlock(nn.Module):
    """A layer of DINOv2's giant transformer as timm has it: SwiGLU of one product, and scales of what is added."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.ls1, self.ls2 = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x)) * self.ls1
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up) * self.ls2

    _attention = ViTBlock._attention


def vit_giant(classes: int) -> nn.Module:
    """Build timm's ``vit_giant_patch14_dinov2`` for images of 224 x 224."""
    model = ViT(layers=0, width=1536, heads=24, patch=14, classes=classes)
    model.blocks = nn.ModuleList(GiantBlock(1536, 24, 4096) for _ in range(40))
    return model


# --- nanochat ---------------------------------------------------------------------------------------------


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class NanochatBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.c_fc, self.mlp_proj = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(_normed(x), cos, sin)
        return x + self.mlp_proj(F.relu(self.c_fc(_normed(x))).square())

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1) for f in (self.c_q, self.c_k, self.c_v))
        q, k = _normed(_rotated_halves(q, cos, sin)), _normed(_rotated_halves(k, cos, sin))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], 3).to(x.dtype)


class Nanochat(nn.Module):
    """nanochat's model: norms without weights, normed queries and keys, ReLU squared, capped logits."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        self.h = nn.ModuleList(NanochatBlock(width, heads) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for name in ("cos", "sin"):
            angles = torch.empty(1, 10 * length, 1, width // heads // 2, dtype=torch.bfloat16)
            self.register_buffer(name, angles)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:, :length], self.sin[:, :length]
        x = _normed(self.wte(tokens))
        for block in self.h:
            x = block(x, cos, sin)
        logits = self.lm_head(_normed(x))
        logits = (15 * torch.tanh(logits / 15)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


# --- MPT --------------------------------------------------------------------------------------------------


class MPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.wqkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    """llm-foundry's MPT: learned positions, and an output layer that shares the embedding."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int = 50368) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(MPTBlock(width, heads) for _ in range(layers))
        self.norm_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
