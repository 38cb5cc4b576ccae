"""Models and loops of torchtune, from the package index, unchanged. Skipped where torchtune is not installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sacplan
from tests.support.steps import bit_equal

# torchtune 0.6.1 needs a torchao that has ``torchao.dtypes.nf4tensor``, such as 0.13, and is asked for by name.
pytest.importorskip("torchtune", reason="torchtune is not installed", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(0, 1))


def on_meta(make: Any, *arguments: Any) -> Any:
    """As torchtune's distributed recipes make a model: on meta, and rotary embeddings on a device afterwards."""
    with torch.device("meta"):
        model = make(*arguments).bfloat16()
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
    return model


def small(seed: int = 0) -> Any:
    from torchtune.models.llama3_2 import llama3_2

    torch.manual_seed(seed)
    return llama3_2(
        vocab_size=256, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=64,
        intermediate_dim=128,
    )  # fmt: skip


def batch() -> Any:
    tokens = torch.randint(0, 256, (4, 64))
    return tokens, tokens


@pytest.mark.parametrize("name", ["llama3_2.llama3_2_1b", "qwen2_5.qwen2_5_0_5b", "gemma.gemma_2b"])
def test_models_on_meta(name: str) -> None:
    import importlib

    package, _, function = name.partition(".")
    model = on_meta(getattr(importlib.import_module(f"torchtune.models.{package}"), function))
    keys = list(model.state_dict())
    tokens = torch.empty(1, 512, dtype=torch.long, device="meta")
    profile = sacplan.profile(model, (tokens, tokens), loss_fn, torch.optim.AdamW, "h100")
    state = 4 * sum(p.nbytes for p in model.parameters())  # parameters, gradients, and two states of AdamW
    assert state < profile.peak_bytes < 2 * state
    plan = sacplan.plan(profile, "smallest", solver="greedy")
    assert plan.peak_bytes <= profile.peak_bytes
    assert list(model.state_dict()) == keys


def test_low_rank_adapters_on_meta() -> None:
    from torchtune.models.llama3_2 import lora_llama3_2_1b
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    model = on_meta(lora_llama3_2_1b, ["q_proj", "v_proj"])
    set_trainable_params(model, get_adapter_params(model))
    tokens = torch.empty(1, 512, dtype=torch.long, device="meta")
    profile = sacplan.profile(model, (tokens, tokens), loss_fn, torch.optim.AdamW, "h100")
    assert len(profile.recorded.gradients) == len(get_adapter_params(model))


def test_a_step_with_a_plan() -> None:
    model, given = small(), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = sacplan.profile(model, given, loss_fn, optimizer, "cpu")
    plan = sacplan.plan(profile, "80%")
    assert sacplan.verify(model, given, plan, loss_fn, optimizer, run="real").peak_bytes == plan.peak_bytes
    plain = copy.deepcopy(model)
    sacplan.apply(model, plan)
    for each in (plain, model):
        loss_fn(each, given).backward()
    assert bit_equal([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_optimizer_in_backward() -> None:
    """``optimizer_in_bwd`` of the recipes: the hooks, and the wrapper that they keep for checkpoints."""
    from torchtune.training import OptimizerInBackwardWrapper, register_optim_in_bwd_hooks

    model, given = small(), batch()
    after = sacplan.profile(
        model, given, loss_fn, lambda ps: torch.optim.AdamW(ps, foreach=False), "cpu"
    ).peak_bytes
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}
    register_optim_in_bwd_hooks(model, optimizers)
    wrapper = OptimizerInBackwardWrapper({n: optimizers[p] for n, p in model.named_parameters()})
    profile = sacplan.profile(model, given, loss_fn, device="cpu")
    assert profile.peak_bytes <= after
    empty = sacplan.plan(profile, "100%")
    assert sacplan.verify(model, given, empty, loss_fn, run="real").peak_bytes == profile.peak_bytes
    assert all(not optimizer.state for optimizer in wrapper.optim_map.values())  # they are as they were


def test_its_own_checkpointing_is_left_alone() -> None:
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.training import set_activation_checkpointing

    model = small()
    set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    profile = sacplan.profile(model, batch(), loss_fn, device="cpu")
    assert any(name.startswith("layers.0.") for name in profile.fingerprint.setup.checkpointed)
