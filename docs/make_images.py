"""The pictures of the documentation, from real runs: nothing in them is drawn by hand.

    python docs/make_images.py     # into docs/images and docs/samples (some minutes, no GPU)

GPT-2 and ResNet-50 of transformers, bfloat16, on the meta device, planned for an H100. Needs
``pip install 'sacplan[plot]'`` and transformers. ``docs/images/frontier.png`` is made by
``python -m benchmarks.frontier``, and ``docs/images/transformer_memory.png`` by ``python examples/transformer.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure

import sacplan

IMAGES = Path(__file__).parent / "images"
SAMPLES = Path(__file__).parent / "samples"
DPI = 160


def gpt2() -> tuple[torch.nn.Module, Any]:
    """16 sequences of 1024 tokens."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).bfloat16()
    tokens = torch.randint(0, 50257, (16, 1024))
    return model, {"input_ids": tokens, "labels": tokens}


def resnet50() -> tuple[torch.nn.Module, Any]:
    """64 images; batch norm, and ReLUs that write in place."""
    with torch.device("meta"):
        model = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=1000)
        ).bfloat16()
        images = torch.empty(64, 3, 224, 224, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, torch.nn.ReLU):
            module.inplace = True
    return model, {"pixel_values": images, "labels": torch.zeros(64, dtype=torch.long)}


def say(*values: object) -> None:
    """To stdout, so that the figures that the text names can be read there."""
    sys.stdout.write("".join(f"{value}\n" for value in values))


def save(figure: Figure, path: Path) -> None:
    """Write a figure, and say where."""
    figure.savefig(path, dpi=DPI)
    say(path)


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=IMAGES)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    model, batch = gpt2()
    profile = sacplan.profile(model, batch, device="h100", optimizer=torch.optim.AdamW)
    plan = sacplan.plan(profile, "70%")
    curve = sacplan.frontier(profile)
    save(sacplan.Report(profile, plan).memory_figure(columns=1), out / "memory_gpt2.png")
    save(sacplan.Report(profile, plan, curve).frontier_figure(), out / "frontier_gpt2.png")
    say(sacplan.Report(profile, plan, curve).write(SAMPLES / "gpt2.html"))
    say(profile, plan, curve.to_string())

    model, batch = resnet50()
    profile = sacplan.profile(model, batch, device="h100", optimizer=torch.optim.SGD)
    plan = sacplan.plan(profile, "60%")
    curve = sacplan.frontier(profile, points=6, policies=False)
    save(sacplan.Report(profile, plan).memory_figure(columns=1), out / "memory_resnet50.png")
    save(sacplan.Report(profile, plan, curve).frontier_figure(), out / "frontier_resnet50.png")
    say(profile, plan, curve.to_string())


if __name__ == "__main__":
    main()
