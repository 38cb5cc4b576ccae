"""Steps of which others have published times: ``benchmarks/data/steps.jsonl``.

    step = TIMED["timm-train-rtx-3090-nhwc-resnet50"]()

Models of timm and of torchvision are made where these packages are installed; sacplan does not need them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sacplan
from benchmarks.harness.results import ROOT
from benchmarks.models import published_networks as networks
from benchmarks.models.cases import Case, fused_adamw
from benchmarks.models.published_prime_rl import prime_rl
from benchmarks.models.published_step import (
    MIXED,
    Point,
    Step,
    blocks_policy,
    classified,
    empty,
    foreach_adamw,
    full_policy,
    in_autocast,
    single_adamw,
)
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.record.step import call_model

DATA = ROOT / "benchmarks" / "data" / "steps.jsonl"

# --- images -----------------------------------------------------------------------------------------------


def _from_zero(model: nn.Module, batch: Any) -> Tensor:
    model.zero_grad(set_to_none=False)
    return classified(model, batch)


_NESTEROV = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False)


def _vision(
    setting: Mapping[str, Any], *, channels_last: bool, half: bool, optimizer: Any, autocast: bool = True
) -> Case:
    """Build a model of timm or torchvision by its name, "timm resnet50"."""
    package, name = setting["model"].split()
    with torch.device("meta"):
        if package == "timm":
            # Attention in one kernel came with torch 2.0.
            importlib.import_module("timm.layers").set_fused_attn(setting["mode"] == "inference")
            model = importlib.import_module("timm").create_model(name)
        else:
            model = getattr(importlib.import_module("torchvision.models"), name)()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = (model.half() if half else model).to(memory_format=layout)
    n, size = setting["batch"], setting["image"]
    images = empty(n, 3, size, size, dtype=torch.half if half else torch.float)
    images = images.contiguous(memory_format=layout)
    if setting["mode"] == "inference":
        return Case(model.eval(), (images,), in_autocast(call_model, torch.float16))
    loss_fn = _from_zero if half else classified
    if autocast and not half:
        loss_fn = in_autocast(classified, torch.float16)
    return Case(model, (images, empty(n)), loss_fn, optimizer)


_GROUPED = """
    resnext50_32x4d efficientnet_b0 tf_efficientnetv2_s mobilenetv2_100 regnetx_032 regnety_032 convnext_tiny
    convnext_small poolformer_s12 nfnet_l0 xception dpn68 ghostnet_100 lcnet_050 mobilevit_s coat_lite_small
    mnasnet_100 xcit_small_12_p16_224
"""
_TRANSFORMERS = ("vit_", "swin_", "mixer_", "resmlp_", "cait_", "beit_")


def _timm(row: Mapping[str, Any]) -> Step:
    setting = row["setting"]
    name = setting["model"].split()[1]
    group = "vision inference"
    if setting["mode"] == "train":
        kind = "transformers and MLPs" if name.startswith(_TRANSFORMERS) else "dense convolutions"
        group = f"vision training, {'grouped convolutions' if name in _GROUPED.split() else kind}"
    return Step(
        build=functools.partial(_vision, setting, channels_last=True, half=False, optimizer=_NESTEROV),
        device=row["device"],
        mode=setting["mode"],
        samples=setting["batch"],
        group=group,
    )


def _torchvision_1_7(setting: Mapping[str, Any]) -> Case:
    """Build a model of torchvision, whose ReLU6 saved its result, as ReLU does, until PyTorch 1.10 (pytorch#95432)."""
    built = _vision(setting, channels_last=False, half=True, optimizer=None)
    for module in built.model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, nn.ReLU(inplace=True))
    return built


def _torchvision(row: Mapping[str, Any]) -> Step:
    """Return a step of pytorch-gpu-benchmark (``benchmark_models.py``), whose clock runs from one wait to the next."""
    setting = row["setting"]
    images, pixels = setting["batch"], setting["image"] ** 2
    return Step(
        build=functools.partial(_torchvision_1_7, setting),
        device="a100-40gb",
        samples=images,
        adds_gradients=True,
        pageable_bytes=images * 3 * pixels * torch.half.itemsize,
        group="small steps",
    )


def _examples(row: Mapping[str, Any]) -> Step:
    """Return a step of NVIDIA's DeepLearningExamples, or of others in float32."""
    setting = row["setting"]
    precision = setting["precision"]
    if setting["model"] == "transformers bert-large":
        build = functools.partial(_bert_large, setting["batch"], setting["seq"])
    else:
        build = functools.partial(
            _vision,
            setting,
            channels_last=setting["layout"] == "channels_last",
            half=False,
            optimizer=_NESTEROV,
            autocast="autocast" in precision,
        )
    group = {"TF32": "TF32 on an A100", "float32": "float32 on a V100"}
    return Step(
        build=build,
        device=row["device"],
        samples=setting["batch"] * setting.get("accumulation", 1),
        accumulation=setting.get("accumulation", 1),
        tf32=precision == "TF32",
        group=group.get(precision, "vision training on an A100"),
    )


