"""Models spread over four gloo ranks: they compute what one process does, hold parts alone, and send what is stated."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._shard.executor.install import spread
from sacplan._shard.executor.placed import PlacedTensor, placed_from
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placements, fits, format_layout, parse_layout
from sacplan._shard.places import CallPattern
from sacplan.errors import PlanError, PlanMismatch, SacplanError
from tests.support.agreement import agreement_cases
from tests.support.spread import (
    MESHES,
    Case,
    Made,
    beside_one_process,
    device_mesh,
    far,
    first_axis,
    homes_of,
    ok,
    on_ranks,
    random_homes,
    spread_on,
)
from tests.support.steps import mean_square
from tests.zoo.language_models import LM, Tied, tokens
from tests.zoo.layers import MLP

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
    pytest.mark.slow,
]


def ignoring_cross_entropy(model: nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), labels.flatten())


def mlp() -> Made:
    return MLP(16).double(), (torch.randn(8, 4, 16).double(),), mean_square


def lm() -> Made:
    """Labels are ignored unevenly: a mean over parts of the batch would be another one."""
    batch = tokens(4, 16, 64)
    labels = batch.clone()
    labels[0, :13] = labels[2, 4:9] = -100
    return LM(1, 32, 4, 64, dropout=0.0).double(), (batch, labels), ignoring_cross_entropy


MLP_BATCH = CallPattern("up", "aten.addmm.default", 0, ("", "S0"))
MLP_BATCH_2D = CallPattern("up", "aten.addmm.default", 0, ("", "S0,R"))
LM_BATCH = CallPattern("embed", "aten.embedding.default", 0, ("", "S0"))
LM_BATCH_2D = CallPattern("embed", "aten.embedding.default", 0, ("", "S0,*"))
LM_MEGATRON = {
    "layers.*.qkv.weight": "S0/3", "layers.*.qkv.bias": "S0/3", "layers.*.proj.weight": "S1",
    "layers.*.mlp.0.weight": "S0", "layers.*.mlp.0.bias": "S0", "layers.*.mlp.2.weight": "S1",
    "embed.weight": "S1", "head.weight": "S0",
}  # fmt: skip
MLP_MEGATRON = {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1"}
SEQUENCE = tuple(
    CallPattern(f"layers.*.norm{i}", "aten.native_layer_norm.default", 0, ("S1", "R", "R")) for i in (1, 2)
)


def on_tp(patterns: Mapping[str, str]) -> dict[str, str]:
    """The same on the second of two axes."""
    return {name: f"R,{text}" for name, text in patterns.items()}


def _model_cases() -> dict[str, Case]:
    one, two = MESHES["4"], MESHES["2x2"]
    both = on_tp(LM_MEGATRON) | {"layers.*.proj.weight": "S0,S1", "head.weight": "S0/2,S0"}
    cases: dict[str, Any] = {
        "mlp fsdp": (mlp, one, functools.partial(first_axis, mesh=one), (MLP_BATCH,)),
        "mlp ddp": (mlp, one, functools.partial(homes_of, mesh=one, patterns={}), (MLP_BATCH,)),
        "mlp megatron": (mlp, one, functools.partial(homes_of, mesh=one, patterns=MLP_MEGATRON), ()),
        "mlp dp x tp": (
            mlp, two, functools.partial(homes_of, mesh=two, patterns=on_tp(MLP_MEGATRON)), (MLP_BATCH_2D,),
        ),
        "lm fsdp": (lm, one, functools.partial(first_axis, mesh=one), (LM_BATCH,)),
        "lm ddp": (lm, one, functools.partial(homes_of, mesh=one, patterns={}), (LM_BATCH,)),
        "lm checkpointed": (
            checkpointed_lm, two, functools.partial(homes_of, mesh=two, patterns=both),
            (LM_BATCH_2D, *(CallPattern(p.unit, p.op, 0, ("*,S1", "", "")) for p in SEQUENCE)),
        ),
        "lm megatron": (lm, one, functools.partial(homes_of, mesh=one, patterns=LM_MEGATRON), ()),
        "lm sequence": (lm, one, functools.partial(homes_of, mesh=one, patterns=LM_MEGATRON), SEQUENCE),
        "lm dp x tp": (
            lm, two, functools.partial(homes_of, mesh=two, patterns=on_tp(LM_MEGATRON)), (LM_BATCH_2D,),
        ),
        "lm fsdp x tp": (lm, two, functools.partial(homes_of, mesh=two, patterns=both), (LM_BATCH_2D,)),
    }  # fmt: skip
    for seed in range(10):
        name, mesh = list(MESHES.items())[seed % 2]
        cases[f"mlp random {seed} {name}"] = (
            mlp, mesh, functools.partial(random_homes, mesh=mesh, seed=seed), (),
        )  # fmt: skip
    return {name: functools.partial(beside_one_process, *case) for name, case in cases.items()}


class _Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def collectives() -> dict[str, Any]:
    """Of Megatron's MLP, and of a data parallel one whose parameters are cut."""
    found = {}
    mesh = MESHES["4"]
    for name, patterns, places in (("megatron", MLP_MEGATRON, ()), ("fsdp", None, (MLP_BATCH,))):
        torch.manual_seed(0)
        model, (x,), loss_fn = mlp()
        lies = first_axis(model, mesh) if patterns is None else homes_of(model, mesh, patterns)
        spread_on(model, mesh, lies, places)
        with _Sent() as forward:
            loss = loss_fn(model, x)
            loss.full_tensor()
        with _Sent() as backward:
            loss.backward()
        found[name] = (dict(forward.counts), dict(backward.counts))
    return found


