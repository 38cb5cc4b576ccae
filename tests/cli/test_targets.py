"""``hf:`` targets: the table against published figures, batches with a loss, and what a configuration file gives."""

from __future__ import annotations

import atexit
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sacplan
from sacplan.cli.origin import seen_in
from sacplan.cli.targets import load_target
from sacplan.integrations.hf import architectures
from sacplan.integrations.hf import models as hf
from sacplan.integrations.hf.batches import FoundBatch
from sacplan.integrations.hf.models import build
from sacplan.integrations.hf.target import ModelOptions, TargetError
from tests.support.commands import run
from tests.support.slow import slow_after

# From the model cards and papers, in millions as they are printed there; the exact counts in the table are of the
# checkpoints.
PRINTED: dict[str, float] = json.loads(
    (Path(__file__).parents[1] / "data/published_parameters.json").read_text()
)
"""Millions of parameters, as the models' cards print them."""


@pytest.mark.parametrize("row", slow_after(4, architectures.table()), ids=lambda row: row.name)
def test_parameters_are_the_published_ones(
    row: architectures.Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(one for one in architectures.table() if one.architecture == row.architecture)
    if row is not first:  # a batch is made for one model of each class
        monkeypatch.setattr(hf, "find", lambda *args: FoundBatch({}, (), {}, None, True))
    built = build(row.name, ModelOptions(), "meta")
    assert sum(p.numel() for p in built.model.parameters()) == row.parameters
    assert type(built.model).__name__ == row.architecture
    assert {p.device.type for p in built.model.parameters()} == {"meta"}
    assert {p.dtype for p in built.model.parameters()} == {torch.bfloat16}
    assert built.model.training


def test_the_table_is_what_the_cards_say() -> None:
    for name, millions in PRINTED.items():
        row = architectures.find(name)
        assert row.parameters / 1e6 == pytest.approx(millions, rel=0.005)
    assert len(PRINTED) == len(architectures.table())


def test_nothing_stays_frozen_when_python_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries in C++ report what is not freed then: torch 2.15 brings a Triton that did so after each command."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99})
    )
    gc.unfreeze()
    build(str(path), ModelOptions(seq=8), "meta")
    assert gc.get_freeze_count()
    for ended in at_exit:
        ended()
    assert not gc.get_freeze_count()
    gc.freeze()  # for the other tests


def test_options_are_heeded() -> None:
    target = load_target(
        "hf:gpt2", ModelOptions(batch=3, seq=17, dtype="float16", optimizer="sgd", attn="eager")
    )
    assert target.batch["input_ids"].shape == (3, 17)
    assert {p.dtype for p in target.model.parameters()} == {torch.float16}
    assert target.optimizer is torch.optim.SGD
    assert target.model.config._attn_implementation == "eager"
    assert load_target("hf:gpt2", ModelOptions(optimizer="none")).optimizer is None


