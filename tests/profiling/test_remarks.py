"""What is said before the figures of a step are believed: of its loss, its optimizer and bfloat16."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sacplan
from sacplan.cli.app import app
from sacplan.core.budget import format_bytes
from sacplan.core.elements import StorageKind
from sacplan.device.devices import resolve_device
from sacplan.distributed.ranks.ranks import Ranks
from sacplan.profiling.remarks import adamw_state_bytes
from sacplan.record.step import default_loss
from tests.support.steps import total as summed


def model() -> nn.Module:
    """Of odd sizes, with one parameter that is not trained and one that no gradient reaches."""
    made = nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 33))
    made[0].bias.requires_grad_(False)
    made.unused = nn.Parameter(torch.zeros(1000))
    return made


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(8, 33, dtype=dtype)


def remark(sentences: tuple[str, ...]) -> str:
    found = [sentence for sentence in sentences if sentence.startswith("no optimizer")]
    return found[0] if found else ""


def state_bytes(profile: sacplan.Profile) -> int:
    program = profile.program
    return sum(
        program.storage_bytes[s]
        for s in program.initial
        if program.storage_kinds[s] == StorageKind.OPTIMIZER_STATE
    )


# --- no optimizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "world_size"), [("h100", 2), ("cpu", 1)])
def test_the_state_that_is_missing_is_that_of_a_step_with_adamw(device: str, world_size: int) -> None:
    ranks = Ranks.of(world_size, None if world_size == 1 else ["0", ""])
    made = model() if world_size == 1 else nn.Sequential(*model().children())  # every gradient is reduced
    without = sacplan.profile(made, batch(), loss, device=device).on_ranks(ranks)
    recorded = sacplan.profile(made, batch(), loss, torch.optim.AdamW, device=device).on_ranks(ranks)
    assert state_bytes(recorded) > 0 == state_bytes(without)
    assert f"AdamW would add {format_bytes(state_bytes(recorded))} of state" in remark(without.assumptions)
    assert remark(recorded.assumptions) == ""


def test_the_state_is_what_torch_makes() -> None:
    real = model()
    optimizer = torch.optim.AdamW(real.parameters())
    loss(real, batch()).backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    trained = [p.nbytes for p in real.parameters() if p.grad is not None]
    assert adamw_state_bytes(trained, resolve_device("cpu")) == sum(value.nbytes for value in state)


@pytest.mark.parametrize("run", ["fake", "real"])
def test_verify_says_it_too(run: Any) -> None:
    here = nn.Sequential(*model().children())  # all that is trained gets a gradient
    plan = sacplan.policy("none", profile=sacplan.profile(here, batch(), loss, device="cpu"))
    seen = sacplan.verify(here, batch(), plan, loss, run=run)
    assert (
        remark(seen.assumptions)
        == remark(sacplan.profile(here, batch(), loss, device="cpu").assumptions)
        != ""
    )
    with_sgd = sacplan.policy(
        "none", profile=sacplan.profile(here, batch(), loss, torch.optim.SGD, device="cpu")
    )
    assert sacplan.verify(here, batch(), with_sgd, loss, torch.optim.SGD, run=run).assumptions == ()


# --- the loss -----------------------------------------------------------------------------------------------


class LogitsAndLoss(nn.Module):
    """A model as nanoGPT's is, which returns its loss beside its logits; ``metrics`` come after them."""

    def __init__(self, metrics: int = 0, losses: int = 1) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        self.metrics, self.losses = metrics, losses

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        logits = self.head(torch.relu(self.up(x)))
        loss = nn.functional.cross_entropy(logits, y)
        return (
            logits,
            {"losses": [loss * n for n in range(1, 1 + self.losses)]},
            *[loss.detach()] * self.metrics,
        )


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 8), torch.randint(5, (64,))


@pytest.mark.parametrize(("trace", "metrics"), [("fake", 1), ("real", 0)])
def test_the_only_scalar_of_the_outputs_is_the_loss(trace: Any, metrics: int) -> None:
    net, options = LogitsAndLoss(metrics), {"optimizer": torch.optim.SGD, "device": "cpu", "trace": trace}
    with warnings.catch_warnings():
        warnings.simplefilter("error", sacplan.SacplanWarning)
        found = sacplan.profile(net, pair(), **options)
    meant = sacplan.profile(net, pair(), lambda m, b: m(*b)[1]["losses"][0], **options)
    summed = sacplan.profile(net, pair(), lambda m, b: m(*b)[0].sum() + m(*b)[1]["losses"][0], **options)
    assert [op.name for op in found.program.ops] == [op.name for op in meant.program.ops]
    assert found.peak_bytes == meant.peak_bytes != summed.peak_bytes
    assert found.fingerprint.setup.loss == "the only scalar of the outputs"
    assert found.assumptions == meant.assumptions


def test_a_real_step_trains_it_too() -> None:
    net, batch = LogitsAndLoss(), pair()
    plan = sacplan.policy(
        "none", profile=sacplan.profile(net, batch, device="cpu", optimizer=torch.optim.SGD)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", sacplan.SacplanWarning)
        seen = sacplan.verify(net, batch, plan, optimizer=torch.optim.SGD, run="real")
    assert seen.assumptions == ()
    assert seen.setup_differences == ()
    expected = torch.autograd.grad(net(*batch)[1]["losses"][0], list(net.parameters()))
    taken = torch.autograd.grad(default_loss(net, batch), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, taken, strict=True))


