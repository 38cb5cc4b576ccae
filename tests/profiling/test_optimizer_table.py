"""Optimizers by name: the classes of their libraries, what they keep on the device, and what on the host."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.device.devices import resolve_device
from sacplan.device.links import Link
from sacplan.profiling.optimizer_names import BY_NAME, OPTIMIZERS, named_optimizer
from sacplan.profiling.optimizer_table import AdamW8bitSizes
from sacplan.profiling.optimizers import recorded_step, state_bytes, with_other_optimizer
from sacplan.record.host_state import PAGED_FROM
from tests.support.slow import slow_after
from tests.support.steps import mean_square as loss

GPU = "rtx-4090"


def net(place: str = "meta") -> nn.Module:
    """Matrices with and without 100,000 elements, and vectors with and without 4,096."""
    torch.manual_seed(0)
    with torch.device(place):
        return nn.Sequential(nn.Linear(64, 4608), nn.Linear(4608, 32), nn.LayerNorm(32), nn.Linear(32, 8))


def batch() -> torch.Tensor:
    return torch.ones(4, 64)


def on(device: str | sacplan.DeviceSpec, optimizer: Any) -> sacplan.Profile:
    return sacplan.profile(net(), batch(), loss, optimizer, device)


def figures(profile: sacplan.Profile) -> tuple[int, int, int]:
    return profile.peak_bytes, state_bytes(profile.recorded), profile.optimizer_host_bytes


# --- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("adamw8bit", "adamw-8bit"),
        ("AdamW8bit", "adamw-8bit"),
        ("adamw_bnb_8bit", "adamw-8bit"),
        ("paged_adamw_32bit", "paged-adamw"),
        ("PagedAdamW8bit", "paged-adamw-8bit"),
        ("adamw_torch_fused", "adamw-fused"),
        ("Muon", "muon"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    assert named_optimizer(text).name == name


def test_names_that_are_none() -> None:
    with pytest.raises(sacplan.errors.TraceError, match=r"'adamw-9bit'. Did you mean 'adamw-8bit'"):
        on(GPU, "adamw-9bit")
    with pytest.raises(sacplan.errors.PlanError, match="Known are adamw, "):
        sacplan.fit(net(), lambda n: torch.ones(n, 64), GPU, loss, "shampoo")


def test_no_two_have_the_same_name() -> None:
    names = [name for one in OPTIMIZERS for name in (one.name, *one.aliases)]
    assert len({named_optimizer(name).name for name in names}) == len(OPTIMIZERS)
    assert all(named_optimizer(name).name == one.name for one in OPTIMIZERS for name in one.aliases)


def test_names_take_no_torch() -> None:
    code = "import sys, sacplan.cli.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(sacplan.errors.TraceError, match="pip install torchao"):
        on(GPU, "adamw-4bit")


OF_THE_TRAINER = """
    adamw_torch adamw_torch_fused adafactor adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit lion_32bit
    lion_8bit paged_lion_32bit paged_lion_8bit sgd adagrad rmsprop
"""


@pytest.mark.parametrize("name", slow_after(5, OF_THE_TRAINER.split()))
def test_a_name_of_the_trainer_is_its_optimizer(name: str, tmp_path: Any) -> None:
    """Peak, state and bytes on the host are those of the class and arguments that the Trainer chooses."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    arguments = transformers.TrainingArguments(optim=name, output_dir=str(tmp_path), report_to="none")
    kind, given = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    theirs = on(GPU, functools.partial(kind, **given))
    assert figures(on(GPU, name)) == figures(theirs)


# --- bitsandbytes


def test_sizes_that_stand_for_a_class_are_its_own() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    theirs, ours = on(GPU, bitsandbytes.optim.AdamW8bit), on(GPU, AdamW8bitSizes)
    assert figures(ours) == figures(theirs)
    assert ours.fingerprint.setup.optimizer == theirs.fingerprint.setup.optimizer == "AdamW8bit"


