"""The batch size that ``auto_find_batch_size`` finds by running out of memory is known before the run."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_leaves

import sacplan
from sacplan.torch_compat.allocations import allocation_events

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from sacplan.integrations.transformers import PlanCallback, step_arguments  # noqa: E402
from tests.support.trainers import SEQUENCE, trainer  # noqa: E402

STARTS_AT = 16


class OutOfMemory(transformers.TrainerCallback):  # type: ignore[misc]
    """Fails as PyTorch does where memory ends: in a step that takes more than there is, by allocation events."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.peaks: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        of_step = [*given["model"].parameters(), *tree_leaves(given["optimizer"].state_dict()["state"])]
        batch = state.train_batch_size * SEQUENCE * 8 * 2
        self.alive = batch + sum(t.nbytes for t in of_step if isinstance(t, torch.Tensor))
        self.profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.profiler.stop()
        self.peaks.append(max(accumulate(allocation_events(self.profiler), initial=self.alive)))
        if self.peaks[-1] > self.n_bytes + 256:  # the loss of the step before, and norms
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def batch_of(n: int) -> dict[str, Any]:
    tokens = torch.ones(n, SEQUENCE, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return {"micro_batches": (batch,), "num_items_in_batch": torch.tensor(n * SEQUENCE)}


@pytest.mark.slow
def test_the_batch_size_of_auto_find_batch_size(tmp_path: Path) -> None:
    auto = trainer(tmp_path, per_device_train_batch_size=STARTS_AT, auto_find_batch_size=True)
    step = step_arguments(auto)
    there_is = int(0.7 * sacplan.profile(**step, device="cpu").peak_bytes)
    found = sacplan.max_batch(
        step["model"], batch_of, f"{there_is}B", device="cpu", at_most=STARTS_AT,
        loss_fn=step["loss_fn"], optimizer=step["optimizer"],
    )  # fmt: skip
    assert 0 < found.unplanned_batch_size < found.batch_size <= STARTS_AT

    memory = OutOfMemory(there_is)
    auto.add_callback(memory)
    auto.train()
    sizes = [STARTS_AT]
    while sizes[-1] > found.unplanned_batch_size:
        sizes.append(int(sizes[-1] * 0.9))  # as Accelerate goes down
    assert auto._train_batch_size == sizes[-1]
    assert sum(peak > there_is + 256 for peak in memory.peaks) == len(sizes) - 1

    planned = trainer(tmp_path, per_device_train_batch_size=found.batch_size, auto_find_batch_size=True)
    memory = OutOfMemory(there_is)
    planned.add_callback(PlanCallback(found.plan, watch_steps=0))
    planned.add_callback(memory)
    planned.train()
    assert planned._train_batch_size == found.batch_size
    assert len(memory.peaks) == planned.args.max_steps
    assert max(memory.peaks) == pytest.approx(found.plan.peak_bytes, abs=256)
