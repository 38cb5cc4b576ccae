"""Shardings as code of other tools: run on gloo ranks against one process, and plans that Hugging Face ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from sacplan._shard.emit import Emission, described, emit
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import Placements, cut, parse_layout
from sacplan._shard.places import CallPattern
from sacplan._shard.sharding import Sharding
from sacplan._shard.tp_plans import homes_of_tp_plan
from sacplan.errors import PlanError
from tests.support.processes import run_ranks
from tests.zoo.parallel import SplitLM

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

VOCAB = 24


MEGATRON = {
    **dict.fromkeys(("attention.q", "attention.k", "attention.v", "up"), (cut(0), cut(0))),
    **dict.fromkeys(("attention.o", "down"), (cut(1), parse_layout("R")[0])),
}
"""Weight and bias of a layer's modules."""


def megatron(embed: str = "R", head: str = "R") -> dict[str, Placements]:
    homes: dict[str, Placements] = {"embed.weight": parse_layout(embed), "head.weight": parse_layout(head)}
    for module, (weight, bias) in MEGATRON.items():
        homes[f"layers.*.{module}.weight"], homes[f"layers.*.{module}.bias"] = (weight,), (bias,)
    return homes


def with_data_axis(tensor: Mapping[str, Placements], data: str = "S0") -> dict[str, Placements]:
    """All parameters cut on their first dimension on an axis before; within what the tensor axis cuts of it."""
    whole = dict.fromkeys((pattern_of(name) for name in described(SplitLM()).shapes), parse_layout("R"))
    found: dict[str, Placements] = {}
    for name, layout in {**whole, **tensor}.items():
        inner = layout[0]
        (placement,) = parse_layout(data)
        if placement.is_cut and inner.is_cut and inner.dim == 0:
            placement = cut(0, 2)
        found[name] = (placement, inner)
    return found


