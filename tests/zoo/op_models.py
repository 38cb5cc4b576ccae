"""Eight small models, and the ops of their forward passes: what strategies are tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.placed import Recorded
from tests.support.slices import OpCall
from tests.zoo.convnets import Bottleneck

Make = Callable[[], tuple[nn.Module, dict[str, Any]]]
MODELS: dict[str, Make] = {}


def model(make: Make) -> Make:
    MODELS[make.__name__] = make
    return make


def labelled(batch: int = 4, length: int = 8, vocabulary: int = 32) -> dict[str, Any]:
    """Token ids, labels of which some are left out, and a mask for what is padded."""
    ids = torch.randint(vocabulary, (batch, length))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = -100
    mask[1, 6:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class WithLoss(nn.Module):
    """A model of images and a loss."""

    def __init__(self, net: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, labels: torch.Tensor, **batch: Any) -> Any:
        return {"loss": self.loss(self.net(**batch), labels)}


@model
def mlp() -> tuple[nn.Module, dict[str, Any]]:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return WithLoss(Named(net), F.mse_loss), {"x": torch.randn(4, 6, 16), "labels": torch.randn(4, 6, 8)}


class Named(nn.Module):
    """A module whose input has a name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


@model
def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), labelled()


@model
def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), labelled()


@model
def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), labelled()


@model
def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    net = transformers.ViTForImageClassification(config)
    return net, {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(4, (4,))}


@model
def resnet() -> tuple[nn.Module, dict[str, Any]]:
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Bottleneck(8, 2, 1, None, inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return WithLoss(Named(net), F.cross_entropy), {
        "x": torch.randn(4, 4, 8, 8),
        "labels": torch.randint(4, (4,)),
    }


class SmallUNet(nn.Module):
    """Down and up once, with what is beside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Conv2d(3 * width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.silu(self.first(x))
        low = F.silu(self.norm(self.down(first)))
        b, c, h, w = low.shape
        pixels = low.flatten(2).transpose(1, 2)
        low = low + F.scaled_dot_product_attention(pixels, pixels, pixels).transpose(1, 2).reshape(b, c, h, w)
        found: torch.Tensor = self.last(
            torch.cat([first, self.up(low), F.interpolate(first, scale_factor=1.0)], 1)
        )
        return found


@model
def unet() -> tuple[nn.Module, dict[str, Any]]:
    return WithLoss(Named(SmallUNet()), F.mse_loss), {
        "x": torch.randn(2, 4, 8, 8),
        "labels": torch.randn(2, 4, 8, 8),
    }


class MixerLayer(nn.Module):
    """Tokens are mixed, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.SiLU(), nn.Linear(2 * tokens, tokens))
        self.width = nn.Sequential(nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        found: torch.Tensor = x + self.width(self.second(x))
        return found


@model
def mixer() -> tuple[nn.Module, dict[str, Any]]:
    net = nn.Sequential(nn.Linear(4, 16), MixerLayer(8, 16), nn.GroupNorm(2, 8))
    return WithLoss(Named(net), F.smooth_l1_loss), {
        "x": torch.randn(4, 8, 4),
        "labels": torch.randn(4, 8, 16),
    }


def calls_of_model(name: str) -> list[OpCall]:
    """The ops of a forward pass, one of each kind."""
    net, batch = MODELS[name]()
    with Recorded() as seen:
        net.double()(**batch)
    return list(seen.calls.values())
