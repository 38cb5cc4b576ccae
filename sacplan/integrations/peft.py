"""LoRA and QLoRA without weights: the models of ``peft`` and ``bitsandbytes`` on the meta device.

    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = sacplan.with_lora(model, LoraConfig(r=16, target_modules="all-linear"), quantization)
    print(sacplan.fit(model, ...))

``from_pretrained`` quantizes weights while it loads them, so that there is nothing to quantize without weights. Here
the same steps run on a model that exists, in the order in which people take them: transformers puts
``bitsandbytes.nn.Linear4bit`` in place of ``nn.Linear``, bitsandbytes quantizes each weight, ``peft`` prepares the
model for training and adds the adapters. On the meta device none of this computes anything.

A model that was loaded with ``from_pretrained(quantization_config=)`` needs none of this: profile it directly.

Tried with transformers 5.23, peft 0.21 and bitsandbytes 0.50.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from sacplan.errors import TraceError
from sacplan.torch_compat.private import without_a_log

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig


def with_lora(
    model: torch.nn.Module,
    lora: PeftConfig | None,
    quantization: BitsAndBytesConfig | None = None,
    *,
    prepare: bool | None = None,
) -> torch.nn.Module:
    """Return a model of transformers with adapters, and with its linear layers in 4 bits.

    Args:
        model: On the meta device, or with weights. It is changed in place, as both libraries do.
        lora: A ``peft.LoraConfig``, or the configuration of another method of PEFT. None: no adapters.
        quantization: A ``transformers.BitsAndBytesConfig`` with ``load_in_4bit=True``. None: the layers stay as they
            are.
        prepare: Whether a quantized model passes through ``peft.prepare_model_for_kbit_training``, which makes
            everything that is not quantized float32: norms, the embedding and the head. Checkpointing stays off, since
            plans take its place. None: unless 4-bit weights are stored as floats (``bnb_4bit_quant_storage``). Such
            storage is for FSDP, whose recipes make nothing float32: adapters have the type of the storage, too.

    Returns:
        The model in training mode; with ``lora`` the ``PeftModel`` around it.

    Raises:
        TraceError: a library is not installed; the model is not one of transformers; an argument is of another type;
            the configuration asks for another quantization than 4 bits; or PEFT refuses it.
    """
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"model must be an nn.Module, not {type(model).__name__}.")
    if lora is not None and not isinstance(lora, library("peft").PeftConfig):
        raise TraceError(f"lora must be a peft.LoraConfig or None, not {type(lora).__name__}.")
    stored_as: torch.dtype | None = None
    with warnings.catch_warnings():
        # PEFT asks the model by an older name of transformers whether it checkpoints.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        if quantization is not None:
            model = _quantized(model, quantization)
            # ``stored_as`` is None for bytes, the default.
            stored: torch.dtype = quantization.bnb_4bit_quant_storage
            stored_as = stored if stored.is_floating_point else None
            if (stored_as is None) if prepare is None else prepare:
                prepared = library("peft").prepare_model_for_kbit_training
                model = prepared(model, use_gradient_checkpointing=False)
        if lora is not None:
            # A copy: PEFT writes the names of this model's layers into it.
            try:
                model = library("peft").get_peft_model(model, copy.deepcopy(lora))
            except ValueError as error:  # no module has the names of target_modules, for example
                raise TraceError(f"peft refuses this configuration for the model: {error}") from error
    if lora is not None and stored_as is not None and not prepare:
        # PEFT makes adapters float32. TRL turns those of quantized models back (``SFTTrainer.__init__``).
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(stored_as)
    trained: torch.nn.Module = model.train()
    return trained


def _quantized(model: torch.nn.Module, quantization: BitsAndBytesConfig) -> torch.nn.Module:
    """Put ``Linear4bit`` in place of the linear layers, and quantize their weights."""
    transformers, bitsandbytes = library("transformers"), library("bitsandbytes")
    kind: type = transformers.PreTrainedModel
    if not isinstance(model, kind):
        raise TraceError(
            f"only models of transformers can be quantized here, not {type(model).__name__}. Put "
            "bitsandbytes.nn.Linear4bit into the model yourself, and profile that."
        )
    if not getattr(quantization, "load_in_4bit", False):
        raise TraceError(
            "only BitsAndBytesConfig(load_in_4bit=True) is modelled; LLM.int8 (load_in_8bit=True) picks columns by "
            "their values, which a step without data does not have."
        )
    auto = importlib.import_module("transformers.quantizers.auto")
    before, maps = dict(model.named_modules()), bitsandbytes.functional.name2qmap
    known = dict(maps)
    auto.AutoHfQuantizer.from_config(quantization).preprocess_model(model=model, device_map=None)
    for name, layer in model.named_modules():
        if not isinstance(layer, bitsandbytes.nn.Linear4bit):
            continue
        replaced: Any = before[name]
        weight: torch.Tensor = replaced.weight.data
        # ``transformers.integrations.bitsandbytes.Bnb4bitQuantize`` does the same while it loads a checkpoint: the
        # layers of GPT-2 hold their weights transposed.
        if issubclass(layer.source_cls, transformers.pytorch_utils.Conv1D):
            weight = weight.T
        packed = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **vars(layer.weight))
        # Not ``packed.to(device)``, which leaves a weight on the meta device unpacked.
        packed._quantize(weight.device)
        layer.weight, layer.bias = packed, replaced.bias
    # bitsandbytes keeps the map of the first quantization for all later ones, to which one without data is of no use.
    maps.clear()
    maps.update(known)
    quantized: Any = model
    quantized.is_loaded_in_4bit = (
        True  # ``Bnb4BitHfQuantizer`` says so after loading; PEFT and the Trainer read it
    )
    return model


_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
"""Logs, on CPUs with bfloat16, that a kernel for inference could not be fetched. PEFT imports it too."""


def library(name: str) -> Any:
    """Import a library that adapters or 4-bit layers need.

    Raises:
        TraceError: it is not installed.
    """
    try:
        with without_a_log(_BITSANDBYTES):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the library is installed, but something that it needs is not
            raise
        raise TraceError(
            f"LoRA and 4-bit layers need {name}, which is not installed; run: pip install 'sacplan[lora]'"
        ) from error
