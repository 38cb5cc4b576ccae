"""The table of architectures: its page, and the benchmark that makes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import compatibility
from benchmarks.compatibility import FAILED, NOT_BUILT, TRAINED, Outcome, lost, outcome_of, page, read
from benchmarks.harness.processes import Limits, in_workers
from benchmarks.harness.results import write_results
from benchmarks.models import small_configs
from benchmarks.real_models import Row
from tests.support.slow import slow_after


def test_the_page_is_what_the_figures_give() -> None:
    assert compatibility.PAGE.read_text() == page(*read())


def test_the_figures_are_of_more_than_210_architectures_each_within_its_budgets_and_bit_equal() -> None:
    about, found = read()
    trained = [o for o in found if o.status == TRAINED]
    assert len(trained) > 210
    assert len({o.model_type for o in found}) == len(found)
    assert all(len(o.planned) == 3 for o in trained)
    assert all(o.bit_equal == 3 for o in trained)
    assert about["machine"].keys() >= {"machine", "torch", "transformers"}


@pytest.mark.parametrize(
    "model_type", slow_after(1, ["smollm3", "vit_msn", "bros", "gpt_bigcode", "poolformer", "squeezebert"])
)
def test_peaks_of_an_architecture_made_by_rule_are_as_predicted(model_type: str) -> None:
    found = outcome_of(model_type)
    assert (found.status, found.reason, found.source) == (TRAINED, "", "rules")
    assert abs(found.worst_error) < 1e-4
    assert found.good
    assert found.bit_equal == found.within_budget == 3


def _outcome(model_type: str, *errors: int) -> Outcome:
    """Of steps whose predicted peaks are off by so many bytes."""
    row = Row(
        model=model_type, family="rules", trace="fake", parameters=1, budget="none", budget_bytes=None,
        predicted_bytes=0, measured_bytes=100_000, recompute_share=0.0, wall_ms=1.0, bit_equal=None, seconds=1.0,
    )  # fmt: skip
    steps = [dataclasses.replace(row, predicted_bytes=100_000 + error) for error in errors]
    return Outcome(model_type, TRAINED, steps=tuple(steps))


def test_the_page_says_why_a_peak_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_configs, "REASONS", {"explained": "it holds its states"})
    rows = [
        _outcome("exact", 0, 0),
        _outcome("number", 0, -8),
        _outcome("explained", -16, -8),
        _outcome("unknown", 4),
    ]
    assert [bool(o.why_not_exact) for o in rows] == [False, True, True, True]
    text = page({"machine": {"machine": "x", "cores": 1, "threads": 1, "torch": "2"}, "date": "-"}, rows)
    section = text.split("## Not exact")[1]
    assert re.findall(r"^\| `(\w+)` \| ([-+]\d+ B) ", section, re.MULTILINE) == [
        ("explained", "-16 B"), ("number", "-8 B"), ("unknown", "+4 B"),
    ]  # fmt: skip
    assert "it holds its states" in section
    assert "not known" in section


def test_what_lacks_a_package_is_not_built_and_says_so() -> None:
    case = next(t for t in ("layoutlmv2", "dinat") if t in small_configs.architectures())
    found = outcome_of(case)
    if found.status == TRAINED:
        pytest.skip(f"the packages of {case} are installed here")
    assert found.status == NOT_BUILT
    assert "requires" in found.reason
    assert found.good


def test_a_failure_of_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("some | pipe")

    monkeypatch.setattr(compatibility, "steps_of", fails)
    found = outcome_of("smollm3")
    assert (found.status, found.good) == (FAILED, False)
    assert found.reason == "not one of sacplan's errors: RuntimeError: some | pipe"
    assert "some \\| pipe" in page(
        {"machine": {"machine": "x", "cores": 1, "threads": 1}, "date": "-"}, [found]
    )


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_replaced() -> None:
    found = list(in_workers(["smollm3"], outcome_of, lost, limits=Limits(seconds=1)))
    assert [(o.model_type, o.status, o.reason) for o in found] == [
        ("smollm3", FAILED, "not done after 1 s of processor time")
    ]


def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    row = Row(
        model="a", family="rules", trace="fake", parameters=1, budget="none", budget_bytes=None, predicted_bytes=10,
        measured_bytes=8, recompute_share=0.0, wall_ms=1.0, bit_equal=None, seconds=1.0,
    )  # fmt: skip
    planned = dataclasses.replace(row, budget="85%", budget_bytes=7, bit_equal=False)
    outcome = Outcome("a", TRAINED, model_class="A", source="rules", steps=(row, planned))
    write_results(tmp_path / "figures.json", [outcome.as_dict()] * 2, row_a_line=True, summary="none")
    assert read(tmp_path / "figures.json")[1] == [outcome, outcome]
    assert (outcome.exact, outcome.worst_error, outcome.within_budget, outcome.bit_equal) == (
        False,
        0.25,
        0,
        0,
    )
    assert not outcome.good


# --- small configs ---------------------------------------------------------------------------------------------------


def test_towers_run_as_part_of_their_architecture() -> None:
    types = small_configs.architectures()
    assert "qwen2_vl" in types
    assert not [t for t in types if t.startswith("qwen2_vl_")]
    assert {"llama", "vit", "whisper", "t5", "mixtral"} <= set(types)


def test_configs_inside_are_made_small_too() -> None:
    case = small_configs.build("git")
    config: Any = case.model.config
    assert (config.hidden_size, config.vision_config.hidden_size) == (
        small_configs.WIDTH,
        small_configs.WIDTH,
    )
    assert config.vision_config.num_hidden_layers == small_configs.LAYERS
    assert case.batch["pixel_values"].shape[0] == case.batch["input_ids"].shape[0] == small_configs.ROWS


def test_one_layer_of_each_kind_is_kept() -> None:
    case = small_configs.build("gpt_oss")
    kinds = case.model.config.layer_types  # type: ignore[union-attr]
    assert sorted(kinds) == ["full_attention", "sliding_attention"]


def test_every_rule_and_override_is_about_something_there_is() -> None:
    for pattern, _ in small_configs.RULES:
        re.compile(pattern)
    known = set(small_configs.configuration_auto.CONFIG_MAPPING_NAMES)
    assert set(small_configs.OVERRIDES) | set(small_configs.UNSHRUNK) <= known


def test_building_leaves_no_gradient_and_the_same_model_each_time() -> None:
    one, other = small_configs.build("smollm3"), small_configs.build("smollm3")
    assert all(p.grad is None for p in one.model.parameters())
    assert all(
        torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )
    assert all(torch.equal(one.batch[k], other.batch[k]) for k in one.batch)
