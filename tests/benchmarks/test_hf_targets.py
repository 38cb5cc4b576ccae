"""The table of model types by name: its page, and the benchmark that makes it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks import hf_targets
from benchmarks.hf_targets import Outcome, outcome_of, page, read, shallow, why

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")


def test_the_page_is_what_the_figures_give() -> None:
    assert hf_targets.PAGE.read_text(encoding="utf-8") == page(*read())


def test_each_model_type_is_there_once_and_most_have_a_step() -> None:
    about, found = read()
    names = [o.model_type for o in found]
    assert len(set(names)) == len(names) == about["model_types"]
    assert sum(o.profiled for o in found) > 0.8 * len(found)
    assert all(o.profiled == bool(o.peak_bytes and o.inputs and o.model_class) for o in found)
    assert all(o.reason for o in found if o.configuration != "default")


@pytest.mark.parametrize(
    ("model_type", "inputs"),
    [
        ("bert", "input_ids"),
        ("vit", "pixel_values"),
        # Towers and models around a model, whose features or sizes are one level deeper.
        pytest.param("colpali", "pixel_values, input_ids, attention_mask", marks=pytest.mark.slow),
        pytest.param("sam2", "pixel_values, input_points, input_labels", marks=pytest.mark.slow),
        pytest.param("speech-encoder-decoder", "input_values, decoder_input_ids", marks=pytest.mark.slow),
    ],
)
def test_a_model_type_by_its_defaults(model_type: str, inputs: str) -> None:
    found = outcome_of(model_type)
    assert (found.configuration, found.inputs, found.reason) == ("default", inputs, "")
    assert found.peak_bytes > 0


def test_what_has_no_step_says_why() -> None:
    found = outcome_of("bark")
    assert not found.profiled
    assert "none of the arguments of its forward is known" in found.reason
    assert "bark" in page({"machine": {"machine": "x", "cores": 1, "threads": 1, "torch": "2"}, "date": "-",
                           "model_types": 3, "parts": ["a"]}, [found])  # fmt: skip


def test_what_has_no_step_says_why_in_words() -> None:
    _, found = read()
    said = {why(o.reason) for o in found if not o.profiled}
    assert "its default configuration does not run" not in said  # which says nothing of the reason
    assert (
        why("ImportError: A requires the timm library but it")
        == "needs the library timm, which was not installed"
    )


def test_layers_that_are_alike_are_left_out() -> None:
    config = {
        "num_hidden_layers": 32, "layer_types": ["a", "b", "a", "b"], "hidden_size": 64, "num_experts": 8,
        "vision_config": {"depth": 24, "num_hidden_layers": None}, "encoder_layers": 1,
        "widths": [7] * 32, "pinpoints": [7] * 5, "per_layer_config": {"1": {"a": 1}, "5": {"a": 2}},
    }  # fmt: skip
    assert shallow(config) == {
        "num_hidden_layers": 2, "layer_types": ["a", "b"], "hidden_size": 64, "num_experts": 8,
        "vision_config": {"depth": 2, "num_hidden_layers": None}, "encoder_layers": 1,
        "widths": [7] * 2, "pinpoints": [7] * 5, "per_layer_config": {"1": {"a": 1}},
    }  # fmt: skip


def test_the_page_says_what_was_not_tried() -> None:
    about = {"machine": {"machine": "x", "cores": 1, "threads": 1, "torch": "2"}, "date": "-", "parts": ["a"]}
    done = Outcome("bert", "default", "BertForMaskedLM", "masked LM", "input_ids", "its own", 2**30)
    assert "2 others were not tried yet" in page({**about, "model_types": 3}, [done])
    assert "not tried" not in page({**about, "model_types": 1}, [done])
