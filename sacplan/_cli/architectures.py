"""Published configurations of well-known models, so that ``hf:NAME`` needs no network and no weights.

Each row holds the values of the published ``config.json`` that shape the model. Other values are the defaults of the
configuration class. ``parameters`` is the count of the published checkpoint, with tied weights counted once. The tests
compare it with the model that is built from the row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """A published model: its name on the hub, its number of parameters, and the values of its configuration."""

    name: str
    parameters: int
    model_type: str
    architecture: str
    values: Mapping[str, Any]
    short: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """The models of one architecture, with the fields that set their sizes and the values that they share."""

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


# The fields of a family, in the order in which its rows give their values.
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
# Versions of Llama differ in rotary embeddings, tied weights and special tokens, and share the rest.
_LLAMA_3: dict[str, Any] = {"bos_token_id": 128000, "eos_token_id": 128001}
_LLAMA_31: dict[str, Any] = {
    **_LLAMA_3,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_32: dict[str, Any] = {
    **_LLAMA_3,
    "rope_parameters": {**_LLAMA_31["rope_parameters"], "factor": 32.0},
    "tie_word_embeddings": True,
}
_MISTRAL = _Family("mistral", "MistralForCausalLM", _DECODER, {"tie_word_embeddings": False})
_QWEN = _Family("qwen2", "Qwen2ForCausalLM", _DECODER, {})
_QWEN_3 = _Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _DECODER,
    {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
)
_QWEN_3_MOE = _Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*_DECODER, "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "norm_topk_prob": True},
)
_SMOLLM_3 = _Family("smollm3", "SmolLM3ForCausalLM", _DECODER, {"tie_word_embeddings": True})
_PHI_3 = _Family("phi3", "Phi3ForCausalLM", _DECODER, {"tie_word_embeddings": False, "pad_token_id": 100349})
# Both models have the same widths, and differ in the number of layers and experts.
_GPT_OSS = _Family(
    "gpt_oss",
    "GptOssForCausalLM",
    ("num_hidden_layers", "num_local_experts"),
    {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
)
_DEEPSEEK_3 = _Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (*_DECODER, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    {
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
)
# Also the order of sizes for the decoder inside of the models that read images.
_GEMMA_3 = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
_GEMMA_3_TEXT = _Family(
    "gemma3_text", "Gemma3ForCausalLM", _GEMMA_3, {"vocab_size": 262144, "max_position_embeddings": 32768}
)


def _gemma_3_images(name: str, parameters: int, *sizes: int) -> Architecture:
    """Return a Gemma 3 that reads images: a decoder of these sizes, and the SigLIP tower that they all share."""
    text = {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        **dict(zip(_GEMMA_3, sizes, strict=True)),
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    values = {
        "text_config": {"model_type": "gemma3_text", **text},
        "vision_config": vision,
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
    }
    return Architecture(name, parameters, "gemma3", "Gemma3ForConditionalGeneration", values, ())


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

_MIXTRAL = _Family(
    "mixtral",
    "MixtralForCausalLM",
    (*_DECODER, "num_local_experts", "num_experts_per_tok"),
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None},
)
_QWEN_2_MOE = _Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *_DECODER,
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
    ),
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
)
_OLMOE = _Family(
    "olmoe",
    "OlmoeForCausalLM",
    (*_DECODER, "num_experts", "num_experts_per_tok"),
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
)
_GEMMA_2 = _Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "query_pre_attn_scalar",
    ),
    {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096},
)
_WHISPER = _Family(
    "whisper",
    "WhisperForConditionalGeneration",
    (
        "d_model",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "num_mel_bins",
        "vocab_size",
    ),
    {"decoder_start_token_id": 50258},
)
# Positions of RoBERTa begin behind that of the padding token, so 514 of them hold 512 tokens.
_ROBERTA = _Family(
    "roberta",
    "RobertaForMaskedLM",
    _ENCODER,
    {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
)
_MODERNBERT = _Family(
    "modernbert",
    "ModernBertForMaskedLM",
    _ENCODER,
    {"vocab_size": 50368, "max_position_embeddings": 8192},
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
        "meta-llama/Llama-2-70b-hf", 68_976_648_192, 8192, 28672, 80, 64, 8, 32000, 4096, short="Llama-2-70b"
    ),
    _LLAMA.row(
        "meta-llama/Meta-Llama-3-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, 128256, 8192,
        short="Llama-3-8B", **_LLAMA_3,
    ),
    _LLAMA.row(
        "meta-llama/Meta-Llama-3-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, 128256, 8192,
        short="Llama-3-70B", **_LLAMA_3,
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.1-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, 128256, 131072, **_LLAMA_31
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.1-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, 128256, 131072, **_LLAMA_31
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.1-405B", 405_853_388_800, 16384, 53248, 126, 128, 8, 128256, 131072, **_LLAMA_31
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.2-1B", 1_235_814_400, 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_LLAMA_32
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.2-3B", 3_212_749_824, 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **_LLAMA_32
    ),
    _LLAMA.row(
        "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, 8192, 28672, 80, 64, 8, 128256, 131072,
        short="Llama-3.3-70B", **_LLAMA_31,
    ),
    _MISTRAL.row(
        "mistralai/Mistral-Small-24B-Base-2501", 23_572_403_200, 5120, 32768, 40, 32, 8, 131072, 32768,
        short="Mistral-Small-24B", head_dim=128, sliding_window=None,
    ),
    _MISTRAL.row(
        "mistralai/Mistral-7B-v0.1", 7_241_732_096, 4096, 14336, 32, 32, 8, 32000, 32768,
        short="Mistral-7B", sliding_window=4096,
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-0.5B", 494_032_768, 896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True
    ),
    _MIXTRAL.row(
        "mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 4096, 14336, 32, 32, 8, 32000, 32768, 8, 2,
        short="Mixtral-8x7B",
    ),
    _MIXTRAL.row(
        "mistralai/Mixtral-8x22B-v0.1", 140_620_634_112, 6144, 16384, 56, 48, 8, 32000, 65536, 8, 2,
        short="Mixtral-8x22B",
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-1.5B", 1_543_714_304, 1536, 8960, 28, 12, 2, 151936, 131072, tie_word_embeddings=True
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-3B", 3_085_938_688, 2048, 11008, 36, 16, 2, 151936, 32768, tie_word_embeddings=True
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-7B", 7_615_616_512, 3584, 18944, 28, 28, 4, 152064, 131072, tie_word_embeddings=False
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-14B", 14_770_033_664, 5120, 13824, 48, 40, 8, 152064, 131072, tie_word_embeddings=False
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-32B", 32_763_876_352, 5120, 27648, 64, 40, 8, 152064, 131072, tie_word_embeddings=False
    ),
    _QWEN.row(
        "Qwen/Qwen2.5-72B", 72_706_203_648, 8192, 29568, 80, 64, 8, 152064, 131072, tie_word_embeddings=False
    ),
    _QWEN_2_MOE.row(
        "Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192, 2048, 5632, 24, 16, 16, 151936, 8192, 1408, 5632, 60, 4
    ),
    _QWEN_3.row(
        "Qwen/Qwen3-0.6B", 596_049_920, 1024, 3072, 28, 16, 8, 151936, 40960, tie_word_embeddings=True
    ),
    _QWEN_3.row(
        "Qwen/Qwen3-1.7B", 1_720_574_976, 2048, 6144, 28, 16, 8, 151936, 40960, tie_word_embeddings=True
    ),
    _QWEN_3.row(
        "Qwen/Qwen3-4B", 4_022_468_096, 2560, 9728, 36, 32, 8, 151936, 40960, tie_word_embeddings=True
    ),
    _QWEN_3.row("Qwen/Qwen3-8B", 8_190_735_360, 4096, 12288, 36, 32, 8, 151936, 40960),
    _QWEN_3.row("Qwen/Qwen3-14B", 14_768_307_200, 5120, 17408, 40, 40, 8, 151936, 40960),
    _QWEN_3.row("Qwen/Qwen3-32B", 32_762_123_264, 5120, 25600, 64, 64, 8, 151936, 40960),
    _QWEN_3_MOE.row(
        "Qwen/Qwen3-30B-A3B", 30_532_122_624, 2048, 6144, 48, 32, 4, 151936, 40960, 768, 128, 8
    ),
    _QWEN_3_MOE.row(
        "Qwen/Qwen3-235B-A22B", 235_093_634_560, 4096, 12288, 94, 64, 4, 151936, 40960, 1536, 128, 8
    ),
    _GEMMA_2.row("google/gemma-2-2b", 2_614_341_888, 2304, 9216, 26, 8, 4, 256, 256),
    _GEMMA_2.row("google/gemma-2-9b", 9_241_705_984, 3584, 14336, 42, 16, 8, 256, 256),
    _GEMMA_3_TEXT.row("google/gemma-3-1b-pt", 999_885_952, 1152, 6912, 26, 4, 1, 256, 512, short="gemma-3-1b"),
    _gemma_3_images("google/gemma-3-4b-pt", 4_300_079_472, 2560, 10240, 34, 8, 4, 256, 1024),
    _gemma_3_images("google/gemma-3-12b-pt", 12_187_325_040, 3840, 15360, 48, 16, 8, 256, 1024),
    _gemma_3_images("google/gemma-3-27b-pt", 27_432_406_640, 5376, 21504, 62, 32, 16, 128, 1024),
    _GPT_OSS.row("openai/gpt-oss-20b", 20_914_757_184, 24, 32),
    _GPT_OSS.row("openai/gpt-oss-120b", 116_829_156_672, 36, 128),
    _DEEPSEEK_3.row(
        "deepseek-ai/DeepSeek-V3", 671_026_404_352, 7168, 18432, 61, 128, 128, 129280, 163840, 2048, 256, 8
    ),
    _OLMOE.row(
        "allenai/OLMoE-1B-7B-0924", 6_919_161_856, 2048, 1024, 16, 16, 16, 50304, 4096, 64, 8, short="OLMoE-1B-7B"
    ),
    _LLAMA.row(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 2048, 5632, 22, 32, 4, 32000, 2048,
        short="TinyLlama-1.1B",
    ),
    _LLAMA.row(
        "HuggingFaceTB/SmolLM2-135M", 134_515_008, 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True
    ),
    _LLAMA.row(
        "HuggingFaceTB/SmolLM2-360M", 361_821_120, 960, 2560, 32, 15, 5, 49152, 8192, tie_word_embeddings=True
    ),
    _LLAMA.row(
        "HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384, 2048, 8192, 24, 32, 32, 49152, 8192, tie_word_embeddings=True
    ),
    _SMOLLM_3.row(
        "HuggingFaceTB/SmolLM3-3B", 3_075_098_624, 2048, 11008, 36, 16, 4, 128256, 65536
    ),
    _PHI_3.row("microsoft/phi-4", 14_659_507_200, 5120, 17920, 40, 40, 10, 100352, 16384),
    _PHI_3.row(
        "microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 3072, 8192, 32, 32, 32, 32064, 4096,
        short="Phi-3-mini", pad_token_id=32000,
    ),
    _BERT.row("google-bert/bert-base-uncased", 109_514_298, 768, 12, 12, 3072, short="bert-base"),
    _BERT.row("google-bert/bert-large-uncased", 335_174_458, 1024, 24, 16, 4096, short="bert-large"),
    _ROBERTA.row("FacebookAI/roberta-base", 124_697_433, 768, 12, 12, 3072, short="roberta-base"),
    _MODERNBERT.row("answerdotai/ModernBERT-base", 149_655_232, 768, 22, 12, 1152, short="ModernBERT-base"),
    _T5.row("google-t5/t5-base", 222_903_552, 768, 3072, 12, 12, 12),
    _T5.row("google-t5/t5-large", 737_668_096, 1024, 4096, 24, 24, 16),
    _WHISPER.row("openai/whisper-small", 241_734_912, 768, 12, 12, 12, 12, 3072, 3072, 80, 51865),
    _WHISPER.row("openai/whisper-large-v3", 1_543_490_560, 1280, 32, 32, 20, 20, 5120, 5120, 128, 51866),
    _VIT.row("google/vit-base-patch16-224", 86_567_656, 768, 12, 12, 3072, short=("ViT-B/16", "vit-b-16")),
)
# fmt: on


def _by_name() -> dict[str, Architecture]:
    # Three names for each row: with its owner, without it, and short forms. Case does not matter on the hub
    # either.
    return {
        name.lower(): row for row in TABLE for name in (row.name, row.name.rpartition("/")[2], *row.short)
    }


def find(name: str) -> Architecture | None:
    """Return the row with this name on the hub, last part of it, or short form. Case does not matter."""
    return _by_name().get(name.lower())


def by_owner() -> list[str]:
    """Return one line per owner on the hub, with the names that are known."""
    found: dict[str, list[str]] = {}
    for row in TABLE:
        owner, _, name = row.name.partition("/")
        found.setdefault(owner, []).append(name)
    return [f"{owner}: {', '.join(names)}" for owner, names in found.items()]


def near(name: str) -> list[str]:
    """Return the names of rows that are spelled alike, for "Did you mean"."""
    known = _by_name()
    # Several names of one row may be near: each row is named once.
    found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return list(dict.fromkeys(known[n].name for n in found))
