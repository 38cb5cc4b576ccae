"""Models that PyTorch's own styles of tensor parallelism spread over a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo.layers import FeedForward


class Sequences(nn.Module):
    def __init__(self, layers: int = 3, dim: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=256, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def parallel_llama(model: nn.Module, mesh: Any, head: bool = False) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = [*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    styles: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, styles)
    if head:
        parallelize_module(
            model, mesh,
            {
                "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
                "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )  # fmt: skip


def parallel_sequences(model: nn.Module, mesh: Any) -> None:
    """The stream of activations is cut over the sequence; norms and dropout run on a part of it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(
        model, mesh,
        {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "layers.*.drop": SequenceParallel(),
            "norm": SequenceParallel(),
        },
    )  # fmt: skip


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: Any = model(x)
    return out.to_local().square().mean()


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss
