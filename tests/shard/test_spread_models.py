"""Models of transformers spread over four gloo ranks, beside one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sacplan._shard.places import CallPattern
from tests.support.spread import (
    MESHES,
    Case,
    Made,
    beside_one_process,
    first_axis,
    homes_of,
    ok,
    on_ranks,
    random_homes,
)

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,  # test_spread has the same for small models, test_mesh_ranks for three of these
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
]


def of_tokens(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss


def of_images(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(pixel_values=images, labels=labels).loss
    return loss


def tokens_of(model: nn.Module) -> Made:
    ids = torch.randint(0, 64, (4, 16))
    labels = ids.clone()
    labels[0, :13] = labels[2, 4:9] = -100
    return model.double(), (ids, labels), of_tokens


def gpt2() -> Made:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return tokens_of(transformers.GPT2LMHeadModel(config))


def llama(attention: str = "sdpa") -> Made:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=64, max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    return tokens_of(transformers.LlamaForCausalLM(config))


def vit() -> Made:
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, num_labels=8,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).double()
    return model, (torch.randn(4, 3, 16, 16).double(), torch.randint(0, 8, (4,))), of_images


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama eager": functools.partial(llama, "eager"),
    "vit": vit,
}
BATCH = {
    "gpt2": CallPattern("transformer.wte", "aten.embedding.default", 0, ("", "S0,*")),
    "llama": CallPattern("model.embed_tokens", "aten.embedding.default", 0, ("", "S0,*")),
    "vit": CallPattern(
        "vit.embeddings.patch_embeddings.projection", "aten.convolution.default", 0, ("S0,*",)
    ),
}
MEGATRON = {
    "gpt2": {
        "transformer.h.*.attn.c_attn.weight": "R,S1/3", "transformer.h.*.attn.c_attn.bias": "R,S0/3",
        "transformer.h.*.attn.c_proj.weight": "R,S0", "transformer.h.*.mlp.c_fc.weight": "R,S1",
        "transformer.h.*.mlp.c_fc.bias": "R,S0", "transformer.h.*.mlp.c_proj.weight": "R,S0",
        "transformer.wte.weight": "R,S0",
    },
    "llama": {
        "model.layers.*.self_attn.q_proj.weight": "R,S0", "model.layers.*.self_attn.k_proj.weight": "R,S0",
        "model.layers.*.self_attn.v_proj.weight": "R,S0", "model.layers.*.self_attn.o_proj.weight": "R,S1",
        "model.layers.*.mlp.gate_proj.weight": "R,S0", "model.layers.*.mlp.up_proj.weight": "R,S0",
        "model.layers.*.mlp.down_proj.weight": "R,S1", "lm_head.weight": "S1,S0",
    },
    "vit": {"classifier.weight": "R,S0", "classifier.bias": "R,S0"},
}  # fmt: skip


def _cases() -> dict[str, Case]:
    one, two = MESHES["4"], MESHES["2x2"]
    cases: dict[str, Any] = {}
    for name, make in MODELS.items():
        kind = name.split()[0]
        batch = (BATCH[kind],)
        megatron = functools.partial(homes_of, mesh=two, patterns=MEGATRON[kind])
        cases[f"{name} fsdp"] = (make, two, functools.partial(first_axis, mesh=two), batch)
        cases[f"{name} dp x tp"] = (make, two, megatron, batch)
        if name == kind:
            cases[f"{name} tp"] = (make, two, megatron, ())
            cases[f"{name} ddp"] = (make, two, functools.partial(homes_of, mesh=two, patterns={}), batch)
            for seed in range(10):
                mesh = (one, two)[seed % 2]
                homes = functools.partial(random_homes, mesh=mesh, seed=seed)
                cases[f"{name} random {seed}"] = (make, mesh, homes, ())
    return {name: functools.partial(beside_one_process, *case) for name, case in cases.items()}


CASES = _cases()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_one_process_does(found: list[dict[str, Any]], case: str) -> None:
    close = 1e-10 if case.startswith("vit") else 1e-5  # the others compute losses in float32
    for result in ok(found, case):
        assert result["loss"] < close
        assert result["gradients"] < close
        assert result["parameters"] < 10 * close
        assert not result["never_met"]
        assert not result["wrong_parts"]
