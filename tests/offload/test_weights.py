"""Frozen parameters on the host: figures, bits, and the weights that people find wherever they lie."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import mixed_plan, plan_with
from sacplan.core.decisions import OffloadWeight
from sacplan.errors import PlanError, SacplanError, SacplanWarning
from sacplan.techniques.offload.weights import homes_of
from tests.support.on_host import Int8, nf4
from tests.support.slow import slow_after
from tests.support.slow_link import slow_link
from tests.support.steps import bit_equal, grads_of, mean_square
from tests.support.threads import at_once
from tests.zoo.layers import Adapted, FromFunction


class Block(nn.Module):
    def __init__(self, kind: Any, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.up, self.down = Adapted(kind(width, wide), width, wide), Adapted(kind(wide, width), wide, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Frozen but for its adapters: an embedding, blocks and a head, whose weight may be the embedding's."""

    def __init__(self, kind: Any = nn.Linear, blocks: int = 4, width: int = 64, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(kind, width) for _ in range(blocks))
        self.head = nn.Linear(width, 256).requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


KINDS: dict[str, Callable[[], Net]] = {
    "float": partial(Net, tied=False),
    "int8": partial(Net, Int8, tied=False),
    "nf4": partial(Net, nf4, tied=False),
    "tied": Net,
}
TOKENS = torch.arange(32).reshape(2, 16) % 256
SGD = torch.optim.SGD


def profiled(make: Callable[[], Net] = Net) -> sacplan.Profile:
    return sacplan.profile(make(), TOKENS, mean_square, SGD, device="cpu")


@pytest.fixture(scope="module")
def planned() -> sacplan.Plan:
    """The smallest peak: all large parameters are on the host, but for their uses."""
    plan = sacplan.plan(profiled(), "smallest", techniques=("offload",))
    assert len(plan.offloaded_weights) >= 9
    assert any(one.fetch for one in plan.offloaded_weights)
    assert any(one.begin != one.module for one in plan.offloaded_weights)
    return plan


def on_host(model: nn.Module, plan: sacplan.Plan) -> bool:
    """Whether the parameters of a plan lie where those that have left lie."""
    from sacplan.torch_compat.host_memory import is_for_host

    parameters = dict(model.named_parameters())
    return all(is_for_host(parameters[one.parameter].untyped_storage()) for one in plan.offloaded_weights)


def trained(model: nn.Module, steps: int = 3) -> Iterator[list[torch.Tensor]]:
    """Yield the loss, gradients and state of each of some steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model, TOKENS)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        yield [loss.detach(), *gradients, *(t.clone() for t in model.state_dict().values())]


WAYS = [(kind, techniques) for techniques in (("offload",), ("recompute", "offload")) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "techniques"),
    slow_after(4, [WAYS[0], WAYS[7], WAYS[2], WAYS[5], WAYS[1], WAYS[3], WAYS[4], WAYS[6]]),
)
def test_predicted_is_fake_is_measured_and_bits_are_equal(kind: str, techniques: tuple[str, ...]) -> None:
    profile = profiled(KINDS[kind])
    rng = random.Random(0)
    plans = [sacplan.plan(profile, budget, techniques=techniques) for budget in ("70%", "smallest")]
    plans += [mixed_plan(profile, rng, techniques) for _ in range(4)]
    assert sum(bool(plan.offloaded_weights) for plan in plans) >= 4
    # A weight of 8 or 4 bits is a quarter or an eighth of what it is made into for its product.
    most = {"float": 1.0, "int8": 1.5, "nf4": 1.5, "tied": 1.0}[kind]
    assert plans[1].peak_bytes < profile.program.liveness.initial_bytes * most
    for plan in plans:
        model = KINDS[kind]()
        fake = sacplan.verify(model, TOKENS, plan, mean_square, SGD)
        assert fake.peak_bytes == plan.peak_bytes == profile.footprint(plan).peak_bytes
        assert fake.host_bytes == plan.host_bytes
        # A CPU has one memory, and the peaks of both parts may be at different times.
        both = max(one.live_bytes + one.host_bytes for one in profile.with_plan(plan).liveness.moments)
        real = sacplan.verify(model, TOKENS, plan, mean_square, SGD, run="real")
        assert real.peak_bytes == both
        assert not real.differences
        wanted = list(trained(KINDS[kind]()))
        with sacplan.apply(model, plan):
            found = list(trained(model))
        assert all(map(bit_equal, wanted, found))


def test_small_tensors_take_no_block_of_the_device_on_the_host() -> None:
    """Pinned memory comes in powers of two, from one byte on; the device's allocator rounds up to 512."""
    model = Net(width=8, blocks=2)
    profile = sacplan.profile(model, TOKENS, mean_square, SGD, device="h100")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("offload",))
    assert any(one.parameter.endswith("norm.weight") for one in plan.offloaded_weights)
    assert plan.host_bytes == sacplan.verify(model, TOKENS, plan, mean_square, SGD).host_bytes
    one = next(one for one in plan.offloaded_weights if one.parameter == "blocks.0.norm.weight")
    assert plan_with(profile, [one]).host_bytes == 32


