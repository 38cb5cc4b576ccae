"""Published steps on images: ViT and ResNet-101."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from benchmarks.harness.results import MIB
from benchmarks.models import published_networks as networks
from benchmarks.models.cases import Case, fused_adamw
from benchmarks.models.published_step import (
    COMPILE,
    GB,
    Point,
    Step,
    blocks_policy,
    classified,
    empty,
    foreach_adamw,
    in_autocast,
    step_in_backward,
)
from sacplan.profiling.optimizer_table import AdamW8bitSizes
from sacplan.record.host_state import CPUOffloadSizes
from tests.zoo.convnets import Bottleneck, ResNet

# --- vision -----------------------------------------------------------------------------------------------


def _images(model: nn.Module, batch: int, optimizer: Any, *, autocast: bool) -> Case:
    pair = empty(batch, 3, 224, 224, dtype=torch.float32), empty(batch)
    return Case(model, pair, in_autocast(classified) if autocast else classified, optimizer)


def _vit_h(optimizer: Any) -> Case:
    with torch.device("meta"):
        model = networks.ViT(layers=32, width=1280, heads=16, patch=14, classes=45)
    return _images(model, 8, optimizer, autocast=True)


def _vit_giant(optimizer: Any, autocast: bool = False) -> Case:
    with torch.device("meta"):
        model = networks.vit_giant(classes=45)
    if autocast:
        return _images(model, 32, optimizer, autocast=True)
    built = _images(model.bfloat16(), 32, optimizer, autocast=False)
    images, labels = built.batch
    return dataclasses.replace(built, batch=(images.bfloat16(), labels))


_offloaded_adamw = functools.partial(CPUOffloadSizes, fused=True)
"""torchao's ``CPUOffloadOptimizer``, which can only be made on a GPU."""

_VIT_GIANT = functools.partial(
    Step, points=(Point(unit=GB),), device="rtx-4070-ti-super", samples=32, plan=blocks_policy
)


def _vit_l() -> Case:
    with torch.device("meta"):
        model = networks.ViT(layers=24, width=1024, heads=16, patch=16, classes=1000)
    adam = functools.partial(torch.optim.Adam, foreach=True)
    return _images(model, 1, adam, autocast=False)


def _vit_l_in_backward() -> Case:
    """Return the tutorial's second half: Adam for each parameter, in a hook."""
    built = _vit_l()
    step_in_backward(built.model, functools.partial(torch.optim.Adam, foreach=False))
    return dataclasses.replace(built, optimizer=None)


def _resnet101() -> Case:
    with torch.device("meta"):
        model = ResNet(Bottleneck, (3, 4, 23, 3), inplace=True, classes=1000)
    return _images(model, 16, foreach_adamw, autocast=True)


_VIT_H = functools.partial(
    Step, points=(Point(unit=GB),), device="rtx-4070-ti-super", samples=8, missing=COMPILE
)


VISION: dict[str, Step] = {
    "ao-vith-PyTorch_fused_AdamW": _VIT_H(build=lambda: _vit_h(fused_adamw)),
    "ao-vith-bnb_8-bit": _VIT_H(build=lambda: _vit_h(AdamW8bitSizes)),
    "ao-vith-ao_8-bit": _VIT_H(build=lambda: _vit_h(AdamW8bitSizes)),
    "ao-vitg-none": _VIT_GIANT(build=lambda: _vit_giant(fused_adamw)),
    "ao-vitg-offload": _VIT_GIANT(build=lambda: _vit_giant(_offloaded_adamw)),
    "ao-vitg-offload_gradients": _VIT_GIANT(
        build=lambda: _vit_giant(functools.partial(_offloaded_adamw, offload_gradients=True))
    ),
    "ao-vitg-amp_offload": _VIT_GIANT(build=lambda: _vit_giant(_offloaded_adamw, autocast=True)),
    "pt-vitl-tutorial": Step(
        build=_vit_l,
        points=(
            Point(part=("Adam foreach",), unit=GB),
            Point(part=("optimizer in backward",), unit=GB, build=_vit_l_in_backward),
        ),
        device="a100-80gb",
        assumed=True,
    ),
    "flashoptim-resnet101": Step(
        build=_resnet101,
        points=(Point(part=("peak",), unit=MIB),),
        device="h100",
        assumed=True,
    ),
}
