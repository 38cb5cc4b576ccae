"""Architectures of Hugging Face transformers at sizes that can be traced in seconds.

    model, batch, loss_fn = hf_models.build("gpt2", "small", device="cpu")

``ARCHITECTURES`` maps a name to a function of ``size`` ("small": a real step runs on a laptop's CPU; "medium": a few
GiB on a GPU) that returns ``(model class, config, make_batch)``; ``make_batch()`` makes real CPU tensors by keyword.
``VARIANTS`` are architectures with LoRA, frozen layers or gradient accumulation. ``build`` makes either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

hf: Any = transformers

Batch = dict[str, Any]
Case = tuple[type[torch.nn.Module], Any, Callable[[], Batch]]

ARCHITECTURES: dict[str, Callable[[str], Case]] = {}


def architecture(make: Callable[[str], Case]) -> Callable[[str], Case]:
    """Register a function of this module under its name."""
    ARCHITECTURES[make.__name__.rstrip("_")] = make
    return make


def _ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(5, vocab, shape)


class _Text:
    """The sizes of text models."""

    def __init__(self, size: str, *, layers: int = 6) -> None:
        small = size == "small"
        self.small = small
        self.vocab = 512 if small else 32000
        self.hidden = 64 if small else 768
        self.ffn = 4 * self.hidden
        self.layers = 2 if small else layers
        self.heads = 4 if small else 12
        self.kv_heads = 2 if small else 4
        self.batch = 2 if small else 4
        self.length = 64 if small else 1024

    def tokens(self, **more: Callable[[], torch.Tensor]) -> Callable[[], Batch]:
        """Return a function that makes token ids and labels."""

        def make() -> Batch:
            ids = _ids(self.vocab, self.batch, self.length)
            return {"input_ids": ids, "labels": ids.clone(), **{k: v() for k, v in more.items()}}

        return make

    def padded(self) -> Callable[[], Batch]:
        """Return the same with an attention mask: the last quarter of the first row is padding."""

        def make() -> Batch:
            batch = self.tokens()()
            mask = torch.ones_like(batch["input_ids"])
            mask[0, -self.length // 4 :] = 0
            return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}

        return make

    def llama_like(self, **more: Any) -> dict[str, Any]:
        """Return the arguments that most decoder configs share."""
        return {
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": 2 * self.length, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, **more,
        }  # fmt: skip

    def bert_like(self, **more: Any) -> dict[str, Any]:
        """Return the arguments that most encoder configs share."""
        common = self.llama_like(**more)
        common.pop("num_key_value_heads")
        return common


# --- decoders ---------------------------------------------------------------------------------------


@architecture
def gpt2(size: str) -> Case:
    t = _Text(size, layers=12)
    config = hf.GPT2Config(
        vocab_size=t.vocab, n_embd=t.hidden, n_layer=t.layers, n_head=t.heads, n_positions=t.length,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel, config, t.tokens()


def _decoder(kind: str, size: str, *, layers: int = 6, padded: bool = False, **more: Any) -> Case:
    """Build one of the many decoders whose config is that of Llama; ``more`` may depend on the sizes."""
    t = _Text(size, layers=layers)
    arguments = {name: value(t) if callable(value) else value for name, value in more.items()}
    config = getattr(hf, f"{kind}Config")(**t.llama_like(**arguments))
    return getattr(hf, f"{kind}ForCausalLM"), config, t.padded() if padded else t.tokens()


_HEAD_DIM: dict[str, Any] = {"head_dim": lambda t: t.hidden // t.heads}
_WINDOW: dict[str, Any] = {"sliding_window": lambda t: t.length // 2}

ARCHITECTURES |= {
    "llama": functools.partial(_decoder, "Llama"),
    "mistral": functools.partial(_decoder, "Mistral", **_WINDOW),
    "qwen2": functools.partial(_decoder, "Qwen2", padded=True),
    "gemma2": functools.partial(_decoder, "Gemma2", **_HEAD_DIM, **_WINDOW),
    "phi3": functools.partial(_decoder, "Phi3"),
    "mixtral": functools.partial(_decoder, "Mixtral", layers=4, num_local_experts=8, num_experts_per_tok=2),
}


@architecture
def falcon(size: str) -> Case:
    t = _Text(size)
    config = hf.FalconConfig(
        vocab_size=t.vocab, hidden_size=t.hidden, num_hidden_layers=t.layers, num_attention_heads=t.heads,
        alibi=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.FalconForCausalLM, config, t.tokens()


@architecture
def gpt_neox(size: str) -> Case:
    t = _Text(size)
    config = hf.GPTNeoXConfig(**t.bert_like(hidden_dropout=0.1))
    return hf.GPTNeoXForCausalLM, config, t.tokens()


@architecture
def opt(size: str) -> Case:
    t = _Text(size)
    config = hf.OPTConfig(
        vocab_size=t.vocab, hidden_size=t.hidden, num_hidden_layers=t.layers, num_attention_heads=t.heads,
        ffn_dim=t.ffn, word_embed_proj_dim=t.hidden, max_position_embeddings=t.length, layerdrop=0.1,
    )  # fmt: skip
    return hf.OPTForCausalLM, config, t.tokens()


@architecture
def bloom(size: str) -> Case:
    t = _Text(size)
    config = hf.BloomConfig(
        vocab_size=t.vocab, hidden_size=t.hidden, n_layer=t.layers, n_head=t.heads, hidden_dropout=0.1,
        attention_dropout=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.BloomForCausalLM, config, t.tokens()


@architecture
def mamba(size: str) -> Case:
    t = _Text(size, layers=4)
    config = hf.MambaConfig(
        vocab_size=t.vocab, hidden_size=t.hidden, num_hidden_layers=t.layers, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    t.batch, t.length = 2, min(t.length, 128)
    return hf.MambaForCausalLM, config, t.tokens()


@architecture
def xlnet(size: str) -> Case:
    t = _Text(size)
    config = hf.XLNetConfig(
        vocab_size=t.vocab, d_model=t.hidden, n_layer=t.layers, n_head=t.heads, d_inner=t.ffn
    )
    t.length = min(t.length, 512)
    return hf.XLNetLMHeadModel, config, t.tokens()


# --- encoders and encoder-decoders ------------------------------------------------------------------


@architecture
def t5(size: str) -> Case:
    t = _Text(size)
    config = hf.T5Config(
        vocab_size=t.vocab, d_model=t.hidden, d_kv=t.hidden // t.heads, d_ff=t.ffn, num_layers=t.layers,
        num_heads=t.heads, decoder_start_token_id=0,
    )  # fmt: skip
    t.length //= 2
    return hf.T5ForConditionalGeneration, config, t.tokens()


def _bart_like(kind: str, size: str, **more: Any) -> Case:
    t = _Text(size)
    config = getattr(hf, f"{kind}Config")(
        vocab_size=t.vocab, d_model=t.hidden, encoder_layers=t.layers, decoder_layers=t.layers,
        encoder_attention_heads=t.heads, decoder_attention_heads=t.heads, encoder_ffn_dim=t.ffn,
        decoder_ffn_dim=t.ffn, max_position_embeddings=t.length, **more,
    )  # fmt: skip
    t.length //= 2
    return getattr(hf, f"{kind}ForConditionalGeneration"), config, t.padded()


ARCHITECTURES |= {
    "bart": functools.partial(_bart_like, "Bart"),
    "pegasus": functools.partial(_bart_like, "Pegasus"),
}


def _bert_like(kind: str, size: str, head: str = "ForMaskedLM", **more: Any) -> Case:
    t = _Text(size)
    config = getattr(hf, f"{kind}Config")(**t.bert_like(**more))
    t.length //= 2
    return getattr(hf, f"{kind}{head}"), config, t.padded()


def _narrow(size: str) -> dict[str, int]:
    """Return the width of embeddings that are narrower than the layers."""
    return {"embedding_size": 128 if size == "medium" else 32}


ARCHITECTURES |= {
    "bert": functools.partial(_bert_like, "Bert"),
    "roberta": functools.partial(_bert_like, "Roberta"),
    "albert": lambda size: _bert_like("Albert", size, **_narrow(size)),
    "electra": lambda size: _bert_like("Electra", size, **_narrow(size)),
    "deberta_v2": functools.partial(
        _bert_like, "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32,
        norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, max_relative_positions=-1,
    ),
}  # fmt: skip


@architecture
def distilbert(size: str) -> Case:
    t = _Text(size)
    config = hf.DistilBertConfig(
        vocab_size=t.vocab, dim=t.hidden, hidden_dim=t.ffn, n_layers=t.layers, n_heads=t.heads,
        max_position_embeddings=t.length,
    )  # fmt: skip
    t.length //= 2
    return hf.DistilBertForMaskedLM, config, t.padded()


# --- vision -----------------------------------------------------------------------------------------


class _Vision:
    def __init__(self, size: str) -> None:
        self.small = size == "small"
        self.hidden = 64 if self.small else 768
        self.layers = 2 if self.small else 8
        self.heads = 4 if self.small else 12
        self.side = 64 if self.small else 224
        self.batch = 8 if self.small else 16
        self.labels = 10 if self.small else 1000

    def images(self) -> torch.Tensor:
        return torch.randn(self.batch, 3, self.side, self.side)

    def classified(self) -> Batch:
        return {"pixel_values": self.images(), "labels": torch.randint(0, self.labels, (self.batch,))}

    def vit_like(self, **more: Any) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden, "intermediate_size": 4 * self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "image_size": self.side, "patch_size": 16,
            "num_labels": self.labels, **more,
        }  # fmt: skip


def _image_classifier(kind: str, size: str, **more: Any) -> Case:
    v = _Vision(size)
    return (
        getattr(hf, f"{kind}ForImageClassification"),
        getattr(hf, f"{kind}Config")(**v.vit_like(**more)),
        v.classified,
    )


ARCHITECTURES |= {
    "vit": lambda size: _image_classifier(
        "ViT", size, patch_size=8 if size == "small" else 16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    ),
    "beit": functools.partial(
        _image_classifier, "Beit", drop_path_rate=0.1, use_relative_position_bias=True
    ),
}  # fmt: skip


@architecture
def resnet(size: str) -> Case:
    v = _Vision(size)
    if v.small:
        config = hf.ResNetConfig(
            embedding_size=16, depths=[1, 1, 2], hidden_sizes=[16, 32, 64], layer_type="basic",
            num_labels=v.labels,
        )  # fmt: skip
    else:
        config = hf.ResNetConfig(num_labels=v.labels)
    return hf.ResNetForImageClassification, config, v.classified


@architecture
def convnext(size: str) -> Case:
    v = _Vision(size)
    more = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 64]} if v.small else {}
    config = hf.ConvNextConfig(num_labels=v.labels, drop_path_rate=0.1, **more)
    return hf.ConvNextForImageClassification, config, v.classified


@architecture
def swin(size: str) -> Case:
    v = _Vision(size)
    more = {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4} if v.small else {}
    config = hf.SwinConfig(image_size=v.side, num_labels=v.labels, hidden_dropout_prob=0.1, **more)
    return hf.SwinForImageClassification, config, v.classified


@architecture
def segformer(size: str) -> Case:
    v = _Vision(size)
    more = (
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32}
        if v.small
        else {}
    )
    config = hf.SegformerConfig(num_labels=v.labels, **more)

    def batch() -> Batch:
        side = v.side // 4
        return {"pixel_values": v.images(), "labels": torch.randint(0, v.labels, (v.batch, side, side))}

    return hf.SegformerForSemanticSegmentation, config, batch


# --- audio ------------------------------------------------------------------------------------------


@architecture
def whisper(size: str) -> Case:
    small = size == "small"
    hidden, layers, heads = (64, 2, 4) if small else (384, 4, 6)
    frames = 200 if small else 3000
    config = hf.WhisperConfig(
        vocab_size=512 if small else 51865, d_model=hidden, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * hidden,
        decoder_ffn_dim=4 * hidden, max_source_positions=frames // 2, dropout=0.1, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    def batch() -> Batch:
        rows, length = (2, 32) if small else (4, 256)
        return {
            "input_features": torch.randn(rows, 80, frames),
            "labels": _ids(config.vocab_size, rows, length),
        }

    return hf.WhisperForConditionalGeneration, config, batch


@architecture
def wav2vec2(size: str) -> Case:
    small = size == "small"
    t = _Text(size)
    convolutions = (
        {"conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4)} if small else {}
    )
    config = hf.Wav2Vec2Config(
        vocab_size=32, hidden_size=t.hidden, num_hidden_layers=t.layers, num_attention_heads=t.heads,
        intermediate_size=t.ffn, num_feat_extract_layers=3 if small else 7,
        num_conv_pos_embeddings=16 if small else 128, layerdrop=0.1, mask_time_length=4, **convolutions,
    )  # fmt: skip

    def batch() -> Batch:
        rows, samples = (2, 4000) if small else (4, 80000)
        return {"input_values": torch.randn(rows, samples), "labels": torch.randint(1, 32, (rows, 8))}

    return hf.Wav2Vec2ForCTC, config, batch


# --- several kinds of input ------------------------------------------------------------------------


@architecture
def clip(size: str) -> Case:
    t, v = _Text(size), _Vision(size)
    t.batch, t.length = v.batch, 32 if t.small else 64
    text = {**t.bert_like(), "max_position_embeddings": t.length, "projection_dim": t.hidden}
    vision = {**v.vit_like(), "projection_dim": t.hidden}
    vision.pop("num_labels")
    config = hf.CLIPConfig(text_config=text, vision_config=vision)

    def batch() -> Batch:
        return {
            "input_ids": _ids(t.vocab, t.batch, t.length),
            "pixel_values": v.images(),
            "return_loss": True,
        }

    return hf.CLIPModel, config, batch


@architecture
def llava(size: str) -> Case:
    t, v = _Text(size), _Vision(size)
    t.batch, t.length = 2, 64 if t.small else 512
    patches = (v.side // 16) ** 2
    vision = v.vit_like(projection_dim=v.hidden)
    vision.pop("num_labels")
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**vision),
        text_config=hf.LlamaConfig(**t.llama_like()),
        image_token_id=3,
    )

    def batch() -> Batch:
        ids = _ids(t.vocab, t.batch, t.length)
        ids[:, 1 : 1 + patches] = 3
        return {
            "input_ids": ids,
            "pixel_values": torch.randn(t.batch, 3, v.side, v.side),
            "labels": ids.clone(),
        }

    return hf.LlavaForConditionalGeneration, config, batch


@architecture
def qwen2_vl(size: str) -> Case:
    t, v = _Text(size), _Vision(size)
    t.batch, t.length = 2, 64 if t.small else 512
    grid = 8 if t.small else 32
    text = t.llama_like(rope_scaling={"type": "mrope", "mrope_section": [t.hidden // t.heads // 2 - 8, 4, 4]})
    vision = {
        "depth": v.layers, "embed_dim": v.hidden, "hidden_size": t.hidden, "num_heads": v.heads, "patch_size": 14,
    }  # fmt: skip
    config = hf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=3, vision_start_token_id=4, vision_end_token_id=4,
        video_token_id=0,
    )  # fmt: skip

    def batch() -> Batch:
        ids = _ids(t.vocab, t.batch, t.length)
        ids[:, 0] = 4
        ids[:, 1 : 1 + grid * grid // 4] = 3
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 3).long(),
            "pixel_values": torch.randn(t.batch * grid * grid, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, grid, grid]] * t.batch), "labels": ids.clone(),
        }  # fmt: skip

    return hf.Qwen2VLForConditionalGeneration, config, batch


# --- variants ---------------------------------------------------------------------------------------


def _with_lora(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    )


def _with_frozen_half(model: torch.nn.Module) -> torch.nn.Module:
    layers = model.model.layers  # type: ignore[union-attr]
    for module in (model.get_input_embeddings(), *list(layers)[: len(layers) // 2]):  # type: ignore[operator, arg-type]
        module.requires_grad_(False)
    return model


def _micro_batches(batch: Batch) -> list[Batch]:
    return [{k: v[i::2] for k, v in batch.items()} for i in range(2)]


def two_micro_batches(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Accumulate gradients as a loop does it: the first half's backward pass ends before the second half begins.

    While the second half runs, the gradients of the first are alive, and counted.
    """
    first, second = _micro_batches(batch)
    (model(**first).loss / 2).backward()
    return model(**second).loss / 2


