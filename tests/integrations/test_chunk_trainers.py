"""Plans with chunks in the Trainers of transformers and of Lightning: nearly the same run, in the predicted memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan

BOTH = ("recompute", "chunk")


def close(got: list[Any], expected: list[Any], rtol: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= rtol * other.norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "max_grad_norm": 0.5}],
    ids=["plain", "bf16"],
)
def test_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sacplan.integrations.transformers import PlanCallback, profile_trainer
    from tests.support.trainers import trainer as trainer_in

    def trained(plan: sacplan.Plan | None) -> Any:
        how = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, **options}
        trainer = trainer_in(tmp_path, layers=1, vocab=2000, dropout=0.0, **how)
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
