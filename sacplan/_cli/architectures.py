"""Published configurations of well-known models, so that ``hf:NAME`` needs no network and no weights.

Each row is what shapes the model in the ``config.json`` that its authors published; what it leaves out is the
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
    """One published model: its name at the hub, the values of its configuration, and how many parameters it has."""

    name: str
    model_type: str
    architecture: str
    parameters: int
    values: Mapping[str, Any]
    short: tuple[str, ...] = ()


def _gpt2(name: str, width: int, layers: int, heads: int, parameters: int) -> Architecture:
    values = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return Architecture(f"openai-community/{name}", "gpt2", "GPT2LMHeadModel", parameters, values)


def _llama(
    name: str, short: tuple[str, ...], shape: tuple[int, int, int, int, int], parameters: int, **values: Any
) -> Architecture:
    width, ffn, layers, heads, kv_heads = shape
    return Architecture(
        name,
        "llama",
        "LlamaForCausalLM",
        parameters,
        {
            "hidden_size": width,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            **values,
        },
        short,
    )


def _bert(name: str, width: int, layers: int, heads: int, parameters: int) -> Architecture:
    values = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    short = (name.removesuffix("-uncased"),)
    return Architecture(f"google-bert/{name}", "bert", "BertForMaskedLM", parameters, values, short)


def _t5(name: str, width: int, ffn: int, layers: int, heads: int, parameters: int) -> Architecture:
    values = {
        "d_model": width,
        "d_ff": ffn,
        "d_kv": 64,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "vocab_size": 32128,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return Architecture(f"google-t5/{name}", "t5", "T5ForConditionalGeneration", parameters, values)


def _qwen(
    name: str, shape: tuple[int, int, int, int, int], vocab: int, tied: bool, positions: int, parameters: int
) -> Architecture:
    width, ffn, layers, heads, kv_heads = shape
    values = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
    return Architecture(f"Qwen/{name}", "qwen2", "Qwen2ForCausalLM", parameters, values)


_LLAMA_2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

TABLE = (
    _gpt2("gpt2", 768, 12, 12, 124_439_808),
    _gpt2("gpt2-medium", 1024, 24, 16, 354_823_168),
    _gpt2("gpt2-large", 1280, 36, 20, 774_030_080),
    _gpt2("gpt2-xl", 1600, 48, 25, 1_557_611_200),
    _llama(
        "meta-llama/Llama-2-7b-hf",
        ("Llama-2-7b",),
        (4096, 11008, 32, 32, 32),
        6_738_415_616,
        **_LLAMA_2,
    ),
    _llama(
        "meta-llama/Llama-2-13b-hf",
        ("Llama-2-13b",),
        (5120, 13824, 40, 40, 40),
        13_015_864_320,
        **_LLAMA_2,
    ),
    _llama(
        "meta-llama/Meta-Llama-3-8B",
        ("Llama-3-8B",),
        (4096, 14336, 32, 32, 8),
        8_030_261_248,
        **_LLAMA_3,
    ),
    _llama(
        "meta-llama/Meta-Llama-3-70B",
        ("Llama-3-70B",),
        (8192, 28672, 80, 64, 8),
        70_553_706_496,
        **_LLAMA_3,
    ),
    Architecture(
        "mistralai/Mistral-7B-v0.1",
        "mistral",
        "MistralForCausalLM",
        7_241_732_096,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        ("Mistral-7B",),
    ),
    _qwen("Qwen2.5-0.5B", (896, 4864, 24, 14, 2), 151936, True, 32768, 494_032_768),
    _qwen("Qwen2.5-7B", (3584, 18944, 28, 28, 4), 152064, False, 131072, 7_615_616_512),
    _bert("bert-base-uncased", 768, 12, 12, 109_514_298),
    _bert("bert-large-uncased", 1024, 24, 16, 335_174_458),
    _t5("t5-base", 768, 3072, 12, 12, 222_903_552),
    _t5("t5-large", 1024, 4096, 24, 16, 737_668_096),
    Architecture(
        "google/vit-base-patch16-224",
        "vit",
        "ViTForImageClassification",
        86_567_656,
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "num_labels": 1000,
        },
        ("ViT-B/16", "vit-b-16"),
    ),
)


def find(name: str) -> Architecture | None:
    """A row by its name at the hub, the last part of it, or a short form; case does not matter."""
    return _by_name().get(name.lower())


def near(name: str) -> list[str]:
    """Names of rows that look like it."""
    known = _by_name()
    found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return list(dict.fromkeys(known[n].name for n in found))


def _by_name() -> dict[str, Architecture]:
    return {
        name.lower(): row for row in TABLE for name in (row.name, row.name.rpartition("/")[2], *row.short)
    }
