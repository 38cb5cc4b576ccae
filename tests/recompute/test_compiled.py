"""A plan under ``torch.compile``: same values, fewer bytes saved, the planned FLOPs again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

import sacplan
from sacplan.techniques.recompute.executor.recipes import PlannedForward
from tests.support.plans import discarding
from tests.support.slow import slow_after
from tests.support.steps import bit_equal
from tests.zoo.language_models import TokenModel
from tests.zoo.language_models import cross_entropy as loss_fn
from tests.zoo.layers import FeedForward, FromFunction, GatedMLP, Residual

DIM, VOCAB = 32, 64


def language_model(dropout: float = 0.0) -> nn.Module:
    block = lambda: Residual(nn.LayerNorm(DIM), GatedMLP(DIM, 96), nn.Dropout(dropout), nn.Softmax(-1))  # noqa: E731
    return TokenModel((block() for _ in range(2)), DIM, VOCAB)


class Seen:
    """A backend that runs the graphs as they are, and adds up what they save and compute."""

    def __init__(self, partition: Callable[..., Any] = min_cut_rematerialization_partition) -> None:
        self.saved_bytes = self.flops = self.graphs = 0
        self._partition = partition
        self.backend = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=self._watch)

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        forward, backward = self._partition(*args, **kwargs)
        inputs = set(forward.graph.find_nodes(op="placeholder"))
        outputs = forward.graph.output_node().args[0][kwargs["num_fwd_outputs"] :]
        values = (n.meta["val"] for n in outputs if isinstance(n, torch.fx.Node) and n not in inputs)
        storages = [
            v.untyped_storage() for v in values if isinstance(v, torch.Tensor) and v.dtype != torch.uint8
        ]
        self.saved_bytes += sum({s._cdata: s.nbytes() for s in storages}.values())
        self.flops += _flops(forward) + _flops(backward)
        self.graphs += 1
        return forward, backward


def _boxed(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def _flops(graph: torch.fx.GraphModule) -> int:
    total = 0
    for node in graph.graph.nodes:
        formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
        if formula is not None:
            args, kwargs = tree_map(
                lambda x: x.meta["val"] if isinstance(x, torch.fx.Node) else x, (node.args, node.kwargs)
            )
            total += formula(*args, **kwargs, out_val=node.meta["val"])
    return total


def step(model: nn.Module, tokens: torch.Tensor, backend: Any, **options: Any) -> list[torch.Tensor]:
    """Loss and gradients of a compiled step (``backend=None``: eager)."""
    run = torch.compile(model, backend=backend, **{"fullgraph": True, **options}) if backend else model
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = loss_fn(run, tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def everything_but(profile: sacplan.Profile, units: list[str], *kept: str) -> sacplan.Plan:
    """A plan that discards all it can in some units, but for some ops."""
    loose = sacplan.plan(profile, budget="100%")
    return discarding(
        loose,
        {
            fqn: [
                site
                for op, site in profile.program.sites(profile.program.calls[fqn][0]).items()
                if profile.program.ops[op].recomputable and not any(name in site[0] for name in kept)
            ]
            for fqn in units
        },
        profile,
    )


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return language_model()


@pytest.fixture(scope="module")
def profile(model: nn.Module, tokens: torch.Tensor) -> sacplan.Profile:
    return sacplan.profile(model, tokens, loss_fn=loss_fn, device="cpu")


@pytest.fixture(scope="module")
def plan(profile: sacplan.Profile) -> sacplan.Plan:
    return sacplan.plan(profile, budget="65%")


def planned(model: nn.Module, plan: sacplan.Plan) -> nn.Module:
    copied = copy.deepcopy(model)
    sacplan.apply(copied, plan)
    return copied


@pytest.mark.parametrize("partition", slow_after(1, [min_cut_rematerialization_partition, default_partition]))
def test_what_is_saved_and_recomputed_is_what_the_plan_says(
    tokens: torch.Tensor, partition: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    model = language_model(dropout=0.2)
    profile = sacplan.profile(model, tokens, loss_fn=loss_fn, device="cpu")
    plan = sacplan.plan(profile, budget="65%")
    assert plan.units
    without, with_plan = Seen(partition), Seen(partition)
    expected = step(copy.deepcopy(model), tokens, without.backend)
    torch._dynamo.reset()
    found = step(planned(model, plan), tokens, with_plan.backend)

    assert bit_equal(expected, found)
    assert with_plan.flops - without.flops == plan.recompute_flops
    freed = sum(u.discard_ratio * profile.tradeoffs[fqn].saved_bytes for fqn, u in plan.units.items())
    share = 0.6  # the default partition saves other tensors than an eager step does, and more
    if partition is min_cut_rematerialization_partition:
        share = 0.8
        assert with_plan.saved_bytes <= profile.tradeoffs[""].saved_bytes - freed
    assert without.saved_bytes - with_plan.saved_bytes > share * freed


@pytest.mark.slow
def test_inductor() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(FeedForward(DIM, 96, 0.0), nn.Linear(DIM, DIM)), torch.randn(64, DIM)
    plan = everything_but(sacplan.profile(model, x, device="cpu"), ["0"])
    results = []
    for run in (copy.deepcopy(model), planned(model, plan)):
        torch._dynamo.reset()
        out = torch.compile(run, backend="inductor", fullgraph=True)(x)
        out.sum().backward()
        results.append([out.detach(), *(p.grad for p in run.parameters())])
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) < 2e-6


def test_same_tags_share_compiled_code_and_others_do_not(
    profile: sacplan.Profile, model: nn.Module, tokens: torch.Tensor
) -> None:
    expected = step(copy.deepcopy(model), tokens, None)
    for units, graphs in ((["layers.0", "layers.1"], 1), (["layers.1"], 2)):
        torch._dynamo.reset()
        regional, seen = planned(model, everything_but(profile, units, "mm")), Seen()
        for layer in regional.layers:  # type: ignore[union-attr]
            layer.compile(backend=seen.backend, fullgraph=True)
        assert bit_equal(expected, step(regional, tokens, None))
        assert seen.graphs == graphs


def test_no_checkpoint_without_gradients(model: nn.Module, plan: sacplan.Plan, tokens: torch.Tensor) -> None:
    run = torch.compile(planned(model, plan), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(run(tokens), model(tokens))


class Odd(nn.Module):
    """Keyword arguments with the names of checkpoint's own, outputs that are not tensors, side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(DIM, 48), nn.Linear(48, DIM), nn.BatchNorm1d(48)
        self.relu, self.calls = nn.ReLU(inplace=True), 0

    def forward(self, x: torch.Tensor, *, context_fn: str = "", early_stop: int = 1, seen: Any = None) -> Any:
        self.calls += 1
        h = F.gelu(self.a(x)) * self.relu(self.norm(self.a(x)))
        y = self.b(h)
        y += x
        if seen is not None:
            seen["last"] = y.sum()
        return {"y": y, "none": None, "number": early_stop, "more": (h.mean(),)}


