"""A plan in the Trainer of transformers: same run, the predicted peak, and nothing left behind."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import sacplan
from tests.support.plans import discarding

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors import safe_open  # noqa: E402

from sacplan.core.compilation import Compilation  # noqa: E402
from sacplan.integrations.transformers import (  # noqa: E402
    PlanCallback,
    profile_trainer,
    step_arguments,
)
from tests.support.chunks import loss_in_slices  # noqa: E402
from tests.support.slow import slow_after  # noqa: E402
from tests.support.steps import bit_equal  # noqa: E402
from tests.support.trainers import SEQUENCE, VOCAB  # noqa: E402
from tests.support.trainers import trainer as trainer_in  # noqa: E402


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """A trainer; all start from the same weights."""
    return functools.partial(trainer_in, tmp_path)


def train(trainer: Any, **options: Any) -> list[torch.Tensor]:
    """Losses of the steps and of evaluations, and the weights after."""
    transformers.set_seed(3)
    trainer.train(**options)
    logged = [e[k] for e in trainer.state.log_history for k in ("loss", "eval_loss") if k in e]
    assert logged
    return [torch.tensor(logged), *trainer.model.parameters()]


_plans: dict[Any, sacplan.Plan] = {}


def plan_for(trainer: Any) -> sacplan.Plan:
    """At 70 % of what the trainer's step takes; made once for trainers that do the same."""
    args = trainer.args
    key = args.bf16, args.gradient_accumulation_steps
    if key not in _plans:
        _plans[key] = sacplan.plan(profile_trainer(trainer, device="cpu"), "70%", solver="greedy")
    assert _plans[key].units
    return _plans[key]


def planned_modules(model: torch.nn.Module) -> list[str]:
    return [fqn for fqn, m in model.named_modules() if "forward" in vars(m)]