def checkpoint(directory: str) -> dict[str, Any]:
    """Saved after a step by ranks that have blocks, loaded by ranks that have others, and as a whole."""
    mesh, other = MESHES["2x2"], MESHES["4"]
    torch.manual_seed(0)
    model, batch, loss_fn = lm()
    fresh = [copy.deepcopy(model), copy.deepcopy(model)]
    homes = random_homes(model, mesh, 3) | {"layers.0.qkv.weight": parse_layout("S0/3,R")}
    spread_on(model, mesh, homes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_fn(model, *batch).backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=directory)
    spread_on(fresh[0], other, homes_of(fresh[0], other, LM_MEGATRON))
    found = {}
    for name, into in (("other homes", fresh[0]), ("whole", fresh[1])):
        for p in into.parameters():
            p.data.mul_(0) if name == "whole" else p.detach().zero_()
        anew = torch.optim.AdamW(into.parameters(), lr=1e-2)
        loss_fn(into, *batch).backward()
        anew.step()
        state = {"model": into.state_dict(), "optimizer": get_optimizer_state_dict(into, anew)}
        dcp.load(state, checkpoint_id=directory)
        into.load_state_dict(state["model"])
        pairs = [*zip(model.parameters(), into.parameters(), strict=True)]
        pairs += [
            (optimizer.state[p]["exp_avg"], state["optimizer"]["state"][n]["exp_avg"])
            for n, p in model.named_parameters()
        ]
        found[name] = max(
            far(a.detach().full_tensor(), b.detach().full_tensor() if isinstance(b, DTensor) else b.detach())
            for a, b in pairs
        )
    return found


def saved_as_dtensors() -> dict[str, Any]:
    """``torch.save`` of a state dict, and a whole one that is loaded into parts."""
    mesh = MESHES["4"]
    torch.manual_seed(0)
    model, _, _ = mlp()
    whole = {name: t.clone() for name, t in model.state_dict().items()}
    spread_on(model, mesh, first_axis(model, mesh))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    kinds = {type(t).__name__ for t in loaded.values()}
    same = max(far(t.full_tensor(), whole[name]) for name, t in loaded.items())
    model.load_state_dict({name: t + 1 for name, t in whole.items()})
    plain = max(far(t.full_tensor(), whole[name] + 1) for name, t in model.state_dict().items())
    model.load_state_dict(loaded)
    again = max(far(t.full_tensor(), whole[name]) for name, t in model.state_dict().items())
    return {"kinds": kinds, "same": same, "plain": plain, "again": again}


