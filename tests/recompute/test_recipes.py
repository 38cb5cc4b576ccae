"""A plan changes when tensors are computed, never a bit of what a step gives; or the step is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity

import sacplan
from sacplan.techniques.runtime.tensors import checksum
from tests.support.ops import Ops
from tests.support.recomputing import (
    assert_peak_is_replayed,
    discard_all,
    fitting_sites,
    plan_of,
    same_bits,
    state,
    step,
)
from tests.support.storages import Storages, no_collector
from tests.zoo.layers import FromFunction
from tests.zoo.units import DIM, Outer, Unit, batch, outer


@pytest.mark.parametrize("times", [1, 2])
def test_what_an_inner_gradient_keeps_for_a_second_derivative_is_predicted(times: int) -> None:
    """Its formulas save what they have unpacked, which is the recomputed value and no longer the original."""
    torch.manual_seed(0)

    def forces(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            energy = self.linear(x).tanh().pow(3).sum()
            (force,) = torch.autograd.grad(energy, self.linear.weight, create_graph=True)
            x = x + F.linear(x.sigmoid(), force).sin()
        return x

    model = Outer(FromFunction(forces, linear=nn.Linear(DIM, DIM)))
    profile = sacplan.profile(model, batch(), device="cpu")
    plan = plan_of(profile, {"units.0": [("aten.tanh.default", i) for i in range(times)]})
    assert_peak_is_replayed(model, plan)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    assert same_bits(step(model, batch()), step(planned, batch()))


def under_autocast(model: nn.Module, backward: bool) -> list[torch.Tensor]:
    """Either pass under autocast, the other one without."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not backward):
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        loss.backward()
    return state(model, loss)


@pytest.mark.filterwarnings("ignore:the step is not the one")
@pytest.mark.parametrize("backward", [False, True])
def test_autocast_around_one_pass_only(backward: bool) -> None:
    model = outer(torch.sin, lambda x: F.layer_norm(x, (DIM,)) * x.softmax(-1))
    for fqns in (None, [""]):
        planned, _ = discard_all(model, fqns)
        for _ in range(2):
            assert same_bits(under_autocast(model, backward), under_autocast(planned, backward))


def test_kept_tensors_go_through_the_hooks_around_the_model() -> None:
    model = outer()
    planned, _ = discard_all(model, ["units.0"])
    packed: list[torch.Size] = []
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        planned(batch())
    everything, packed = packed, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        model(batch())
    assert 0 < len(everything) < len(packed)


def test_a_module_that_calls_itself() -> None:
    class Recursive(Unit):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = super().forward(x)
            return self(y.tanh(), depth - 1) + y if depth else y

    torch.manual_seed(0)
    model = Outer(Recursive())
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_units_that_share_a_module_do_not_nest_at_run_time() -> None:
    model = outer()
    model.units[1].first = model.units[0].first
    planned, _ = discard_all(model, ["units.0.first", "units.1"])
    assert same_bits(step(model, batch()), step(planned, batch()))
    profile = sacplan.profile(model, batch(), device="cpu")
    fqns = ["units.0.first", "units.1"]
    assert_peak_is_replayed(model, plan_of(profile, {f: sorted(fitting_sites(profile, f)) for f in fqns}))


def test_occurrences_are_counted_in_each_call_anew() -> None:
    model = outer(torch.sin, torch.sin)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    plan = plan_of(profile, {"units.0": [("aten.exp.default", 0)]})
    with Ops() as plain:
        step(model, batch())
    for _ in range(2):
        planned = copy.deepcopy(model)
        sacplan.apply(planned, plan)
        for _ in range(2):
            with Ops() as seen:
                step(planned, batch())
            assert seen.noted.count("exp") == plain.noted.count("exp") + 1
            assert seen.noted.count("addmm") == plain.noted.count("addmm")


@pytest.mark.slow
def test_a_long_chain() -> None:
    model = outer(lambda x: [x := x.sin() for _ in range(1500)][-1])
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_vmap_inside_of_a_unit() -> None:
    model = outer(torch.vmap(lambda row: row.sin() * row.sum().exp()))
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("discarded", ["aten.mul.Tensor", "aten.exp.default"])
def test_an_activation_that_changed_before_the_backward_pass(discarded: str) -> None:
    """Whether it is discarded or kept."""
    held: list[torch.Tensor] = []
    model = outer(lambda x: held.append(x) or x.sin())
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    held.clear()
    sacplan.apply(model, plan_of(profile, {"units.0": [(discarded, 0)]}))
    for _ in range(2):  # by look-up, and by what was learned
        loss = model(batch())
        held[-1].detach().mul_(2)
        with pytest.raises(sacplan.errors.RecipeError, match="written in place"):
            loss.backward()


def write_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.sin()
    y.data.add_(1)
    return z.exp() * z


