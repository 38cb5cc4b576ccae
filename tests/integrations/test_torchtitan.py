"""torchtitan's Llama, from the package index, unchanged. Skipped where torchtitan is not installed.

torchtitan 0.2 and 0.3 import Triton, which the CPU build of torch does not bring along.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sacplan
from tests.support.steps import bit_equal

pytest.importorskip("triton", reason="torchtitan needs Triton")
pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def llama(flavor: str, place: str) -> Any:
    """The model of a configuration, with torchtitan's own SDPA: FlexAttention has no backward pass on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs[flavor](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    with torch.device(place):
        return config.build()


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(0, 1))


def test_llama_3_8b_on_meta() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = llama("8B", "meta")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    tokens = torch.empty(1, 1024, dtype=torch.long, device="meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    profile = sacplan.profile(
        model, (tokens, tokens), loss_fn, torch.optim.AdamW, "h100", 
        ranks=sacplan.FSDP2(8, ["layers.*", ""], mp_policy=policy),
    )  # fmt: skip
    shards = 3 * 8_030_261_248 * 4 // 8  # parameters and two states of AdamW, in float32
    assert profile.peak_bytes > shards
    assert sacplan.plan(profile, "smallest", solver="greedy").peak_bytes < profile.peak_bytes


def test_a_plan_in_the_place_of_its_checkpointing(tmp_path: Path) -> None:
    """``parallelize_llama`` builds its configuration and calls ``apply``, as here."""
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    class Planned(ActivationCheckpointing):
        @dataclass(kw_only=True, slots=True)
        class Config(ActivationCheckpointing.Config):
            plan: str = "plan.json"

        def apply(self, model: Any) -> None:
            sacplan.apply(model, self.config.plan)

    model = llama("debugmodel", "cpu")
    tokens = torch.randint(0, 2048, (4, 256))
    given = tokens, tokens
    profile = sacplan.profile(model, given, loss_fn, device="cpu")
    plan = sacplan.plan(profile, "80%")
    assert sacplan.verify(model, given, plan, loss_fn, run="real").peak_bytes == plan.peak_bytes
    plan.save(tmp_path / "plan.json")
    plain = copy.deepcopy(model)
    Planned.Config(plan=str(tmp_path / "plan.json")).build(dump_folder="").apply(model)
    for each in (plain, model):
        loss_fn(each, given).backward()
    assert bit_equal([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_its_own_checkpointing_is_left_alone() -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC

    model = llama("debugmodel", "meta")
    FullAC.Config().build(dump_folder="").apply(model)
    tokens = torch.empty(1, 64, dtype=torch.long, device="meta")
    profile = sacplan.profile(model, (tokens, tokens), loss_fn, device="h100")
    assert any(name.startswith("layers.0.") for name in profile.fingerprint.setup.checkpointed)
