"""Plans with chunks in the Trainers of transformers and of Lightning: nearly the same run, in the predicted memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan

VOCAB, SEQUENCE = 2000, 32
BOTH = ("recompute", "chunk")


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))


def close(got: list[Any], expected: list[Any], rtol: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= rtol * other.norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "max_grad_norm": 0.5}],
    ids=["plain", "bf16"],
)
def test_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    def trained(plan: sacplan.Plan | None) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, logging_steps=1, optim="sgd",
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=0.1, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=transformers.LlamaForCausalLM(config),
            args=arguments,
            train_dataset=[{"input_ids": t, "labels": t} for t in tokens(16)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if plan is None:
            plan = sacplan.plan(profile_trainer(trainer, device="cpu"), "70%", techniques=BOTH)
        trainer.add_callback(PlanCallback(plan))
        return trainer

    chunked = trained(None)
    (callback,) = [c for c in chunked.callback_handler.callbacks if isinstance(c, PlanCallback)]
    assert [chunk.unit for chunk in callback.plan.chunks] == ["lm_head"]
    plain = trained(sacplan.plan(profile_trainer(chunked, device="cpu"), "200%"))
    for trainer in (plain, chunked):
        trainer.train()
    assert callback.differences == ()
    assert max(callback.peaks_bytes) == callback.plan.peak_bytes
    assert "forward" not in vars(chunked.model.lm_head)
    loss, plain_loss = (
        [torch.tensor(e["loss"]) for e in t.state.log_history if "loss" in e] for t in (chunked, plain)
    )
    close(loss, plain_loss, rtol=1e-3 if options else 2e-6)
    close([*chunked.model.parameters()], [*plain.model.parameters()], rtol=1e-3 if options else 1e-6)