def on_and_off() -> dict[str, Any]:
    """Tied parameters, attributes, hooks and gradients stay."""
    mesh = MESHES["4"]
    torch.manual_seed(0)
    model = Tied(8, 4)
    original, seen = model.embed.weight, []
    original.note = "mine"
    original.register_hook(lambda g: seen.append(tuple(g.shape)))
    ids = torch.arange(8).view(2, 4)
    model(ids).square().sum().backward()
    gradient = original.grad.clone()
    values = original.detach().clone()
    handle = spread_on(model, mesh, {"embed.weight": parse_layout("S0")})
    placed = model.embed.weight
    held = original.untyped_storage().nbytes()
    model(ids).square().sum().backward()
    twice = far(placed.grad.full_tensor(), 2 * gradient)
    tied = model.head.weight is placed and placed.note == "mine" and type(model.scale) is torch.Tensor
    handle.remove()
    return {
        "tied": tied, "held": held, "twice": twice, "hooks": seen,
        "back": model.embed.weight is original and model.head.weight is original,
        "values": far(original.detach(), values), "gradient": far(original.grad, 2 * gradient),
    }  # fmt: skip


def refused() -> dict[str, Any]:
    """What raises, and what it says."""
    mesh, rank = MESHES["4"], dist.get_rank()
    made = {}

    def message(name: str, error: type[Exception], run: Any) -> None:
        try:
            run()
        except error as e:
            made[name] = str(e)

    def another() -> None:
        torch.manual_seed(rank == 2)
        spread_on(MLP(16), mesh, {})

    torch.manual_seed(0)
    message("world", PlanError, lambda: spread(MLP(16), Mesh.of(8), device_mesh(mesh), {}))
    message("shape", PlanError, lambda: spread(MLP(16), MESHES["2x2"], device_mesh(mesh), {}))
    message("pattern", PlanMismatch, lambda: spread_on(MLP(16), mesh, {"nothing.*": parse_layout("S0")}))
    message("uneven", PlanError, lambda: spread_on(nn.Linear(4, 6), mesh, {"weight": parse_layout("S0")}))
    message("values", PlanMismatch, another)
    torch.manual_seed(0)
    message(
        "homes",
        PlanMismatch,
        lambda: spread_on(MLP(16), mesh, {"up.weight": parse_layout("S0" if rank != 3 else "S1")}),
    )
    model, never = MLP(16), CallPattern("up", "aten.mm.default", 7, ("S0",))
    handle = spread_on(model, mesh, {}, [never])
    model(torch.randn(2, 16))
    made["never_met"] = list(map(str, handle.never_met))
    return made


def in_place() -> dict[str, Any]:
    """What is written reaches the tensor, or it is an error."""
    mesh = MESHES["4"]
    handle = spread_on(nn.Linear(4, 4), mesh, {})
    with torch.no_grad():
        x = placed_from(torch.arange(64.0).view(8, 8), parse_layout("S0"), handle.grid)
        x[:, 2:4].mul_(0)
        x.add_(torch.ones(8, 8)).clamp_(max=50)
        expected = torch.arange(64.0).view(8, 8)
        expected[:, 2:4] = 0
        expected = (expected + 1).clamp(max=50)
        found: dict[str, Any] = {"along": far(x.full_tensor(), expected), "errors": []}
        for write in (lambda row: row.mul_(0), lambda row: torch._foreach_mul_([row], 0.0)):
            try:
                write(x[3])
            except PlanError as e:
                found["errors"].append(str(e))
        found["after"] = far(x.full_tensor(), expected)
    return found


def random_numbers() -> dict[str, Any]:
    """Dropout on a cut input: other numbers on each rank of the axis, and the generators agree afterwards."""
    mesh = MESHES["2x2"]
    handle = spread_on(nn.Linear(4, 4), mesh, {})
    found: dict[str, Any] = {}
    for text in ("S0,R", "S0,S1", "R,R"):
        torch.manual_seed(7)
        x = placed_from(torch.ones(64, 64), parse_layout(text), handle.grid)
        first, second = (F.dropout(x, 0.5) for _ in range(2))
        found[text] = (first.to_local(), second.to_local(), torch.rand(1).item(), first.full_tensor())
    return found


