"""The command line: results on stdout, all else on stderr, exit codes, and every example that ``--help`` shows."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import sacplan
from sacplan.cli.app import app
from sacplan.cli.command import EXAMPLES
from sacplan.core.budget import format_bytes
from sacplan.device.devices import DEFAULT_DEVICE, resolve_device
from sacplan.integrations.hf.target import TargetError
from tests.support.commands import INHERITED, run
from tests.support.slow import slow_after

ROOT = Path(sacplan.__file__).parent.parent

TRAIN = '''
"""Targets, as a person's file has them."""
import sys
import torch
import torch.nn.functional as F
from torch import nn

import words  # beside this file


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=32, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    return model(batch).pow(2).mean()


def sacplan_target():
    return Model(), torch.randn(256, 32)


def make():
    print("loading", words.DATA)
    return {
        "model": Model(), "batch": torch.randn(256, 32), "loss_fn": loss, "optimizer": torch.optim.AdamW,
        "make_batch": lambda n: torch.randn(n, 32),
    }


def wider():
    return Model(64), torch.randn(256, 64)


def with_sgd():
    return {"model": Model(), "batch": torch.randn(256, 32), "loss_fn": loss}


def breaks():
    raise ValueError("no such data")


def wrong_shape():
    return Model(), torch.randn(4, 31)


def three():
    return 1, 2, 3


def strange_key():
    return {"model": Model(), "batch": torch.randn(4, 32), "lr": 1}


def needs(n):
    return Model(), torch.randn(n, 32)


