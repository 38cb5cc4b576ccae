"""Styles of ``parallelize_module`` from placements of parameters, and shardings as values, code and errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.sharding import Sharding
from sacplan.distributed.sharding.styles import kinds_of, tensor_parallel
from sacplan.errors import PlanError, TraceError
from sacplan.planning.meshes import way
from tests.support.steps import mean_square
from tests.zoo.layers import MLP, FromFunction, Residual, Stack
from tests.zoo.parallel import SplitLM

GATHERED = "ColwiseParallel(output_layouts=Replicate())"


@functools.cache
def profile() -> sacplan.Profile:
    return recorded(MLP(64))


def recorded(model: nn.Module, loss_fn: Any = mean_square) -> sacplan.Profile:
    return sacplan.profile(model, torch.randn(16, 64), loss_fn, device="h100")


def of(found: sacplan.Profile, ranks: int = 4, *, sequence: bool = False) -> dict[str, str]:
    return tensor_parallel(found.recorded, found.fingerprint, found.source.model, ("tp", ranks), sequence)


def test_an_mlp_is_cut_by_columns_and_then_by_rows() -> None:
    assert of(profile()) == {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}


def test_equal_layers_have_one_pattern_and_what_is_whole_is_replicated() -> None:
    made = recorded(Stack([Residual(MLP(64)) for _ in range(3)], nn.Linear(64, 64)))
    assert of(made) == {
        "layers.*.layer.*.up": "ColwiseParallel()",
        "layers.*.layer.*.down": "RowwiseParallel()",
        "head": GATHERED,
    }


@pytest.mark.parametrize(
    ("between", "pairs"),
    [
        (nn.functional.gelu, True),
        (lambda h: h * 2 + 1, True),
        (lambda h: h.softmax(-1), False),  # needs all of a row
        (lambda h: h / h.norm(dim=-1, keepdim=True), False),
        (lambda h: h.chunk(2, -1)[0].repeat(1, 2), False),  # halves of all, not of each part
        (lambda h: h - h.sum(), False),
    ],
    ids=["pointwise", "affine", "softmax", "norm", "halves", "sum"],
)
def test_what_runs_between_columns_and_rows_runs_on_parts(between: Any, pairs: bool) -> None:
    """Else each rank would compute something else, without an error: shapes fit."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(between(self.up(x)))

    made = recorded(FromFunction(forward, up=nn.Linear(64, 256), down=nn.Linear(256, 64)))
    if pairs:
        assert of(made) == {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}
    else:
        assert of(made) == {"up": GATHERED, "down": GATHERED}


@pytest.mark.parametrize("features", [1, 256], ids=["a gate", "as many gates"])
def test_an_activation_with_a_gradient_that_is_whole_makes_no_pair(features: int) -> None:
    """Each rank would have a summand of the gate's gradient, and train with that."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid().mean(-1, keepdim=True))

    layers = {"up": nn.Linear(64, 256), "down": nn.Linear(256, 64), "gate": nn.Linear(64, features)}
    made = recorded(FromFunction(forward, **layers))
    assert set(of(made).values()) <= {GATHERED, "Replicated()"}


def test_sequences_are_cut_between_pairs_and_logits_by_classes() -> None:
    """What PyTorch's own documentation and torchtitan cut; norms gather for all layers that read them."""
    cut = "output_layouts=Shard(1), use_local_output=False"
    assert of(recorded_tokens(), sequence=True) == {
        "embed": f"RowwiseParallel(input_layouts=Replicate(), {cut})",
        **{f"layers.*.{norm}": "Replicated(output_layouts=Replicate())" for norm in ("before", "norm")},
        **{f"layers.*.attention.{n}": "ColwiseParallel()" for n in "qkv"},
        "layers.*.attention.o": f"RowwiseParallel({cut})",
        "layers.*.up": "ColwiseParallel()",
        "layers.*.down": f"RowwiseParallel({cut})",
        "norm": "Replicated(output_layouts=Replicate())",
        "head": "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)",
    }
    odd = of(recorded_tokens(26), sequence=True)
    assert (odd["embed"], odd["head"]) == ("Replicated(output_layouts=Shard(1))", "Replicated()")