VARIANTS: dict[str, tuple[str, Callable[[torch.nn.Module], torch.nn.Module] | None, Any]] = {
    "llama+lora": ("llama", _with_lora, None), "llama+frozen": ("llama", _with_frozen_half, None),
    "llama+accumulation": ("llama", None, two_micro_batches),
}  # fmt: skip
"""Name: (architecture, what is done to the model, loss_fn)."""

NAMES = (*ARCHITECTURES, *VARIANTS)


def build(
    name: str,
    size: str = "medium",
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
    *,
    dropout: float | None = None,
    copies: int = 1,
) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """Build ``(model, batch, loss_fn)``, in training mode; float inputs have the model's type.

    Args:
        name: of ``NAMES``.
        size: "small" or "medium".
        device: where the parameters are; the batch is on the CPU.
        dtype: of the parameters and of inputs that are float.
        dropout: put in place of each dropout probability that the config has at 0.
        copies: that many batches of the size, joined.
    """
    base, change, loss_fn = VARIANTS.get(name, (name, None, None))
    model_class, config, make_batch = ARCHITECTURES[base](size)
    if dropout is not None:
        _set_dropout(config, dropout)
    with torch.device(device):
        model = model_class(config)
    model = model.to(dtype).train()
    if change is not None:
        model = change(model)
    batch = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in _joined([make_batch() for _ in range(copies)]).items()
    }
    return model, batch, loss_fn


def _joined(batches: list[Batch]) -> Batch:
    """Join tensors and lists end to end; anything else stays as the first batch has it."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        return [x for v in values for x in v] if isinstance(values[0], list) else values[0]

    return {k: join([b[k] for b in batches]) for k in batches[0]}


def _set_dropout(config: Any, p: float) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _set_dropout(value, p)
        elif ("dropout" in name or name.endswith("_pdrop")) and value == 0.0:
            setattr(config, name, p)
