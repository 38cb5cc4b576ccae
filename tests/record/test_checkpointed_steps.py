"""Steps with ``torch.utils.checkpoint`` in them: profiled as they are, and planned around it.

The truth is the peak of a real step, by the allocator's events, and the gradients of the step without a plan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import sacplan
from sacplan.core.decisions import Recompute
from tests.support.slow import slow_after
from tests.support.steps import assert_carried_out, mean_square
from tests.zoo.layers import FeedForward


class Model(nn.Module):
    """Six blocks, of which two in the middle are checkpointed: each, or both and again the second within."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(32, 32), nn.ModuleList(FeedForward(32) for _ in range(6))
        self.how, self.reentrant = how, reentrant

    def _again(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return self._again(self.blocks[3], self.blocks[2](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.first(x)))
        if self.how == "nested":
            x = self._again(self._middle, x)
        elif self.how == "function":
            x = self._again(lambda x: self.blocks[3](self.blocks[2](x)).exp().sin() * 3.0, x)
        else:
            x = self._again(self.blocks[3], self._again(self.blocks[2], x))
        return self.blocks[5](self.blocks[4](x))


@pytest.mark.parametrize("reentrant", slow_after(1, [False, True]))
@pytest.mark.parametrize("how", ["each", "nested", "function"])
def test_profiled_as_it_is_and_planned_around(how: str, reentrant: bool) -> None:
    model, batch = Model(how, reentrant), torch.randn(128, 32)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    again = profile.fingerprint.setup.checkpointed
    assert {"blocks.2", "blocks.3"} <= set(again)
    assert not {"", "blocks.1", "blocks.4"} & set(again)
    as_it_is = sacplan.plan(profile, "100%")
    assert as_it_is.peak_bytes == profile.peak_bytes
    seen = sacplan.verify(model, batch, as_it_is, mean_square, run="real")
    assert seen.peak_bytes == profile.peak_bytes
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < profile.peak_bytes
    assert "checkpoints by itself (blocks.*)" in " ".join(plan.provenance.remarks or ())
    places = [f"{site.unit}.{site.place}" for site in plan.decisions if isinstance(site, Recompute)]
    assert places
    assert not any(block in place for place in places for block in ("blocks.2.", "blocks.3."))
    assert_carried_out(model, batch, plan)


def test_a_model_of_transformers_with_its_own_switch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=2000, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, 2000, (2, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    loss_fn = lambda model, batch: model(**batch).loss  # noqa: E731

    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    model.gradient_checkpointing_disable()
    assert profile.peak_bytes < sacplan.profile(model, batch, loss_fn, device="cpu").peak_bytes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < profile.peak_bytes  # the logits
    assert_carried_out(model, batch, plan, loss_fn)


def test_a_wrapper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(32) for _ in range(4)))
    model[1] = checkpoint_wrapper(model[1])
    batch = torch.randn(128, 32)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < profile.peak_bytes
    assert_carried_out(model, batch, plan)