@pytest.mark.parametrize("discarded", [[("aten.mul.Tensor", 1)], [("aten.sin.default", 0)]])
def test_a_write_through_data_in_the_forward(discarded: list[tuple[str, int]]) -> None:
    """It counts no version. What was saved of it and is discarded is refused, and so is what would be made of it."""
    model = outer(write_data)
    plan = plan_of(sacplan.profile(model, batch(), device="cpu", trace="real"), {"units.0": discarded})
    sacplan.apply(model, plan, check=False)
    with pytest.raises(sacplan.errors.RecipeError, match="written in place"):
        step(model, batch())


class NumpyInPlace(torch.autograd.Function):
    """Writes where no mode sees it, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] = 0.5
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0


# --- what no dispatch mode sees -------------------------------------------------------------------


def fill_empty(x: torch.Tensor) -> torch.Tensor:
    """A kernel that fills a buffer through its pointer."""
    y = torch.empty_like(x)
    y.numpy()[:] = x.detach().numpy() * 2
    return y.cos() * x


def fill_zeroed(x: torch.Tensor) -> torch.Tensor:
    """A kernel that adds to zeros through their pointer."""
    y = torch.empty_like(x).zero_()
    y.numpy()[:] += x.detach().numpy() * 2
    return y.cos() * x


def overwrite_output(x: torch.Tensor) -> torch.Tensor:
    """A kernel that writes into what an op made."""
    y = x * 2
    y.detach().numpy()[:] = 1.5
    return y * x


def overwrite_argument(x: torch.Tensor) -> torch.Tensor:
    """A kernel that writes into what a recipe needs."""
    y = torch.zeros_like(x).add_(x)
    z = y.sin()
    y.detach().numpy()[:] = 0
    return z * z


def versions(x: torch.Tensor) -> torch.Tensor:
    """One that only autograd counted."""
    y: torch.Tensor = NumpyInPlace.apply(x * 2)
    return y.sin() * x


@pytest.mark.parametrize("fill", [fill_empty, fill_zeroed, versions])
def test_a_buffer_that_is_filled_unseen_is_kept(fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = outer(fill)
    planned, _ = discard_all(model, check=False)
    assert same_bits(step(model, batch()), step(planned, batch()))


@pytest.mark.parametrize("middle", [overwrite_output, overwrite_argument])
def test_the_first_step_finds_what_was_written_unseen(middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = outer(middle)
    planned, _ = discard_all(model)
    with pytest.raises(sacplan.errors.RecipeError, match="other bits"):
        step(planned, batch())
    unchecked, _ = discard_all(model, check=False)  # or the test above would prove nothing
    assert not same_bits(step(model, batch()), step(unchecked, batch()))


def test_checksums_allocate_nothing_of_pytorchs() -> None:
    t = torch.rand(2**16)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(8)
        checksum(t)
    seen = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(n_bytes > 0 for n_bytes in seen) == 1  # the profiler sees allocations, and this is not one


def test_only_the_first_step_leaves_checksums() -> None:
    planned, _ = discard_all(outer())
    for is_first in (True, False):
        with Ops() as seen:
            step(planned, batch())
        assert ("hash_tensor" in seen.noted) is is_first


# --- nothing is left behind -----------------------------------------------------------------------


@pytest.mark.parametrize("fqns", [None, [""]])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_lives_on_after_a_step(fqns: list[str] | None, backward: bool) -> None:
    planned, _ = discard_all(outer(torch.sin, lambda x: F.layer_norm(x, (DIM,)).softmax(-1) * x), fqns)
    for p in planned.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):  # by look-up, and by what was learned
        with no_collector(), Storages(planned) as storages:
            loss = planned(batch())
            if backward:
                loss.backward()
            assert storages.alive
            del loss
            assert storages.alive == 0


def test_an_argument_that_is_written_later_makes_no_cycle() -> None:
    """The tensor's new autograd node leads to the node that saved the recipe that holds the tensor."""

    def middle(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += y.exp().sin()
        return y

    model = outer(middle)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"units.0": [("aten.exp.default", 0)]}))
    with no_collector(), Storages(planned) as storages:
        planned(batch())
        assert storages.alive == 0


def test_a_value_dies_with_its_last_use() -> None:
    """When the backward pass arrives at the first unit, nothing is left of the second one."""

    def alive_between(model: Outer) -> int:
        seen = []
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with no_collector(), Storages(model) as storages:
            x = model.units[1](batch().requires_grad_())
            x.register_hook(lambda grad: seen.append(storages.alive))
            loss = model.units[0](x).pow(2).mean()
            del x
            loss.backward()
        return seen[0]

    model = outer()
    kept_first, _ = discard_all(model, ["units.0"])
    assert alive_between(kept_first) == alive_between(model)