@pytest.mark.parametrize(
    "options",
    slow_after(
        1,
        [
            {"bf16": True, "optim": "sgd", "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
            {},
            {"gradient_accumulation_steps": 3, "max_steps": 2},
            {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
        ],
    ),
    ids=lambda options: "+".join(options) or "plain",
)
def test_a_planned_run_is_the_same_run_in_the_predicted_memory(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    trainer, unplanned = make(**options), make(**options)
    arguments = step_arguments(trainer)
    profile = sacplan.profile(**arguments, device="cpu")
    observer = PlanCallback(sacplan.plan(profile, "200%"))
    unplanned.add_callback(observer)
    expected = train(unplanned)
    assert observer.peaks_bytes[1] == pytest.approx(profile.peak_bytes, abs=256)
    plan = sacplan.plan(profile, "70%", solver="greedy")
    assert plan.units
    assert sacplan.verify(**arguments, plan=plan).peak_bytes == plan.peak_bytes

    callback = PlanCallback(plan)
    trainer.add_callback(callback)
    assert bit_equal(train(trainer), expected)
    assert len(callback.peaks_bytes) == 2
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)
    assert not planned_modules(trainer.model) or options.get("bf16")


@pytest.mark.slow
def test_a_trainer_that_compiles_is_profiled_compiled_and_keeps_no_slices(make: Callable[..., Any]) -> None:
    trainer = make(torch_compile=True, torch_compile_backend="aot_eager")
    profile = profile_trainer(trainer, device="cpu")
    assert profile.fingerprint.setup.compiled == Compilation(backend="aot_eager")
    with pytest.raises(
        sacplan.errors.PlanError, match=r"compiled as a whole\. torch.compile cannot keep slices"
    ):
        loss_in_slices(profile, 2)
    eager = profile_trainer(make(), device="cpu")
    trainer.add_callback(PlanCallback(loss_in_slices(eager, 2)))
    with pytest.raises(
        sacplan.errors.PlanError, match=r"torch_compile=True\). torch.compile cannot keep slices"
    ):
        trainer.train()
    assert not planned_modules(trainer.model)


def test_mixed_precision_leaves_only_what_accelerate_did(make: Callable[..., Any]) -> None:
    trainer, plain = make(bf16=True), make(bf16=True)
    trainer.add_callback(PlanCallback(plan_for(trainer)))
    train(trainer)
    train(plain)
    assert planned_modules(trainer.model) == planned_modules(plain.model) == [""]
    assert vars(trainer.model).keys() == vars(plain.model).keys()


def test_profiling_does_not_touch_the_trainer(make: Callable[..., Any]) -> None:
    trainer = make(bf16=True, gradient_accumulation_steps=2)
    before = dict(vars(trainer))
    state = torch.get_rng_state()
    model_before = {fqn: dict(vars(m)) for fqn, m in trainer.model.named_modules()}
    profile_trainer(trainer, device="h100")
    profile_trainer(trainer, device="cpu", trace="real")
    assert vars(trainer) == before
    assert {fqn: dict(vars(m)) for fqn, m in trainer.model.named_modules()} == model_before
    assert torch.equal(torch.get_rng_state(), state)
    assert trainer.optimizer is None
    assert trainer.accelerator._dataloaders == []
    assert trainer.accelerator.gradient_state.active_dataloader is None
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_trained_trainer_is_profiled_alike(make: Callable[..., Any]) -> None:
    """Accelerate has wrapped the model's forward by then, and there is an optimizer."""
    trainer = make(bf16=True)
    fresh = profile_trainer(trainer, device="cpu")
    train(trainer)
    again = profile_trainer(trainer, device="cpu")
    assert again.peak_bytes == fresh.peak_bytes
    assert [op.name for op in again.program.ops] == [op.name for op in fresh.program.ops]


def test_more_micro_batches_take_their_own_bytes_only(make: Callable[..., Any]) -> None:
    two, four = (
        profile_trainer(make(gradient_accumulation_steps=k, max_steps=1), device="cpu").peak_bytes
        for k in (2, 4)
    )
    assert four - two == 2 * 2 * 4 * SEQUENCE * 8  # batches, tensors, rows, tokens, bytes


def test_checkpoints_are_those_of_the_plain_run(make: Callable[..., Any], tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def keys(run: str) -> list[str]:
        with safe_open(tmp_path / run / "checkpoint-2" / "model.safetensors", "pt") as f:
            return sorted(f.keys())

    expected = train(make(**options, output_dir=str(tmp_path / "plain")))
    whole = make(**options, output_dir=str(tmp_path / "planned"))
    plan = plan_for(whole)
    whole.add_callback(PlanCallback(plan))
    assert bit_equal(train(whole), expected)
    assert keys("planned") == keys("plain")

    resumed = make(**options, output_dir=str(tmp_path / "resumed"))
    callback = PlanCallback(plan)
    resumed.add_callback(callback)
    found = train(resumed, resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert bit_equal(found[1:], expected[1:])
    assert resumed.state.global_step == 4
    assert callback.peaks_bytes[0] == pytest.approx(plan.peak_bytes, abs=256)  # its state was there at once


def test_evaluation_between_the_steps(make: Callable[..., Any]) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1}
    expected = train(make(**options))
    trainer = make(**options)
    plan = plan_for(trainer)
    callback = PlanCallback(plan)
    trainer.add_callback(callback)
    assert bit_equal(train(trainer), expected)
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 3
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)


def test_a_step_that_takes_more_than_the_plan_says_is_a_warning(make: Callable[..., Any]) -> None:
    trainer = make()
    plan = plan_for(trainer)
    small = structs.replace(plan, peak_bytes=plan.peak_bytes * 9 // 10, budget_bytes=None)
    trainer.add_callback(PlanCallback(small))
    with pytest.warns(
        sacplan.SacplanWarning, match=r"\+11\.1% from .*no budget.*4 sequences of 32 tokens.*profile_trainer"
    ):
        train(trainer)

    for options in ({"watch_steps": 0}, {"tolerance": 0.2}):
        quiet = make()
        quiet.add_callback(PlanCallback(small, **options))
        train(quiet)

    tight = make()
    tight.add_callback(PlanCallback(structs.replace(plan, budget_bytes=plan.peak_bytes - 10_000)))
    with pytest.warns(sacplan.SacplanWarning, match=r"step 2 took .* \(budget "):
        train(tight)


def test_what_cannot_be_measured_is_said(make: Callable[..., Any]) -> None:
    trainer = make()
    elsewhere = sacplan.plan(profile_trainer(trainer, device="h100"), "200%")
    trainer.add_callback(PlanCallback(elsewhere))
    with pytest.warns(sacplan.SacplanWarning, match=r"made for h100.* runs on cpu.*watch_steps=0"):
        train(trainer)

    profiled = make()
    profiled.add_callback(PlanCallback(plan_for(profiled)))
    with (
        pytest.warns(sacplan.SacplanWarning, match="a profiler is on"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        train(profiled)
    with pytest.raises(sacplan.errors.PlanError, match="watch_steps"):
        PlanCallback(elsewhere, watch_steps=-1)
    with pytest.raises(sacplan.errors.PlanError, match="tolerance"):
        PlanCallback(elsewhere, tolerance=-0.1)


def test_a_plan_takes_the_place_of_checkpointing(make: Callable[..., Any]) -> None:
    expected = train(make())
    trainer = make(gradient_checkpointing=True)
    plan = plan_for(trainer)
    assert plan == plan_for(make())
    callback = PlanCallback(plan)
    trainer.add_callback(callback)
    assert bit_equal(train(trainer), expected)
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)
    by_hand = make()
    by_hand.model.gradient_checkpointing_enable()
    by_hand.add_callback(PlanCallback(plan))
    with pytest.raises(sacplan.SacplanError, match="gradient_checkpointing_disable"):
        train(by_hand)
    assert not planned_modules(by_hand.model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_the_trainer_switches_on_behind_a_plan(
    make: Callable[..., Any], reentrant: bool
) -> None:
    """Nobody can refuse it then; it costs memory or time, never a bit."""
    expected = train(make())
    trainer = make(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    sacplan.apply(trainer.model, plan_for(make()))
    assert bit_equal(train(trainer), expected)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_plan_that_is_applied_before_the_trainer_is_made(make: Callable[..., Any], bf16: bool) -> None:
    expected = train(make(bf16=bf16))
    spare = make(bf16=bf16)
    plan = plan_for(spare)
    handle = sacplan.apply(spare.model, plan)
    trainer = transformers.Trainer(model=spare.model, args=spare.args, train_dataset=spare.train_dataset)
    assert bit_equal(train(trainer), expected)
    trainer.add_callback(PlanCallback(plan))
    with pytest.raises(sacplan.errors.TraceError, match="a plan is applied"):
        train(trainer)
    if not bf16:
        handle.remove()
        train(trainer)


def test_training_again_and_after_a_failure(make: Callable[..., Any]) -> None:
    class Failing(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = make(gradient_accumulation_steps=2)
    callback = PlanCallback(plan_for(trainer))
    trainer.add_callback(callback)
    trainer.add_callback(Failing)
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    trainer.remove_callback(Failing)
    train(trainer)
    first = callback.peaks_bytes
    train(trainer)
    assert len(first) == len(callback.peaks_bytes) == 2
    assert not planned_modules(trainer.model)
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_a_compiled_run_keeps_its_plan(make: Callable[..., Any]) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plan = plan_for(make())

    def run(units: Any) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        trainer = make(**options)
        callback = PlanCallback(discarding(plan, units), watch_steps=3, tolerance=1.0)
        callback.plan = structs.replace(callback.plan, budget_bytes=None)
        trainer.add_callback(callback)
        return train(trainer), callback.peaks_bytes[2]  # the first compiles

    (expected, peak), (found, planned_peak) = run({}), run(plan.discarded)
    assert bit_equal(found, expected)
    assert planned_peak < 0.9 * peak


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_predicted_too(make: Callable[..., Any]) -> None:
    trainer = make(use_cpu=False, bf16=True)
    plan = sacplan.plan(profile_trainer(trainer, device="cuda"), "100%", solver="greedy")
    callback = PlanCallback(plan)
    trainer.add_callback(callback)
    train(trainer)
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, rel=0.0035)  # "0.35 %", docs/gpu.md


def test_a_plan_for_another_model_is_refused(make: Callable[..., Any]) -> None:
    plan = plan_for(make())
    trainer = make()
    trainer.model.lm_head = torch.nn.Linear(32, VOCAB + 1, bias=False)
    trainer.add_callback(PlanCallback(plan))
    with pytest.raises(sacplan.errors.PlanMismatch, match=r"lm_head\.weight"):
        train(trainer)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sacplan.integrations.transformers")
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    with pytest.raises(ImportError, match=r"pip install 'sacplan\[transformers\]'"):
        importlib.import_module("sacplan.integrations.transformers")