def pattern_of(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def batch_on(*layouts: str) -> list[CallPattern]:
    return [CallPattern("embed", "aten.embedding.default", 0, ("", layout)) for layout in layouts]


def sequence(dp: str = "*") -> list[CallPattern]:
    return [
        CallPattern(unit, "aten.native_layer_norm.default", 0, (f"{dp},S1",))
        for unit in ("layers.*.before", "layers.*.norm", "norm")
    ]


Case = tuple[dict[str, int], dict[str, Placements], list[CallPattern]]

CASES: dict[str, Case] = {
    "megatron": ({"dp": 2, "tp": 2}, with_data_axis(megatron()), batch_on("S0,R")),
    "all of it": ({"dp": 2, "tp": 2}, with_data_axis(megatron("S0", "S0")), batch_on("S0,R")),
    "embedding's columns, head's rows": (
        {"dp": 2, "tp": 2},
        with_data_axis(megatron("S1", "S1")),
        batch_on("S0,R"),
    ),
    "sequence": (
        {"dp": 2, "tp": 2},
        with_data_axis(megatron("S0", "S0")),
        [*batch_on("S0,R"), *sequence()],
    ),
    "sequence, whole embedding and head": (
        {"dp": 2, "tp": 2},
        with_data_axis(megatron()),
        [*batch_on("S0,R"), *sequence()],
    ),
    "tensor alone": ({"tp": 4}, megatron("S0", "S0"), []),
    "fully_shard": (
        {"dp": 4},
        {pattern_of(n): (cut(0),) for n in described(SplitLM()).shapes},
        batch_on("S0"),
    ),
    "other dimensions": (
        {"dp": 2, "tp": 2},
        with_data_axis(megatron())
        | {"embed.weight": parse_layout("S1,R"), "layers.*.up.weight": parse_layout("S1,S0")},
        batch_on("S0,R"),
    ),
    "replicas of shards": (
        {"replica": 2, "dp": 2},
        {pattern_of(n): parse_layout("R,S0") for n in described(SplitLM()).shapes},
        batch_on("S0,R", "R,S0"),
    ),
    "replicas": ({"dp": 4}, {}, batch_on("S0")),
}
DATA_AXES = ("replica", "dp")


def emitted(name: str) -> Emission:
    axes, homes, places = CASES[name]
    with torch.device("meta"):
        return emit(Sharding.of(axes, homes, places), described(SplitLM()))


def model_and_tokens() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = SplitLM().double()
    return model, torch.randint(0, VOCAB, (8, 12)), torch.randint(0, VOCAB, (8, 12))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, tokens, targets = model_and_tokens()
    loss = loss_of(model, tokens, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_case(name: str, code: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    axes = CASES[name][0]
    device_mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    loss, gradients = expected()
    model, tokens, targets = model_and_tokens()
    scope: dict[str, Any] = {}
    exec(code, scope)
    wrapped = scope["shard"](model, device_mesh)
    part = tokens, targets
    for axis in DATA_AXES:
        if axis in axes:
            part = tuple(t.chunk(axes[axis])[device_mesh.get_local_rank(axis)] for t in part)  # type: ignore[assignment]
    found = loss_of(wrapped, *part)
    found.backward()
    total = found.detach().clone()
    for axis in DATA_AXES:
        if axis in axes:
            dist.all_reduce(total, group=device_mesh.get_group(axis))
            total /= axes[axis]
    torch.testing.assert_close(total, loss, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}")
    cut_anywhere = False
    for parameter, p in model.named_parameters():
        assert p.grad is not None, f"{name}: {parameter}"
        cut_anywhere |= isinstance(p, DTensor) and p.to_local().numel() < p.numel()
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        right = torch.allclose(gradient, gradients[parameter], rtol=1e-9, atol=1e-11)
        assert right, f"{name}: gradient of {parameter}"
    assert cut_anywhere == (name != "replicas"), name


def on_rank(rank: int, directory: str, codes: Mapping[str, str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4)
    try:
        for name, code in codes.items():
            run_case(name, code)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_code_runs_on_four_ranks_as_one_process_does(tmp_path: Path) -> None:
    codes = {name: emitted(name).code for name in CASES}
    assert all(codes.values()), [(name, emitted(name).reasons) for name, code in codes.items() if not code]
    run_ranks(on_rank, (str(tmp_path), codes), 4)


def test_what_the_code_looks_like() -> None:
    assert emitted("all of it").code == (
        """from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def shard(model, device_mesh):
    \"\"\"device_mesh: init_device_mesh(device, (2, 2), mesh_dim_names=('dp', 'tp'))\"\"\"
    parallelize_module(
        model,
        device_mesh['tp'],
        {
            'embed': RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            'layers.*.attention.q': ColwiseParallel(),
            'layers.*.attention.k': ColwiseParallel(),
            'layers.*.attention.v': ColwiseParallel(),
            'layers.*.attention.o': RowwiseParallel(),
            'layers.*.up': ColwiseParallel(),
            'layers.*.down': RowwiseParallel(),
            'head': ColwiseParallel(output_layouts=Replicate()),
        },
    )
    data_mesh = device_mesh['dp']
    for layer in model.get_submodule('layers').children():
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return model
"""
    )
    assert "SequenceParallel(" in emitted("sequence").code
    assert emitted("sequence").tp_plan == {}


# --- what has no such form ----------------------------------------------------------------------------


def reasons(axes: Mapping[str, int], homes: Mapping[str, str], places: Sequence[CallPattern] = ()) -> str:
    found = emit(Sharding.of(axes, homes, places), described(SplitLM()))
    assert found.code == ""
    assert found.tp_plan == {} or len(axes) == 1
    return "\n".join(found.reasons)


def test_reasons() -> None:
    assert "nothing is cut" in reasons({"a": 2}, {})
    assert "on 'a' and 'b'" in reasons({"a": 2, "b": 2}, {"head.weight": "S0,R", "embed.weight": "R,S0"})
    assert "'norm.weight' of the Norm 'norm' is cut as S0" in reasons({"tp": 2}, {"norm.weight": "S0"})
    assert "cut as S0/4" in reasons({"tp": 2}, {"head.weight": "S0/4"})
    assert "'embed.weight' is whole on the data axis" in reasons(
        {"dp": 2}, {"head.weight": "S0"}, batch_on("S0")
    )
    assert "several axes of one kind" in reasons({"a": 2, "b": 2}, {}, batch_on("S0,R", "R,S0"))
    tensor = {"layers.*.up.weight": "R,S0", "layers.*.up.bias": "R,S0", "layers.*.down.weight": "R,S1"}
    assert "DistributedDataParallel" in reasons({"a": 2, "b": 2}, tensor, batch_on("S0,R"))
    tensor = {name: layout[2:] for name, layout in tensor.items()}
    some = [CallPattern("norm", "aten.native_layer_norm.default", 0, ("S1",))]
    assert "at some norms, and not at 'layers.0.before'" in reasons({"tp": 2}, tensor, some)
    odd = [CallPattern("layers.*.attention", "aten.transpose.int", 0, ("S2",))]
    assert "occurrence 0 in layers.*.attention cuts what" in reasons({"tp": 2}, tensor, odd)


def test_a_layer_that_differs_is_named() -> None:
    homes = {
        "layers.1.up.weight": (cut(0),),
        "layers.1.up.bias": (cut(0),),
        "layers.1.down.weight": (cut(1),),
    }
    found = emit(Sharding.of({"tp": 2}, homes), described(SplitLM()))
    assert "'layers.1.up': ColwiseParallel()" in found.code
    assert "layers.0" not in found.code
    assert found.tp_plan == {}
    assert "'layers.1.up' differs" in found.reasons[0]


def test_what_rows_take_is_gathered_where_it_does_not_arrive_cut() -> None:
    homes = megatron()
    code = emit(
        Sharding.of({"tp": 2}, homes), described(SplitLM()), arriving_cut={"layers.0.attention.o"}
    ).code
    assert "'layers.0.attention.o': RowwiseParallel()" in code
    assert "'layers.0.attention.q': ColwiseParallel()" in code
    assert "'layers.1.attention.o': RowwiseParallel(input_layouts=Replicate())" in code
    assert "'layers.*.down': RowwiseParallel(input_layouts=Replicate())" in code
    assert "'layers.*.up': ColwiseParallel(output_layouts=Replicate())" in code


def test_shared_parameters_have_no_form() -> None:
    model = SplitLM()
    model.head.weight = model.embed.weight
    found = emit(Sharding.of({"tp": 2}, {"embed.weight": "S0"}), described(model))
    assert found.code == ""
    assert "'embed.weight' is also 'head.weight'" in found.reasons[0]


def test_homes_must_be_of_the_model() -> None:
    with pytest.raises(PlanError, match=r"a home for 'layers\.\*\.gate'"):
        emit(Sharding.of({"tp": 2}, {"layers.*.gate": "S0"}), described(SplitLM()))
    with pytest.raises(PlanError, match=r"'norm.weight' of shape \(16,\) cannot lie as S0"):
        emit(Sharding.of({"tp": 3}, {"norm.weight": "S0"}), described(SplitLM()))


# --- Hugging Face -------------------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def small(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma", "mixtral"])
def test_the_plans_that_models_carry(kind: str) -> None:
    """Read as homes and written again, they are the same."""
    model = small(kind)
    homes = homes_of_tp_plan(model, Mesh.of({"dp": 2, "tp": 2}), "tp")
    assert all(str(layout[0]) == "R" for layout in homes.values())
    tensor = {name: layout[1:] for name, layout in homes.items()}
    found = emit(Sharding.of({"tp": 2}, tensor), described(model))
    assert dict(found.tp_plan) == model._tp_plan, found.reasons
    prefix = f"{model.base_model_prefix}."
    inner = {n.removeprefix(prefix): s for n, s in found.tp_plan.items() if n.startswith(prefix)}
    assert model.config.base_model_tp_plan.items() <= inner.items()


def test_homes_of_llamas_plan() -> None:
    homes = homes_of_tp_plan(small("llama"), Mesh.of({"dp": 2, "tp": 2}), "tp")
    attention = {f"model.layers.*.self_attn.{n}_proj.weight": "R,S0" for n in "qkv"}
    assert {name: ",".join(map(str, layout)) for name, layout in homes.items()} == {
        "model.embed_tokens.weight": "R,S0",
        **attention,
        "model.layers.*.self_attn.o_proj.weight": "R,S1",
        "model.layers.*.mlp.gate_proj.weight": "R,S0",
        "model.layers.*.mlp.up_proj.weight": "R,S0",
        "model.layers.*.mlp.down_proj.weight": "R,S1",
        "lm_head.weight": "R,S0",
    }


def test_no_plan_and_no_axis() -> None:
    with pytest.raises(PlanError, match="SplitLM has no tensor-parallel plan"):
        homes_of_tp_plan(SplitLM(), Mesh.of({"tp": 2}), "tp")
    with pytest.raises(PlanError, match="has no axis 'model'"):
        homes_of_tp_plan(SplitLM(), Mesh.of({"tp": 2}), "model")
