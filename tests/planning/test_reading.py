"""Plans in words: layers, bytes and times are those of the recording; two plans are compared call site by call site."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from typer.testing import CliRunner

import sacplan
from sacplan.cli.app import app
from sacplan.core.names import braced
from sacplan.planning.layers import read_layers, together
from tests.support.plans import discarding
from tests.zoo.layers import FeedForward, Stack

ROWS, DIM = 512, 16


def model() -> Stack:
    return Stack(FeedForward(DIM, dropout=0.0) for _ in range(4))


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    batch = torch.randn(ROWS, DIM)
    return sacplan.profile(model(), batch, lambda m, b: m(b).square().mean(), torch.optim.AdamW, device="cpu")


@pytest.fixture(scope="module")
def gelus(profile: sacplan.Profile) -> sacplan.Plan:
    """Discards what GELU returns, in three of four layers."""
    unplanned = sacplan.policy("none", profile=profile)
    plan = discarding(unplanned, {f"layers.{i}": [("aten.gelu.default", 0)] for i in (0, 1, 3)}, profile)
    found = profile.footprint(plan.decisions)
    return structs.replace(plan, peak_bytes=found.peak_bytes, recompute_ms=found.recompute_ms)


def test_layers_that_do_the_same_are_read_once(profile: sacplan.Profile, gelus: sacplan.Plan) -> None:
    (layer,) = read_layers(gelus)
    assert layer.layers == ("layers.0", "layers.1", "layers.3")
    assert layer.name == "layers.{0-1,3} (3 layers)"
    (part,) = layer.recomputed
    assert str(part) == "gelu of act"
    assert part.n_bytes == ROWS * 4 * DIM * 4  # float32
    ops = [op for op in profile.program.ops if op.name == "aten.gelu.default"]
    assert part.ms == pytest.approx(ops[0].time_ms)
    up = next(part for part in layer.kept if "up" in part.modules)
    assert up.ops == "matmul"
    assert up.n_bytes == ROWS * 4 * DIM * 4


def test_a_whole_model_is_read_layer_by_layer(profile: sacplan.Profile) -> None:
    """Where the unit is the model itself, whose name is empty."""
    sites = [site for site in profile.program.call_sites("") if site.op == "aten.gelu.default"]
    unplanned = sacplan.policy("none", profile=profile)
    plan = discarding(unplanned, {"": sites}, profile)
    assert list(plan.units) == [""]
    (layer,) = read_layers(plan)
    assert layer.name == "layers.0-3 (4 layers)"
    assert [str(part) for part in layer.recomputed] == ["gelu of act"]
    assert "\n\n\n" not in str(plan)


def test_bytes_add_up_to_what_autograd_keeps(profile: sacplan.Profile, gelus: sacplan.Plan) -> None:
    """Against the table of modules, which is made from the recording with the plan applied."""
    table = sacplan.Report(profile, gelus).module_table()
    (layer,) = read_layers(gelus)
    own = table[[name == "layers.0" or name.startswith("layers.0.") for name in table.index]]
    assert sum(part.n_bytes or 0 for part in layer.recomputed) == own["discarded_bytes"].sum()
    assert sum(part.ms or 0.0 for part in layer.recomputed) == pytest.approx(own["recompute_ms"].sum())


def test_a_plan_is_printed(gelus: sacplan.Plan) -> None:
    text = str(gelus)
    assert max(map(len, text.splitlines())) <= 100
    for said in (
        "Plan for Stack on cpu",
        "AdamW",
        "bit-equal",
        "gelu of act",
        "layers.{0-1,3} (3 layers)",
        "All else",
    ):
        assert said in text
    assert "\n" not in repr(gelus)


def test_what_runs_in_slices_is_read(profile: sacplan.Profile) -> None:
    chunk = sacplan.core.decisions.Chunk("layers.1.up", "module", 4, 0)  # type: ignore[attr-defined]
    unplanned = sacplan.policy("none", profile=profile)
    plan = structs.replace(unplanned, decisions=(chunk,), units={"layers.1.up": sacplan.UnitPlan(0.0, 0.0)})
    (layer,) = read_layers(plan)
    assert layer.name == "layers.1"
    assert layer.sliced == ("up: the module, forward and backward, in 4 slices",)


def test_a_plan_without_bytes_is_read(gelus: sacplan.Plan) -> None:
    units = {
        fqn: structs.replace(unit, kept_bytes=(), discarded_bytes=(), discarded_ms=())
        for fqn, unit in gelus.units.items()
    }
    (layer,) = read_layers(structs.replace(gelus, units=units))
    assert layer.recomputed[0].n_bytes is None
    wrong = structs.replace(gelus.units["layers.0"], kept_bytes=(1, 2))
    with pytest.raises(sacplan.errors.PlanError, match="2 kept_bytes"):
        structs.replace(gelus, units={**gelus.units, "layers.0": wrong})


def test_names_of_layers() -> None:
    assert together(["h.0", "h.1", "h.2"]) == "h.0-2 (3 layers)"
    assert together([""]) == "(the model itself)"
    assert together(["block1.layers.0", "block1.layers.3"]) == "block1.layers.{0,3} (2 layers)"


def test_show(profile: sacplan.Profile, gelus: sacplan.Plan, tmp_path) -> None:  # type: ignore[no-untyped-def]
    profile.save(tmp_path / "profile.json.gz")
    gelus.save(tmp_path / "a.json")

    def run(*words: str) -> str:
        result = CliRunner().invoke(
            app, [w if w[0] == "-" or "." not in w else str(tmp_path / w) for w in words]
        )
        assert result.exit_code == 0, result.stderr
        return result.stdout

    shown = run("show", "a.json")
    assert "gelu of act" in shown
    facts = json.loads(run("show", "a.json", "--json"))
    assert facts["what"] == "plan"
    assert facts["layers"][0]["recomputed"][0]["bytes"] == ROWS * 4 * DIM * 4
    assert "layers.0-3 (4 layers)" in run("show", "profile.json.gz")
    facts = json.loads(run("show", "profile.json.gz", "--json"))
    assert facts["what"] == "profile"
    kept = sum(part["bytes"] * len(one["layers"]) for one in facts["layers"] for part in one["kept"])
    own = sacplan.Report(profile).module_table()
    assert kept == own[own.index != "(outside the model)"]["kept_bytes"].sum()


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), unique=True, max_size=8)
)
def test_names_in_braces_stand_for_exactly_these(names: list[str]) -> None:
    def expanded(name: str) -> list[str]:
        parts = [part.strip("{}").split(",") for part in re.split(r"\.(?![^{]*})", name)]
        return [".".join(one) for one in itertools.product(*parts)]

    assert sorted(one for name in braced(names) for one in expanded(name)) == sorted(names)
