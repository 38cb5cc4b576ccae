"""Make ``diffusers:`` targets: the denoiser of an image or video model, without weights, and a batch for it.

    diffusers:black-forest-labs/FLUX.1-dev
    diffusers:Wan-AI/Wan2.1-T2V-14B-Diffusers@832x480x81        width x height x frames, in pixels

The classes are those of ``diffusers``; ``diffusers.json`` has what the published configurations change of their
defaults, and what each one takes. Text encoders and the autoencoder are not there: trainers encode the data set
beforehand. The step is that of diffusers' training scripts: the mean squared error of the prediction, under autocast.
With ``--lora``, adapters in float32 lie on the attention's projections, and all else is frozen.

``run_planned`` is for a training script that switches checkpointing on, whatever its model: the plan takes its place.

    handle = sacplan.apply(transformer, plan)
    transformer.enable_gradient_checkpointing(run_planned)
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sacplan.core.near import did_you_mean
from sacplan.integrations.hf.lora import ALL_LINEAR, parse
from sacplan.integrations.hf.target import DEFAULTS, ModelOptions, Target, TargetError, hinted
from sacplan.integrations.peft import library
from sacplan.profiling.optimizer_names import NONE, named_optimizer
from sacplan.record.step import run_planned as run_planned
from sacplan.torch_compat.host_memory import device_of

PREFIX = "diffusers:"

_PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]
"""The layers that diffusers' LoRA scripts train by default."""

_INTEGERS, _FLOATS = ("mask",), ("ids", "guidance")
"""Endings of names of inputs that are integers, or float32; all other inputs have the type of the model."""


@functools.cache
def known() -> dict[str, Any]:
    """Return the models by their names on the hub."""
    models: dict[str, Any] = json.loads(Path(__file__).with_name("diffusers.json").read_bytes())
    return models


def build(target: str, asked: ModelOptions, place: str) -> Target:
    """Make the denoiser that a name describes, with a batch and an optimizer.

    Args:
        target: ``diffusers:``, a name, and if you like ``@`` and a size in pixels, with frames for a video.
        asked: batch, dtype, optimizer and LoRA; a model of diffusers takes no other option.
        place: the device of the tensors.

    Raises:
        TargetError: diffusers is missing, the name or the size is not known, or an option is not for such a model.
    """
    name, _, size = target.removeprefix(PREFIX).partition("@")
    matches = [full for full in known() if name.lower() in (full.lower(), full.rpartition("/")[2].lower())]
    if not matches:
        meant = did_you_mean(name, known(), PREFIX.__add__)
        raise hinted(
            TargetError(f"{name!r} is no model that is known.{meant}"), "names that are known:", *known()
        )
    for option in ("seq", "attn", "load_in_4bit", "bnb_4bit_quant_storage"):
        if getattr(asked, option) is not None:
            raise TargetError(
                f"--{option.replace('_', '-')} is not for {PREFIX} targets. Their size is part of the name: "
                f"{PREFIX}{matches[0]}@1024x1024."
            )
    options = replace(DEFAULTS, **asked.given())
    spec, dtype = known()[matches[0]], getattr(torch, str(options.dtype))
    width, height, frames = pixels = _size(size, spec, target)
    model = _model(spec, dtype, place)
    whole = sum(p.numel() for p in model.parameters())
    adapters = {}
    if options.lora is not None:
        model = _adapted(model, options.lora)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        adapters = {"trained": trained, "lora": options.lora}

    def make_batch(n: int) -> dict[str, Any]:
        return _batch(n, pixels, spec, dtype, place)

    facts = {
        "model": spec["class"],
        "parameters": whole,
        **adapters,
        "task": "denoising",
        "size": f"{width}x{height}" + (f"x{frames}" if frames > 1 else ""),
        "batch": options.batch,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
    }
    chosen = str(options.optimizer)
    optimizer = None if chosen == NONE else named_optimizer(chosen).make
    batch = make_batch(int(options.batch or 1))
    return Target(target, model, batch, DenoisingLoss(dtype), optimizer, make_batch, facts)


