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

from benchmarks.harness.results import ROOT
from benchmarks.models import cases
from benchmarks.models.cases import Case, empty_text, fused_adamw
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


def long_sequence(name: str, tokens: int, **config: Any) -> Case:
    """Build a published model in bfloat16, on meta, for one sequence; ``config`` changes it."""
    model = cases.published(name, max_position_embeddings=2**20, **config)
    return Case(model, empty_text(1, tokens), optimizer=fused_adamw)


OFFLOADED: dict[str, Callable[..., Case]] = {
    "llama-3-8b": functools.partial(long_sequence, "meta-llama/Meta-Llama-3-8B"),
    "gemma-2-2b": functools.partial(long_sequence, "google/gemma-2-2b"),
    "llama-3.2-1b": functools.partial(long_sequence, "meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": functools.partial(long_sequence, "meta-llama/Llama-3.2-3B"),
}
