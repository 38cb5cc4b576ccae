"""What people do with autograd, with a plan on: the same bits as without it, or an error that names the unit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sacplan
from sacplan.techniques.recompute.executor.nodes import RecipeNode
from sacplan.techniques.runtime.recording import here
from sacplan.torch_compat.allocations import allocation_events
from tests.support.ops import Ops
from tests.support.recomputing import state
from tests.support.slow import slow_after
from tests.support.steps import bit_equal
from tests.support.threads import at_once

# Plans are used in other steps than those that they were made for.
pytestmark = pytest.mark.filterwarnings("ignore:the step is not the one")

DIM, LENGTH, BATCH = 8, 5, 3


class AttentionBlock(nn.Module):
    """Norm, dropout, attention without a kernel of its own, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj((q @ k.mT).softmax(-1).tanh() @ v)
        return x + self.ff(x.sin()).exp().tanh()


class TwoHeads(nn.Module):
    """Blocks, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.head, self.other = nn.Linear(DIM, 1), nn.Linear(DIM, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)).pow(2).mean()


class Size:
    """Of the batches; tests of the peak make them larger."""

    length = LENGTH


def batch(length: int | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, length or Size.length, DIM)


def net(change: Callable[[TwoHeads], object] | None = None) -> TwoHeads:
    torch.manual_seed(0)
    model = TwoHeads()
    if change is not None:
        change(model)
    return model


BLOCKS = ("blocks.0", "blocks.1")
SMALLEST = ("",)


def plan_for(model: nn.Module, units: tuple[str, ...]) -> sacplan.Plan:
    """Discards whatever may be discarded in blocks, or what the smallest peak takes."""
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    if units == BLOCKS:
        return sacplan.policy("full", profile=profile, layers="blocks.*")
    return sacplan.plan(profile, "smallest", "greedy")


_of_the_plain_net = cache(lambda units: plan_for(net(), units))


def discarding(model: nn.Module, units: tuple[str, ...] = BLOCKS) -> Any:
    """A copy with a plan on."""
    plain = not hasattr(model.blocks[0].ff[0], "parametrizations") and not hasattr(
        model.blocks[1].proj, "parametrizations"
    )
    plan = _of_the_plain_net(units) if plain else plan_for(model, units)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    return planned


@contextlib.contextmanager
def recomputed_ops() -> Iterator[list[str]]:
    """The ops that recipes run."""
    found: list[str] = []
    plain = RecipeNode.compute

    def compute(self: RecipeNode) -> Any:
        found.append(self.traits.name)
        return plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecipeNode, "compute", compute)
        yield found


def started(model: nn.Module) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    return batch()


def assert_nothing_is_on() -> None:
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert here.recorder is None


Use = Callable[[Any], list[torch.Tensor]]

# --- ways to ask for gradients --------------------------------------------------------------------


def two_losses(model: TwoHeads) -> list[torch.Tensor]:
    features = model.features(started(model))
    one, two = model.head(features).mean(), model.other(features).exp().mean()
    one.backward(retain_graph=True)
    between = state(model)
    two.backward()
    return between + state(model, one, two)


def kept_for_three(model: TwoHeads) -> list[torch.Tensor]:
    loss = model(started(model))
    found = [torch.autograd.grad(loss, list(model.blocks.parameters()), retain_graph=True) for _ in range(2)]
    loss.backward()
    return [*found[0], *found[1], *state(model, loss)]


def gradient_penalty(model: TwoHeads) -> list[torch.Tensor]:
    x = started(model).requires_grad_()
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + (slope.norm(dim=-1) - 1).pow(2).mean()).backward()
    return state(model, loss, slope, x.grad)


def batched_gradients(model: TwoHeads) -> list[torch.Tensor]:
    x = started(model).requires_grad_()
    out = model.features(x)[0, 0]
    return list(torch.autograd.grad(out, [x, model.stem.weight], torch.eye(DIM), is_grads_batched=True))


def inputs_only(model: TwoHeads) -> list[torch.Tensor]:
    x = started(model).requires_grad_()
    model(x).backward(inputs=[x, model.blocks[0].norm.weight])
    return state(model, x.grad)


def frozen_base(model: TwoHeads) -> list[torch.Tensor]:
    """Only the last head is trained: nothing in the units takes part."""
    for p in model.parameters():
        p.requires_grad_(False)
    model.head.requires_grad_(True)
    loss = model(started(model))
    loss.backward()
    found = state(model, loss)
    model.requires_grad_(True)
    return found


# --- hooks ----------------------------------------------------------------------------------------


def offloaded(model: TwoHeads) -> list[torch.Tensor]:
    with torch.autograd.graph.save_on_cpu():
        loss = model(started(model))
    loss.backward()
    return state(model, loss)


def module_hooks(model: TwoHeads) -> list[torch.Tensor]:
    """Inside of the units, on a leaf: each changes what passes, and is called once a step."""
    calls: list[str] = []

    def note(name: str, value: Any) -> Any:
        calls.append(name)
        return value

    linear = model.blocks[0].ff[0]
    handles = [
        linear.register_forward_pre_hook(lambda m, args: note("pre", (args[0] * 1.5,))),
        linear.register_forward_hook(lambda m, args, out: note("forward", out.sin())),
        linear.register_full_backward_pre_hook(lambda m, grads: note("backward pre", (grads[0] * 2,))),
        linear.register_full_backward_hook(lambda m, gi, go: note("backward", (gi[0] / 3,))),
    ]
    loss = model(started(model))
    loss.backward()
    for handle in handles:
        handle.remove()
    assert sorted(calls) == ["backward", "backward pre", "forward", "pre"]
    return state(model, loss)


def tensor_hooks(model: TwoHeads) -> list[torch.Tensor]:
    """On an activation that is discarded, and one that keeps its gradient."""
    seen: list[torch.Tensor] = []

    def on_output(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: grad * 0.5)
        out.retain_grad()
        seen.append(out)

    handle = model.blocks[1].ff[1].register_forward_hook(on_output)
    loss = model(started(model))
    loss.backward()
    handle.remove()
    return state(model, loss, seen[0].grad)


# --- other people's checkpoints, and evaluation ---------------------------------------------------


def around_one_unit(reentrant: bool) -> Use:
    def run(model: TwoHeads) -> list[torch.Tensor]:
        x = model.stem(started(model)).tanh()
        x = checkpoint(model.blocks[0], x, use_reentrant=reentrant)
        loss = model.head(model.blocks[1](x)).mean()
        loss.backward()
        return state(model, loss)

    return run


def evaluated(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Use:
    def run(model: TwoHeads) -> list[torch.Tensor]:
        loss = model(started(model))
        model.eval()
        with mode():
            between = model(batch(7)).clone()
        model.train()
        loss.backward()
        return state(model, loss, between)

    return run


def functional(model: TwoHeads) -> list[torch.Tensor]:
    parameters = {n: (p * 1.1).detach().requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, parameters, (started(model),))
    grads = torch.autograd.grad(loss, [p for n, p in parameters.items() if not n.startswith("other")])
    return [loss, *grads]


def other_calls(model: TwoHeads) -> list[torch.Tensor]:
    """Another batch shape, another dtype, train and eval in turns."""
    found = []
    for length, dtype, training in (
        (9, torch.float32, True),
        (2, torch.float64, False),
        (5, torch.bfloat16, True),
    ):
        model.train(training).to(dtype)
        started(model)
        loss = model(batch(length).to(dtype))
        loss.backward()
        found += state(model, loss)
        model.train().to(torch.float32)
    model.zero_grad(set_to_none=True)
    return found


def several_calls(model: TwoHeads) -> list[torch.Tensor]:
    """The same unit a different number of times each step, in other orders."""
    found = []
    for order in ((0, 0, 1), (1,), (1, 0, 1, 0)):
        x = started(model)
        for i in order:
            x = model.blocks[i](x)
        x.tanh().mean().backward()
        found += state(model, x)
    return found


PARTLY: list[Use] = [  # without a call of the model itself
    two_losses, batched_gradients, around_one_unit(False), around_one_unit(True), several_calls,
]  # fmt: skip
WHOLLY: list[Use] = [
    kept_for_three, gradient_penalty, inputs_only, offloaded, module_hooks, tensor_hooks,
    evaluated(torch.no_grad), evaluated(torch.inference_mode), functional,
    other_calls,
]  # fmt: skip
CASES = [
    pytest.param(
        use, units, id=f"{use.__qualname__.partition('.')[0]}-{'blocks' if units == BLOCKS else 'smallest'}"
    )
    for uses, plans in ((PARTLY, [BLOCKS]), (WHOLLY, [BLOCKS, SMALLEST]))
    for use in uses
    for units in plans
]


@pytest.mark.parametrize(("use", "units"), CASES)
def test_the_same_bits(use: Use, units: tuple[str, ...]) -> None:
    model = net()
    planned = discarding(model, units)
    for _ in range(2):
        expected = use(model)
        with recomputed_ops() as ops:
            assert bit_equal(expected, use(planned))
        assert ops
        assert_nothing_is_on()


def test_units_that_take_no_part_recompute_nothing() -> None:
    model = net()
    planned = discarding(model)
    with recomputed_ops() as ops:
        assert bit_equal(frozen_base(model), frozen_base(planned))
    assert not ops
    assert bit_equal(two_losses(model), two_losses(planned))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that the allocator had handed out since, by the profiler's events."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return max(itertools.accumulate(allocation_events(profiler)))


@pytest.mark.parametrize(
    ("use", "most"),
    [
        (module_hooks, 0.75),
        (tensor_hooks, 0.75),
        (offloaded, 0.75),
        (evaluated(torch.no_grad), 0.75),
        (two_losses, 1.01),  # a graph that is retained keeps what has been recomputed for it
        (gradient_penalty, 1.01),
    ],
    ids=lambda one: one.__qualname__.partition(".")[0] if callable(one) else str(one),
)
def test_the_peak_is_smaller_all_the_same(use: Use, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    planned = discarding(model)
    monkeypatch.setattr(Size, "length", 128)
    for run in (model, planned):
        use(run)  # the first step leaves checksums
    assert peak_bytes(lambda: use(planned)) <= most * peak_bytes(lambda: use(model))


# --- transforms, traces and exports ---------------------------------------------------------------


def with_jvp(model: TwoHeads) -> list[torch.Tensor]:
    x = started(model)
    out, tangent = torch.func.jvp(model.features, (x,), (x.sin(),))
    return [out, tangent, *torch.autograd.grad((out + tangent).mean(), list(model.blocks.parameters()))]


def with_vmap(model: TwoHeads) -> list[torch.Tensor]:
    out = torch.func.vmap(model.features, randomness="different")(started(model))
    return [out, *torch.autograd.grad(out.mean(), list(model.blocks.parameters()))]


def with_dual_numbers(model: TwoHeads) -> list[torch.Tensor]:
    x = started(model)
    with torch.autograd.forward_ad.dual_level():
        out = torch.autograd.forward_ad.make_dual(x, x.sin())
        primal, tangent = torch.autograd.forward_ad.unpack_dual(model.features(out))
        return [primal.clone(), tangent.clone()]


def jit_traced(model: TwoHeads) -> list[torch.Tensor]:
    model.eval()
    traced = torch.jit.trace(model, (started(model),))
    model.train()
    loss = traced(batch() * 2)
    return [loss, *torch.autograd.grad(loss, list(traced.blocks.parameters()))]


def fx_traced(model: TwoHeads) -> list[torch.Tensor]:
    traced = torch.fx.symbolic_trace(model)
    loss = traced(started(model))
    loss.backward()
    return state(model, loss)


def linearized(model: TwoHeads) -> list[torch.Tensor]:
    model.eval()
    out, tangent = torch.func.linearize(model.features, started(model))
    model.train()
    return [out, tangent(batch().cos())]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "use",
    slow_after(3, [with_jvp, jit_traced, with_vmap, with_dual_numbers, fx_traced, linearized]),
    ids=lambda use: use.__name__,
)
def test_transforms_and_traces_of_a_planned_model(use: Use) -> None:
    model = net()
    planned = discarding(model)
    assert bit_equal(two_losses(model), two_losses(planned))
    for _ in range(2):
        # With any mode on, PyTorch's formulas for tangents write nothing in place.
        with Ops() if use is with_dual_numbers else contextlib.nullcontext():
            expected = use(model)
        assert bit_equal(expected, use(planned))
        assert_nothing_is_on()


def test_the_first_call_may_be_a_trace() -> None:
    model = net()
    assert bit_equal(linearized(model), linearized(discarding(model)))


REVERSE: dict[str, Callable[[TwoHeads, torch.Tensor], Any]] = {
    "grad": lambda m, x: torch.func.grad(m)(x),
    "vjp": lambda m, x: torch.func.vjp(m, x),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "hessian": lambda m, x: torch.func.hessian(m)(x),
    "of a functional call": lambda m, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)))(
        dict(m.named_parameters())
    ),
    "hooks switched off": lambda m, x: _without_hooks(m, x),
}


def _without_hooks(model: TwoHeads, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none in here"):
        return model(x)


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_transforms_name_the_unit(name: str) -> None:
    """PyTorch forbids saved-tensor hooks in them. The model works afterwards, and there without the plan."""
    model = net()
    planned = discarding(model)
    for _ in range(2):
        with pytest.raises(sacplan.errors.RecipeError, match=r"unit 'blocks\.0' .*hooks.*handle\.remove\(\)"):
            REVERSE[name](planned, batch())
        assert_nothing_is_on()
        assert bit_equal(two_losses(model), two_losses(planned))
    handle = sacplan.apply(model, plan_for(model, BLOCKS))
    handle.remove()
    REVERSE[name](model.eval(), batch())


# --- parameters that are computed -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda m: parametrizations.weight_norm(m.blocks[0].ff[0]),
        lambda m: parametrizations.spectral_norm(m.blocks[0].ff[0]),
        lambda m: parametrizations.orthogonal(m.blocks[1].proj),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal"],
)
def test_parametrizations(change: Callable[[TwoHeads], object]) -> None:
    model = net(change)
    planned = discarding(model)
    for _ in range(2):
        for use in (two_losses, gradient_penalty, kept_for_three):
            assert bit_equal(use(model), use(planned))


# --- what was changed behind a recipe -------------------------------------------------------------


def test_a_parameter_that_was_written_is_refused_and_the_next_step_is_right() -> None:
    model = net()
    planned = discarding(model)
    for _ in range(2):
        loss = planned(started(planned))
        for written in (planned, model):
            with torch.no_grad():
                written.blocks[0].ff[0].weight.mul_(2)
        with pytest.raises(
            sacplan.errors.RecipeError,
            match=r"aten\..* of unit 'blocks\.0'.*written in place.*keep=\['aten\.",
        ):
            loss.backward()
        assert_nothing_is_on()
        assert bit_equal(two_losses(model), two_losses(planned))


# --- threads, and what breaks off -----------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["one graph", "two graphs"])
def test_two_backward_passes_in_two_threads(shared: bool) -> None:
    model = net()
    planned = discarding(model)

    def gradients(run: TwoHeads, threaded: bool) -> list[torch.Tensor]:
        started(run)
        losses = [run(batch()), run(batch().cos())]
        losses = [losses[0], losses[0]] if shared else losses
        found: list[Any] = [None, None]

        def work(i: int) -> None:
            found[i] = torch.autograd.grad(losses[i], list(run.blocks.parameters()), retain_graph=True)

        if threaded:
            at_once(lambda: work(0), lambda: work(1))
        else:
            work(0)
            work(1)
        return [*found[0], *found[1]]

    for _ in range(5):
        assert bit_equal(gradients(model, False), gradients(planned, True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_breaks_off_leaves_nothing_on(error: type[BaseException], place: str) -> None:
    """In the middle of a unit, in the first call, which is looked up, and in later ones."""
    model = net()
    planned = discarding(model)

    def breaks(*args: Any) -> None:
        raise error("broken")

    def on_output(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if place == "forward":
            breaks()
        out.register_hook(breaks)

    for _ in range(2):
        handle = planned.blocks[1].ff[1].register_forward_hook(on_output)
        with pytest.raises(error, match="broken"):
            planned(started(planned)).backward()
        handle.remove()
        assert_nothing_is_on()
        assert bit_equal(two_losses(model), two_losses(planned))


def test_a_backward_pass_that_broke_off_can_be_asked_again() -> None:
    """With the graph retained: what was recomputed before the error is still right."""
    model = net()
    planned = discarding(model)

    def gradients(run: TwoHeads, fails: bool) -> list[torch.Tensor]:
        broken = [fails]

        def once(grad: torch.Tensor) -> None:
            if broken.pop():
                raise ValueError("broken")

        x = run.stem(started(run)).tanh()
        middle = run.blocks[0](x)
        if fails:
            middle.register_hook(lambda grad: once(grad) if broken else None)
        loss = run.head(run.blocks[1](middle)).mean()
        if fails:
            with pytest.raises(ValueError, match="broken"):
                torch.autograd.grad(loss, list(run.blocks.parameters()), retain_graph=True)
        return list(torch.autograd.grad(loss, list(run.blocks.parameters())))

    assert bit_equal(gradients(model, False), gradients(planned, True))