def as_dtensor() -> dict[str, Any]:
    """Gradients through ``full_tensor``, ``to_local`` and ``redistribute``; copies; clipping of gradients."""
    mesh = MESHES["4"]
    torch.manual_seed(0)
    model, (x,), loss_fn = mlp()
    whole = copy.deepcopy(model)
    spread_on(model, mesh, first_axis(model, mesh))
    weight = model.up.weight
    (
        weight.full_tensor().square().sum() + weight.redistribute(placements=model.down.bias.placements).sum()
    ).backward()
    through = far(weight.grad.full_tensor(), 2 * whole.up.weight.detach() + 1)
    weight.grad = None
    weight.to_local().square().sum().backward()
    local = far(weight.grad.full_tensor(), 2 * whole.up.weight.detach())
    weight.grad = None
    twin = copy.deepcopy(model)
    for m in (model, whole):
        loss_fn(m, x).backward()
    foreach_norm = torch._foreach_norm([p.grad for p in model.parameters()])
    each = max(
        far(n.full_tensor(), p.grad.norm()) for n, p in zip(foreach_norm, whole.parameters(), strict=True)
    )
    with _Sent() as sent:
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (model, whole)]
    norm = far(norms[0].full_tensor(), norms[1])
    clipped = far(model.up.weight.grad.full_tensor(), whole.up.weight.grad)
    lists = torch._foreach_mul([p.detach() for p in twin.parameters()], 2.0)
    foreach = max(
        far(a.full_tensor(), 2 * b.detach()) for a, b in zip(lists, whole.parameters(), strict=True)
    )
    return {
        "through": through, "local": local, "norm": norm, "clipped": clipped, "foreach": foreach, "each": each,
        "sent": dict(sent.counts),
        "kinds": {type(p) for p in twin.parameters()} == {PlacedTensor} and isinstance(weight, nn.Parameter),
        "says": "placements=(Shard(dim=0),)" in repr(weight),
    }  # fmt: skip


