"""Models that tests and benchmarks of chunks share: inference, training with a large head, and plans for an H100.

    case = INFERENCE["evoformer"]()          # a model in eval, and a batch for ``model(*args, **kwargs)``
    case = TRAINING["llama"]()               # a small language model whose head and loss make the peak
    case = large_vocabulary()                # a loss outside the model, over 128,256 words
    case = PLANNED["llama-3-8b"](32768)      # on meta: for plans alone

Everything is drawn from a fixed seed; models that are computed are float32 on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.models import LM, cross_entropy

hf: Any = transformers

_SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a batch.

    Attributes:
        batch: a tensor, a tuple (positional) or a dictionary (by keyword), as for ``sacplan.profile``.
        loss_fn: None where the model returns its loss, and in inference.
        optimizer: parameters -> optimizer, or None.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None
    optimizer: Any = None


Make = Callable[..., Case]


def _seeded(make: Make) -> Make:
    @functools.wraps(make)
    def build(*args: Any, **kwargs: Any) -> Case:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_SEED)
            return make(*args, **kwargs)

    return build


# --- inference: attention ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention by the math path: scores are whole tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


@_seeded
def attention() -> Case:
    """512 tokens, width 256, 8 heads."""
    return Case(Attention(256, 8).eval(), torch.randn(1, 512, 256))


def _gpt2(width: int, heads: int, tokens: int) -> Case:
    config = hf.GPT2Config(
        n_embd=width,
        n_layer=2,
        n_head=heads,
        n_positions=tokens,
        attn_implementation="eager",
        use_cache=False,
    )
    ids = torch.randint(0, 50000, (1, tokens))
    return Case(hf.GPT2Model(config).eval(), {"input_ids": ids})


@_seeded
def gpt_96() -> Case:
    """Width 96, 2 layers, 512 tokens, without a head."""
    return _gpt2(96, 4, 512)


@_seeded
def gpt_768() -> Case:
    """Width 768, 2 layers, 1024 tokens, without a head."""
    return _gpt2(768, 12, 1024)


@_seeded
def vit() -> Case:
    """ViT-L/16 at 384 x 384: 577 tokens."""
    config = hf.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        image_size=384, patch_size=16, attn_implementation="eager",
    )  # fmt: skip
    return Case(hf.ViTModel(config).eval(), {"pixel_values": torch.randn(1, 3, 384, 384)})


# --- inference: Evoformer (AlphaFold 2, supplement 1.6) ---------------------------------------------------


class GatedAttention(nn.Module):
    """Attention over the last dimension but one, gated, with a bias on the scores that is made from pairs.

    Args:
        width: of what it mixes.
        heads: how many heads.
        bias: None: no bias; "self": from the (normalised) input; a number: from pairs of this width.
    """

    def __init__(self, width: int, heads: int, bias: int | str | None = None, head_width: int = 32) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_width
        self.norm = nn.LayerNorm(width)
        self.pair_norm = nn.LayerNorm(bias) if isinstance(bias, int) else None
        self.bias = nn.Linear(bias if isinstance(bias, int) else width, heads, bias=False) if bias else None
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.gate, self.out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None = None) -> torch.Tensor:
        """``x``: [batch, rows, columns, width]; ``pair``: [batch, columns, columns, pair width]."""
        x = self.norm(x)
        bias = self._bias(x, pair)
        shape = (*x.shape[:3], self.heads, -1)
        q, k, v = (t.reshape(shape).transpose(2, 3) for t in self.qkv(x).chunk(3, -1))
        scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)  # [batch, rows, heads, columns, columns]
        if bias is not None:
            scores = scores + bias
        weights = torch.softmax(scores, -1)
        del scores
        mixed = (weights @ v).transpose(2, 3).flatten(-2)
        return self.out(mixed * torch.sigmoid(self.gate(x)))

    def _bias(self, x: torch.Tensor, pair: torch.Tensor | None) -> torch.Tensor | None:
        if self.bias is None:
            return None
        source = x if pair is None or self.pair_norm is None else self.pair_norm(pair)
        return self.bias(source).permute(0, 3, 1, 2).unsqueeze(1)


class Transition(nn.Module):
    """A normalised MLP, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """From the alignment to the pair representation."""

    def __init__(self, width: int, pair_width: int, inner: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left, self.right = nn.Linear(width, inner), nn.Linear(width, inner)
        self.out = nn.Linear(inner * inner, pair_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        left, right = self.left(x), self.right(x)
        products = torch.einsum("bsic,bsjd->bijcd", left, right) / x.shape[1]
        return self.out(products.flatten(-2))


class TriangleProduct(nn.Module):
    """Triangular multiplicative update, with outgoing or incoming edges."""

    def __init__(self, width: int, equation: str, inner: int = 128) -> None:
        super().__init__()
        self.equation = equation
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(inner)
        self.sides, self.side_gates = nn.Linear(width, 2 * inner), nn.Linear(width, 2 * inner)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        left, right = (self.sides(x) * torch.sigmoid(self.side_gates(x))).chunk(2, -1)
        update = self.inner_norm(torch.einsum(self.equation, left, right))
        return self.out(update) * torch.sigmoid(self.gate(x))


class Evoformer(nn.Module):
    """One block: an alignment [batch, sequences, residues, width] and pairs [batch, residues, residues, pair width]."""

    def __init__(self, width: int = 256, pair_width: int = 128) -> None:
        super().__init__()
        self.rows, self.columns = GatedAttention(width, 8, pair_width), GatedAttention(width, 8)
        self.transition, self.pair_transition = Transition(width), Transition(pair_width)
        self.outer = OuterProductMean(width, pair_width)
        self.outgoing = TriangleProduct(pair_width, "bikc,bjkc->bijc")
        self.incoming = TriangleProduct(pair_width, "bkic,bkjc->bijc")
        self.starting, self.ending = (GatedAttention(pair_width, 4, "self") for _ in range(2))

    def forward(self, alignment: torch.Tensor, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        alignment = alignment + self.rows(alignment, pair)
        alignment = alignment + self.columns(alignment.transpose(1, 2)).transpose(1, 2)
        alignment = alignment + self.transition(alignment)
        pair = pair + self.outer(alignment)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair)
        pair = pair + self.ending(pair.transpose(1, 2)).transpose(1, 2)
        return alignment, pair + self.pair_transition(pair)


@_seeded
def evoformer() -> Case:
    """32 sequences of 64 residues."""
    return Case(Evoformer().eval(), (torch.randn(1, 32, 64, 256), torch.randn(1, 64, 64, 128)))


# --- inference: U-Net (the shape of diffusers' UNet2DModel) -----------------------------------------------


class Residual(nn.Module):
    """Two convolutions, the embedding of the time step added between them."""

    def __init__(self, channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, out_channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.skip = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class PixelAttention(nn.Module):
    """Attention among the positions of an image, in heads of width 8."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, channels), Attention(channels, channels // 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(positions).transpose(1, 2).reshape(x.shape)


class Stage(nn.Module):
    """Residual blocks at one resolution, each with attention after it, where the stage has attention."""

    def __init__(self, channels: list[int], out_channels: int, time_width: int, *, attention: bool) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(Residual(c, out_channels, time_width) for c in channels)
        self.attentions = nn.ModuleList(
            PixelAttention(out_channels) if attention else nn.Identity() for _ in channels
        )
        self.resample: nn.Conv2d | None = None


class UNet(nn.Module):
    """Noise from a noisy image [batch, 3, height, width] and its time step [batch]."""

    def __init__(self, channels: tuple[int, ...] = (224, 448, 672, 896), layers: int = 2) -> None:
        super().__init__()
        first, last = channels[0], channels[-1]
        time_width = 4 * first
        self.time = nn.Sequential(nn.Linear(first, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.head = nn.Conv2d(3, first, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips = [first]
        for depth, c in enumerate(channels):
            stage = Stage([skips[-1], *[c] * (layers - 1)], c, time_width, attention=depth > 0)
            skips += [c] * layers
            if depth < len(channels) - 1:
                stage.resample = nn.Conv2d(c, c, 3, stride=2, padding=1)
                skips.append(c)
            self.down.append(stage)
        self.middle = Stage([last, last], last, time_width, attention=True)
        previous = last
        for depth, c in reversed(list(enumerate(channels))):
            inputs = [width + skips.pop() for width in (previous, *[c] * layers)]
            stage = Stage(inputs, c, time_width, attention=depth > 0)
            stage.resample = nn.Conv2d(c, c, 3, padding=1) if depth else None
            self.up.append(stage)
            previous = c
        self.norm, self.tail = nn.GroupNorm(32, first), nn.Conv2d(first, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time_step: torch.Tensor) -> torch.Tensor:
        time = self.time(self._waves(time_step))
        x = self.head(x)
        skips = [x]
        for stage in self.down:
            for residual, attention in zip(stage.residuals, stage.attentions, strict=True):
                x = attention(residual(x, time))
                skips.append(x)
            if stage.resample is not None:
                x = stage.resample(x)
                skips.append(x)
        first, second = self.middle.residuals
        x = second(self.middle.attentions[0](first(x, time)), time)
        for stage in self.up:
            for residual, attention in zip(stage.residuals, stage.attentions, strict=True):
                x = attention(residual(torch.cat([x, skips.pop()], 1), time))
            if stage.resample is not None:
                x = stage.resample(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.tail(F.silu(self.norm(x)))

    def _waves(self, time_step: torch.Tensor) -> torch.Tensor:
        half = self.head.out_channels // 2
        positions = torch.arange(half, dtype=torch.float32, device=time_step.device)
        angles = time_step[:, None].float() * torch.exp(-math.log(10000.0) * positions / half)
        return torch.cat([angles.cos(), angles.sin()], -1)


@_seeded
def unet() -> Case:
    """An image of 64 x 64, 224 to 896 channels."""
    return Case(UNet().eval(), (torch.randn(1, 3, 64, 64), torch.tensor([7])))


INFERENCE: dict[str, Callable[[], Case]] = {
    "attention": attention, "gpt-96": gpt_96, "gpt-768": gpt_768, "evoformer": evoformer, "unet": unet, "vit": vit,
}  # fmt: skip

BUDGETS_MIB: dict[str, tuple[float, ...]] = {
    "attention": (8, 4, 2.5, 1.6),
    "gpt-96": (8, 6, 3),
    "gpt-768": (67.5, 54, 27),
    "evoformer": (24, 20, 16, 13),
    "unet": (300, 150, 100),
    "vit": (32, 20),
}
"""What of a case's step may be allocated, in MiB: published budgets of chunked inference, and tighter ones."""


# --- training: small language models with a large head ------------------------------------------------------

VOCABULARY = 4096
WIDTH = 64
ROWS, LENGTH = 4, 64

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 2 * LENGTH, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}


def _architecture(model_class: str, **config: Any) -> Case:
    cls = getattr(hf, model_class)
    model = cls(cls.config_class(**config)).train()
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    labels = ids.clone()
    labels[0, : LENGTH // 4] = -100
    return Case(model, {"input_ids": ids, "labels": labels})


def _small(model_class: str, **config: Any) -> Callable[[], Case]:
    return _seeded(functools.partial(_architecture, model_class, **config))


TRAINING: dict[str, Callable[[], Case]] = {
    "gpt2": _small(
        "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    ),
    "llama": _small("LlamaForCausalLM", **_GROUPED),
    "qwen2": _small("Qwen2ForCausalLM", **_GROUPED, tie_word_embeddings=True),
    "mistral": _small("MistralForCausalLM", **_GROUPED),
    "gemma2": _small("Gemma2ForCausalLM", **_GROUPED, head_dim=16),  # soft-capped scores and logits, tied
    "phi": _small("PhiForCausalLM", **_DECODER),  # the head has a bias
    "opt": _small(
        "OPTForCausalLM", **{k: v for k, v in _DECODER.items() if k != "intermediate_size"}, ffn_dim=2 * WIDTH,
        word_embed_proj_dim=WIDTH,
    ),
    "gpt-neox": _small("GPTNeoXForCausalLM", **_DECODER),
    "bloom": _small(
        "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2, use_cache=False,
    ),
    "mamba": _small(
        "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    ),
    "t5": _small(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2,
        num_heads=4, decoder_start_token_id=0, use_cache=False,
    ),
    "bert": _small("BertForMaskedLM", **{k: v for k, v in _DECODER.items() if k != "use_cache"}),
}  # fmt: skip
"""Twelve architectures of transformers with ``labels=``, some of them ignored; dropout as in their configs."""


@_seeded
def large_vocabulary() -> Case:
    """A loss outside the model, over 128,256 words: 2 x 128 tokens, width 64, head and embedding not tied."""
    vocabulary = 128_256
    model = LM(layers=1, dim=64, heads=4, vocab=vocabulary).train()
    return Case(model, torch.randint(0, vocabulary, (2, 128)), cross_entropy)


# --- plans for an H100 ------------------------------------------------------------------------------------------


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that needs no temporaries."""
    return torch.optim.AdamW(parameters, fused=True)


def _on_meta(model_class: type[nn.Module], config: Any, tokens: int) -> Case:
    with torch.device("meta"):
        model = model_class(config).bfloat16().train()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    return Case(model, {"input_ids": ids, "labels": ids}, optimizer=fused_adamw)


def llama_3_8b(tokens: int = 32768, layers: int = 32) -> Case:
    """Llama-3-8B's shape in bfloat16, on meta."""
    config = hf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    return _on_meta(hf.LlamaForCausalLM, config, tokens)


def gemma_2_2b(tokens: int = 8192, layers: int = 26) -> Case:
    """Gemma-2-2B's shape in bfloat16, on meta: 256,000 words, soft-capped, head and embedding tied."""
    config = hf.Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=256000, max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    return _on_meta(hf.Gemma2ForCausalLM, config, tokens)


PLANNED: dict[str, Callable[..., Case]] = {"llama-3-8b": llama_3_8b, "gemma-2-2b": gemma_2_2b}
