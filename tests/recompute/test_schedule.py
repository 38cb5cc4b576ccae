"""From its second call on a unit follows what it has learned: less work, the same decisions, the same safety."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sacplan
from sacplan.device.op_kernels import Call
from sacplan.techniques.recompute.executor.lookup import Lookup
from sacplan.techniques.recompute.executor.recorder import UnitRecorder
from sacplan.techniques.recompute.executor.slots import SlotTable
from tests.support.ops import Ops, name_of
from tests.support.recomputing import discard_all, fitting_sites, plan_of, same_bits, step
from tests.support.storages import Storages, no_collector
from tests.zoo.layers import FromFunction
from tests.zoo.units import DIM, Outer, Unit, batch, outer


@contextmanager
def calls_of(method: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of every call of a method of the recorder or of a part of it."""
    seen: list[Any] = []
    owners = {cls.__name__: cls for cls in (UnitRecorder, Lookup, SlotTable)}
    owner, _, name = method.__qualname__.rpartition(".")

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return method(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owners[owner], name, spy)
        yield seen


def calls_in_step(
    method: Callable[..., Any],
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any] = step,
) -> int:
    with calls_of(method, monkeypatch) as seen:
        run(model, batch())
    return len(seen)


DISCARDED = {"aten.addmm.default", "aten.gelu.default", "aten.mul.Tensor", "aten.sub.Tensor"} | {
    f"aten.{name}.default" for name in ("sin", "cos", "exp", "tanh")
}


def applied(model: nn.Module, sites: dict[str, list[tuple[str, int]] | None], **kwargs: Any) -> nn.Module:
    """A copy of the model with call sites discarded; None: those of all ops in ``DISCARDED``."""
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    found = {
        fqn: own if own is not None else [s for s in fitting_sites(profile, fqn) if s.op in DISCARDED]
        for fqn, own in sites.items()
    }
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, found), **kwargs)
    return planned


# --- no waste -------------------------------------------------------------------------------------


def test_a_unit_that_discards_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = outer()
    planned = applied(model, {"units.0": [], "units.1": [("aten.exp.default", 0)]}, check=False)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    (scope,) = profile.program.calls["units.1"]
    assert "forward" not in vars(planned.units[0])
    for _ in range(2):
        handled = calls_in_step(UnitRecorder.__torch_dispatch__, planned, monkeypatch)
        assert handled == len(profile.program.sites(scope))  # those of the other unit, and no more


def test_a_hook_that_runs_the_next_op_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd saves what ``exp`` returns, and the hook around the unit negates it, as the unit does next."""
    model = outer(lambda x: x.exp().neg().sin())
    planned = applied(model, {"units.0": [("aten.sin.default", 0)]})

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().neg(), lambda t: t.neg()):
            return step(model, x)

    run(planned, batch())
    for _ in range(2):
        assert calls_in_step(Lookup.next, planned, monkeypatch, run) == 0
    assert same_bits(step(model, batch()), run(planned, batch()))


def test_nothing_of_ours_runs_outside_of_units_in_the_forward_pass() -> None:
    planned, _ = discard_all(outer())
    step(planned, batch())

    def look(call: Call) -> Any:
        modes = _get_current_dispatch_mode_stack()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return name_of(call), any(isinstance(m, UnitRecorder) for m in modes), hooks

    with Ops(look) as seen:
        planned(batch())
    assert [one for one in seen.noted if one[0] == "tanh"] == [("tanh", False, None)] * 2  # between the units


# --- the same decisions ---------------------------------------------------------------------------


class Flow(nn.Module):
    """What it runs depends on an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.flow = "long"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).sin().exp()
        if self.flow == "other":
            return F.gelu(y.tanh() * x).exp()
        if self.flow == "written":
            y = y.cos() * y
            z = y.sin()
            y.data.mul_(2)
            return z.exp()
        if self.flow == "short":
            return y
        z = self.b(y).cos().exp()
        return z * y if self.flow == "long" else F.gelu(z - y).exp()


FLOWS = ["long", "other", "short", "gelu", "long", "short", "other", "gelu", "gelu", "short", "long"]