NOT_CALLABLE = 3
'''

UNITS = "--world-size 4 --fsdp-unit 'layers.*' --fsdp-unit ''"


def line_of(code: str) -> int:
    """Where it stands in train.py, from 1."""
    return next(i for i, line in enumerate(TRAIN.splitlines(), 1) if code in line)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory as the examples take it to be, and the current one."""
    directory = tmp_path_factory.mktemp("stranger")
    (directory / "train.py").write_text(TRAIN)
    (directory / "words.py").write_text("DATA = 'the data'\n")
    (directory / "empty.py").write_text("import sys\n")
    (directory / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (directory / "broken.py").write_text("def make(:\n")
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "vocab_size": 99,
    }
    (directory / "config.json").write_text(json.dumps(config))
    before, path = Path.cwd(), list(sys.path)
    os.chdir(directory)
    yield directory
    os.chdir(before)
    sys.path[:] = path
    for name in ("train", "words", "exits", "broken", "empty"):
        sys.modules.pop(name, None)


PLAN = "plan train.py:make --device cpu --budget 85% -o plan.json"
PLAN_OF_A_RANK = f"plan train.py:make --device cpu {UNITS} --budget 85% -o rank.json"


@pytest.fixture(scope="module")
def printed(place: Path) -> dict[str, str]:
    """A profile and plans are saved by the commands themselves; what these print, by command."""
    commands = (
        "profile train.py:make -o profile.json.gz --device cpu",
        PLAN,
        f"profile train.py:make --device cpu {UNITS} -o rank.json.gz",
        PLAN_OF_A_RANK,
    )
    results = {command: run(command) for command in commands}
    assert not any(result.exit_code for result in results.values())
    shutil.copy("plan.json", "plan-cpu.json")
    return {command: result.stdout for command, result in results.items()}


@pytest.fixture(scope="module")
def saved(place: Path, printed: dict[str, str]) -> Path:
    """The directory with what ``printed`` saves."""
    return place


def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, in a pipe."""
    inherited = {k: v for k, v in os.environ.items() if k not in INHERITED}
    return subprocess.run(
        [sys.executable, "-m", "sacplan", *arguments],
        capture_output=True,
        text=True,
        env=inherited | {"PYTHONPATH": str(ROOT)} | env,
        check=False,
    )


def error_line(result: Any) -> str:
    """The one line about what went wrong; no traceback beside it."""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_plan_is_the_librarys(saved: Path) -> None:
    """What the command saves and prints is what sacplan.plan returns for the same profile."""
    result = run("plan profile.json.gz --budget 85% --json -o again.json")
    facts = json.loads(result.stdout)
    expected = sacplan.plan(sacplan.Profile.load("profile.json.gz"), "85%")
    assert sacplan.Plan.load("again.json").decisions == expected.decisions
    assert facts["peak_bytes"] == expected.peak_bytes <= facts["budget_bytes"]
    assert facts["discard_ratios"] == expected.discard_ratios != {}
    # recorded and planned in one go, the plan is the same
    assert sacplan.Plan.load("plan.json").decisions == expected.decisions


def test_what_a_target_prints_is_not_in_the_results(saved: Path) -> None:
    result = run("profile train.py:make --device cpu --batch 1 --json")
    assert json.loads(result.stdout)["command"] == "profile"
    assert "loading the data" in result.stderr


def test_people_see_the_figures(printed: dict[str, str]) -> None:
    found = sacplan.Plan.load("plan.json")
    words = " ".join(printed[PLAN].split())
    assert " ".join(str(found).split()) in words  # as print(plan) says it
    assert format_bytes(found.peak_bytes) in words
    assert "layers." in words


def test_verify(saved: Path) -> None:
    result = run("verify train.py:make plan.json --json")
    facts = json.loads(result.stdout)
    assert facts["verified"] is True
    assert facts["peak_bytes"] == facts["predicted_peak_bytes"] <= facts["budget_bytes"]


def test_the_step_of_a_plan_is_that_of_its_verification(printed: dict[str, str]) -> None:
    made = printed[PLAN]
    seen = run("verify train.py:make plan.json").stdout
    ((planned, without),) = re.findall(r"^ *step +([\d.]+) ms, ([\d.]+) ms without a plan", made, re.M)
    assert float(planned) > float(without)
    assert re.findall(r"^ *step +([\d.]+) ms \(predicted\)", seen, re.M) == [planned]
    result = run("verify train.py:make plan.json --run real")
    assert "ms (wall time)" in result.stdout
    assert "running three real steps: " in result.stderr  # it may be a minute until the next line


def test_help_is_about_the_command(saved: Path) -> None:
    """Defaults of options that several commands share."""
    said = {
        name: " ".join(run(f"{name} --help").stdout.split()) for name in ("fit", "layouts", "plan", "verify")
    }
    assert f"Default: {DEFAULT_DEVICE}. " in said["fit"]
    assert f"Default: {DEFAULT_DEVICE}. " in said["layouts"]
    assert f"Default: {DEFAULT_DEVICE}; a saved profile has its own." in said["plan"]
    assert {name for name, text in said.items() if "the plan's" in text} == {"verify"}


def test_another_model_or_batch_is_not_verified(saved: Path) -> None:
    result = run("verify train.py:wider plan.json --json")
    assert result.exit_code == 4
    assert "layers.0" in error_line(result)
    facts = json.loads(result.stdout)
    assert facts["verified"] is False
    assert facts["error"]["type"] == "VerificationFailed"
    assert run("verify train.py:make plan.json --batch 255").exit_code == 4


def test_the_library_has_the_defaults_of_the_command_line() -> None:
    # Outside of sacplan.ranks, None is the default too.
    assert resolve_device(None) == resolve_device(DEFAULT_DEVICE)
    for function in (sacplan.fit, sacplan.max_batch, sacplan.throughput, sacplan.layouts):
        assert inspect.signature(function).parameters["device"].default == DEFAULT_DEVICE


def test_words_that_people_type(saved: Path) -> None:
    made = run("plan train.py:make --device 24GB --budget 1 --batch-size 4 --json")
    assert json.loads(made.stdout)["budget_bytes"] == 2**30
    assert "note: --device 24GB of memory (22.35 GiB), with the kernels and times of rtx-4090" in made.stderr
    assert "none of bfloat16, float16, float32" in run("plan hf:gpt2 --dtype int8").stderr


def test_over_the_budget_is_not_verified(saved: Path) -> None:
    """The same plan with a budget one byte below its peak."""
    plan = sacplan.Plan.load("plan.json")
    structs.replace(plan, budget_bytes=plan.peak_bytes - 1).save("tight.json")
    result = run("verify train.py:make tight.json")
    assert result.exit_code == 4
    assert "over the budget" in error_line(result)
    assert "OVER" in result.stdout


def test_infeasible(saved: Path) -> None:
    result = run("plan profile.json.gz --budget 1KiB --json -o never.json")
    assert result.exit_code == 3
    smallest = json.loads(result.stdout)["error"]["smallest_feasible_bytes"]
    assert str(smallest) in error_line(result)
    assert not Path("never.json").exists()
    assert run(f"plan profile.json.gz --budget {smallest}B").exit_code == 0


def test_pins_reach_the_planner(saved: Path) -> None:
    free = json.loads(run("plan profile.json.gz --budget 85% --json").stdout)
    pinned = json.loads(
        run("plan profile.json.gz --budget 90% --json --never layers.0 --keep aten.gelu").stdout
    )
    assert "layers.0" in free["discard_ratios"]
    assert not any(name.startswith("layers.0") for name in pinned["discard_ratios"])
    result = run("plan profile.json.gz --budget 90% --never nothing.like.it")
    assert result.exit_code == 2
    assert "nothing.like.it" in error_line(result)


def test_frontier(saved: Path) -> None:
    result = run("frontier profile.json.gz --points 3 --no-policies -o curve.csv --json")
    rows = json.loads(result.stdout)["rows"]
    expected = sacplan.frontier(sacplan.Profile.load("profile.json.gz"), 3, policies=False)
    assert [r["peak_bytes"] for r in rows] == list(expected["peak_bytes"])
    assert {"milp", "greedy"} <= {r["solver"] for r in rows}
    lines = Path("curve.csv").read_text().splitlines()
    assert lines[0].startswith("solver,budget_bytes,peak_bytes")
    assert len(lines) == len(rows) + 1
    assert "milp" in run("frontier profile.json.gz --points 2").stdout


@pytest.mark.slow
def test_the_plan_of_a_rank(printed: dict[str, str]) -> None:
    """It is the library's, goes through every command, and each says that it is of one rank."""
    assert "one of 4 ranks, run by FSDP2 (fully_shard: layers.*, the model)" in printed[PLAN_OF_A_RANK]
    profile, plan = sacplan.Profile.load("rank.json.gz"), sacplan.Plan.load("rank.json")
    assert plan.ranks == profile.ranks
    assert (plan.ranks.world_size, plan.ranks.fsdp_units) == (4, ("layers.*", ""))
    assert plan.peak_bytes == sacplan.plan(profile, "85%").peak_bytes
    assert profile.peak_bytes < sacplan.Profile.load("profile.json.gz").peak_bytes
    loaded = json.loads(run("plan rank.json.gz --budget 85% --json").stdout)
    assert loaded["ranks"] == {"world_size": 4, "fsdp_units": ["layers.*", ""], "sharding": None}
    assert loaded["peak_bytes"] == plan.peak_bytes
    seen = json.loads(run("verify train.py:make rank.json --json").stdout)
    assert seen["peak_bytes"] == plan.peak_bytes
    assert "one of 4 ranks" in run("verify train.py:make rank.json").stdout
    # The profile has the modules.
    counted = "one of 4 ranks, run by FSDP2 (fully_shard: 3 x layers.*, the model)"
    assert counted in run("frontier rank.json.gz --points 2 --no-policies").stderr
    assert run("report rank.json.gz rank.json -o rank.html --no-frontier").exit_code == 0


def test_replicas(saved: Path) -> None:
    facts = json.loads(run("profile train.py:make --device cpu --world-size 2 --json").stdout)
    assert facts["ranks"] == {"world_size": 2, "fsdp_units": None, "sharding": None}
    assert (
        facts["peak_bytes"] > sacplan.Profile.load("profile.json.gz").peak_bytes
    )  # gradients are held twice
    assert "DistributedDataParallel" in run("profile train.py:make --device cpu --world-size 2").stdout


def test_inference(saved: Path) -> None:
    train = json.loads(run("profile train.py:make --device cpu --batch 1 --json").stdout)
    facts = json.loads(
        run("profile train.py:make --device cpu --mode inference -o forward.json.gz --json").stdout
    )
    assert facts["peak_bytes"] < train["peak_bytes"]
    assert (train["mode"], facts["mode"]) == ("train", "inference")
    assert sacplan.Profile.load("forward.json.gz").mode == "inference"
    assert run("plan forward.json.gz --budget 100%").exit_code == 0
    assert run("plan forward.json.gz --budget 90%").exit_code == 0  # in slices
    result = run("plan forward.json.gz --budget 90% --technique recompute")
    assert result.exit_code == 3
    assert "nothing to recompute" in result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan train.py:make --budget 85% --fsdp-unit 'layers.*'", "--world-size 8"),
        ("plan train.py:make --budget 85% --world-size 1 --fsdp-unit ''", "1 rank"),
        (
            "plan train.py:make --budget 85% --world-size 2 --fsdp-unit layer",
            "--fsdp-unit: no module matches",
        ),
        ("report profile.json.gz rank.json -o r.html", "rank.json is for one of 4 ranks"),
        ("verify train.py:make rank.json --run real", "--run fake"),
    ],
)
def test_ranks_that_do_not_go_together(saved: Path, command: str, said: str) -> None:
    result = run(command)
    assert result.exit_code == 2
    assert said in error_line(result)


@pytest.mark.slow
def test_max_batch(saved: Path) -> None:
    """One sample more than what it says fits does not."""
    result = run("max-batch train.py:make --device cpu --budget 1MiB --json -o largest.json")
    facts = json.loads(result.stdout)
    n = facts["batch_size"]
    assert n > facts["unplanned_batch_size"] > 0
    assert run(f"verify train.py:make largest.json --batch {n}").exit_code == 0
    assert run(f"profile train.py:make --device cpu --batch {n + 1} -o more.json.gz").exit_code == 0
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(sacplan.Profile.load("more.json.gz"), "1MiB")
    assert "make_batch" in error_line(run("max-batch train.py:wider --device cpu --budget 1MiB"))
    # Nothing runs in slices. A column of zeros says nothing.
    shown = run("max-batch train.py:make --device cpu --budget 1MiB --at-most 8").stdout
    assert "step ms" in shown
    assert "added ms" not in shown


def test_fit(saved: Path) -> None:
    """The peak as it is is that of the profile; what is to be run makes a plan that holds."""
    facts = json.loads(run("profile train.py:make --device cpu --batch 1 --json").stdout)
    found = json.loads(run("fit train.py:make --device cpu --budget 1GiB --no-sizes --json").stdout)
    assert found["fits"]
    assert found["rows"][0]["peak_bytes"] == facts["peak_bytes"]
    lines = run("fit train.py:make --device cpu --budget 1GiB --no-sizes").stdout.splitlines()
    assert sum(line.startswith("adamw") for line in lines) == 1
    assert "No plan is needed." in lines
    assert not any("largest batch" in line for line in lines)
    tight = f"fit train.py:make --device cpu --budget {int(0.8 * facts['peak_bytes'])}B"
    found = json.loads(run(f"{tight} --json").stdout)
    assert not found["fits"]
    assert found["recommended"]["fits"]
    made = run(found["run"].partition(" ")[2])
    assert made.exit_code == 0, made.stderr
    shown = run(tight).stdout
    assert shown.startswith(found["verdict"])
    assert found["run"] in shown
    assert found["code"] in shown
    assert "largest batch" in shown
    assert "make_batch" in error_line(run("fit train.py:wider --device cpu --budget 1MiB"))


@pytest.mark.slow
def test_certify(place: Path) -> None:
    """The run is that of the library; lengths are read from each kind of file."""
    lengths = [9, 40, 17, 64, 30, 12, 55, 8]
    Path("lengths.json").write_text(json.dumps(lengths))
    Path("lengths.txt").write_text("\n".join(map(str, lengths)))
    np.save("lengths.npy", lengths)
    line = "--batch 2 --device cpu --dtype float32"
    shown = run(f"certify hf:config.json lengths.npy {line} --budget 1GiB -o runs.json")
    assert shown.exit_code == 0, shown.stderr
    assert "no plan is needed" in shown.stderr
    assert shown.stdout.startswith("GPT2LMHeadModel on cpu: 4 batches of ")
    found = json.loads(run(f"certify hf:config.json lengths.json {line} --budget 1GiB --json").stdout)
    most = found["rows"][0]["allocated_bytes"]
    assert found["fits"]
    between = "--grad-accum 2 --eval-lengths lengths.txt --eval-batch 8 --eval-every 1"
    longer = json.loads(run(f"certify hf:config.json lengths.json {line} {between} --json").stdout)
    assert longer["rows"][0]["allocated_bytes"] > most
    asked = f"certify hf:config.json lengths.txt {line} --budget {most - 1}B --buckets 2 -o runs.json"
    tight = run(f"{asked} --json")
    assert tight.exit_code == 3
    found = json.loads(tight.stdout)
    plans = [sacplan.Plan.load(f"runs-{k}.json") for k in (1, 2)]
    assert [plan.peak_bytes for plan in plans] == [one["plan"]["peak_bytes"] for one in found["plans"]]
    assert run("verify hf:config.json runs-2.json").exit_code == 0  # with the batch that the plan is for
    assert found["largest"] == 1
    assert [row["fits"] for row in found["rows"]] == [False, True, True]
    assert found["plans"][-1]["shapes"] == [[2, max(lengths)]]
    Path("lengths.txt").write_text("9 forty")
    assert "lengths.txt cannot be read" in error_line(run("certify hf:config.json lengths.txt"))
    assert "64 positions" in error_line(run("certify hf:config.json lengths.npy --batch 2 --pack 65"))
    assert "make_batch" in error_line(run("certify train.py:wider lengths.npy --device cpu"))


@pytest.mark.slow
def test_certify_reads_images_of_many_sizes(place: Path) -> None:
    sizes = [[32, 64], [64, 32], [96, 96], [32, 32]]
    Path("sizes.json").write_text(json.dumps(sizes))
    config = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config |= {"architectures": ["ResNetForImageClassification"]}
    Path("resnet.json").write_text(json.dumps(config))
    line = "--device h100 --batch 1 --dtype float32"
    found = json.loads(run(f"certify hf:resnet.json sizes.json {line} --json").stdout)
    assert found["rows"][0]["allocated_at"]["shape"] == [1, 96, 96]
    Path("patches.py").write_text(
        "import torch\n"
        "def make():\n"
        "    def make_batch(n, height, width):\n"
        "        return torch.zeros(n, 3, height, width)\n"
        "    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, 16), torch.nn.GELU())\n"
        "    return {'model': model, 'batch': make_batch(1, 32, 32), 'make_batch': make_batch}\n"
    )
    shown = run("certify patches.py:make sizes.json --device h100 --batch 2")
    assert shown.exit_code == 0, shown.stderr
    assert "4 shapes" not in shown.stdout
    assert "2 batches of" in shown.stdout


@pytest.mark.slow
def test_fit_on_several_devices(saved: Path) -> None:
    asked = "fit train.py:make --no-sizes --device"
    several = json.loads(run(f"{asked} h100,h200 --json").stdout)["answers"]
    assert several == [json.loads(run(f"{asked} {one} --json").stdout) for one in ("h100", "h200")]
    shown = run(f"{asked} h100,h200")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["device", "h100", "h200"]
    assert "h1000" in error_line(run(f"{asked} h100,h1000"))


def test_devices() -> None:
    rows = json.loads(run("devices --json").stdout)["devices"]
    h100 = next(r for r in rows if r["name"] == "h100")
    assert h100["memory_gib"] == sacplan.devices().loc["h100", "memory_gib"]
    assert {r["name"] for r in rows} == set(sacplan.devices().index)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan train.py:make --budget 24G", "'24GB' or '24GiB'"),
        ("plna", "'plan'"),
        ("plan train.py:make --budget 50% --solver simplex", "'greedy'"),
        ("plan train.py:make --budget 50% --device h1000", "h100"),
        ("plan train.py:make --budget 50% --seq 5", "--seq"),
        ("plan train.py:make --budget 50% --fetch", "--fetch: only for hf: targets"),
        ("plan train.py:wider --budget 50% --batch 5", "make_batch"),
        ("plan profile.json.gz --budget 50% --device h100", "profile.json.gz is recorded already"),
        ("plan profile.json.gz --budget 50% --dtype float16", "--dtype"),
        ("plan plan.json --budget 50%", "plan.json is a plan; a profile or the model itself is needed"),
        ("plan nothere.json --budget 50%", "nothere.json: No such file"),
        ("plan nothere.py:make --budget 50%", "nothere.py: there is no such file"),
        ("plan nomodule.at.all:make --budget 50%", "no module 'nomodule.at.all'"),
        ("plan train --budget 50%", "Did you mean train.py?"),
        ("plan train.py:mkae --budget 50%", "sacplan_target, make, wider"),
        ("plan train.py:NOT_CALLABLE --budget 50%", "NOT_CALLABLE is of type int"),
        ("plan empty.py --budget 50%", "it defines no functions"),
        ("plan train.py:breaks --budget 50%", f"train.py:{line_of('raise ValueError')}, in breaks"),
        ("plan train.py:wrong_shape --budget 50%", f"train.py:{line_of('return x + self.down')}, in forward"),
        ("plan train.py:three --budget 50%", "a tuple of 3"),
        ("plan train.py:strange_key --budget 50%", "the keys model, batch, lr;"),
        ("plan train.py:needs --budget 50%", "train.py:needs is called without arguments: needs() missing 1"),
        ("plan exits.py --budget 50%", "__main__"),
        ("plan broken.py --budget 50%", "broken.py:1"),
        ("verify profile.json.gz plan.json", "the model itself is needed"),
        ("verify train.py:make nothere.json", "nothere.json"),
        ("verify train.py:make profile.json.gz", "'profile', not a sacplan plan"),
        ("report profile.json.gz", "Missing option '--output'"),
        ("report train.py:make plan.json -o r.html", "sacplan profile train.py:make -o profile.json.gz"),
        ("profile train.py:make -o nowhere/profile.json", "no directory nowhere"),
    ],
)
def test_bad_input(saved: Path, command: str, said: str) -> None:
    result = run(command)
    assert result.exit_code == 2
    assert said in error_line(result)
    assert result.stdout == ""


def test_debug_shows_the_traceback(saved: Path) -> None:
    result = run("profile train.py:breaks --debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "ValueError: no such data" in result.stderr


def test_a_fault_of_ours_is_not_called_bad_input(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(sacplan, "plan", faulty)
    result = run("plan profile.json.gz --budget 50%")
    assert result.exit_code == 1
    assert "ZeroDivisionError: ours" in error_line(result)


def test_interrupted(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sacplan, "profile", interrupted)
    result = run("profile train.py:make -o half.json")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in result.stderr
    assert not Path("half.json").exists()


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("profile train.py:make --device cpu", "train.py"),
        ("plan profile.json.gz --budget 85%", "profile.json.gz"),
        ("plan profile.json.gz --budget 85%", "notes.json"),
        ("frontier profile.json.gz --points 2 --no-policies", "plan.json"),
        ("report profile.json.gz", "plan.json"),
        ("plan profile.json.gz --budget 85%", "somewhere"),
    ],
)
def test_nothing_of_others_is_overwritten(saved: Path, command: str, output: str) -> None:
    Path("notes.json").write_text('{"mine": 1}')
    Path("somewhere").mkdir(exist_ok=True)
    before = None if Path(output).is_dir() else Path(output).read_bytes()
    result = run(f"{command} -o {output}")
    assert result.exit_code == 2
    assert output in error_line(result)
    assert before is None or Path(output).read_bytes() == before


def test_ours_is_overwritten_and_others_with_force(saved: Path) -> None:
    shutil.copy("plan.json", "old.json")
    assert run("plan profile.json.gz --budget 95% -o old.json").exit_code == 0
    assert Path("old.json").read_bytes() != Path("plan.json").read_bytes()
    Path("other.json").write_text("mine")
    assert run("plan profile.json.gz --budget 95% -o other.json --force").exit_code == 0
    assert sacplan.Plan.load("other.json").budget_bytes == sacplan.Plan.load("old.json").budget_bytes
    assert not list(Path().glob(".*part*"))


@pytest.mark.slow
def test_reports_are_written_and_written_again(saved: Path) -> None:
    command = "report profile.json.gz plan.json -o page.html --no-frontier --json"
    facts = json.loads(run(command).stdout)
    assert facts["written"] == "page.html"
    assert Path("page.html").stat().st_size
    assert facts["plan"]["peak_bytes"] == sacplan.Plan.load("plan.json").peak_bytes
    assert run(command).exit_code == 0
    Path("page.html").write_text("my holidays, and what torch.cuda.memory has dumped")
    assert "page.html" in error_line(run(command))
    Path("page.html").unlink()


def test_a_device_from_a_file(saved: Path) -> None:
    sacplan.DeviceSpec(
        name="bench", kind="cpu", memory_bytes=2**30, bandwidth_bytes_per_s=1e9, flops={"float32": 1e9}
    ).save("bench.json")
    facts = json.loads(run("profile train.py:make --device bench.json --json").stdout)
    assert (facts["device"], facts["device_memory_bytes"]) == ("bench", 2**30)


def test_module_targets(saved: Path) -> None:
    assert json.loads(run("profile train:make --device cpu --json").stdout)["model_class"] == "Model"
    assert "words" in error_line(run("profile words:make"))


def test_help_shows_the_examples() -> None:
    for name, lines in EXAMPLES.items():
        shown = run(f"{name} --help").stdout
        for line in lines:
            assert f"  {line}\n" in shown
    assert run("").stdout == run("--help").stdout
    assert set(EXAMPLES) - {""} == {c.name for c in app.registered_commands}


_LINES = [line for lines in EXAMPLES.values() for line in lines]


@pytest.mark.parametrize("line", _LINES)
def test_examples_are_parsed(line: str) -> None:
    """Every word of them is understood; the commands of docs/cli.md run."""
    from typer.main import get_command

    root: Any = get_command(app)
    _, name, *rest = shlex.split(line)
    with root.make_context("sacplan", [name]) as outer:
        root.commands[name].make_context(name, rest, parent=outer).close()


@pytest.mark.slow
def test_in_a_pipe(saved: Path) -> None:
    """No colour, no boxes, no progress but for a line, no trailing blanks; the same figures as in this process."""
    result = process("frontier", "profile.json.gz", "--points", "2", "--no-policies")
    assert result.returncode == 0
    assert result.stderr == "planning for 2 budgets ...\n"
    assert result.stdout == run("frontier profile.json.gz --points 2 --no-policies").stdout
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert not any(line != line.rstrip() for line in result.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_progress_is_for_terminals(saved: Path) -> None:
    """stderr is a terminal here, stdout is not: the stages and the colours are on stderr alone."""
    controller, terminal = os.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sacplan",
            *shlex.split("plan profile.json.gz --budget 85% --never nothing.like.it --json"),
        ],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=inherited | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
    ) as started:
        os.close(terminal)
        seen = b""
        with contextlib.suppress(OSError):  # what a terminal says when its last process has ended
            while data := os.read(controller, 4096):
                seen += data
        results = started.stdout.read()
    os.close(controller)
    assert started.returncode == 2
    assert json.loads(results)["error"]["type"] == "PlanError"
    assert b"reading" in seen
    assert b"planning" in seen
    assert b"\x1b[1;31merror" in seen


_TABLES = {
    "devices": "devices",
    "frontier": "frontier profile.json.gz --points 2",
    "max-batch": "max-batch train.py:make --device cpu --budget 4MiB --at-most 8",
    "plan": "plan profile.json.gz --budget 70%",
    "chunks": "plan profile.json.gz --budget 95% --technique chunk --technique recompute",
}


@pytest.mark.parametrize("columns", slow_after(1, [40, 80]))
@pytest.mark.parametrize("command", list(_TABLES.values()), ids=list(_TABLES))
def test_narrow_tables_fold(saved: Path, command: str, columns: int) -> None:
    """Nothing is cut off: a narrow table has every letter of a wide one."""
    wide, narrow = run(command), run(command, COLUMNS=str(columns))
    assert narrow.exit_code == 0, narrow.stderr
    assert max(map(len, narrow.stdout.splitlines())) <= columns
    letters = [sorted("".join(text.split())) for text in (wide.stdout, narrow.stdout)]
    assert letters[0] == letters[1]


_INTERRUPTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("module", ["typer", "torch", "words"])
def test_an_interrupt_during_an_import_is_one_line(saved: Path, tmp_path: Path, module: str) -> None:
    """Ctrl-C as soon as one of the modules that a command needs is asked for."""
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    result = process("plan", "train.py:make", "--budget", "70%", PYTHONPATH=path, INTERRUPTED_IMPORT=module)
    # Python ends itself by the signal where that arrived in code that was compiled from a string
    assert result.returncode in (130, -signal.SIGINT)
    assert (result.stdout, result.stderr) == ("", "interrupted\n")


def test_fit_takes_float16_where_there_is_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``plan`` does, which has to plan for the step that was judged."""
    asked = []

    def load(target: str, hf: Any) -> Any:
        asked.append(hf.dtype)
        raise TargetError("enough is known")

    monkeypatch.setattr("sacplan.cli.sources.load_target", load)
    assert "--dtype float16" in run("fit hf:gpt2 --device t4").stderr
    run("fit hf:gpt2 --device h100")
    assert asked == ["float16", None]
