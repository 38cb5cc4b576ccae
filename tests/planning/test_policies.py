"""``policy``: the modes of today as plans; FLOPs held against torch's own checkpoints and FLOP counter."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sacplan
from sacplan.planning.policies import layers_of
from tests.zoo.language_models import LM, Block, cross_entropy, tokens
from tests.zoo.layers import MLP, FromFunction

LAYERS, VOCAB = 6, 200


def model() -> LM:
    return LM(layers=LAYERS, dim=32, vocab=VOCAB)


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        return sacplan.profile(model(), tokens(2, 32, VOCAB), loss_fn=cross_entropy, device="h100")


def extra_flops(prepare: Any) -> int:
    """FLOPs that a fake step takes more once ``prepare`` has changed the model, by torch's counter."""
    with sacplan.fake_device("h100"):
        lm, batch = model(), tokens(2, 32, VOCAB)
        counts = []
        for change in (lambda _: None, prepare):
            change(lm)
            with FlopCounterMode(display=False) as counter:
                cross_entropy(lm, batch).backward()
            counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


def torch_checkpoint(layers: slice, **options: Any) -> Any:
    """Puts torch's checkpoint around some layers."""

    def prepare(lm: LM) -> None:
        for layer in list(lm.layers)[layers]:
            layer.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, layer.forward, use_reentrant=False, **options
            )

    return prepare


def by_op(every_second: bool) -> Any:
    """torch's selective contexts that keep attention and matmuls, all or every second."""

    def contexts() -> Any:
        seen = {False: 0, True: 0}

        def keep(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func._overloadpacket not in flop_registry:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if "attention" in str(func):
                return CheckpointPolicy.MUST_SAVE
            seen[ctx.is_recompute] += 1
            odd = seen[ctx.is_recompute] % 2 == 1
            return (
                CheckpointPolicy.MUST_SAVE if odd or not every_second else CheckpointPolicy.PREFER_RECOMPUTE
            )

        return create_selective_checkpoint_contexts(keep)

    return torch_checkpoint(slice(None), context_fn=contexts)


@pytest.mark.parametrize(
    ("mode", "option", "torchs"),
    [
        ("full", None, torch_checkpoint(slice(None))),
        ("selective", 2, torch_checkpoint(slice(1, None, 2))),
        ("selective", 4, torch_checkpoint(slice(3, None, 4))),
        ("selective", "op", by_op(every_second=True)),
        ("selective", "op-keep-matmuls", by_op(every_second=False)),
    ],
)
def test_flops_are_those_of_torchs_checkpoints(
    profile: sacplan.Profile, mode: str, option: Any, torchs: Any
) -> None:
    assert sacplan.policy(mode, option, profile=profile).recompute_flops == extra_flops(torchs)


def test_keeping_matmuls_recomputes_the_rest(profile: sacplan.Profile) -> None:
    plan = sacplan.policy("selective", "op-keep-matmuls", profile=profile)
    assert plan.recompute_flops == 0
    assert plan.recompute_ms > 0
    assert plan.peak_bytes < profile.peak_bytes
    names = {decision.op for decision in plan.decisions}
    assert names == {
        f"aten.{op}"
        for op in ("native_layer_norm.default", "add.Tensor", "gelu.default", "native_dropout.default")
    }


def test_every_second_matmul_counts_within_one_layer() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.ReLU())))

    stack = nn.Sequential(*(layer() for _ in range(3)))  # a counter that they share would alternate
    plan = sacplan.policy("selective", "op", profile=profiled(stack))
    assert list(plan.units) == ["0", "1", "2"]
    for sites in plan.discarded.values():
        assert [site for site in sites if "addmm" in site.op] == [("aten.addmm.default", 0, "2")]


def test_k_counts_checkpointed_layers(profile: sacplan.Profile) -> None:
    units = {k: list(sacplan.policy("selective", k, profile=profile).units) for k in (2, "2", 5, LAYERS)}
    assert units[2] == units["2"] == ["layers.1", "layers.3", "layers.5"]
    assert units[5] == ["layers.4"]
    assert units[LAYERS] == [f"layers.{LAYERS - 1}"]
    every, full = (sacplan.policy(*mode, profile=profile) for mode in (("selective", 1), ("full",)))
    assert dict(every.units) == dict(full.units)


