"""Small models of packages that are each one person's or one laboratory's, for ``benchmarks.zoo``.

They are written unlike those of the large libraries: einops, parametrizations, scans, flows that are differentiated in
their forward pass, heads that return lists and dictionaries, and a hundred optimizers.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Built = tuple[Any, ...]
"""A model and its batch, and an optimizer for it if it is one that is tried."""

Builder = Callable[[], Built]

_ROWS, _TOKENS, _DIM, _VOCABULARY = 4, 64, 32, 128


class _Loss(nn.Module):
    """A model whose loss is what one of its methods returns."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *batch)


def _seeded(build: Builder) -> Builder:
    """Return a builder that always makes the same model."""

    def built() -> Built:
        torch.manual_seed(0)
        model, *rest = build()
        return (model.train(), *rest)

    return built


def _tokens() -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (_ROWS, _TOKENS))


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (_ROWS, _TOKENS, _DIM)))


# --- x-transformers --------------------------------------------------------------------------------------------------

_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True},
    "t5_bias": {"rel_pos_bias": True}, "dynamic_bias": {"dynamic_pos_bias": True}, "xpos": {"rotary_xpos": True},
    "flash": {"attn_flash": True}, "rmsnorm": {"use_rmsnorm": True}, "scalenorm": {"use_scalenorm": True},
    "glu": {"ff_glu": True, "ff_swish": True}, "relu_squared": {"ff_relu_squared": True},
    "macaron": {"macaron": True}, "sandwich": {"sandwich_coef": 1}, "talking_heads": {"attn_pre_talking_heads": True},
    "memory": {"attn_num_mem_kv": 4}, "one_kv_head": {"attn_one_kv_head": True}, "qk_norm": {"attn_qk_norm": True},
    "sparse_topk": {"attn_sparse_topk": 4}, "gated_values": {"attn_gate_values": True}, "gru": {"gate_residual": True},
    "shift": {"shift_tokens": 1}, "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1, "layer_dropout": 0.0},
}  # fmt: skip


def _x_transformers() -> Mapping[str, Builder]:
    import x_transformers as x

    sizes = {"dim": _DIM, "depth": 2, "heads": 2}

    def language(**more: Any) -> Built:
        wrapper = x.TransformerWrapper(
            num_tokens=_VOCABULARY, max_seq_len=_TOKENS, attn_layers=x.Decoder(**sizes, **more)
        )
        return wrapper, (_tokens(),)

    def encoder_decoder() -> Built:
        sides = {
            f"{side}_{k}": v for side in ("enc", "dec") for k, v in {**_TEXT, "depth": 2, "heads": 2}.items()
        }
        return x.XTransformer(dim=_DIM, tie_token_emb=True, **sides), (_tokens(), _tokens())

    def image() -> Built:
        layers = x.Encoder(**sizes)
        return x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers), (
            _values(_ROWS, 3, 32, 32),
        )

    def continuous() -> Built:
        layers = x.Encoder(**sizes)
        wrapper = x.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=_TOKENS, attn_layers=layers)
        return wrapper, (_values(_ROWS, _TOKENS, 8),)

    found = {name: functools.partial(language, **more) for name, more in _ATTENTION.items()}
    return found | {"encoder_decoder": encoder_decoder, "image": image, "continuous": continuous}


_TEXT = {"num_tokens": _VOCABULARY, "max_seq_len": _TOKENS}

# --- vit-pytorch -----------------------------------------------------------------------------------------------------