@dataclass(frozen=True)
class DenoisingLoss:
    """The mean squared error of what a denoiser predicts, under autocast."""

    dtype: torch.dtype

    def __call__(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss, a scalar."""
        inputs = {name: value for name, value in batch.items() if name != "target"}
        mixed = self.dtype != torch.float32
        with torch.autocast(device_of(model).type, self.dtype if mixed else None, enabled=mixed):
            (predicted,) = model(**inputs, return_dict=False)
        return F.mse_loss(predicted.float(), batch["target"].float())


def _size(text: str, spec: dict[str, Any], target: str) -> tuple[int, int, int]:
    width, height, frames = spec["size"]
    if text:
        match = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", text)
        if match is None:
            raise TargetError(
                f"{target}: {text!r} is no size. Write {width}x{height}, or {width}x{height}x{frames}."
            )
        width, height, frames = int(match[1]), int(match[2]), int(match[3] or frames)
    # Most models join 2 x 2 points of the autoencoder's output, each of which stands for 8 x 8 pixels: 16 in all.
    unit = max(16, spec["pixels"])
    if not width or not height or width % unit or height % unit:
        raise TargetError(f"{target}: width and height must be multiples of {unit}.")
    if frames < 1 or (frames - 1) % spec["frames"] or (frames > 1 and spec["frames"] == 1):
        rule = f"a multiple of {spec['frames']}, and one more" if spec["frames"] > 1 else "1: it makes images"
        raise TargetError(f"{target}: the number of frames must be {rule}.")
    return width, height, frames


def _model(spec: dict[str, Any], dtype: torch.dtype, place: str) -> torch.nn.Module:
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise TargetError(f"{PREFIX} targets need diffusers: pip install 'sacplan[diffusers]'") from error
    with torch.device(place):
        model: Any = getattr(diffusers, spec["class"])(**spec["config"])
    # As ``from_pretrained(torch_dtype=...)`` does it, which leaves some modules in float32.
    kept = set(model._keep_in_fp32_modules or ())
    with torch.no_grad():
        for fqn, p in model.named_parameters():
            p.data = p.data.to(torch.float32 if kept.intersection(fqn.split(".")) else dtype)
    model.train()
    return model  # type: ignore[no-any-return]


def _adapted(model: torch.nn.Module, lora: str) -> torch.nn.Module:
    options = parse(lora)
    if options["target_modules"] == ALL_LINEAR:
        options["target_modules"] = _PROJECTIONS
    peft = library("peft")
    model.requires_grad_(False)
    try:
        adapted = peft.inject_adapter_in_model(peft.LoraConfig(**options), model)
    except ValueError as error:  # PEFT finds no layers of these names
        raise TargetError(f"--lora {lora}: {error}") from error
    for p in adapted.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return adapted  # type: ignore[no-any-return]


def _batch(
    n: int, pixels: tuple[int, int, int], spec: dict[str, Any], dtype: torch.dtype, place: str
) -> dict[str, Any]:
    """Return the inputs, and the target: what is to be predicted, of the size of the first input."""
    width, height = (size // spec["pixels"] for size in pixels[:2])
    time = (pixels[2] - 1) // spec["frames"] + 1
    sizes = {"n": n, "width": width, "height": height, "time": time, "text": spec["text"]}
    sizes["tokens"] = math.prod((width, height, time))

    def input_of(name: str, what: Any) -> Any:
        if isinstance(what, dict):
            return {key: input_of(key, value) for key, value in what.items()}
        if isinstance(what, str):
            return [[(time, height, width)]] * n if what == "shapes" else sizes[what]
        of = torch.int64 if name.endswith(_INTEGERS) else torch.float32 if name.endswith(_FLOATS) else dtype
        return torch.zeros([sizes.get(size, size) for size in what], dtype=of, device=place)

    batch = {name: input_of(name, what) for name, what in spec["inputs"].items()}
    batch["target"] = torch.zeros_like(next(iter(batch.values())))
    return batch