def recorded_tokens(vocabulary: int = 24) -> sacplan.Profile:
    tokens = torch.randint(24, (8, 8))
    return sacplan.profile(
        SplitLM(vocab=vocabulary),
        tokens,
        lambda m, x: nn.functional.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        device="h100",
    )


def test_modules_with_shared_parameters_have_no_kind() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    assert kinds_of(model) == {"0": "", "1": "", "2": "Linear"}


@pytest.mark.parametrize(
    "text",
    [
        "ColwiseParallel",
        "print()",
        "ColwiseParallel(f())",
        "ColwiseParallel(open('x'))",
        "(",
        "1",
        "a.b()",
        "ColwiseParallel('x')",
        "ColwiseParallel(Shard)",
        "ColwiseParallel(ColwiseParallel())",
    ],
)
def test_styles_in_files_are_styles(text: str) -> None:
    with pytest.raises(PlanError, match="the style of 'up' is"):
        Sharding(Mesh.of({"tp": 2}), {"up": text})


@pytest.mark.parametrize("way", ["fsdp + megatron", "fsdp + sequence"])
def test_code_does_what_apply_does(way: str) -> None:
    made = recorded_tokens()
    plan = sacplan.policy(way, profile=made, mesh={"dp": 2, "tp": 2})
    code = plan.code()
    compile(code, "plan", "exec")
    for pattern, style in plan.ranks.sharding.styles.items():
        assert f"{pattern!r}: {style}," in code
    assert ("\nloss_parallel()" in code) == (way == "fsdp + sequence")
    assert "    fully_shard(layer, mesh=mesh['dp'])\nfully_shard(model, mesh=mesh['dp'])" in code
    assert plan.code() == sacplan.Plan.code(plan)
    assert "DistributedDataParallel(model)" in sacplan.policy("ddp", profile=made, mesh={"dp": 2}).code()
    with pytest.raises(PlanError, match="spreads nothing over ranks"):
        sacplan.plan(made, "100%").code()


@pytest.mark.parametrize(
    ("mesh", "name", "says"),
    [
        ({"dp": 2, "tp": 2}, "ddp + megatron", "does not take a model that parallelize_module has cut"),
        ({"a": 2, "b": 2, "c": 2}, "fsdp", "3 axes for data; PyTorch takes one, or two"),
        ({"tp": 7}, "megatron", "7 ranks of axis 'tp' divide no nn.Linear"),
        ({"dp": 3}, "fsdp", "a batch of 16 cannot be cut for 3 ranks"),
        (4, "fsdp", "stands for several meshes"),
        ({"dp": 2}, "zero", "sharding 'zero' is not known"),
    ],
)
def test_ways_that_there_are_not(mesh: Any, name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        way(profile(), mesh, name).profile  # noqa: B018


def test_a_profile_from_a_file_has_no_model(tmp_path: Any) -> None:
    profile().save(tmp_path / "profile.json")
    loaded = sacplan.Profile.load(tmp_path / "profile.json")
    with pytest.raises(PlanError, match="recorded from the model, which a profile from a file does not have"):
        sacplan.plan(loaded, "100%", mesh={"dp": 2})


def test_what_does_not_run_on_parts_is_refused_by_name() -> None:
    """Heads are written down in its forward pass."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(16, 4, 16)
        return self.o((q * 2).view(16, 64))

    made = recorded(FromFunction(forward, q=nn.Linear(64, 64), o=nn.Linear(64, 64)))
    with pytest.raises(TraceError, match="does not run on tp 4 as PyTorch spreads it: RuntimeError"):
        sacplan.policy("megatron", profile=made, mesh={"tp": 4})
