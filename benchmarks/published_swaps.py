"""Which peaks have been published for swapping N blocks of frozen weights, and which are predicted?

    python -m benchmarks.published_swaps

- **Qwen-Image**: ``docs/qwen_image.md`` of musubi-tuner, as written on 2025-08-10 (36f3a98): LoRA, 1,024 x 1,024
  pixels, batch 1, bfloat16, every block checkpointed. Its fp8 left the modulations in bfloat16 then.
- **Flux**: ``docs/flux_train_network.md`` of kohya's sd-scripts (48d368f): what to swap on which card, with all weights
  in fp8, AdamW8bit and batch 1. N blocks are N/2 double and N single ones (``library/flux_models.py``).

Not said: the card, its seconds a step, how memory was read, and for Flux the resolution, taken as 1,024 x 1,024. The
last N blocks wait on the host here, and are fetched ahead. Predicted is the sum of tensors: the context of CUDA, some
0.5 GiB, and what the allocator holds beyond it come on top.
"""

from __future__ import annotations

import torch
from torch import nn

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import Row
from benchmarks.swapping import swapped
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions

FLUX, QWEN = "diffusers:FLUX.1-dev@1024x1024", "diffusers:Qwen-Image@1024x1024"
CASES = {
    "Qwen-Image, bf16": (QWEN, "", 0, 42),
    "Qwen-Image, fp8": (QWEN, "_mod", 0, 30),
    "Qwen-Image, fp8, 16 blocks": (QWEN, "_mod", 16, 24),
    "Qwen-Image, fp8, 45 blocks": (QWEN, "_mod", 45, 12),
    "Flux, fp8, 16 blocks": (FLUX, "none", 16, 12),
    "Flux, fp8, 22 blocks": (FLUX, "none", 22, 10),
    "Flux, fp8, 28 blocks": (FLUX, "none", 28, 8),
}
"""Target, the layers of blocks that are not in fp8 (empty: all), swapped blocks, and GB as published."""


class Fp8(nn.Linear):
    """A layer whose weight is in fp8, and is converted when it is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


def in_fp8(model: nn.Module, but: str) -> None:
    """Put the weights of the blocks' layers in fp8, but those of a name, and of adapters."""
    for fqn, layer in model.named_modules():
        if type(layer) is nn.Linear and "blocks." in fqn and but not in fqn and "lora_" not in fqn:
            layer.__class__ = Fp8
            layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)


def row_of(case: str) -> Row:
    """Return the row of a published peak."""
    name, but, n, published = CASES[case]
    target = load_target(name, ModelOptions(dtype="bfloat16", lora="r=16", optimizer="adamw8bit"))
    if but:
        in_fp8(target.model, but)
    profile = sacplan.profile(target.model, target.batch, target.loss_fn, target.optimizer, device="rtx-4090")
    by_hand = swapped(profile)
    single = [b for b in by_hand.blocks if b.unit.startswith("single_")]
    other = [b for b in by_hand.blocks if b not in single]
    chosen = (
        [*other[len(other) - n // 2 :], *single[len(single) - n :]] if single else other[len(other) - n :]
    )
    found = by_hand.with_weights_of(chosen, ahead=True)
    return {
        "case": case,
        "published_gb": published,
        "peak_bytes": found.footprint.peak_bytes,
        "step_ms": profile.step_ms + found.cost,
    }


def main() -> None:
    parser = Parser(__doc__, "published_swaps.json")
    parser.choice("--cases", CASES)
    arguments = parser.begin(silence=True)
    run_cases(arguments.cases, lambda case: [row_of(case)], arguments.json, key="case")


if __name__ == "__main__":
    main()
