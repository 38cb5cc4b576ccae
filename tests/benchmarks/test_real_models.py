"""Plans on real steps of small models of transformers and other packages, against the profiler's allocation events."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks import zoo
from benchmarks.compatibility import TRAINED, outcome_of
from benchmarks.models import zoo_models
from tests.support.slow import slow_after


@pytest.mark.parametrize("model_type", slow_after(1, ["smollm3", "vit_msn", "bros", "squeezebert"]))
def test_peaks_of_an_architecture_made_by_rule_are_as_predicted(model_type: str) -> None:
    found = outcome_of(model_type)
    assert (found.status, found.reason, found.source) == (TRAINED, "", "rules")
    assert abs(found.worst_error) < 1e-4
    assert found.good
    assert found.bit_equal == found.within_budget == 3


@pytest.mark.parametrize(
    "name",
    [
        "timm/resnet",
        "torchvision/mobilenetv2",
        pytest.param("diffusers/DiTTransformer2DModel", marks=pytest.mark.slow),
        "torch_geometric/GCN",
        "peft/lora",
        "torch_geometric/GCN+inference",
    ],
)
def test_a_small_model_of_each_package_is_as_predicted(name: str) -> None:
    pytest.importorskip(zoo_models.FAMILIES[name.split("/")[0]].package)
    found = zoo.outcome_of(name)
    assert (found.status, found.reason, found.source) == (TRAINED, "", name.split("/")[0])
    assert abs(found.worst_error) < 1e-4
    assert found.good
