"""Plans on a mesh, on four gloo ranks: they compute what one process does, in the bytes that the plan says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import sacplan
from sacplan._ranks.ranks import Ranks
from sacplan._torch.versions import torch_release
from tests.support.drawn import drawn_sharding
from tests.support.ranks import OPTIMIZER, RankMemory, patient_collectives
from tests.support.spread import Case, far, ok, on_ranks
from tests.support.steps import mean_square
from tests.zoo.language_models import LM, Block, cross_entropy, tokens
from tests.zoo.layers import MLP

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
    pytest.mark.skipif(
        torch_release() < (2, 12), reason="torch 2.11 runs the ops of DTensors without asking their class"
    ),
]

MESHES: Mapping[str, dict[str, int]] = {"4": {"dp": 4}, "2x2": {"dp": 2, "tp": 2}, "tp": {"tp": 4}}
Made = tuple[nn.Module, Any, Callable[..., torch.Tensor]]


def of_model(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def mlp() -> Made:
    return MLP(1024), torch.randn(512, 1024), mean_square


def block() -> Made:
    return Block(256, 8, 0.0), torch.randn(4, 128, 256), mean_square


def lm() -> Made:
    return LM(2, 64, 4, 128, dropout=0.0), tokens(4, 32, 128), cross_entropy


def of_tokens(model: nn.Module) -> Made:
    return (
        model,
        {"input_ids": torch.randint(0, 256, (4, 32)), "labels": torch.randint(0, 256, (4, 32))},
        of_model,
    )


def llama() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=128,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    return of_tokens(transformers.LlamaForCausalLM(config))


def gpt2() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return of_tokens(transformers.GPT2LMHeadModel(config))


def vit() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, num_labels=8,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(0, 8, (8,))}
    return transformers.ViTForImageClassification(config), batch, of_model


def seeded(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    return make()


# --- on a rank ------------------------------------------------------------------------------------------


def whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def measured(make: Callable[[], Made], plan: sacplan.Plan) -> int:
    model, batch, loss_fn = seeded(make)
    with sacplan.apply(model, plan, check=False), patient_collectives():
        return RankMemory(model, batch, loss_fn).peak_bytes()


def runs(make: Callable[[], Made], file: Path) -> dict[str, Any]:
    """What a plan takes, and how far three steps and a checkpoint are from those of one process."""
    plan = sacplan.Plan.load(file)
    found: dict[str, Any] = {
        "predicted": plan.peak_bytes, "budget": plan.budget_bytes, "measured": measured(make, plan),
    }  # fmt: skip
    model, batch, loss_fn = seeded(make)
    reference, fresh = copy.deepcopy(model), copy.deepcopy(model)
    names = list(model.state_dict())
    handle = sacplan.apply(model, plan)
    pairs = [(m, OPTIMIZER(m.parameters(), lr=1e-2, eps=1e-3)) for m in (model, reference)]
    for step in range(3):
        losses = [loss_fn(m, batch) for m, _ in pairs]
        for loss in losses:
            loss.backward()
        if step == 0:
            found["loss"] = far(whole(losses[0]), losses[1].detach())
            found["gradients"] = apart(model, reference, lambda p: p.grad)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    found["differences"] = list(map(str, handle.differences))
    found["parameters"] = apart(model, reference, lambda p: p)
    found["keys"] = list(model.state_dict()) == names
    found |= restored(model, pairs[0][1], fresh, plan, batch, loss_fn, file.with_suffix(""))
    handle.remove()
    found["plain"] = all(type(p) is nn.Parameter for p in model.parameters())
    found["whole again"] = apart(model, reference, lambda p: p)
    return found


def apart(ours: nn.Module, theirs: nn.Module, of: Callable[[Any], Any]) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(far(whole(of(p)), whole(of(q))) for p, q in pairs if of(q) is not None)


def restored(
    model: nn.Module,
    optimizer: Any,
    fresh: nn.Module,
    plan: sacplan.Plan,
    batch: Any,
    loss_fn: Any,
    file: Path,
) -> dict[str, float]:
    """A checkpoint loaded into the same model under the same plan: parameters, state, and the next step."""
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=file,
    )
    sacplan.apply(fresh, plan)
    anew = OPTIMIZER(fresh.parameters(), lr=1e-2, eps=1e-3)
    loss_fn(fresh, batch).backward()
    anew.step()  # makes its state, which is then loaded
    anew.zero_grad()
    state = {"model": fresh.state_dict(), "optimizer": get_optimizer_state_dict(fresh, anew)}
    dcp.load(state, checkpoint_id=file)
    fresh.load_state_dict(state["model"])
    set_optimizer_state_dict(fresh, anew, state["optimizer"])
    loaded = apart(fresh, model, lambda p: p)
    states = max(
        far(whole(anew.state[p]["exp_avg"]), whole(optimizer.state[q]["exp_avg"]))
        for p, q in zip(fresh.parameters(), model.parameters(), strict=True)
        if q in optimizer.state
    )
    return {"loaded": loaded, "loaded state": states}


# --- planning -------------------------------------------------------------------------------------------


def planned(
    make: Callable[[], Made], mesh: dict[str, int], directory: Path, n_budgets: int = 3
) -> Iterator[Path]:
    """Files of plans at falling budgets, made without ranks."""
    model, batch, loss_fn = seeded(make)
    profile = sacplan.profile(model, batch, loss_fn, OPTIMIZER, device="cpu")
    budget = int(0.6 * profile.peak_bytes)
    for n in range(n_budgets):
        try:
            plan = sacplan.plan(profile, f"{budget}B", mesh=mesh, techniques=("shard", "recompute"))
        except sacplan.InfeasibleBudget as error:
            plan = sacplan.plan(
                profile, f"{error.smallest_feasible_bytes}B", mesh=mesh, techniques=("shard", "recompute")
            )
        file = directory / f"{make.__name__}-{'-'.join(mesh)}-{n}.json"
        plan.save(file)
        yield file
        budget = int(0.93 * plan.peak_bytes)


def planned_on_any_sharding(make: Callable[[], Made], mesh: dict[str, int], file: Path) -> None:
    """A plan for the smallest budget on strategies that are drawn at random."""
    model, batch, loss_fn = seeded(make)
    profile = sacplan.profile(model, batch, loss_fn, OPTIMIZER, device="cpu")
    sharding = drawn_sharding(profile, mesh, 0.3, 0)
    on_rank = profile.on_ranks(Ranks.spread(sharding))
    smallest = sacplan.plan_smallest(on_rank, techniques=("recompute",)).peak_bytes
    plan = sacplan.plan(on_rank, f"{smallest}B", techniques=("recompute",))
    assert plan.decisions
    plan.save(file)


def cases_of(models: Mapping[Any, tuple[str, ...]], directory: Path, n_budgets: int) -> dict[str, Case]:
    return {
        f"{make.__name__} on {mesh}, {n}": functools.partial(runs, make, file)
        for make, meshes in models.items()
        for mesh in meshes
        for n, file in enumerate(planned(make, MESHES[mesh], directory, n_budgets))
    }


def check(found: Any, case: str) -> None:
    for result in ok(found, case):
        assert result["measured"] <= 1.0001 * result["budget"]
        assert abs(result["measured"] / result["predicted"] - 1) < 0.01
        assert result["loss"] < 1e-5
        assert result["gradients"] < 1e-5
        assert result["parameters"] < 1e-5
        assert not result["differences"]
        assert result["keys"]
        assert result["plain"]
        assert result["whole again"] < 1e-5
        assert result["loaded"] == result["loaded state"] == 0


def check_all(models: Mapping[Any, tuple[str, ...]], directory: Path, n_budgets: int) -> None:
    cases = cases_of(models, directory, n_budgets)
    found = on_ranks(cases, directory)
    for case in cases:
        check(found, case)


@pytest.mark.slow
def test_plans_on_a_mesh_hold_on_ranks(tmp_path: Path) -> None:
    check_all({lm: ("2x2",)}, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("meshes", "budgets"), [(("2x2",), 3), (("4", "tp"), 1)])
def test_models_of_transformers(meshes: tuple[str, ...], budgets: int, tmp_path: Path) -> None:
    check_all(dict.fromkeys((llama, gpt2, vit), meshes), tmp_path, budgets)


@pytest.mark.slow
@pytest.mark.parametrize("models", [(llama,), pytest.param((gpt2, vit), marks=pytest.mark.exhaustive)])
def test_plans_on_any_sharding_hold_on_ranks(models: tuple[Callable[[], Made], ...], tmp_path: Path) -> None:
    cases = {}
    for make in models:
        file = tmp_path / f"{make.__name__}.json"
        planned_on_any_sharding(make, MESHES["2x2"], file)
        cases[make.__name__] = functools.partial(runs, make, file)
    found = on_ranks(cases, tmp_path)
    for case in cases:
        check(found, case)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_wide_mlp_and_a_block_take_what_is_predicted(tmp_path: Path) -> None:
    check_all(dict.fromkeys((mlp, block), ("4", "2x2")), tmp_path, 1)
