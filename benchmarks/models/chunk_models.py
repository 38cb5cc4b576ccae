"""Models whose memory chunks save: training with a large head, and long sequences on an H100.

    case = TRAINING["llama"]()               # a small language model whose head and loss make the peak
    case = large_vocabulary()                # a loss outside the model, over 128,256 words
    case = OFFLOADED["llama-3-8b"](32768)    # on meta: for plans alone

Everything is drawn from a fixed seed; models that are computed are float32 on the CPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.harness.results import ROOT
from benchmarks.models import cases
from benchmarks.models.cases import Case, empty_text, fused_adamw, on_meta
from tests.zoo.language_models import LM, cross_entropy

hf: Any = transformers

_SEED = 0

Make = Callable[..., Case]


def _seeded(make: Make) -> Make:
    @functools.wraps(make)
    def build(*args: Any, **kwargs: Any) -> Case:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_SEED)
            return make(*args, **kwargs)

    return build


# --- training: small language models with a large head ------------------------------------------------------

VOCABULARY = 4096
ROWS, LENGTH = 4, 64


def _architecture(*, model_class: str, **config: Any) -> Case:
    cls = getattr(hf, model_class)
    model = cls(cls.config_class(**config)).train()
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    labels = ids.clone()
    labels[0, : LENGTH // 4] = -100
    return Case(model, {"input_ids": ids, "labels": labels})


_TABLE = json.loads((ROOT / "benchmarks" / "data" / "chunk_models.json").read_text(encoding="utf-8"))
TRAINING = {name: _seeded(functools.partial(_architecture, **row)) for name, row in _TABLE.items()}
"""Twelve architectures of transformers with ``labels=``, some of them ignored; dropout as in their configs."""


@_seeded
def large_vocabulary() -> Case:
    """Build a model with the loss outside: 128,256 words, 2 x 128 tokens, width 64, head not tied to the embedding."""
    vocabulary = 128_256
    model = LM(layers=1, dim=64, heads=4, vocab=vocabulary).train()
    return Case(model, torch.randint(0, vocabulary, (2, 128)), cross_entropy)


# --- plans for an H100 ------------------------------------------------------------------------------------------


def _planned(model: nn.Module, tokens: int) -> Case:
    return Case(model.train(), empty_text(1, tokens), optimizer=fused_adamw)


def llama_3_8b(tokens: int = 32768, layers: int = 32) -> Case:
    """Build Llama-3-8B's shape in bfloat16, on meta."""
    model = cases.llama_3_8b(num_hidden_layers=layers, max_position_embeddings=2**20, use_cache=False)
    return _planned(model, tokens)


def gemma_2_2b(tokens: int = 8192, layers: int = 26) -> Case:
    """Build Gemma-2-2B's shape in bfloat16, on meta: 256,000 words, soft-capped, head and embedding tied."""
    config = hf.Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=256000, max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    return _planned(on_meta(hf.Gemma2ForCausalLM, config), tokens)


def llama_3_2_1b(tokens: int) -> Case:
    """Build Llama-3.2-1B's shape in bfloat16, on meta; head and embedding are tied."""
    model = cases.llama_3_8b(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True,
        max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    return _planned(model, tokens)


def llama_3_2_3b(tokens: int) -> Case:
    """Build Llama-3.2-3B's shape in bfloat16, on meta; head and embedding are tied."""
    model = cases.llama_3_8b(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128,
        tie_word_embeddings=True, max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    return _planned(model, tokens)


OFFLOADED: dict[str, Callable[[int], Case]] = {
    "llama-3-8b": llama_3_8b,
    "gemma-2-2b": gemma_2_2b,
    "llama-3.2-1b": llama_3_2_1b,
    "llama-3.2-3b": llama_3_2_3b,
}