_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": _DIM,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
}
_STAGES = {"num_classes": 5, "dim": 16, "depth": (1, 1, 1, 1)}
_VITS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("ViT", {**_VIT, "dropout": 0.1}, 32), "simple_vit": ("SimpleViT", _VIT, 32),
    "deepvit": ("DeepViT", _VIT, 32), "cait": ("CaiT", {**_VIT, "cls_depth": 1}, 32),
    "parallel_vit": ("ViT", _VIT, 32),
    "normalized_vit": ("nViT", _VIT, 32),
    "vit_for_small_dataset": ("ViT", _VIT, 32), "vit_with_patch_merger": ("ViT", _VIT, 32),
    "vit_with_patch_dropout": ("ViT", {**_VIT, "patch_dropout": 0.25}, 32), "rvt": ("RvT", _VIT, 32),
    "simple_vit_with_qk_norm": ("SimpleViT", _VIT, 32),
    "simple_vit_with_fft": ("SimpleViT", {**_VIT, "freq_patch_size": 8}, 32),
    "simple_vit_with_register_tokens": ("SimpleViT", _VIT, 32), "simple_uvit": ("SimpleUViT", _VIT, 32),
    "simple_vit_with_value_residual": ("SimpleViT", _VIT, 32),
    "simple_vit_with_hyper_connections": ("SimpleViT", {**_VIT, "num_residual_streams": 2}, 32),
    "ats_vit": ("ViT", {**_VIT, "max_tokens_per_depth": (8, 4)}, 32),
    "t2t": ("T2TViT", {**{k: v for k, v in _VIT.items() if k != "patch_size"}, "t2t_layers": ((7, 4), (3, 2))}, 32),
    "pit": ("PiT", {**_VIT, "depth": (1, 1)}, 32),
    "cct": ("CCT", {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "num_layers": 2, "num_heads": 2,
                    "mlp_ratio": 2.0, "num_classes": 5, "positional_embedding": "learnable"}, 32),
    "cross_vit": ("CrossViT", {"image_size": 96, "num_classes": 5, "sm_dim": 16, "lg_dim": 32, "depth": 1,
                               "sm_enc_depth": 1, "lg_enc_depth": 1, "sm_patch_size": 8, "lg_patch_size": 16}, 96),
    "cvt": ("CvT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s3_depth": 1}, 64),
    "levit": ("LeViT", {"image_size": 64, "num_classes": 5, "dim": (32, 48, 64), "depth": 1, "heads": (2, 2, 2),
                        "mlp_mult": 2}, 64),
    "max_vit": ("MaxViT", {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4,
                           "dim_conv_stem": 16}, 32),
    "mobile_vit": ("MobileViT", {"image_size": (64, 64), "dims": (16, 24, 32), "num_classes": 5,
                                 "channels": (8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 32), "depths": (1, 1, 1)}, 64),
    "nest": ("NesT", {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "heads": 2,
                      "num_hierarchies": 2, "block_repeats": (1, 1)}, 32),
    "regionvit": ("RegionViT", {**_STAGES, "dim": (16, 32, 32, 32), "window_size": 2}, 64),
    "scalable_vit": ("ScalableViT", {**_STAGES, "heads": (1, 1, 1, 1), "reduction_factor": (2, 2, 2, 1),
                                     "window_size": (8, 4, None, None)}, 64),
    "twins_svt": ("TwinsSVT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32,
                               "s4_emb_dim": 32, "s3_depth": 1, "s1_local_patch_size": 2, "s2_local_patch_size": 2,
                               "s3_local_patch_size": 2, "s1_global_k": 2, "s2_global_k": 2, "s3_global_k": 2,
                               "s4_global_k": 2}, 64),
    "xcit": ("XCiT", {**_VIT, "cls_depth": 1}, 32),
    "crossformer": ("CrossFormer", {"num_classes": 5, "dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1),
                                    "global_window_size": (4, 2, 1, 1), "local_window_size": 2}, 64),
    "vit_1d": ("ViT", {"seq_len": 64, "channels": 3, **{k: v for k, v in _VIT.items() if k != "image_size"}}, 0),
    "vit_3d": ("ViT", {**_VIT, "frames": 4, "frame_patch_size": 2, "image_patch_size": 8}, -4),
}  # fmt: skip


def _vit_pytorch() -> Mapping[str, Builder]:
    def build(name: str) -> Built:
        class_name, arguments, size = _VITS[name]
        if size < 0:  # a video
            arguments = {k: v for k, v in arguments.items() if k != "patch_size"}
            batch = _values(2, 3, -size, 32, 32)
        else:
            batch = _values(2, 3, size, size) if size else _values(2, 3, 64)
        return getattr(importlib.import_module(f"vit_pytorch.{name}"), class_name)(**arguments), (batch,)

    return {name: functools.partial(build, name) for name in _VITS}


# --- zuko ------------------------------------------------------------------------------------------------------------

_FLOWS: dict[str, dict[str, Any]] = {
    "NSF": {"transforms": 2}, "MAF": {"transforms": 2}, "NICE": {"transforms": 2}, "SOSPF": {"transforms": 2},
    "BPF": {"transforms": 2}, "NAF": {"transforms": 2}, "UNAF": {"transforms": 2}, "GF": {"transforms": 2},
    "NCSF": {"transforms": 2}, "CNF": {"atol": 0.1, "rtol": 0.1}, "GMM": {"components": 3},
}  # fmt: skip


def _zuko() -> Mapping[str, Builder]:
    import zuko

    def build(name: str) -> Built:
        hidden = {} if name in ("GF", "GMM") else {"hidden_features": (64, 64)}
        flow = getattr(zuko.flows, name)(4, 3, **_FLOWS[name], **hidden)
        return _Loss(flow, lambda flow, x, c: -flow(c).log_prob(x).mean()), (
            _values(256, 4).tanh(),
            _values(256, 3),
        )

    return {name: functools.partial(build, name) for name in _FLOWS}