# --- MPT --------------------------------------------------------------------------------------------------

_MPT = {
    "125m": (12, 768, 12),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
}
"""Layers, width and heads (llm-foundry, ``scripts/train/yamls/pretrain``)."""


def _triton_attention(width: int, heads: int) -> DeviceSpec:
    """Return an A100 whose flash attention is that of 2022 in Triton, which MPT was trained with.

    It reaches 100 TFLOP/s with heads of 64 and 95 with 128, forward and backward, with 16,384 tokens (README of
    Dao-AILab/flash-attention, ``assets/flash2_a100_fwd_bwd_benchmark.png``); FlashAttention-2 176 and 203.
    """
    spec = resolve_device("a100-80gb")
    share = {64: 100e12, 128: 95e12}[width // heads] / spec.reached_flops(torch.bfloat16)
    shares = {"flash_attention": share, "flash_attention_backward": share}
    return dataclasses.replace(spec, matrix_shares=shares)


def _mpt(setting: Mapping[str, Any]) -> Case:
    with torch.device("meta"):
        model = networks.MPT(*_MPT[setting["model"].split()[1]], setting["seq"])
    tokens = empty(setting["microbatch"], setting["seq"])
    return Case(model, (tokens, tokens), optimizer=foreach_adamw)


def _foundry(row: Mapping[str, Any]) -> Step:
    setting = row["setting"]
    return Step(
        build=functools.partial(_mpt, setting),
        device=_triton_attention(*_MPT[setting["model"].split()[1]][1:]),
        fsdp=sacplan.FSDP2(setting["gpus"], ("blocks.*", ""), mp_policy=MIXED),
        plan=None if setting["checkpointing"] == "none" else blocks_policy,
        samples=setting["microbatch"] * setting["seq"] * setting["accumulation"],
        accumulation=setting["accumulation"],
        group="MPT, FSDP, " + ("up to 4,096 tokens" if setting["seq"] <= 4096 else "longer"),
    )


# --- transformers ----------------------------------------------------------------------------------------


def _mistral(batch: int, lora: bool) -> Case:
    import transformers

    config = transformers.MistralConfig(sliding_window=None, use_cache=False, max_position_embeddings=32768)
    with torch.device("meta"):
        model: Any = transformers.MistralForCausalLM(config).bfloat16()
        if lora:
            import peft

            names = ["q_proj", "k_proj", "v_proj", "o_proj"]
            adapter = peft.LoraConfig(r=16, task_type="CAUSAL_LM", target_modules=names)
            model = peft.get_peft_model(model, adapter)
    tokens = empty(batch, 4096)
    return Case(model.train(), {"input_ids": tokens, "labels": tokens}, optimizer=foreach_adamw)


def _fms(row: Mapping[str, Any]) -> Step:
    name = row["setting"]["name"]
    lora, batch = "lora" in name, int(name[-1])
    layers = "base_model.model.model.layers.*" if lora else "model.layers.*"
    rate = row["kind"] == "time"
    return Step(
        build=functools.partial(_mistral, batch, lora),
        points=() if rate else (Point(),),
        device="a100-80gb",
        plan=functools.partial(full_policy, layers=layers),
        samples=batch * 4096 if rate else 0,
        group="Mistral-7B, checkpointed" if rate else "",
        assumed=lora,
    )


def _bert_large(batch: int, seq: int) -> Case:
    """Build BERT-large, pre-trained, with attention in single ops."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.BertForPreTraining(config).train()
    names = ("input_ids", "token_type_ids", "attention_mask", "labels")
    inputs = {name: empty(batch, seq) for name in names} | {"next_sentence_label": empty(batch)}
    return Case(model, inputs, optimizer=fused_adamw)


def _t5(row: Mapping[str, Any]) -> Step:
    def build() -> Case:
        import transformers

        config = transformers.T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False,
            attn_implementation="eager", decoder_start_token_id=0,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.T5ForConditionalGeneration(config)
        batch = {"input_ids": empty(1, 512), "labels": empty(1, 64)}
        return Case(model, batch, optimizer=single_adamw)

    return Step(build=build, device="rtx-3090", samples=1, group="small steps")


_MAKERS = {
    "timm": _timm,
    "tv12": _torchvision,
    "dle": _examples,
    "skb": _examples,
    "mpt": _foundry,
    "fms": _fms,
    "hf15026": _t5,
    "prime": prime_rl,
}


def timed_rows() -> dict[str, dict[str, Any]]:
    """Return the published rows by id."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


TIMED: dict[str, Step] = {name: _MAKERS[name.split("-")[0]](row) for name, row in timed_rows().items()}