@pytest.mark.parametrize("losses", [0, 2])
def test_the_sum_of_the_outputs_is_said(losses: int) -> None:
    net, batch = LogitsAndLoss(losses=losses), pair()
    with pytest.warns(
        sacplan.errors.SumOfOutputsWarning, match=r"sum of its float outputs.* loss_fn=lambda"
    ) as caught:
        profile = sacplan.profile(net, batch, optimizer=torch.optim.SGD, device="cpu")
    assert caught[0].filename == __file__
    assert profile.assumptions == (str(caught[0].message).rstrip("."),)
    plan = sacplan.policy("none", profile=profile)
    for run in ("fake", "real"):
        with pytest.warns(sacplan.errors.SumOfOutputsWarning) as again:
            seen = sacplan.verify(net, batch, plan, optimizer=torch.optim.SGD, run=run)
        assert [warning.filename for warning in again] == [__file__]
        assert seen.assumptions == profile.assumptions
    with pytest.warns(sacplan.SacplanWarning, match="Give the loss_fn that was profiled") as other:
        sacplan.verify(net, batch, plan, lambda m, b: m(*b)[0].mean(), torch.optim.SGD)
    assert len(other) == 1


def test_a_sum_that_was_asked_for_is_not_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", sacplan.SacplanWarning)
        sacplan.profile(nn.Linear(4, 4), torch.ones(2, 4), summed)
        sacplan.profile(nn.Linear(4, 4), torch.ones(2, 4), mode="inference")


# --- bfloat16 -----------------------------------------------------------------------------------------------


def test_a_bfloat16_step_on_a_device_without_it_warns() -> None:
    half = model().to(torch.bfloat16)
    with pytest.warns(sacplan.SacplanWarning, match=r"t4 has no bfloat16 .*7\.5.*float16") as caught:
        profile = sacplan.profile(half, batch(torch.bfloat16), loss, torch.optim.SGD, device="t4")
    assert caught[0].filename == __file__
    assert profile.assumptions == (str(caught[0].message).rstrip("."),)


def test_others_do_not_warn() -> None:  # a SacplanWarning would be an error here
    sacplan.profile(model().half(), batch(torch.float16), loss, device="t4")
    sacplan.profile(model().to(torch.bfloat16), batch(torch.bfloat16), loss, device="a10")


def test_autocast_to_bfloat16_counts() -> None:
    def cast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(model, batch)

    with pytest.warns(sacplan.SacplanWarning, match="t4 has no bfloat16"):
        sacplan.profile(model(), batch(), cast, device="t4")


# --- on the command line ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 2,
        "vocab_size": 64, "n_positions": 32,
    }  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return lambda words: CliRunner().invoke(app, words.split())


def test_commands_say_that_there_is_no_optimizer_once(run: Callable[[str], Any]) -> None:
    for words in ("plan hf:tiny.json --optimizer none -o plan.json", "verify hf:tiny.json plan.json"):
        said = " ".join(run(words).output.split())
        assert len(re.findall("no optimizer, so .*? AdamW would add", said)) == 1
    assert "no optimizer" not in run("plan hf:tiny.json").stderr


def test_dtype_follows_the_device(run: Callable[[str], Any]) -> None:
    made = run("profile hf:tiny.json --device t4 --json")
    assert json.loads(made.stdout)["hf"]["dtype"] == "float16"
    assert "--dtype float16, since t4 has no bfloat16" in made.stderr
    made = run("profile hf:tiny.json --device t4 --dtype bfloat16")
    assert len(re.findall("t4 has no bfloat16", made.stderr)) == 1
    assert json.loads(run("profile hf:tiny.json --json").stdout)["hf"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        ("a100-80gb", torch.float32, "in float32 count as 0"),
        ("a100-80gb", torch.bfloat16, "as measured on an H100"),
        ("cpu", torch.float32, ""),
    ],
)
def test_a_conv_net_on_a_gpu_says_what_is_known_of_cudnn(device: str, dtype: torch.dtype, said: str) -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=dtype)
    profile = sacplan.profile(nn.Conv2d(3, 4, 3).to(dtype), images, loss, device=device)
    found = [sentence for sentence in profile.assumptions if "workspaces of cuDNN" in sentence]
    assert [said in sentence for sentence in found] == ([True] if said else [])
    assert not any("cuDNN" in s for s in sacplan.profile(model(), batch(), loss, device=device).assumptions)


def test_a_model_of_transformers_names_its_loss_and_version() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    made = transformers.GPT2LMHeadModel(config)
    profile = sacplan.profile(made, {"input_ids": tokens, "labels": tokens}, device="a100-80gb")
    (said,) = [sentence for sentence in profile.assumptions if "transformers" in sentence]
    assert f"ForCausalLMLoss of transformers {transformers.__version__}: logits in float32" in said
    summed = sacplan.profile(
        made, {"input_ids": tokens}, lambda m, b: m(**b).logits.sum(), device="a100-80gb"
    )
    assert not any("transformers" in sentence for sentence in summed.assumptions)


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [("h100", torch.float32, True), ("h100", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_attention_that_keeps_its_scores_is_said(device: str, dtype: torch.dtype, said: bool) -> None:
    """Fewer heads of keys and values than of queries: on a GPU, flash attention alone runs that."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    q, k = (torch.rand(1, heads, 64, 64, dtype=dtype, requires_grad=True) for heads in (8, 2))
    found = sacplan.profile(Attention(), (q, k), lambda m, b: m(*b).float().mean(), device=device)
    assert any("keep the scores" in sentence for sentence in found.assumptions) == said