def redistributions() -> dict[str, Any]:
    """Between hundreds of pairs of layouts of a matrix, beside slices of the whole."""
    wrong = []
    for mesh in MESHES.values():
        handle = spread_on(nn.Linear(4, 4), mesh, {})
        grid, whole = handle.grid, torch.arange(128.0).view(16, 8)
        texts = ("R", "P", "S0", "S0/2", "S0/4", "S1", "S1/2")
        layouts = [parse_layout(",".join(t)) for t in itertools.product(texts, repeat=len(mesh.axes))]
        layouts = [layout for layout in layouts if fits(whole.shape, layout, mesh.ranks)]
        parts = {layout: _part_of(whole, layout, mesh.ranks, grid.coordinate) for layout in layouts}
        pairs = list(itertools.product(layouts, repeat=2))
        for source, target in pairs[:: 1 + len(pairs) // 400]:
            moved = grid.move(parts[source], whole.shape, source, target)
            summed = tuple(REPLICATED if p.is_partial else p for p in target)
            moved = grid.move(moved, whole.shape, target, summed)
            if not torch.equal(moved, parts[summed]) or not moved.is_contiguous():
                wrong.append((str(mesh), format_layout(source), format_layout(target)))
    return {"wrong": wrong}


def _part_of(
    whole: torch.Tensor, layout: Placements, ranks: tuple[int, ...], at: tuple[int, ...]
) -> torch.Tensor:
    """By the indices that a rank has; summands are equal."""
    indices = [torch.arange(size) for size in whole.shape]
    for placement, n, position in zip(layout, ranks, at, strict=True):
        if placement.is_cut:
            inner = whole.shape[placement.dim] // (placement.outer * n)
            own = indices[placement.dim]
            indices[placement.dim] = own[own // inner % n == position]
        elif placement.is_partial:
            whole = whole / n
    return whole[indices[0]][:, indices[1]]


class Checkpointed(LM):
    """Layers run again in the backward pass: places are met again, and random numbers are the same."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)
        return self.head(self.norm(h))


def checkpointed_lm() -> Made:
    _, batch, loss_fn = lm()
    return Checkpointed(2, 32, 4, 64, dropout=0.0).double(), batch, loss_fn


def dropout_with_checkpoints() -> dict[str, Any]:
    """The same gradients with and without running layers again."""
    mesh, found = MESHES["2x2"], []
    for kind in (LM, Checkpointed):
        torch.manual_seed(0)
        model = kind(2, 32, 4, 64, dropout=0.3).double()
        _, batch, loss_fn = lm()
        spread_on(model, mesh, homes_of(model, mesh, on_tp(LM_MEGATRON)), (LM_BATCH_2D,))
        torch.manual_seed(5)
        loss_fn(model, *batch).backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    return {"far": max(map(far, *found)), "drawn": float(torch.rand(1))}


def other_ways() -> dict[str, Any]:
    """Autocast, inference mode, an axis of one rank, and a batch of which each rank loads its part."""
    mesh, found = MESHES["4"], {}
    torch.manual_seed(0)
    model, (x,), loss_fn = mlp()
    model, x = model.float(), x.float()
    whole = copy.deepcopy(model)
    handle = spread_on(model, mesh, first_axis(model, mesh))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_fn(m, x) for m in (model, whole)]
    for loss in losses:
        loss.backward()
    found["autocast"] = far(model.up.weight.grad.full_tensor(), whole.up.weight.grad)
    found["kind"] = model.up.weight.grad.dtype is torch.float32
    with torch.inference_mode():
        found["inference"] = far(model(x).full_tensor(), whole(x))
    model.zero_grad(), whole.zero_grad()
    own = handle.from_parts(x.chunk(4)[dist.get_rank()], parse_layout("S0"))
    for m, batch in ((model, own), (whole, x)):
        loss_fn(m, batch).backward()
    found["parts"] = far(model.up.weight.grad.full_tensor(), whole.up.weight.grad)
    narrow = Mesh.of({"dp": 1, "tp": 4})
    again = beside_one_process(mlp, narrow, functools.partial(random_homes, mesh=narrow, seed=1), ())
    found["one rank"] = max(again["loss"], again["gradients"])
    return found


MODEL_CASES = _model_cases()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks find in the models that this run asks for, and in all other cases; one spawn for all."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    models = {name: case for name, case in MODEL_CASES.items() if {"case": name} in asked}
    others: dict[str, Case] = {
        "collectives": collectives,
        "checkpoint": functools.partial(checkpoint, str(directory / "checkpoint")),
        "saved": saved_as_dtensors,
        "on and off": on_and_off,
        "refused": refused,
        "in place": in_place,
        "random": random_numbers,
        "dtensor": as_dtensor,
        "redistributions": redistributions,
        "dropout": dropout_with_checkpoints,
        "other ways": other_ways,
    }
    return on_ranks({**models, **others, **agreement_cases(directory)}, directory)


@pytest.mark.parametrize("case", MODEL_CASES)
def test_it_computes_what_one_process_does(found: list[dict[str, Any]], case: str) -> None:
    for result in ok(found, case):
        assert result["loss"] < 1e-10
        assert result["gradients"] < 1e-10
        assert result["parameters"] < 1e-8  # AdamW divides by square roots of small gradients
        assert not result["never_met"]


@pytest.mark.parametrize("case", MODEL_CASES)
def test_each_rank_holds_its_parts_alone(found: list[dict[str, Any]], case: str) -> None:
    assert [result["wrong_parts"] for result in ok(found, case)] == [[]] * 4


def test_nothing_is_sent_but_what_is_stated(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "collectives"):
        forward, backward = result["megatron"]
        assert forward == {"all_reduce": 1}, (
            "one sum after the second product; the loss is the same on all ranks"
        )
        assert not backward, "the batch needs no gradient"
        forward, backward = result["fsdp"]
        assert forward == {"all_gather_into_tensor": 4, "all_reduce": 1}, "four parameters, and the loss"
        assert backward == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 4}, (
            "the second weight again"
        )


def test_checkpoints_fit_other_shardings(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "checkpoint"):
        assert result == {"other homes": 0.0, "whole": 0.0}


def test_state_dicts_are_saved_as_dtensors_and_loaded_from_whole_ones(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "saved"):
        assert result == {"kinds": {"DTensor"}, "same": 0.0, "plain": 0.0, "again": 0.0}


def test_what_the_user_had_is_there_before_and_after(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "on and off"):
        assert result["tied"]
        assert result["back"]
        assert result["held"] == 0, "the whole parameter is let go"
        assert result["hooks"] == [(8, 4)] * 2
        assert result["values"] == 0
        assert result["twice"] < 1e-6
        assert result["gradient"] < 1e-6


def test_wrong_shardings_are_named_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "refused"):
        assert "8 ranks, and 4 run" in result["world"]
        assert "init_device_mesh" in result["shape"]
        assert "'nothing.*'" in result["pattern"]
        assert "weight of shape (6, 4) cannot be cut as S0" in result["uneven"]
        assert "values of the model's parameters: 2 from rank 0" in result["values"]
        assert "the sharding: 3 from rank 0" in result["homes"]
        assert result["never_met"] == ["place aten.mm.default, occurrence 7 in up"]


def test_what_is_written_in_place_reaches_the_tensor_or_is_an_error(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "in place"):
        assert result["along"] == 0
        assert result["after"] == 0
        assert len(result["errors"]) == 2, "an op that returns what it writes, and one that does not"
        assert all("writes a view of shape (8,)" in error for error in result["errors"])


def test_ranks_draw_other_numbers_where_they_have_other_parts(found: list[dict[str, Any]]) -> None:
    results = ok(found, "random")
    for text, different in (("S0,R", 2), ("S0,S1", 4), ("R,R", 1)):
        parts = [result[text] for result in results]
        assert len({part[0].numpy().tobytes() for part in parts}) == different, text
        assert text != "S0,R" or torch.equal(parts[0][0], parts[1][0]), "ranks of the second axis do the same"
        assert len({part[2] for part in parts}) == 1, "generators agree afterwards"
        assert not any(torch.equal(part[0], part[1]) for part in parts)
        assert all(0.45 < float(part[3].count_nonzero()) / 64**2 < 0.55 for part in parts)


def test_placed_tensors_work_as_dtensors_do(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "dtensor"):
        assert result["kinds"]
        assert result["says"]
        assert all(
            result[name] < 1e-10 for name in ("through", "local", "norm", "clipped", "foreach", "each")
        )
        assert set(result["sent"]) == {"all_reduce"}, "no gradient is gathered for its norm"


def test_redistributions_give_the_parts_that_layouts_say(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "redistributions"):
        assert not result["wrong"]


def test_layers_that_run_again_drop_the_same(found: list[dict[str, Any]]) -> None:
    results = ok(found, "dropout")
    assert all(result["far"] < 1e-10 for result in results)
    assert len({result["drawn"] for result in results}) == 1, "generators agree afterwards"


def test_other_ways_to_run(found: list[dict[str, Any]]) -> None:
    for result in ok(found, "other ways"):
        assert result["kind"]
        assert result["autocast"] < 1e-2
        assert result["inference"] < 1e-6
        assert result["parts"] < 1e-6
        assert result["one rank"] < 1e-10


@pytest.mark.parametrize(
    ("differently", "alike"), [("differently", "alike"), ("again", "alike"), ("parts", "parts alike")]
)
def test_seeds_that_differ_give_what_the_seed_of_rank_0_gives(
    found: list[dict[str, Any]], differently: str, alike: str
) -> None:
    expected = ok(found, alike)[0]
    for result in ok(found, differently):
        for name in ("losses", "gradients"):
            assert all(map(torch.equal, result[name], expected[name]))


@pytest.mark.parametrize("case", ["differently", "again"])
def test_what_is_replicated_is_alike_and_parts_drop_by_themselves(
    found: list[dict[str, Any]], case: str
) -> None:
    results = ok(found, case)
    for step in range(3):
        inside, after = ([r[name][step] == 0 for r in results] for name in ("inside", "after"))
        assert torch.equal(after[0], after[1])  # replicated on tp
        assert torch.equal(after[2], after[3])
        assert not torch.equal(after[0], after[2])  # another part of the batch
        assert len({t.numpy().tobytes() for t in inside}) == 4  # cut on both axes


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("values", "in the call of the model, ranks differ in the values of argument 0: 3 from rank 0"),
        ("labels", r"in aten.mse_loss.default in the model, .*the tensor of shape \(8, 16\): 3 from rank 0"),
        ("shapes", r"argument 0 \(\(8, 16\) of torch.float32 on rank 0, \(4, 16\) .* on rank 3\)"),
        (
            "later",
            r"argument 0 \(\(4, 16\) of torch.float32 on rank 0, \(8, 16\) .* on rank 1\): 1, 2, 3 from",
        ),
    ],
)
def test_batches_that_differ_are_named_on_all_ranks(
    found: list[dict[str, Any]], case: str, says: str
) -> None:
    for result in ok(found, case):
        with pytest.raises(SacplanError, match=says):
            raise SacplanError(result["says"])
        assert "same whole batch" in result["says"]


def test_batches_that_are_the_same_go_without_a_word(found: list[dict[str, Any]]) -> None:
    assert {result["says"] for result in ok(found, "same batches")} == {""}
