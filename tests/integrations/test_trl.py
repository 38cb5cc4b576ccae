"""A plan in trainers of TRL: same run, the predicted peak, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from sacplan.integrations.transformers import PlanCallback, profile_trainer, step_arguments  # noqa: E402
from tests.support.slow import slow_after  # noqa: E402
from tests.support.steps import bit_equal  # noqa: E402
from tests.support.trainers import llama, short_run  # noqa: E402

WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "and", "slept", "under", "my"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(count: int, length: int = 31) -> Any:
    """Of one length, so that all batches are alike."""
    drawn = torch.randint(3, len(WORDS), (count, length), generator=torch.Generator().manual_seed(0))
    return datasets.Dataset.from_list([{"text": " ".join(WORDS[i] for i in row)} for row in drawn.tolist()])


def preferences(count: int) -> Any:
    texts = [row["text"] for row in sentences(3 * count, length=10)]
    names = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list([dict(zip(names, texts[i::count], strict=True)) for i in range(count)])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A trainer; all start from the same weights."""
    # So that the columns of the head that are looked at together do not outweigh this small model.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)

    def make_trainer(kind: str = "SFT", peft_config: Any = None, beside: bool = False, **options: Any) -> Any:
        model = llama()
        arguments = getattr(trl, f"{kind}Config")(
            **short_run(tmp_path, bf16=False, gradient_checkpointing=False) | options
        )
        trainer = getattr(trl, f"{kind}Trainer")(
            model,
            args=arguments,
            train_dataset=sentences(32) if kind == "SFT" else preferences(32),
            processing_class=tokenizer(),
            peft_config=peft_config,
            **({"ref_model": type(model)(model.config)} if beside else {}),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    return make_trainer


def train(trainer: Any) -> list[torch.Tensor]:
    """Losses and metrics of the steps, and the weights after."""
    transformers.set_seed(3)
    trainer.train()
    logged = [e[k] for e in trainer.state.log_history for k in ("loss", "entropy", "num_tokens") if k in e]
    assert len(logged) == 3 * trainer.state.global_step
    return [torch.tensor(logged), *trainer.model.parameters()]


def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj", "v_proj"], r=4)


@pytest.mark.parametrize(
    ("options", "adapters"),
    slow_after(
        2,
        [
            ({}, None),
            ({"bf16": True, "padding_free": True, "max_length": None}, None),
            ({"gradient_accumulation_steps": 2, "max_steps": 2}, None),
            ({"loss_type": "dft"}, lora),
            ({"kind": "DPO"}, lora),
            ({"kind": "DPO", "precompute_ref_log_probs": True}, None),
        ],
    ),
    ids=["plain", "bf16+padding_free", "accumulation", "dft+lora", "DPO+lora", "DPO"],
)
def test_a_planned_run_is_the_same_run_in_the_predicted_memory(
    make: Callable[..., Any], options: dict[str, Any], adapters: Callable[[], Any] | None
) -> None:
    adapted = {} if adapters is None else {"peft_config": adapters()}
    expected = train(make(**options, **adapted))
    trainer = make(gradient_checkpointing=True, **options, **adapted)  # TRL's default
    arguments = step_arguments(trainer)
    plan = sacplan.plan(sacplan.profile(**arguments, device="cpu"), "80%", solver="greedy")
    assert plan.units
    callback = PlanCallback(plan)
    trainer.add_callback(callback)
    assert bit_equal(train(trainer), expected)
    assert callback.peaks_bytes[1] == pytest.approx(plan.peak_bytes, abs=256)


def test_profiling_does_not_touch_the_metrics(make: Callable[..., Any]) -> None:
    trainer = make()
    before = {**vars(trainer), "_metrics": copy.deepcopy(trainer._metrics)}
    profile_trainer(trainer, device="h100")
    profile_trainer(trainer, device="cpu", trace="real")
    assert vars(trainer) == before


def test_what_is_not_supported_is_refused_by_name(make: Callable[..., Any]) -> None:
    with pytest.warns(FutureWarning, match="label_smoothing_factor"):
        smoothed = make(label_smoothing_factor=0.1)
    with pytest.raises(
        sacplan.errors.TraceError, match="label_smoothing_factor or compute_loss_func with TRL"
    ):
        profile_trainer(smoothed, device="cpu")
    offloading = make()
    offloading.args.activation_offloading = True  # TRL itself wants an accelerator for it
    with pytest.raises(sacplan.errors.TraceError, match="activation_offloading"):
        profile_trainer(offloading, device="cpu")
    with pytest.raises(
        sacplan.errors.TraceError, match=r"a reference model of TRL \(precompute_ref_log_probs"
    ):
        profile_trainer(make("DPO", beside=True), device="cpu")