def dispatched(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The ops of a step; what runs again is among them."""
    with Ops() as seen:
        step(model, x)
    return [name for name in seen.noted if name not in ("detach", "as_strided")]


@pytest.mark.filterwarnings("ignore:the step is not the one")
def test_a_call_that_does_something_else_is_planned_as_if_it_were_the_first() -> None:
    torch.manual_seed(0)
    model = Outer(Flow())
    never_run = applied(model, {"units.0": None}, check=False)
    planned = copy.deepcopy(never_run)
    for i, flow in enumerate(FLOWS):
        fresh = copy.deepcopy(never_run)
        model.units[0].flow = planned.units[0].flow = fresh.units[0].flow = flow
        x = torch.randn(i % 3 + 1, DIM)
        ops = dispatched(planned, x)
        assert ops == dispatched(fresh, x)
        assert len(ops) > len(dispatched(model, x))
        assert same_bits(step(model, x), step(planned, x))


def fills_a_cache(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """Makes a table in its first call, between two ops of every call, or behind a custom function."""
    y = self.linear(x)
    self.made = weakref.ref(y.untyped_storage())
    if self.behind:
        y = Square.apply(y)  # type: ignore[no-untyped-call]
    if self.table is None:
        self.table = torch.arange(DIM).mul(0.1).cos()
    return (y if self.behind else y.sin()) * self.table


class Square(torch.autograd.Function):
    """Saves what a discarded op has made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x


@pytest.mark.filterwarnings("ignore:the step is not the one")
@pytest.mark.parametrize("behind", [False, True], ids=["between two ops", "behind a custom function"])
def test_a_cache_that_the_first_call_fills_keeps_nothing_in_later_ones(behind: bool) -> None:
    """Autograd saves an input before the op runs: in the first call, before the ops that make the cache."""
    torch.manual_seed(0)
    model = Outer(FromFunction(fills_a_cache, linear=nn.Linear(DIM, DIM), behind=behind, table=None))
    profile = sacplan.profile(copy.deepcopy(model), batch(), device="cpu", trace="fake")
    sacplan.apply(model, plan_of(profile, {"units.0": [("aten.addmm.default", 0)]}))
    kept = []
    for _ in range(4):
        loss = model(batch())
        kept.append(model.units[0].made() is not None)
        loss.backward()
    assert not any(kept)


@pytest.mark.filterwarnings("ignore:the step is not the one")
def test_a_write_that_no_call_before_made_is_seen() -> None:
    planned = applied(Outer(Flow()), {"units.0": None}, check=False)
    for flow in ("long", "other", "long"):
        planned.units[0].flow = flow
        step(planned, batch())
    planned.units[0].flow = "written"
    with pytest.raises(sacplan.errors.RecipeError, match="written in place"):
        step(planned, batch())


def test_a_parameter_that_is_frozen_and_trained_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors are saved then, by the same ops; the discarded ones among them are discarded all the same."""
    torch.manual_seed(0)
    gate = nn.Parameter(torch.randn(DIM))
    model = Outer(FromFunction(lambda self, x: x.sin().mul(self.gate).exp() * 2, gate=gate))
    planned = applied(model, {"units.0": [("aten.sin.default", 0)]})
    for trained in (False, True, False, True):
        for m in (model, planned):
            m.units[0].gate.requires_grad_(trained)
        for _ in range(2):
            x = batch().requires_grad_()
            torch.manual_seed(0)
            with calls_of(UnitRecorder._pack, monkeypatch) as packed:
                loss = planned(x)
                loss.backward()
            expected = x.grad
            x = batch().requires_grad_()
            model(x).backward()
            assert torch.equal(x.grad, expected)
        sines = [t for (t,) in packed if torch.equal(t, batch().sin())]
        assert len(sines) == trained


# --- the same safety ------------------------------------------------------------------------------


def test_an_error_in_the_forward_leaves_nothing_behind() -> None:
    fail = [False]

    def middle(x: torch.Tensor) -> torch.Tensor:
        x = x.sin().exp()
        if fail[0]:
            raise ValueError("broken")
        return x.cos()

    model = outer(middle)
    planned, _ = discard_all(model)
    for _ in range(3):  # the first call and later ones
        fail[0] = True
        with no_collector(), Storages(planned) as storages:
            with pytest.raises(ValueError, match="broken"):
                planned(batch())
            assert storages.alive == 0
        assert len(_get_current_dispatch_mode_stack()) == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        fail[0] = False
        assert same_bits(step(model, batch()), step(planned, batch()))


def hooks_inside(x: torch.Tensor) -> torch.Tensor:
    x = x.sin().exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        x = x.cos().exp()
    return x.sin().exp()


def checkpoint_inside(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: t.sin().exp(), x.cos(), use_reentrant=False).tanh().exp()


def reentrant_checkpoint_inside(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: F.dropout(t.sin(), 0.5).exp(), x, use_reentrant=True)


def backward_inside(x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
    return (slope * x.cos()).exp()


@pytest.mark.filterwarnings("ignore:the step is not the one")
@pytest.mark.parametrize(
    "middle", [hooks_inside, checkpoint_inside, reentrant_checkpoint_inside, backward_inside]
)
def test_hooks_that_come_and_go_inside_of_a_unit(middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = outer(middle, torch.sin)
    plain = outer(torch.sin, torch.sin)
    for runs in ([model] * 4, [plain, plain, model, plain, model]):  # known, or a surprise
        planned = applied(model, {"units.0": None, "units.1": None}, check=False)
        for m in runs:
            planned.units[0].middle = m.units[0].middle
            assert same_bits(step(m, batch()), step(planned, batch()))
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_hooks_around_the_model_do_not_shift_call_sites() -> None:
    """Their ops run inside of the unit's forward, but are none of its ops."""
    planned = applied(Outer(Unit()), {"units.0": [("aten.exp.default", 0)]})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.exp(), lambda t: t.log()):
        loss = planned(batch())
    with Ops() as seen:
        loss.backward()
    assert seen.noted.count("exp") == 1