@pytest.mark.parametrize("name", ["adamw-8bit", "lion-8bit", "paged-adamw", "adafactor", "muon"])
def test_a_real_step_takes_what_is_predicted(name: str) -> None:
    """On a CPU, where bitsandbytes updates in float32 copies, pages nothing, and says so."""
    pytest.importorskip("bitsandbytes")
    model = net("cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        profile = sacplan.profile(model, batch(), loss, BY_NAME[name].make, "cpu")
        seen = sacplan.verify(
            model, batch(), sacplan.plan(profile, "100%"), loss, BY_NAME[name].make, run="real"
        )
    assert profile.optimizer_host_bytes == 0
    assert seen.peak_bytes == pytest.approx(profile.peak_bytes, rel=1e-3)


def test_paged_state_is_on_the_host() -> None:
    """Of parameters with 100,000 elements or more; the others' is on the device, as that of the plain class."""
    pytest.importorskip("bitsandbytes")
    paged, plain = (on(GPU, name) for name in ("paged-adamw", "paged-adamw-8bit"))
    large = [p.numel() for p in net().parameters() if p.numel() >= PAGED_FROM]
    assert large
    assert paged.optimizer_host_bytes == 2 * 4 * sum(large)
    assert plain.optimizer_host_bytes == 2 * sum(large)
    assert paged.peak_bytes < on(GPU, "adamw-fused").peak_bytes
    assert any("host's memory" in sentence for sentence in paged.assumptions)
    assert "host's memory" not in " ".join(on(GPU, "adamw").assumptions)


# --- torchao


def test_an_optimizer_on_the_host() -> None:
    """A copy, its gradient and two moments of each parameter from 4,096 elements on; the device has no state of it."""
    profile = on(GPU, "adamw-offload")
    large = [p for p in net().parameters() if p.numel() >= 4096]
    small = [p for p in net().parameters() if p.numel() < 4096]
    counters = 4 * len(large)
    assert profile.optimizer_host_bytes == 4 * sum(p.nbytes for p in large) + counters
    round_up = profile.spec.round_up
    assert state_bytes(profile.recorded) == sum(2 * round_up(p.nbytes) for p in small)
    dropped = on(GPU, "adamw-offload-gradients")
    assert dropped.peak_bytes < profile.peak_bytes
    assert dropped.optimizer_host_bytes == profile.optimizer_host_bytes
    assert profile.fingerprint.setup.optimizer == "CPUOffloadOptimizer"
    # Its gradients go one by one, in a backward pass that the step of another optimizer does not have.
    make = BY_NAME["adamw-offload-gradients"].make
    bare = sacplan.profile(net(), batch(), loss, None, GPU)
    assert recorded_step(bare, make) is None
    with pytest.raises(sacplan.errors.TraceError, match="Record the whole step"):
        with_other_optimizer(bare, make)


@pytest.mark.parametrize("link_bytes_per_s", [1e8, 1e12])
def test_the_time_of_an_optimizer_on_the_host(link_bytes_per_s: float) -> None:
    """It reads all at the host's rate; on a slow link the first update is waited for, on a fast one the last copy."""
    spec = dataclasses.replace(resolve_device(GPU), host_link=Link("a link", link_bytes_per_s, 0.0))
    profile = on(spec, "adamw-offload")
    (step,) = (op for op in profile.recorded.ops if "from_host_" in op.name)
    large = [p.nbytes for p in net().parameters() if p.numel() >= 4096]
    reads = [4 * n_bytes + 4 for n_bytes in large]
    assert sum(reads) == profile.optimizer_host_bytes
    updates, copies = (
        [n / spec.host_bandwidth_bytes_per_s for n in reads],
        [n / link_bytes_per_s for n in large],
    )
    seconds = updates[0] + sum(copies) if link_bytes_per_s < 1e9 else sum(updates) + copies[-1]
    assert step.time_ms == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize(("world", "sharers"), [(2, 2), (8, 4)])
def test_ranks_of_a_node_share_the_memory_of_their_host(world: int, sharers: int) -> None:
    spec = dataclasses.replace(resolve_device(GPU), host_link=Link("a link", 1e12, 0.0))
    with sacplan.ranks(world, device=spec):
        profile = on(spec, "adamw-offload")
    (step,) = (op for op in profile.recorded.ops if "from_host_" in op.name)
    large = [p.nbytes for p in net().parameters() if p.numel() >= 4096]
    share = spec.host_bandwidth_bytes_per_s / sharers
    seconds = sum(4 * n + 4 for n in large) / share + large[-1] / 1e12
    assert step.time_ms == pytest.approx(1e3 * seconds)
    assert any(f"{sharers} of {world} ranks share a processor" in said for said in profile.assumptions)


# --- Muon


def test_muon_has_matrices_and_adamw_the_rest() -> None:
    """An embedding is as long as a vocabulary, and an adapter as thin as its rank: neither is for Muon."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64 * 16))
    profile = sacplan.profile(model, batch(), loss, "muon", GPU)
    hidden, bias, head, other = model.parameters()
    round_up = profile.spec.round_up
    states = [round_up(hidden.nbytes), *(2 * round_up(p.nbytes) for p in (bias, head, other))]
    assert state_bytes(profile.recorded) == sum(states)
    assert profile.fingerprint.setup.optimizer == "Muon + AdamW"
