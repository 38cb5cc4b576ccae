"""Plan files: what is read is what was written, or an error of the family; its types forbid what the loader does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from msgspec import structs
from torch import nn

import sacplan
from sacplan.core.decisions import Chunk, as_decisions
from sacplan.core.fingerprint import Fingerprint
from sacplan.planning.make import provenance_of
from sacplan.planning.plan import PlanFile, _digest
from sacplan.planning.reading import plan_rows
from tests.support.damage import set_to
from tests.support.plans import discarding
from tests.zoo.language_models import LM, cross_entropy, tokens

VALIDATOR = jsonschema.Draft202012Validator(msgspec.json.schema(PlanFile))


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    return sacplan.profile(LM(layers=2), tokens(), loss_fn=cross_entropy, device="h100")


@pytest.fixture(scope="module")
def plan(profile: sacplan.Profile) -> sacplan.Plan:
    """With all that a file can hold: pins, ranks, a target, values that are dropped twice."""
    made = sacplan.policy("full", profile=profile, keep=["head"])
    twice = {
        unit: {site: 2 - i % 2 for i, site in enumerate(sites)} for unit, sites in made.discarded.items()
    }
    return structs.replace(
        made,
        decisions=as_decisions(twice),
        ranks=type(made.ranks).of(2, ["layers.*"]),
        fingerprint=structs.replace(made.fingerprint, target={"name": "hf:gpt2", "batch": 2}),
    )


@pytest.fixture(scope="module")
def contents(plan: sacplan.Plan, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "plan.json"


# --- what is written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_there_and_back(plan: sacplan.Plan, tmp_path: Path, name: str) -> None:
    plan.save(tmp_path / name)
    loaded = sacplan.Plan.load(tmp_path / name)
    assert loaded == plan
    assert loaded.provenance == plan.provenance
    assert list(loaded.units) == list(plan.units)
    assert type(loaded) is sacplan.Plan
    assert loaded.op_decisions == plan.op_decisions


def test_one_decision_per_line_before_the_fingerprint(plan: sacplan.Plan, contents: bytes) -> None:
    lines = contents.decode().splitlines()
    assert sum('"technique": "recompute"' in line for line in lines) == len(plan.decisions)
    assert list(json.loads(contents))[:2] == ["what", "schema_version"]
    assert contents.index(b'"decisions"') < contents.index(b'"fingerprint"')


def test_who_made_it_with_what(profile: sacplan.Profile) -> None:
    smallest = sacplan.plan(profile, "smallest", "rotor")
    made = {
        "plan": sacplan.plan(profile, "99%", sacplan.Milp(gap=0.01), objective="flops", keep=["head"]),
        "unplanned": sacplan.plan(profile, 50),
        "smallest": smallest,
        "rotor": sacplan.plan(profile, f"{smallest.peak_bytes}B", "rotor"),
        "policy": sacplan.policy("selective", 2, profile=profile),
    }
    for plan in made.values():
        found = plan.provenance
        assert (found.sacplan, found.torch) == (sacplan.__version__, str(torch.__version__))
        assert (found.trace, found.runtime, found.techniques) == ("fake", "cost-model", ("recompute",))
        assert found.date.utcoffset() is not None
        assert found.solver == plan.solver
    by = {name: plan.provenance for name, plan in made.items()}
    assert (by["plan"].solver, by["plan"].options["gap"], by["plan"].options["seed"]) == ("milp", 0.01, 0)
    assert (by["plan"].objective, by["plan"].budget, by["plan"].keep) == ("flops", "99%", ("head",))
    assert (by["unplanned"].solver, by["unplanned"].budget) == ("none", 50)
    assert (by["smallest"].budget, by["smallest"].options) == (None, {"slots": 500, "stages": 256})
    assert by["rotor"].solver == "rotor"
    assert by["policy"].options == {"mode": "selective", "option": 2, "layers": None}
    assert by["policy"].objective is None


def test_the_host_budget_is_in_the_file_where_one_was_given(profile: sacplan.Profile, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"budget": "99%", "solver": "greedy", "techniques": ("recompute", "offload")}
    given = sacplan.plan(profile, **asked, host_budget="4GiB")
    free = sacplan.plan(profile, **asked)
    for name, made, found in (("given", given, "4GiB"), ("free", free, None)):
        made.save(tmp_path / f"{name}.json")
        written = json.loads((tmp_path / f"{name}.json").read_text())
        VALIDATOR.validate(written)
        # A file without one is as it was before there was the field.
        assert written["provenance"].get("host_budget") == found
        assert sacplan.Plan.load(tmp_path / f"{name}.json").provenance == made.provenance
        assert dict(plan_rows(made)).get("host budget") == found


def test_plans_are_equal_whoever_made_them(plan: sacplan.Plan, profile: sacplan.Profile) -> None:
    assert structs.replace(plan, provenance=provenance_of(profile, "somebody")) == plan
    assert structs.replace(plan, peak_bytes=1) != plan
    assert plan != "a plan"


# --- the schema -------------------------------------------------------------------------------------------


def test_the_schema_accepts_what_is_written(profile: sacplan.Profile, plan: sacplan.Plan, path: Path) -> None:
    for one in (plan, sacplan.plan(profile, "99%"), sacplan.plan(profile, 50)):
        one.save(path)
        VALIDATOR.validate(json.loads(path.read_text()))


CHANGES = {
    "another type": set_to("peak_bytes", to="1"),
    "a float for an integer": set_to("peak_bytes", to=1.5),
    "a bool for a number": set_to("step_ms", to=True),
    "a negative size": set_to("peak_bytes", to=-1),
    "a 400-digit integer": set_to("decisions", 0, "occurrence", to=10**400),
    "a negative occurrence": set_to("decisions", 0, "occurrence", to=-1),
    "dropped not even once": set_to("decisions", 0, "times", to=0),
    "an empty name": set_to("decisions", 0, "op", to=""),
    "an unknown technique": set_to("decisions", 0, "technique", to="pray"),
    "an unknown key": set_to("mood", to="good"),
    "an unknown key inside": set_to("decisions", 0, "mood", to="good"),
    "a missing key": lambda data: data.pop("peak_bytes"),
    "a missing key inside": lambda data: data["decisions"][0].pop("op"),
    "a share above one": set_to("units", "layers.0", "discard_ratio", to=1.1),
    "an unknown status": set_to("status", to="guessed"),
    "no ranks at all": set_to("ranks", "world_size", to=0),
    "a shape of text": set_to("fingerprint", "parameters", 0, 1, to="wide"),
    "another schema version": set_to("schema_version", to=5),
    "another kind of file": set_to("what", to="profile"),
    "a checksum of another form": set_to("sha256", to="0"),
}
"""What the schema forbids."""

MEANINGS = {
    "nested units": set_to(
        "units",
        "layers.0.mlp",
        to={"discard_ratio": 0.0, "recompute_ms": 0.0}
        | {key: [] for key in ("kept", "calls", "kept_bytes", "discarded_bytes", "discarded_ms")},
    ),
    "a decision twice": lambda data: data["decisions"].append(data["decisions"][0] | {"times": 7}),
    "a decision about a unit that is not there": lambda data: data["units"].pop("layers.0"),
    "a decision about an op that is not there": set_to("decisions", 0, "op", to="aten.nothing.default"),
    "a decision about an op in another place": set_to("decisions", 0, "place", to="nowhere"),
    "an op more often than the unit runs it": set_to("decisions", 0, "occurrence", to=99),
    "units of fully_shard for one rank": set_to("ranks", to={"world_size": 1, "fsdp_units": ["layers.*"]}),
    "a date that is none": set_to("provenance", "date", to="yesterday"),
    "a date without a time zone": set_to("provenance", "date", to="2025-01-01T00:00:00"),
}
"""What is forbidden besides: also with the right checksum."""


@pytest.mark.parametrize("change", CHANGES)
def test_schema_and_loader_reject_the_same(contents: bytes, path: Path, change: str) -> None:
    data = json.loads(contents)
    CHANGES[change](data)
    assert not VALIDATOR.is_valid(data)
    path.write_text(json.dumps(data))
    with pytest.raises(sacplan.errors.PlanError, match=r"plan\.json .*[Mm]ake the plan again"):
        sacplan.Plan.load(path)


@pytest.mark.parametrize("change", MEANINGS)
def test_plans_that_mean_nothing(contents: bytes, path: Path, change: str) -> None:
    data = json.loads(contents)
    MEANINGS[change](data)
    plain = {k: v for k, v in data.items() if k not in ("what", "schema_version", "sha256")}
    path.write_text(json.dumps(data | {"sha256": _digest(plain)}))
    with pytest.raises(sacplan.errors.PlanError, match="not a sacplan plan") as info:
        sacplan.Plan.load(path)
    assert "checksum" not in str(info.value)


def test_where_it_is_wrong_is_said(contents: bytes, path: Path) -> None:
    data = json.loads(contents)
    data["decisions"][1]["occurrence"] = "first"
    path.write_text(json.dumps(data))
    with pytest.raises(
        sacplan.errors.PlanError, match=r"Expected `int`, got `str` - at `\$\.decisions\[1\]\.occurrence`"
    ):
        sacplan.Plan.load(path)


def test_an_edited_plan_is_not_what_it_says(contents: bytes, path: Path, plan: sacplan.Plan) -> None:
    data = json.loads(contents)
    path.write_text(json.dumps(data, sort_keys=True))  # another form of the same
    assert sacplan.Plan.load(path) == plan
    data["peak_bytes"] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(sacplan.errors.PlanError, match="damaged or edited"):
        sacplan.Plan.load(path)


def test_plans_that_cannot_be_saved(plan: sacplan.Plan, path: Path) -> None:
    path.write_text("before")
    for change in ({"peak_bytes": -1}, {"step_ms": math.nan}, {"step_ms": math.inf}, {"device": path}):
        with pytest.raises(sacplan.errors.PlanError, match="cannot be saved"):
            structs.replace(plan, **change).save(path)
    assert path.read_text() == "before"


def test_plans_that_mean_nothing_are_not_even_made(plan: sacplan.Plan) -> None:
    sites = plan.discarded["layers.0"]
    with pytest.raises(
        sacplan.errors.PlanError, match=r"must not nest, but 'layers\.0\.mlp' is inside 'layers\.0'"
    ):
        discarding(plan, {"layers.0": sites, "layers.0.mlp": sites})
    with pytest.raises(sacplan.errors.PlanError, match="must not nest"):
        discarding(plan, {"layers.0": sites, "": sites})
    assert list(discarding(plan, {"layers.1": sites, "layers.10": sites}).units) == ["layers.1", "layers.10"]
    with pytest.raises(sacplan.errors.PlanError, match="two decisions"):
        structs.replace(plan, decisions=(*plan.decisions, plan.decisions[0]))
    with pytest.raises(sacplan.errors.PlanError, match="no unit"):
        structs.replace(plan, units={})


def test_call_sites_that_the_units_do_not_run(plan: sacplan.Plan) -> None:
    """Refused with what is there instead, whatever the technique; a unit may come without its ops."""
    first = plan.decisions[0]
    there = f"there it runs .*{first.op}"
    for change, said in (
        ({"op": "aten.nothing.default"}, there),
        (
            {"occurrence": 99},
            rf"about {first.op} \(number 99, place '{first.place}'\) in unit 'layers\.0', .*{there}",
        ),
        ({"place": "nowhere"}, f"no such place, but .*'{first.place}'"),
    ):
        wrong = structs.replace(first, **change)
        with pytest.raises(sacplan.errors.PlanError, match=said):
            structs.replace(plan, decisions=(wrong, *plan.decisions[1:]))
        with pytest.raises(sacplan.errors.PlanError, match=said):
            structs.replace(
                plan, decisions=(*plan.decisions, Chunk("layers.0", "stretch", 2, 0, sites=wrong.sites))
            )
        without = {fqn: structs.replace(unit, calls=()) for fqn, unit in plan.units.items()}
        structs.replace(plan, decisions=(wrong, *plan.decisions[1:]), units=without)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"attention_mask": (2, 9), "input_ids": (2, 9)}, "2 sequences of 9 tokens"),
        ({"pixel_values": (1, 3, 8, 16)}, "1 image of 8 x 16"),
        ({"x": (4, 2)}, "float32 [4, 2]"),
        ({}, "no tensors"),
    ],
)
def test_a_fingerprint_in_words(batch: dict[str, tuple[int, ...]], words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).bfloat16())
    found = Fingerprint.of(model, {name: torch.zeros(shape) for name, shape in batch.items()})
    assert found.batch_in_words == words
    assert (found.n_parameters, found.dtype) == (2 * 3 + 3 + 3 + 1, "float32")