class Hides(torch.autograd.Function):
    """Keeps a weight in an object of its own, as LLM.int8 does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.state = SimpleNamespace(weight=weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.state.weight.t(), None


def test_a_parameter_leaves_only_if_each_of_its_uses_is_served() -> None:
    class Uses(Net):
        def __init__(self) -> None:
            super().__init__(blocks=3)
            self.blocks[0].up.base.weight.requires_grad_(True)  # trained
            self.view = nn.Linear(64, 64).requires_grad_(False)
            self.register_buffer("alias", self.view.weight.detach())
            self.hides = FromFunction(
                lambda m, x: Hides.apply(x, m.weight), weight=nn.Parameter(torch.eye(64), False)
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.view(self.embed(tokens))
            for block in (*self.blocks, self.blocks[2]):  # called twice
                x = block(x)
            # Used by nobody's call but the model's own.
            return self.head(self.hides(x)) * self.blocks[1].down.base.weight.sum()

    program = sacplan.profile(Uses(), TOKENS, mean_square, SGD, device="cpu").program
    names = {program.fixed[s]: program.scopes[home.call].fqn for s, home in homes_of(program).items()}
    large = {name: call for name, call in names.items() if name.endswith("weight") and "norm" not in name}
    assert large == {
        "blocks.0.down.base.weight": "blocks.0.down.base",
        "blocks.1.up.base.weight": "blocks.1.up.base",
        # On the device until the last of its uses ends, for which alone autograd saves it.
        "embed.weight": "head",
        # Used in several calls: these are on the device for all of the forward pass.
        "blocks.1.down.base.weight": "",
        "blocks.2.up.base.weight": "",
        "blocks.2.down.base.weight": "",
    }


def test_weights_are_found_wherever_they_lie(planned: sacplan.Plan) -> None:
    model, plain = Net(), Net()
    names = [name for name, _ in model.named_parameters()]
    handle = sacplan.apply(model, planned)
    assert on_host(model, planned)
    assert [name for name, _ in model.named_parameters()] == names
    wanted = plain.state_dict()
    assert all(torch.equal(wanted[name], t) for name, t in model.state_dict().items())
    # Loaded in the middle of training, evaluated between steps.
    other = {name: t + 1 for name, t in wanted.items()}
    for each in (model, plain):
        grads_of(each, TOKENS, mean_square)
        each.load_state_dict(other)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(TOKENS), plain(TOKENS))
    assert bit_equal(*(grads_of(each, TOKENS, mean_square) for each in (model, plain)))
    assert on_host(model, planned)
    handle.remove()
    assert not on_host(model, planned)
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())
    assert bit_equal(*(grads_of(each, TOKENS, mean_square) for each in (model, plain)))


def test_after_an_error_and_in_graphs_that_live_on(planned: sacplan.Plan) -> None:
    model, plain = Net(), Net()
    handle = sacplan.apply(model, planned)

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    for where in (model.blocks[2].down.base, model.blocks[1]):
        hook = where.register_forward_hook(fail)
        with pytest.raises(KeyError):
            model(TOKENS)
        hook.remove()
        assert on_host(model, planned)
        # Copies that had begun have old values.
        for each in (model, plain):
            each.load_state_dict({name: t * 1.5 for name, t in each.state_dict().items()})
        assert bit_equal(*(grads_of(each, TOKENS, mean_square) for each in (model, plain)))
    # Two graphs at once, of which one is asked twice, and the plan is removed before.
    found = []
    for each in (model, plain):
        losses = [mean_square(each, TOKENS), mean_square(each, TOKENS + 1)]
        if each is model:
            handle.remove()
        losses[0].backward(retain_graph=True)
        sum(losses).backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert bit_equal(*found)


def test_copies_replaced_parameters_and_moved_ones(planned: sacplan.Plan) -> None:
    model, plain = Net(), Net()
    with sacplan.apply(model, planned):
        wanted = grads_of(plain, TOKENS, mean_square)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert bit_equal(wanted, grads_of(other, TOKENS, mean_square))
            assert on_host(other, planned)
            assert bit_equal(wanted, grads_of(other, TOKENS, mean_square))
        assert on_host(model, planned)
        # A parameter that somebody has replaced is used where it lies.
        for each in (model, plain):
            each.head.weight = nn.Parameter(plain.head.weight.detach() * 2, requires_grad=False)
            each.blocks[0].up.base.weight.data = plain.blocks[0].up.base.weight.data * 2
        wanted = grads_of(plain, TOKENS, mean_square)
        assert bit_equal(wanted, grads_of(model, TOKENS, mean_square))
    assert bit_equal(wanted, grads_of(model, TOKENS, mean_square))


def test_inside_of_other_hooks_weights_are_kept_and_right(planned: sacplan.Plan) -> None:
    model, plain = Net(), Net()

    def checkpointed(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(mean_square, m, batch, use_reentrant=False)
        return out

    only = [one for one in planned.decisions if isinstance(one, OffloadWeight)]
    with sacplan.apply(model, plan_with(profiled(), only)):
        wanted = grads_of(plain, TOKENS, checkpointed)
        with pytest.warns(SacplanWarning, match="runs inside of saved-tensor hooks"):
            assert bit_equal(wanted, grads_of(model, TOKENS, checkpointed))
        assert on_host(model, planned)


def test_several_threads_may_call_one_model(planned: sacplan.Plan) -> None:
    wanted = grads_of(Net(), TOKENS, mean_square)[1:]
    with sacplan.apply(model := Net(), planned):
        trained = [p for p in model.parameters() if p.requires_grad]

        def steps() -> list[list[torch.Tensor]]:
            return [list(torch.autograd.grad(mean_square(model, TOKENS), trained)) for _ in range(5)]

        results = at_once(*[steps] * 4)
        assert on_host(model, planned)
    assert all(bit_equal(wanted, found) for each in results for found in each)


def test_a_custom_function_that_keeps_the_weight_of_a_graph_that_runs_twice() -> None:
    plan = sacplan.plan(profiled(KINDS["nf4"]), "smallest", techniques=("offload",))
    assert sum(one.parameter.endswith("base.weight") for one in plan.offloaded_weights) == 8
    found = []
    for model in (planned := KINDS["nf4"](), KINDS["nf4"]()):
        with sacplan.apply(model, plan) if model is planned else nullcontext(), slow_link() as link:
            losses = [mean_square(model, TOKENS), mean_square(model, TOKENS + 1)]
            losses[0].backward(retain_graph=True)
            sum(losses).backward()
        assert not link.broken
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert bit_equal(*found)


def test_right_on_a_slow_link_and_not_without_its_waits(planned: sacplan.Plan) -> None:
    wanted = grads_of(Net(), TOKENS, mean_square)
    for without in ((), ("wait", "_enter"), ("wait", "take"), ("_begin", "back")):
        model = Net()
        with sacplan.apply(model, planned), slow_link(without) as link:
            right = bit_equal(wanted, grads_of(model, TOKENS, mean_square)) and not link.broken
        assert right == (not without), without


def test_plans_and_profiles_are_files(planned: sacplan.Plan, tmp_path: Any) -> None:
    planned.save(tmp_path / "plan.json")
    assert sacplan.Plan.load(tmp_path / "plan.json") == planned
    profile = profiled()
    profile.save(tmp_path / "profile.json")
    assert sacplan.Profile.load(tmp_path / "profile.json").program.fixed == profile.program.fixed
    words = str(planned)
    assert f"{len(planned.offloaded_weights)} parameters; with waits" in words
    assert "on the host  parameters: weight\n" in words  # of the embedding
    # Reports are about the device.
    assert int(sacplan.Report(profile, planned).alive_at_peak()["bytes"].sum()) == planned.peak_bytes
    assert profile.timeline(planned)["total_bytes"].max() == planned.peak_bytes


def test_errors(planned: sacplan.Plan) -> None:
    profile = profiled()
    one = planned.offloaded_weights[-1]
    for changed, said in (
        ({"parameter": "blocks.0.up.down.weight"}, "is changed on the device, shared, or used elsewhere"),
        ({"module": "blocks.0"}, "is changed on the device, shared, or used elsewhere"),
        ({"begin": "nowhere"}, "does not run once before"),
    ):
        with pytest.raises(PlanError, match=said):
            plan_with(profile, [msgspec.structs.replace(one, **changed)])
    model = Net()
    with sacplan.apply(model, planned):
        dict(model.named_parameters())[one.parameter].requires_grad_(True)
        with pytest.raises(PlanError, match="is trained by now"):
            model(TOKENS)
    with pytest.raises(SacplanError):
        sacplan.apply(model, planned)
    model = Net()
    hook = model.get_submodule(one.module).register_forward_pre_hook(lambda *_: None)
    with pytest.raises(PlanError, match="forward pre-hook"):
        sacplan.apply(model, planned)
    hook.remove()
    owner, _, name = one.parameter.rpartition(".")
    weight = model.get_submodule(owner)._parameters[name]
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]
    with pytest.raises(PlanError, match="part of other memory"):
        sacplan.apply(model, planned)
    assert not on_host(model, planned)
    assert not any("forward" in module.__dict__ for module in model.modules())
    # Written between the passes.
    model = Net()
    with sacplan.apply(model, planned):
        loss = mean_square(model, TOKENS)
        model.load_state_dict(model.state_dict())
        with pytest.raises(SacplanError, match="between the forward"):
            loss.backward()
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match="technique offload"):
            compiled(TOKENS)
    torch._dynamo.reset()


def test_what_a_call_was_given_is_gone_before_the_next_copy() -> None:
    """Where only the last bias is trained, autograd saves no input, and nothing else may keep one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32)))
    model.requires_grad_(False)
    model[0][2].bias.requires_grad_(True)
    batch = torch.randn(16, 64, 32)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("recompute", "offload"))
    assert plan.offloaded_weights
    fake = sacplan.verify(model, batch, plan, mean_square)
    assert (fake.peak_bytes, fake.host_bytes) == (plan.peak_bytes, plan.host_bytes)