def test_a_policy_is_a_plan_like_any_other(profile: sacplan.Profile, tmp_path: Path) -> None:
    plan = sacplan.policy("full", profile=profile)
    assert (plan.status, plan.budget_bytes, plan.gap) == ("policy", None, None)
    assert plan.baseline_peak_bytes == profile.peak_bytes
    assert all(0 < ratio <= 1 for ratio in plan.discard_ratios.values())
    plan.save(tmp_path / "plan.json")
    assert sacplan.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("option", [0, -1, "-2", True, 2.0, "2.5", "every-op", "", None, LAYERS + 1])
def test_options_that_make_no_sense_list_those_that_do(profile: sacplan.Profile, option: Any) -> None:
    with pytest.raises(sacplan.errors.PlanError, match=r"(?s)integer.*'op', 'op-keep-matmuls'"):
        sacplan.policy("selective", option, profile=profile)


def test_modes_are_listed(profile: sacplan.Profile) -> None:
    with pytest.raises(sacplan.errors.PlanError, match="'none', 'full', 'selective'"):
        sacplan.policy("everything", profile=profile)
    for mode in ("none", "full"):
        with pytest.raises(sacplan.errors.PlanError, match="takes no option"):
            sacplan.policy(mode, 2, profile=profile)


def test_layers_by_pattern(profile: sacplan.Profile) -> None:
    assert layers_of(profile.program, "layers.*") == [f"layers.{i}" for i in range(LAYERS)]
    assert layers_of(profile.program, "layers.[13].mlp") == ["layers.1.mlp", "layers.3.mlp"]
    with pytest.raises(sacplan.errors.PlanError, match=r"matches layers='h\.\*'.*'layers\.\*'"):
        sacplan.policy("full", profile=profile, layers="h.*")
    with pytest.raises(sacplan.errors.PlanError, match=r"discard nothing in the layers 'embed'"):
        sacplan.policy("full", profile=profile, layers="embed")


def expert() -> nn.Module:
    return MLP(16, 32)


def mixture() -> nn.Module:
    """More experts than there are layers; they are siblings, but none reads what another made."""
    return FromFunction(
        lambda self, x: torch.stack([expert(x) for expert in self.experts]).sum(0),
        experts=nn.ModuleList(expert() for _ in range(5)),
    )


def two_stacks() -> nn.Module:
    """An encoder with a differing last part, a decoder, and nothing named layers."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.decoder["h"]:
            x = torch.tanh(block(x))
        return x

    encoder = nn.Sequential(*(Block(16, 2, 0.0) for _ in range(2)), expert())
    decoder = nn.ModuleDict({"h": nn.ModuleList(mixture() for _ in range(3))})
    return FromFunction(forward, encoder=encoder, decoder=decoder)


def gated() -> nn.Module:
    """Differs from an expert in one of three names."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x)) * self.down(F.gelu(self.up(x)))

    return FromFunction(forward, up=nn.Linear(16, 32), down=nn.Linear(32, 16), gate=nn.Linear(16, 16))


def profiled(module: nn.Module) -> sacplan.Profile:
    return sacplan.profile(module, torch.randn(2, 8, 16), device="h100")


def test_layers_are_found_by_structure() -> None:
    found = layers_of(profiled(two_stacks()).program)
    assert found == ["encoder.0", "encoder.1", "decoder.h.0", "decoder.h.1", "decoder.h.2"]


def test_layers_may_differ_in_a_part() -> None:
    hybrid = nn.Sequential(gated(), expert(), expert(), gated())
    assert layers_of(profiled(hybrid).program) == ["0", "1", "2", "3"]


def test_without_layers_nothing_is_done_silently() -> None:
    parallel = profiled(mixture())
    with pytest.raises(sacplan.errors.PlanError, match=r"no layers found.*'experts\.0'"):
        sacplan.policy("full", profile=parallel)
    assert not sacplan.policy("none", profile=parallel).units
