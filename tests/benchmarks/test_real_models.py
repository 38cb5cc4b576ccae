"""Plans on real steps of small models of transformers, against the profiler's allocation events."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sacplan

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks.harness.steps import real_step
from benchmarks.models import hf_models
from benchmarks.real_models import FAMILY, TOLERANCE, claim, plans_of, read, rows_of


@pytest.mark.filterwarnings("ignore:the step is not the one")  # a smaller batch may run other ops
@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "mixtral", "vit", "llama+lora", "llama+accumulation"])
def test_predicted_peak_is_the_measured_one_and_bits_are_equal(name: str) -> None:
    unplanned, planned, *lazy = rows_of(name, shares=(0.8,), copies=2)
    for row in (unplanned, planned):
        assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=TOLERANCE)
        assert row.smaller_bytes < row.measured_bytes
    assert planned.budget == "80%"
    assert planned.measured_bytes <= planned.budget_bytes < unplanned.measured_bytes
    assert planned.bit_equal
    assert planned.smaller_bit_equal
    assert [row.variant for row in lazy] == ["lazy cache", "lazy cache"]
    assert lazy[1].bit_equal


@pytest.mark.slow
def test_values_of_steps_with_other_dropout_masks_differ() -> None:
    model, batch, _ = hf_models.build("gpt2", "small", "cpu")
    once, again, other = (real_step(model, batch, seed=seed) for seed in (1, 1, 2))
    assert once.same_bits(again)
    assert not once.same_bits(other)
    assert all(p.grad is None for p in model.parameters())


def test_where_a_share_is_infeasible_budgets_start_at_the_smallest_feasible_one() -> None:
    model, batch, _ = hf_models.build("bert", "small", "meta")
    profile = sacplan.profile(model, batch, device="cpu")
    found = list(plans_of(profile, (0.5, 0.01)))
    assert [words.split()[0] for words, _, _ in found][-1] == "smallest"
    budgets = [plan.budget_bytes for _, plan, _ in found]
    assert budgets == sorted(budgets, reverse=True)
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.plan(profile, "1%")
    assert budgets[-1] == caught.value.smallest_feasible_bytes


@pytest.mark.parametrize("name", ["gpt2", "qwen2_vl", "yolos"])
def test_copies_join_batches(name: str) -> None:
    torch.manual_seed(0)
    _, one, _ = hf_models.build(name, "small", "meta")
    _, three, _ = hf_models.build(name, "small", "meta", copies=3)
    assert {k: 3 * len(v) for k, v in one.items()} == {k: len(v) for k, v in three.items()}


def test_dropout_is_put_where_the_config_has_none() -> None:
    model, _, _ = hf_models.build("llama", "small", "meta", dropout=0.25)
    assert model.config.attention_dropout == 0.25
    model, _, _ = hf_models.build("gpt2", "small", "meta", dropout=0.25)
    assert model.config.attn_pdrop == 0.1  # its own


def test_the_docs_say_what_the_figures_are() -> None:
    rows = read()
    root = Path(__file__).parents[2]
    assert claim(rows) in (root / "docs" / "figures.md").read_text()


def test_every_architecture_and_variant_is_an_entry() -> None:
    assert set(hf_models.NAMES) <= set(FAMILY)
