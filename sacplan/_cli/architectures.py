"""Published configurations of well-known models, so that ``hf:NAME`` needs no network and no weights.

Each row holds what shapes the model in the ``config.json`` that its authors published; what it leaves out is the
default of the configuration class. ``parameters`` is the count of the published checkpoint, tied weights once; the
tests compare it with that of the model which is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published model: its name at the hub, how many parameters it has, and the values of its configuration."""

    name: str
    parameters: int
    model_type: str
    architecture: str
    values: Mapping[str, Any]
    short: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """Models of one architecture: the fields that set their sizes, and the values that they share."""

    model_type: str
    architecture: str
    fields: tuple[str, ...]
    values: Mapping[str, Any]

    def row(
        self, name: str, parameters: int, *sizes: int, short: str | tuple[str, ...] = (), **own: Any
    ) -> Architecture:
        sized = dict(zip(self.fields, sizes, strict=True))
        values = {**self.values, **sized, **own}
        shorts = (short,) if isinstance(short, str) else short
        return Architecture(name, parameters, self.model_type, self.architecture, values, shorts)


_DECODER = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_ENCODER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

_GPT2 = _Family(
    "gpt2", "GPT2LMHeadModel", ("n_embd", "n_layer", "n_head"), {"n_positions": 1024, "vocab_size": 50257}
)
_LLAMA = _Family("llama", "LlamaForCausalLM", _DECODER, {"rms_norm_eps": 1e-5, "tie_word_embeddings": False})
_LLAMA_3: dict[str, Any] = {"bos_token_id": 128000, "eos_token_id": 128001}
_MISTRAL = _Family("mistral", "MistralForCausalLM", _DECODER, {"tie_word_embeddings": False})
_QWEN = _Family("qwen2", "Qwen2ForCausalLM", _DECODER, {})
_BERT = _Family(
    "bert",
    "BertForMaskedLM",
    _ENCODER,
    {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
)
_T5 = _Family(
    "t5",
    "T5ForConditionalGeneration",
    ("d_model", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    {
        "d_kv": 64,
        "vocab_size": 32128,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
)
_VIT = _Family(
    "vit",
    "ViTForImageClassification",
    _ENCODER,
    {"image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 1000},
)

# fmt: off
TABLE = (
    _GPT2.row("openai-community/gpt2", 124_439_808, 768, 12, 12),
    _GPT2.row("openai-community/gpt2-medium", 354_823_168, 1024, 24, 16),
    _GPT2.row("openai-community/gpt2-large", 774_030_080, 1280, 36, 20),
    _GPT2.row("openai-community/gpt2-xl", 1_557_611_200, 1600, 48, 25),
    _LLAMA.row(
        "meta-llama/Llama-2-7b-hf", 6_738_415_616, 4096, 11008, 32, 32, 32, 32000, 4096, short="Llama-2-7b"
    ),
    _LLAMA.row(
        "meta-llama/Llama-2-13b-hf", 13_015_864_320, 5120, 13824, 40, 40, 40, 32000, 4096, short="Llama-2-13b"
    ),
    _LLAMA.row(
        "meta-llama/Meta-Llama-3-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, 128256, 8192,
        short="Llama-3-8B", **_LLAMA_3,
    ),
    _LLAMA.row(
        "meta-llama/Meta-Llama-3-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, 128256, 8192,
        short="Llama-3-70B", **_LLAMA_3,
    ),
    _MISTRAL.row(
        "mistralai/Mistral-7B-v0.1", 7_241_732_096, 4096, 14336, 32, 32, 8, 32000, 32768,
        short="Mistral-7B", sliding_window=4096,
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-0.5B", 494_032_768, 896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-7B", 7_615_616_512, 3584, 18944, 28, 28, 4, 152064, 131072, tie_word_embeddings=False
    ),
    _BERT.row("google-bert/bert-base-uncased", 109_514_298, 768, 12, 12, 3072, short="bert-base"),
    _BERT.row("google-bert/bert-large-uncased", 335_174_458, 1024, 24, 16, 4096, short="bert-large"),
    _T5.row("google-t5/t5-base", 222_903_552, 768, 3072, 12, 12, 12),
    _T5.row("google-t5/t5-large", 737_668_096, 1024, 4096, 24, 24, 16),
    _VIT.row("google/vit-base-patch16-224", 86_567_656, 768, 12, 12, 3072, short=("ViT-B/16", "vit-b-16")),
)
# fmt: on


def _by_name() -> dict[str, Architecture]:
    return {
        name.lower(): row for row in TABLE for name in (row.name, row.name.rpartition("/")[2], *row.short)
    }


def find(name: str) -> Architecture | None:
    """A row by its name at the hub, the last part of it, or a short form; case does not matter."""
    return _by_name().get(name.lower())


def near(name: str) -> list[str]:
    """Names of rows that look like it."""
    known = _by_name()
    found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return list(dict.fromkeys(known[n].name for n in found))