def twice(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    seen: dict[str, torch.Tensor] = {}
    first = self.odd(x, context_fn="mine", early_stop=3, seen=seen)
    second = self.odd(first["y"])
    return (second["y"] ** 2).sum() + first["more"][0] * first["number"] + seen["last"]


def test_arguments_outputs_writes_and_side_effects() -> None:
    torch.manual_seed(0)
    model, x = FromFunction(twice, odd=Odd()), torch.randn(64, DIM)
    profile = sacplan.profile(model, x, device="cpu")
    plan = everything_but(profile, ["odd"])
    results = []
    for run in (copy.deepcopy(model), planned(model, plan)):
        torch._dynamo.reset()
        loss = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        loss.backward()
        assert run.odd.calls == 2  # type: ignore[union-attr]
        results.append([loss.detach(), *(p.grad for p in run.parameters()), *run.buffers()])
    assert bit_equal(*results)


def test_a_site_that_the_trace_does_not_meet_is_an_error(
    model: nn.Module, profile: sacplan.Profile, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = everything_but(profile, ["layers.0"])
    assert sum(site.op == "aten.silu.default" for site in plan.discarded["layers.0"]) == 1
    monkeypatch.setattr(F, "silu", torch.sigmoid)
    with pytest.raises(Exception, match=r"does not run 1 of the ops .*aten.silu.default #0"):
        step(planned(model, plan), tokens, "aot_eager")


def test_a_graph_break_inside_of_a_unit_is_an_error(
    model: nn.Module, plan: sacplan.Plan, tokens: torch.Tensor
) -> None:
    broken = planned(model, plan)
    for layer in broken.layers:  # type: ignore[union-attr]
        layer.layer[0].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(sacplan.errors.PlanError, match="broke the graph inside a unit"):
        step(broken, tokens, "aot_eager", fullgraph=False)


def test_a_unit_left_uncompiled_keeps_its_plan(
    model: nn.Module, plan: sacplan.Plan, tokens: torch.Tensor
) -> None:
    partly = planned(model, plan)
    for module in partly.modules():
        stand_in = module.__dict__.get("forward")
        if isinstance(stand_in, PlannedForward):
            module.forward = torch.compiler.disable(stand_in)
    assert bit_equal(
        step(copy.deepcopy(model), tokens, None), step(partly, tokens, "aot_eager", fullgraph=False)
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_compiled_before_takes_the_plan(
    model: nn.Module, plan: sacplan.Plan, tokens: torch.Tensor, in_place: bool
) -> None:
    seen = Seen()
    called: Any = copy.deepcopy(model)
    if in_place:
        called.compile(backend=seen.backend)
    else:
        called = torch.compile(called, backend=seen.backend)
    before = step(called, tokens, None)
    saved, seen.saved_bytes = seen.saved_bytes, 0
    with sacplan.apply(called, plan):
        assert bit_equal(before, step(called, tokens, None))
    assert 0 < seen.saved_bytes < saved
    seen.saved_bytes = 0
    assert bit_equal(before, step(called, tokens, None))
    assert seen.saved_bytes in (0, saved)  # the first code again, or made again
    partly = copy.deepcopy(model)
    partly.layers[1] = torch.compile(partly.layers[1])  # type: ignore[assignment]
    with pytest.raises(sacplan.errors.PlanError, match=r"module 'layers\.1' is compiled on its own"):
        sacplan.apply(partly, plan)