# --- ultralytics -----------------------------------------------------------------------------------------------------

_YOLOS = {
    "yolov3-tiny": "Detection", "yolov5n": "Detection", "yolov6n": "Detection", "yolov8n": "Detection",
    "yolov9t": "Detection", "yolov10n": "Detection", "yolo11n": "Detection", "yolo12n": "Detection",
    "yolo11n-seg": "Segmentation", "yolo11n-pose": "Pose", "yolo11n-obb": "OBB", "yolo11n-cls": "Classification",
}  # fmt: skip


def _ultralytics() -> Mapping[str, Builder]:
    def build(name: str) -> Built:
        from ultralytics.nn import tasks

        model = getattr(tasks, f"{_YOLOS[name]}Model")(f"{name}.yaml", verbose=False)
        # Models are made with parameters that are not trained until a trainer says so.
        return model.requires_grad_(True), (_values(2, 3, 64, 64),)

    return {name: functools.partial(build, name) for name in _YOLOS}


# --- mambapy ---------------------------------------------------------------------------------------------------------


def _mambapy() -> Mapping[str, Builder]:
    from mambapy.jamba import Jamba, JambaLMConfig
    from mambapy.mamba import Mamba, MambaConfig

    def mamba(**more: Any) -> Built:
        return Mamba(MambaConfig(d_model=_DIM, n_layers=2, **more)), (_values(),)

    def jamba() -> Built:
        config = JambaLMConfig(
            d_model=_DIM, n_layers=4, mlp_size=64, num_attention_heads=2, num_key_value_heads=1, num_experts=2
        )
        return Jamba(config), (_values(),)

    return {
        "mamba": mamba, "sequential_scan": functools.partial(mamba, pscan=False),
        "inner_layernorms": functools.partial(mamba, inner_layernorms=True),
        "mup": functools.partial(mamba, mup=True, mup_base_width=16), "jamba": jamba,
    }  # fmt: skip


# --- xlstm -----------------------------------------------------------------------------------------------------------


def _xlstm() -> Mapping[str, Builder]:
    import xlstm as x

    def config(slstm_at: list[int], **more: Any) -> dict[str, Any]:
        small = {"conv1d_kernel_size": 4, "num_heads": 2}
        return {
            "mlstm_block": x.mLSTMBlockConfig(x.mLSTMLayerConfig(**small, qkv_proj_blocksize=4)),
            "slstm_block": x.sLSTMBlockConfig(
                x.sLSTMLayerConfig(**small, backend="vanilla"), x.FeedForwardConfig(proj_factor=1.3)
            ),
            "context_length": _TOKENS, "num_blocks": 2, "embedding_dim": _DIM, "slstm_at": slstm_at, **more,
        }  # fmt: skip

    def stack(slstm_at: list[int]) -> Built:
        return x.xLSTMBlockStack(x.xLSTMBlockStackConfig(**config(slstm_at))), (_values(),)

    def language() -> Built:
        made = x.xLSTMLMModel(x.xLSTMLMModelConfig(**config([1], vocab_size=_VOCABULARY)))
        return made, (_tokens(),)

    return {
        "mlstm": functools.partial(stack, []), "slstm": functools.partial(stack, [0, 1]),
        "both": functools.partial(stack, [1]), "language": language,
    }  # fmt: skip


# --- pytorch_optimizer -----------------------------------------------------------------------------------------------


class _Perceptron(nn.Sequential):
    """Parameters of one and of two dimensions, larger than what a step keeps."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(48, 192), nn.LayerNorm(192), nn.GELU(), nn.Linear(192, 48))


def _pytorch_optimizer() -> Mapping[str, Builder]:
    from pytorch_optimizer import optimizer

    def build(make: Any) -> Built:
        model, batch = _Perceptron(), (_values(64, 48),)
        # What needs a closure, a second gradient or further arguments is no optimizer of an ordinary loop.
        tried = copy.deepcopy(model)
        tried(*batch).square().mean().backward()
        make(tried.parameters()).step()
        return model, batch, make

    return {name: functools.partial(build, make) for name, make in sorted(optimizer.OPTIMIZERS.items())}


FOREIGN: dict[str, Callable[[], Mapping[str, Builder]]] = {
    "x_transformers": _x_transformers,
    "vit_pytorch": _vit_pytorch,
    "zuko": _zuko,
    "ultralytics": _ultralytics,
    "mambapy": _mambapy,
    "xlstm": _xlstm,
    "pytorch_optimizer": _pytorch_optimizer,
}
"""By package, a function that returns a builder for each of its models."""


def seeded(package: str) -> Mapping[str, Builder]:
    """Return the builders of a package that is installed."""
    return {name: _seeded(build) for name, build in FOREIGN[package]().items()}
