"""Batches that differ in length, packing and accumulation in trainers: no step over its budget without a warning.

A plan that a trainer's own profile leads to holds for all steps, and nothing is said. One for a shorter batch is over
its budget sooner or later, and the step that is says so before it runs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from sacplan.integrations._watch import _SCALARS_BYTES

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.support.slow import slow_after  # noqa: E402
from tests.support.steps import bit_equal  # noqa: E402
from tests.support.trainers import VOCAB, llama, short_run  # noqa: E402

IGNORED, STEPS = -100, 6


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Of 4 to 96 tokens; the longest are near the end, as nothing shuffles here."""
    drawn = torch.Generator().manual_seed(0)
    lengths = [4 + 92 * i * i // (count - 1) ** 2 for i in range(count)]
    rows = [torch.randint(1, VOCAB, (n,), generator=drawn) for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As the collator of stanford_alpaca does: to the longest of the batch."""
    ids = pad_sequence([one["input_ids"] for one in samples], True)
    labels = pad_sequence([one["labels"] for one in samples], True, IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": ids != 0}


@contextlib.contextmanager
def everything_said() -> Iterator[list[str]]:
    """Collect the warnings of sacplan inside, in order."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", sacplan.SacplanWarning)
        yield found
    found.extend(str(one.message) for one in said if issubclass(one.category, sacplan.SacplanWarning))


def check(said: list[str], peaks: tuple[int, ...], plan: sacplan.Plan, *, holds: bool) -> None:
    assert len(peaks) == STEPS
    over = [peak for peak in peaks if peak > plan.budget_bytes + _SCALARS_BYTES]
    assert not over if holds else over
    if holds:
        # A batch without padding runs other ops of attention than the longest, which is said, too.
        assert all("the step is not the one that was planned for" in one for one in said)
    else:
        assert any("larger than the plan was made for" in one for one in said)


def hf_trainer(directory: Path, data: Any, **options: Any) -> Any:
    made = transformers.Trainer(
        llama(),
        transformers.TrainingArguments(**short_run(directory, max_steps=STEPS, **options)),
        train_dataset=data,
        data_collator=padded,
    )
    made.remove_callback(transformers.PrinterCallback)
    made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    return made


@pytest.mark.parametrize(
    ("accumulated", "holds"), slow_after(2, [(2, True), (1, False), (1, True), (2, False)])
)
def test_the_trainer_of_transformers(tmp_path: Path, accumulated: int, holds: bool) -> None:
    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    options = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 4 // accumulated}
    trainer = hf_trainer(tmp_path, texts(), **options)
    planned_for = trainer if holds else hf_trainer(tmp_path, texts()[:8], **options)
    plan = sacplan.plan(profile_trainer(planned_for, device="cpu"), "80%" if holds else "100%", "greedy")
    assert plan.fingerprint.setup.accumulation_steps == accumulated
    callback = PlanCallback(plan, watch_steps=STEPS)
    trainer.add_callback(callback)
    with everything_said() as said:
        trainer.train()
    check(said, callback.peaks_bytes, plan, holds=holds)


def certified(arguments: dict[str, Any], make_batch: Callable[[int, int], Any]) -> sacplan.Certificate:
    """The run with two plans by length, in 85 % of the memory that it takes without one."""
    lengths = [len(one["input_ids"]) for one in texts()][: 4 * STEPS]
    how = {name: arguments[name] for name in ("loss_fn", "optimizer")} | {"batch": 4, "seed": None}
    whole = sacplan.certify(arguments["model"], make_batch, lengths, "cpu", **how).rows[0].allocated_bytes
    budget = f"{int(0.85 * whole)}B"
    return sacplan.certify(arguments["model"], make_batch, lengths, "cpu", budget=budget, buckets=2, **how)


def test_each_step_of_a_trainer_has_the_plan_for_its_lengths(tmp_path: Path) -> None:
    from sacplan.integrations.transformers import PlanCallback, step_arguments

    def make_batch(n: int, seq: int) -> dict[str, Any]:
        ids = torch.ones(n, seq, dtype=torch.long)
        ids[1:, -1] = 0  # padding, as in all batches but the first
        batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": ids != 0}
        return {"micro_batches": (batch,), "num_items_in_batch": torch.tensor(n * seq)}

    arguments = step_arguments(hf_trainer(tmp_path, texts()))
    found = certified(arguments, make_batch)
    short, long = (plan for _, plan in found.plans)
    assert not short.decisions
    weights, flops, peaks = [], [], ()
    # The counter is a mode of its own under which attention runs otherwise, so it has runs of its own.
    for callback, counter in product(
        (None, PlanCallback([short, long], watch_steps=STEPS)),
        (contextlib.nullcontext(), FlopCounterMode(display=False)),
    ):
        trainer = hf_trainer(tmp_path, texts())
        if callback is not None:
            trainer.add_callback(callback)
        with everything_said() as said, counter:
            trainer.train()
        assert not any("larger than" in one for one in said)
        if isinstance(counter, FlopCounterMode):
            flops.append(counter.get_total_flops())
        else:
            weights.append([*trainer.model.parameters()])
            peaks = () if callback is None else callback.peaks_bytes
    assert bit_equal(*weights)
    assert len(peaks) == STEPS
    assert max(peaks) == pytest.approx(found.rows[-1].allocated_bytes, abs=256)
    assert flops[1] - flops[0] == found.rows[-1].recompute_flops > 0
    with pytest.raises(sacplan.errors.PlanError, match="no plan was given"):
        PlanCallback([])


@pytest.mark.slow
def test_each_step_of_lightning_has_the_plan_for_its_lengths() -> None:
    pytest.importorskip("lightning")
    from sacplan.integrations.lightning import PlanCallback, step_arguments
    from tests.support.lightning import Llama, quiet_trainer

    def make_batch(n: int, seq: int) -> dict[str, Any]:
        ids = torch.ones(n, seq, dtype=torch.long)
        ids[1:, -1] = 0  # padding, as in all batches but the first
        return {"batch": {"input_ids": ids, "labels": ids.clone(), "attention_mask": ids != 0}}

    loader = torch.utils.data.DataLoader(texts()[: 4 * STEPS], batch_size=4, collate_fn=padded)
    arguments = step_arguments(quiet_trainer(max_steps=STEPS), Llama(), loader)
    found = certified(arguments, make_batch)
    short, long = (plan for _, plan in found.plans)
    assert not short.decisions
    plain, planned = Llama(), Llama()
    quiet_trainer(max_steps=STEPS).fit(plain, loader)
    callback = PlanCallback([short, long], watch_steps=STEPS)
    with everything_said() as said:
        quiet_trainer(callback, max_steps=STEPS).fit(planned, loader)
    assert not any("larger than" in one for one in said)
    assert bit_equal([*plain.parameters()], [*planned.parameters()])
    assert len(callback.peaks_bytes) == STEPS
    assert max(callback.peaks_bytes) == pytest.approx(found.rows[-1].allocated_bytes, abs=256)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["bfd", "wrapped", None])
def test_the_sft_trainer_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str | None) -> None:
    """Best fit decreasing puts whole texts into rows of different lengths, which the collator makes into one."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from sacplan.integrations.transformers import PlanCallback, profile_trainer
    from tests.integrations.test_trl import tokenizer

    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    rows = [{"input_ids": (one["input_ids"] % 12 + 1).tolist()} for one in texts(64)]
    arguments = trl.SFTConfig(
        **short_run(tmp_path, max_steps=STEPS, per_device_train_batch_size=2),
        bf16=False,
        gradient_checkpointing=False,
        max_length=96,
        packing=packing is not None,
        packing_strategy=packing or "wrapped",
        gradient_accumulation_steps=2,
    )
    trainer = trl.SFTTrainer(
        llama(), args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.remove_callback(transformers.PrinterCallback)
    plan = sacplan.plan(profile_trainer(trainer, device="cpu"), "85%", "greedy")
    callback = PlanCallback(plan, watch_steps=STEPS)
    trainer.add_callback(callback)
    with everything_said() as said:
        trainer.train()
    check(said, callback.peaks_bytes, plan, holds=True)