def test_a_plan_of_the_library_says_what_it_was_made_for() -> None:
    """verify finds batch, length and type in any plan."""
    target = load_target("hf:gpt2", ModelOptions(batch=3, seq=17, dtype="float16"))
    fingerprint = sacplan.profile(target.model, target.batch).fingerprint
    assert seen_in(fingerprint) == ModelOptions(batch=3, seq=17, dtype="float16")
    images = load_target("hf:vit-b-16", ModelOptions(batch=2, dtype="float32"))
    fingerprint = sacplan.profile(images.model, images.batch).fingerprint
    assert seen_in(fingerprint) == ModelOptions(batch=2, dtype="float32")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt22", ModelOptions(), "hf:openai-community/gpt2"),
        ("someone/unknown-to-us", ModelOptions(), "meta-llama: .*Meta-Llama-3-8B"),
        ("missing/config.json", ModelOptions(), "no such file"),
        ("gpt2", ModelOptions(seq=2048), "positions for 1024"),
        ("ViT-B/16", ModelOptions(seq=64), "reads images"),
    ],
)
def test_names_that_lead_nowhere(name: str, options: ModelOptions, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        load_target(f"hf:{name}", options)


def _run(command: str) -> Any:
    result = run(command)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the configuration of a small model."""
    monkeypatch.chdir(tmp_path)
    transformers.GPT2Config(n_embd=64, n_layer=3, n_head=2, n_positions=128, vocab_size=99).save_pretrained(
        "."
    )
    return tmp_path


CHOSEN = "--device cpu --batch 3 --seq 48 --dtype float32 --optimizer sgd --attn eager"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["plan", "profile and plan", "max-batch"])
def test_verify_makes_what_the_plan_was_made_with(small: Path, by: str) -> None:
    """Nothing is said to it twice, and the peak is the plan's to the byte: with AdamW or SDPA it would not be."""
    if by == "plan":
        _run(f"plan hf:config.json {CHOSEN} --budget 80% -o plan.json --json")
    elif by == "max-batch":
        without_batch = CHOSEN.replace("--batch 3 ", "")
        _run(f"max-batch hf:config.json {without_batch} --budget 8MiB --at-most 3 -o plan.json --json")
    else:
        _run(f"profile hf:config.json {CHOSEN} -o profile.json.gz --json")
        _run("plan profile.json.gz --budget 80% -o plan.json --json")
    result = run("verify hf:config.json plan.json --json")
    assert result.exit_code == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["peak_bytes"] == seen["predicted_peak_bytes"] == sacplan.Plan.load("plan.json").peak_bytes
    made = {k: seen["hf"][k] for k in ("batch", "seq", "dtype", "optimizer", "attn")}
    assert made == {"batch": 3, "seq": 48, "dtype": "float32", "optimizer": "sgd", "attn": "eager"}
    assert "--seq 48 --dtype float32 --optimizer sgd --attn eager: from plan.json" in result.stderr
    assert "warning" not in result.stderr


def test_options_go_before_the_plans_with_a_warning(small: Path) -> None:
    _run(f"plan hf:config.json {CHOSEN} --budget 80% -o plan.json --json")
    with pytest.warns(sacplan.SacplanWarning, match="optimizer: SGD in the plan, none here"):
        result = run("verify hf:config.json plan.json --optimizer none --seq 48 --json")
    assert json.loads(result.stdout)["hf"]["optimizer"] == "none"
    assert run("verify hf:config.json plan.json --seq 47").exit_code == 4


@pytest.mark.slow
def test_the_cache_is_spoken_of_where_a_file_is_made_without_it(small: Path) -> None:
    """The file is for the user's own model, which has a cache by default."""
    asked = "hf:config.json --device cpu --seq 48"
    assert "use_cache" not in run(f"profile {asked}").stderr
    assert "use_cache" not in run(f"plan {asked} --budget 80%").stderr
    assert "use_cache=False" in run(f"plan {asked} --budget 80% -o plan.json").stderr


@pytest.mark.slow
def test_where_the_optimizer_is_what_does_not_fit(small: Path) -> None:
    """On a GPU AdamW works on all parameters at once; a batch of one token leaves nothing else to be large."""
    command = "hf:config.json --seq 1 --budget 100KiB"
    _run(f"profile {command.partition(' --budget')[0]} -o profile.json.gz --json")
    for asked in (f"plan {command}", "plan profile.json.gz --budget 100KiB", f"max-batch {command}"):
        result = run(asked)
        assert result.exit_code == 3
        assert "(fused=True)" in result.stderr
        assert "shard it over several devices" in result.stderr
    result = run(f"plan {command.replace('100KiB', '10KiB')} --world-size 2 --fsdp-unit ''")
    assert result.exit_code == 3
    assert "shard it" not in result.stderr


def test_layouts_have_a_sample_for_each_rank(small: Path) -> None:
    """With one sample for all, data parallelism would not be among the rows."""
    found = _run("layouts hf:config.json --devices 2 --device h100 --seq 48 --budget 2GiB --json")
    assert found["batch_size"] == 2
    assert {"ddp", "fsdp"} <= {row["layout"] for row in found["rows"]}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gpt2", "Did you mean hf:gpt2?"),
        ("meta-llama/Meta-Llama-3-8B", "Did you mean hf:meta-llama/Meta-Llama-3-8B?"),
        ("gpt-2", "Did you mean hf:openai-community/gpt2"),
        ("hf:gpt-2", "Did you mean hf:openai-community/gpt2"),
        ("hf:", "hf: needs a name"),
        ("hf:nothere.json", "there is no such file"),
        ("config.json", "looks like a configuration of transformers. Did you mean hf:config.json?"),
        ("a-plan.json", "a-plan.json is a plan"),
        ("a-device.json", "Give it as --device a-device.json"),
        ("folder.json", "Is a directory"),
        ("notes.json", "not a sacplan profile"),
    ],
)
def test_what_was_meant_instead_of_a_target(small: Path, target: str, said: str) -> None:
    Path("a-plan.json").write_text('{"what": "plan", "schema_version": 4}')
    Path("a-device.json").write_text('{"what": "device"}')
    Path("notes.json").write_text("[" * 100_000)
    Path("folder.json").mkdir()
    result = run(f"plan {target} --budget 80%")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model", "plain.py:model is of type Linear"),
        ("Net", "plain.py:Net is the class Net"),
        ("batch", "plain.py:batch is of type Tensor"),
    ],
)
def test_a_model_is_not_taken_for_a_function(small: Path, name: str, said: str) -> None:
    """Both are callable, and calling a model complains about its forward."""
    Path("plain.py").write_text(
        "import torch\nclass Net(torch.nn.Module): pass\nmodel, batch = torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    result = run(f"plan plain.py:{name}")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "a function without arguments that returns" in result.stderr
    assert "forward" not in result.stderr


def test_names_that_are_known_have_a_line_for_each_owner(small: Path) -> None:
    names = {row.name for row in architectures.table()}
    for target in ("hf:", "hf:nothing-like-it"):
        error, *hints = run(f"plan {target}").stderr.splitlines()
        assert error.startswith("error: ")
        assert not any(name in error for name in names)
        listed = [hint.removeprefix("hint: ").split(": ") for hint in hints[1:]]
        assert {f"{owner}/{name}" for owner, all_of_it in listed for name in all_of_it.split(", ")} == names
    (_, hint) = run("plan hf:gpt-2").stderr.splitlines()
    assert hint == "hint: sacplan plan hf: lists the names that are known"
