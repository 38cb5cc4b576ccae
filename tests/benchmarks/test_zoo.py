"""The benchmark over models of other packages: its tables, and single models where the packages are installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import compatibility, zoo
from benchmarks.compatibility import FAILED, NOT_BUILT, TRAINED, Outcome
from benchmarks.models import foreign_models, zoo_models
from benchmarks.real_models import Row

needs = {
    name: pytest.mark.skipif(not family.installed, reason=f"{name} is not installed")
    for name, family in zoo_models.FAMILIES.items()
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("timm/resnet", marks=needs["timm"]),
        pytest.param("torchvision/mobilenetv2", marks=needs["torchvision"]),
        pytest.param("diffusers/DiTTransformer2DModel", marks=needs["diffusers"]),
        pytest.param("torch_geometric/GCN", marks=needs["torch_geometric"]),
        pytest.param("peft/lora", marks=needs["peft"]),
        pytest.param("torch_geometric/GCN+inference", marks=needs["torch_geometric"]),
    ],
)
def test_a_small_model_of_each_package_is_as_predicted(name: str) -> None:
    found = zoo.outcome_of(name)
    assert (found.status, found.reason, found.source) == (TRAINED, "", name.split("/")[0])
    assert abs(found.worst_error) < 1e-4
    assert found.good


ROW = Row(
    model="a/b", family="a", trace="fake", parameters=1, budget="none", budget_bytes=None, predicted_bytes=10,
    measured_bytes=10, recompute_share=0.0, wall_ms=1.0, bit_equal=None, seconds=1.0,
)  # fmt: skip
PLANNED = dataclasses.replace(
    ROW, budget="85%", budget_bytes=9, predicted_bytes=8, measured_bytes=9, bit_equal=True
)


def test_only_what_is_not_as_it_should_be_is_remarked() -> None:
    over = dataclasses.replace(PLANNED, measured_bytes=10)
    found = [
        Outcome("a/exact", TRAINED, steps=(ROW,)),
        Outcome("a/near", TRAINED, steps=(ROW, PLANNED)),
        Outcome("a/over", TRAINED, steps=(ROW, over)),
        Outcome("a/failed", FAILED, "no plan"),
        Outcome("a/unbuilt", NOT_BUILT, "no image"),
    ]
    assert zoo.remarks(found) == [
        f"a/near: -1 B (85%): {found[1].why_not_exact}",
        f"a/over: -2 B (85%); within 0, bit-equal 1 of 1: {found[2].why_not_exact}",
        "a/failed: failed: no plan",
        "a/unbuilt: not built: no image",
    ]
    assert compatibility.summary(found, zoo.WHAT) == (
        "3 models of other packages run, 5 steps: 1 exact to the byte in every step, worst error -20.000%; 1 of 2 "
        "planned steps within the budget, 2 bit-equal; 1 failed, 1 not built"
    )


def test_slices_in_inference_need_not_be_bit_equal_to_be_good() -> None:
    assert Outcome("a/b+inference", TRAINED, steps=(ROW, dataclasses.replace(PLANNED, bit_equal=None))).good
    assert not Outcome("a/b", TRAINED, steps=(ROW, dataclasses.replace(PLANNED, bit_equal=False))).good


def test_packages_that_are_missing_are_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = zoo_models.Family(
        "torch", lambda: {"one": lambda: (torch.nn.ReLU(), ()), "two": lambda: None}, ("two",)
    )
    gone = zoo_models.Family("no_such_package", lambda: pytest.fail("not installed"))
    monkeypatch.setattr(zoo, "FAMILIES", {"there": there, "gone": gone})
    everything = ["there/one", "there/two", "there/two+inference"]
    assert zoo.chosen([]) == (everything, ["gone"])
    assert zoo.chosen(["there/two", "there", "gone/three"]) == (
        ["there/two", "there/one", "there/two+inference"],
        ["gone"],
    )
    for word in ("elsewhere", "there/three"):
        with pytest.raises(ValueError, match="there are"):
            zoo.chosen([word])


def test_nothing_installed_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(zoo, "FAMILIES", {"gone": zoo_models.Family("no_such_package", dict)})
    assert zoo.main(["--json", str(tmp_path / "zoo.json")]) == 0
    assert "gone is not installed: its models are left out" in capsys.readouterr().out


def test_a_model_that_its_package_cannot_build_is_no_fault_of_the_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> zoo_models.Built:
        raise ImportError("needs torch_cluster")

    monkeypatch.setattr(zoo, "FAMILIES", {"there": zoo_models.Family("torch", lambda: {"one": fails})})
    found = zoo.outcome_of("there/one")
    assert (found.status, found.reason, found.good) == (NOT_BUILT, "ImportError: needs torch_cluster", True)


def test_the_smallest_model_of_a_module_is_told_by_its_name() -> None:
    smallest = zoo_models.smallest_name
    assert smallest(["convnext_base", "convnext_atto", "convnext_tiny"]) == "convnext_atto"
    assert smallest(["deit3_base_patch16_224", "deit_tiny_patch16_224"]) == "deit_tiny_patch16_224"
    assert smallest(["vgg16", "vgg11_bn", "vgg11"]) == "vgg11"
    assert smallest(["efficientnet_b3", "efficientnet_b0"]) == "efficientnet_b0"


def test_the_docs_say_what_the_committed_figures_are() -> None:
    rows = json.loads(zoo.FIGURES.read_text(encoding="utf-8"))["rows"]
    errors = [max(abs(s["predicted_bytes"] - s["measured_bytes"]) for s in row["steps"]) for row in rows]
    exact, others = errors.count(0), {error for error in errors if error}
    page = (zoo.FIGURES.parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    assert others == {8}
    timm = sum(row["model_type"].startswith("timm/") and "+" not in row["model_type"] for row in rows)
    assert f"{len(rows)} models of timm ({timm})" in page
    assert f"{exact} are exact to the byte in every step, the other one 8 bytes off" in page


def test_the_table_of_foreign_packages_is_of_the_committed_figures() -> None:
    found = compatibility.read(zoo.FOREIGN_FIGURES)[1]
    assert found
    assert zoo.table(found) in zoo.PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.zoo --table"
    assert zoo.chosen(["foreign"]) == zoo.chosen(list(foreign_models.FOREIGN))
    assert {o.model_type.partition("/")[0] for o in found} <= foreign_models.FOREIGN.keys()
    off = Outcome("a/off", TRAINED, steps=(ROW, PLANNED))
    assert zoo.table([off, Outcome("a/unbuilt", NOT_BUILT)]).splitlines()[2:] == [
        "| `a` | 1 of 2 | 0 | -11.111% | 1 of 1 | 1 of 1 | off -11.11% |"
    ]
