"""Steps that differ from the recorded one, as the benchmark of real models makes them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from benchmarks.harness.steps import real_step
from benchmarks.models import hf_models, step_variants
from benchmarks.models.cases import Case
from benchmarks.real_models import steps_of


class _Cosines(TorchDispatchMode):
    """Counts the cosines that a step computes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten.cos.default
        return func(*args, **(kwargs or {}))


def _cosines(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    with _Cosines() as counter:
        model(**batch)
    return counter.count


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_tables_are_filled_in_the_first_forward_and_again_when_they_are_emptied(name: str) -> None:
    model, batch, _ = hf_models.build(name, "small", "cpu")
    before = _cosines(model, batch)
    parameters = {k: p.clone() for k, p in model.named_parameters()}
    kind = type(model)
    empty = step_variants.rotate_lazily(model, batch)
    layers = _cosines(model, batch) - before
    assert layers >= 2
    assert _cosines(model, batch) == before
    empty()
    assert _cosines(model, batch) == before + layers
    assert type(model) is kind
    assert all(torch.equal(p, parameters[k]) for k, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_tables_count_as_memory_and_change_the_output() -> None:
    model, batch, _ = hf_models.build("gpt2", "small", "cpu")
    plain = real_step(model, batch)
    empty = step_variants.rotate_lazily(model, batch)
    first = real_step(model, batch)
    empty()
    second = real_step(model, batch, before=(batch,))
    assert first.same_bits(second)
    assert not first.same_bits(plain)
    assert second.peak_bytes > plain.peak_bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", "2 of 2 rows, 57 of 64 tokens"),
        ("yolos", "6 of 8 rows"),
        ("qwen2_vl", "2 of 2 rows, 57 of 64 tokens"),
    ],
)
def test_a_smaller_batch_is_one_that_the_model_takes(name: str, words: str) -> None:
    model, batch, loss_fn = hf_models.build(name, "small", "cpu")
    smaller, said = step_variants.smaller_batch(model, batch, loss_fn)
    assert said == words
    assert smaller.keys() == batch.keys()
    assert real_step(model, smaller, loss_fn).peak_bytes <= real_step(model, batch, loss_fn).peak_bytes


def test_rows_with_several_entries_stay_together() -> None:
    _, batch, _ = hf_models.build("qwen2_vl", "small", "cpu", copies=2)
    smaller = step_variants.fewer_rows(batch, 3, 4)
    assert {k: len(v) / len(batch[k]) for k, v in smaller.items()} == dict.fromkeys(batch, 0.75)


def test_a_smaller_batch_after_the_full_one_needs_no_more_and_has_the_same_bits() -> None:
    model, batch, loss_fn = hf_models.build("gpt2", "small", "cpu", copies=2)
    rows = list(steps_of("gpt2", "dense", Case(model, batch, loss_fn), shares=(0.8,), smaller=True))
    assert [row.budget for row in rows] == ["none", "80%"]
    assert all(row.smaller_bytes is not None and row.smaller_bytes < row.measured_bytes for row in rows)
    assert rows[1].smaller_bit_equal
    assert all(row.good for row in rows)
