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


NEEDS = {
    name: pytest.mark.skipif(not family.installed, reason=f"{name} is not installed")
    for name, family in zoo_models.FAMILIES.items()
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("timm/resnet", marks=NEEDS["timm"]),
        pytest.param("torchvision/mobilenetv2", marks=NEEDS["torchvision"]),
        pytest.param("diffusers/DiTTransformer2DModel", marks=[NEEDS["diffusers"], pytest.mark.slow]),
        pytest.param("torch_geometric/GCN", marks=NEEDS["torch_geometric"]),
        pytest.param("peft/lora", marks=NEEDS["peft"]),
        pytest.param("torch_geometric/GCN+inference", marks=NEEDS["torch_geometric"]),
    ],
)
def test_a_small_model_of_each_package_is_as_predicted(name: str) -> None:
    found = zoo.outcome_of(name)
    assert (found.status, found.reason, found.source) == (TRAINED, "", name.split("/")[0])
    assert abs(found.worst_error) < 1e-4
    assert found.good
