"""``keep`` and ``never``: what is pinned is left alone by every plan, and patterns that match nothing are refused."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sacplan
from sacplan.core.program import Program
from sacplan.techniques.recompute.rewrite import discarded_ops, recomputed
from tests.support.ops import Ops
from tests.support.slow import slow_after
from tests.support.steps import bit_equal, grads_of
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction, Stack

DIM, LENGTH, BATCH = 16, 24, 4


def experts() -> nn.Module:
    """A router that chooses, and experts that are all run."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        values, chosen = gates.topk(2, dim=-1)
        weight = torch.zeros_like(gates).scatter(-1, chosen, values)
        return sum(weight[..., i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts))

    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    return FromFunction(forward, router=nn.Linear(DIM, 4), experts=nn.ModuleList(expert() for _ in range(4)))


def layer(inner: nn.Module) -> nn.Module:
    """Residual, with everything in modules of their own."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.gelu(self.inner(self.norm(x))).sin())

    return FromFunction(forward, norm=nn.LayerNorm(DIM), inner=inner, drop=nn.Dropout(0.2))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def both() -> nn.Module:
    """Two towers, of which one shares a layer with itself, experts, and a module that nothing calls."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = (self.vision_tower(x) + self.shared(x).tanh()).exp().tanh()
        return self.text(self.shared(x)).tanh().pow(2).mean()

    return FromFunction(
        forward,
        vision_tower=Stack(layer(inner) for inner in (dense(), dense())),
        text=Stack(layer(inner) for inner in (dense(), experts(), dense())),
        shared=layer(dense()),
        unused=nn.Linear(DIM, DIM),
    )


@cache
def model_and_batch(name: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    if name == "both":
        return both(), torch.randn(BATCH, LENGTH, DIM), None
    return LM(layers=3, dim=32, vocab=64, dropout=0.0), tokens(4, 32, 64), cross_entropy


@cache
def profile_of(name: str) -> sacplan.Profile:
    model, batch, loss_fn = model_and_batch(name)
    return sacplan.profile(model, batch, loss_fn=loss_fn, device="cpu")


def runs_in(program: Program, op: int, inside: Callable[[str], bool]) -> bool:
    """Whether an op runs in a call of a module whose name fits."""
    scope = program.ops[op].scope
    return scope >= 0 and any(inside(program.scopes[s].fqn) for s in (scope, *program.ancestors(scope)))


def under(*modules: str) -> Callable[[str], bool]:
    return lambda fqn: any(fqn == m or fqn.startswith(m + ".") for m in modules)


def units_that_touch(program: Program, units: Iterable[str], inside: Callable[[str], bool]) -> set[str]:
    """Units that are, contain or run in (by call) a module whose name fits."""
    found = set()
    for i in range(len(program.scopes)):
        path = [program.scopes[s].fqn for s in (i, *program.ancestors(i))]
        if any(map(inside, path)):
            found.update(set(path) & set(units))
    return found


PINS: dict[str, tuple[str, dict[str, list[str]], Callable[[str], bool], Callable[[str], bool]]] = {
    # model, pins, names of modules and of ops that are pinned
    "an op": ("both", {"keep": ["aten.gelu"]}, under(), lambda op: op == "aten.gelu.default"),
    "an overload": ("both", {"keep": ["aten.addmm.default"]}, under(), lambda op: op == "aten.addmm.default"),
    "ops by pattern": ("lm", {"keep": ["aten.*attention*"]}, under(), lambda op: "attention" in op),
    "colons": ("both", {"keep": ["aten::tanh", "aten::sin"]}, under(), lambda op: "tanh" in op or ".sin." in op),
    "a module": ("lm", {"keep": ["layers.1"]}, under("layers.1"), lambda op: False),
    "a container": ("lm", {"keep": ["layers"]}, under("layers"), lambda op: False),
    "routers and topk": (
        "both", {"keep": ["*.router", "aten.topk"]}, under("text.layers.1.inner.router"), lambda op: "topk" in op,
    ),
    "a shared layer": ("both", {"keep": ["shared"]}, under("shared"), lambda op: False),
    "what is not called": ("both", {"keep": ["unused"]}, under("unused"), lambda op: False),
    "never a layer": ("lm", {"never": ["layers.1"]}, under("layers.1"), lambda op: False),
    "never a tower": ("both", {"never": ["vision_tower"]}, under("vision_tower"), lambda op: False),
    "never what is in a tower": (
        "both", {"never": ["vision_tower.*"]}, under("vision_tower.layers"), lambda op: False,
    ),
    "never experts": ("both", {"never": ["*.inner.experts.*"]}, under("text.layers.1.inner.experts"), lambda op: False),
    "never something shared": ("both", {"never": ["shared.inner"]}, under("shared.inner"), lambda op: False),
    "never a leaf": ("lm", {"never": ["layers.?.mlp.1"]}, lambda fqn: fqn.endswith("mlp.1"), lambda op: False),
    "both": (
        "both", {"never": ["vision_tower"], "keep": ["text.layers.0", "aten.native_layer_norm"]},
        under("vision_tower", "text.layers.0"), lambda op: "layer_norm" in op,
    ),
}  # fmt: skip
NOTHING_LEFT = {"a container", "never what is in a tower", "never a leaf"}  # or too little to count on


def assert_pinned(profile: sacplan.Profile, plan: sacplan.Plan, case: str) -> None:
    _, pins, module, op = PINS[case]
    program = profile.program
    for i in discarded_ops(program, plan.discarded):
        assert not runs_in(program, i, module), (i, program.ops[i])
        assert not op(program.ops[i].name)
    if "never" in pins:
        alone = under("vision_tower") if case == "both" else module
        assert not units_that_touch(program, plan.units, alone)
    assert plan.peak_bytes == recomputed(program, plan.discarded).footprint.peak_bytes


@cache
def smallest_of(case: str, solver: str = "best", objective: Any = "time") -> sacplan.Plan:
    name, pins, _, _ = PINS[case]
    return sacplan.plan(profile_of(name), "smallest", solver, objective, **pins)


SOLVERS = (("best", "time"), ("milp", "time"), ("milp", "flops"), ("greedy", "flops"))


@pytest.mark.parametrize(
    ("case", "solver", "objective"),
    [
        *(("both", *solver) for solver in SOLVERS),
        *((case, *SOLVERS[i % len(SOLVERS)]) for i, case in enumerate(PINS) if case != "both"),
    ],
)
def test_no_plan_touches_what_is_pinned(case: str, solver: str, objective: Any) -> None:
    name, pins, _, _ = PINS[case]
    profile, smallest = profile_of(name), smallest_of(case, solver, objective)
    assert_pinned(profile, smallest, case)
    assert smallest.peak_bytes < profile.peak_bytes or case in NOTHING_LEFT
    for budget in (smallest.peak_bytes, (smallest.peak_bytes + profile.peak_bytes) // 2):
        plan = sacplan.plan(profile, f"{budget}B", solver, objective, **pins)
        assert plan.peak_bytes <= budget
        assert plan.lower_bound_ms <= plan.recompute_ms
        assert_pinned(profile, plan, case)


@pytest.mark.parametrize("case", PINS)
def test_rotor_keeps_what_is_pinned_and_refuses_never(case: str) -> None:
    """It has one unit, around everything."""
    name, pins, _, _ = PINS[case]
    if "never" in pins:
        with pytest.raises(sacplan.errors.PlanError, match=r"'rotor'.*never="):
            sacplan.plan(profile_of(name), "smallest", "rotor", **pins)
    else:
        assert_pinned(profile_of(name), sacplan.plan(profile_of(name), "smallest", "rotor", **pins), case)


@pytest.mark.parametrize("case", PINS)
def test_pins_bind_where_plans_would_have_touched_them(case: str) -> None:
    """Or the test above would hold of any planner."""
    name, _, module, op = PINS[case]
    program = profile_of(name).program
    plan = sacplan.plan(profile_of(name), "smallest")
    touched = any(
        runs_in(program, i, module) or op(program.ops[i].name) for i in discarded_ops(program, plan.discarded)
    )
    assert touched or units_that_touch(program, plan.units, module) or case == "what is not called"


LAYERS_PINNED = {("a container", None), ("a container", "op")} | {
    (case, 2) for case in ("a container", "a module", "never a layer")
}


@pytest.mark.parametrize("case", PINS)
@pytest.mark.parametrize(("mode", "option"), [("full", None), ("selective", 2), ("selective", "op")])
def test_no_policy_touches_what_is_pinned(case: str, mode: str, option: Any) -> None:
    name, pins, _, _ = PINS[case]
    profile = profile_of(name)
    if (case, option) in LAYERS_PINNED:
        with pytest.raises(sacplan.errors.PlanError, match="pinned by keep or never"):
            sacplan.policy(mode, option, profile=profile, **pins)
    else:
        plan = sacplan.policy(mode, option, profile=profile, **pins)
        assert_pinned(profile, plan, case)
        assert plan.recompute_ms > 0


def test_a_policy_falls_back_on_inner_units() -> None:
    profile = profile_of("both")
    layers = "text.layers.*"
    whole = sacplan.policy("full", profile=profile, layers=layers)
    inner = sacplan.policy("full", profile=profile, layers=layers, never=["text.layers.*.norm"])
    assert "text.layers.0" in whole.units
    assert "text.layers.0" not in inner.units
    assert "text.layers.0.inner" in inner.units


def test_a_plan_falls_back_on_inner_units() -> None:
    profile = profile_of("both")
    plan = sacplan.plan(profile, "smallest", never=["text.layers.*.norm", "vision_tower", "shared"])
    assert plan.peak_bytes < profile.peak_bytes
    assert {unit.split(".inner")[0] + ".inner" for unit in plan.units} <= {
        f"text.layers.{i}.inner" for i in range(3)
    }


# --- while it runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", slow_after(3, PINS))
def test_gradients_are_bit_equal_and_the_fake_step_has_the_peak(case: str) -> None:
    name = PINS[case][0]
    model, batch, loss_fn = model_and_batch(name)
    plan = smallest_of(case)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    run = loss_fn or (lambda m, x: m(x))
    for _ in range(2):
        assert bit_equal(grads_of(model, batch, run), grads_of(planned, batch, run))
    seen = sacplan.verify(model, batch, plan, loss_fn=loss_fn)
    assert seen.peak_bytes == plan.peak_bytes


def test_pinned_ops_run_once() -> None:
    model, batch, _ = model_and_batch("both")
    counts = []
    for keep in ([], ["aten.gelu", "aten.native_layer_norm"]):
        planned = copy.deepcopy(model)
        sacplan.apply(planned, sacplan.plan(profile_of("both"), "smallest", keep=keep))
        with Ops() as seen:
            planned(batch).backward()
        counts.append(Counter(seen.noted))
    with Ops() as plain:
        copy.deepcopy(model)(batch).backward()
    for op in ("gelu", "native_layer_norm"):
        assert counts[0][op] > counts[1][op] == plain.noted.count(op)
    assert counts[1].total() > len(plain.noted)


def test_no_mode_is_on_in_modules_that_are_left_alone() -> None:
    model, batch, _ = model_and_batch("both")
    seen: dict[str, int] = {}
    for pins in ({}, {"never": ["vision_tower", "text.layers.1.inner.router"]}):
        planned = copy.deepcopy(model)
        plan = sacplan.plan(profile_of("both"), "smallest", **pins)
        assert plan.units
        sacplan.apply(planned, plan)
        for fqn, module in planned.named_modules():
            module.register_forward_pre_hook(
                lambda m, args, fqn=fqn: seen.__setitem__(fqn, len(_get_current_dispatch_mode_stack()))
            )
        planned(batch).backward()
        watched = {fqn for fqn, depth in seen.items() if depth}
        assert watched
        assert bool(watched & {"vision_tower.layers.0.norm", "text.layers.1.inner.router"}) != bool(pins)
        left_alone = [fqn for fqn in seen if fqn.startswith("vision_tower")]
        assert not pins or all("forward" not in planned.get_submodule(f).__dict__ for f in left_alone)


def averaged() -> nn.Module:
    """Scales by a running average, which the loop moves on before the backward pass."""
    return FromFunction(
        lambda self, x: self.linear(x).tanh() * (self.average.exp() * 2),
        linear=nn.Linear(DIM, DIM),
        average=torch.zeros(BATCH, LENGTH, DIM),
    )


def moved_on(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).pow(2).mean()
    with torch.no_grad():
        model[0].average.add_(0.1)
    return loss


def test_what_an_error_says_to_pin_makes_the_step_run() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(averaged()), torch.randn(BATCH, LENGTH, DIM)
    # As the trace sees it nothing moves, so nothing speaks against making the exponential again.
    profile = sacplan.profile(model, x, loss_fn=lambda m, x: m(x).pow(2).mean(), device="cpu")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, sacplan.policy("full", profile=profile, layers="0"))
    with pytest.raises(sacplan.errors.RecipeError, match=r"unit '0'.*written in place") as info:
        grads_of(planned, x, moved_on)
    named = re.search(r"(aten\.\w+)\.\w+ #\d+ of unit", str(info.value))
    plan = sacplan.policy("full", profile=profile, layers="0", keep=[named[1]])
    assert plan.units
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    assert bit_equal(grads_of(model, x, moved_on), grads_of(planned, x, moved_on))


# --- what is infeasible, and what is no pattern ---------------------------------------------------


@pytest.mark.parametrize(
    "pins", [{"keep": ["*"]}, {"never": ["*"]}, {"keep": ["layers.*", "embed", "norm", "head", "aten.*"]}]
)
def test_all_pinned_is_infeasible_at_the_unplanned_peak(pins: dict[str, list[str]]) -> None:
    profile = profile_of("lm")
    with pytest.raises(sacplan.InfeasibleBudget) as info:
        sacplan.plan(profile, "99%", **pins)
    assert info.value.smallest_feasible_bytes == profile.peak_bytes
    argument, given = next(iter(pins.items()))
    assert f"That is with {argument}={given!r}." in str(info.value)
    assert sacplan.plan(profile, "100%", **pins).status == "unplanned"


def test_the_bound_heeds_the_pins() -> None:
    profile = profile_of("both")
    bound, free = (sacplan.plan(profile, "80%", keep=keep).lower_bound_ms for keep in (["shared"], []))
    assert bound > 1.01 * free


def test_a_frontier_with_pins() -> None:
    profile = profile_of("lm")
    frame = sacplan.frontier(profile, points=3, solvers=("greedy",), never=["layers.1"])
    greedy = frame[frame["solver"] == "greedy"]
    assert (greedy["peak_bytes"] <= greedy["budget_bytes"]).all()
    assert greedy["budget_bytes"].min() == sacplan.plan(profile, "smallest", never=["layers.1"]).peak_bytes
    full = sacplan.policy("full", profile=profile, never=["layers.1"])
    assert frame[frame["solver"] == "full"]["peak_bytes"].tolist() == [full.peak_bytes]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"keep": ["*.ruoter"]}, r"keep: '\*\.ruoter' matches nothing.*name of a module\. Did you mean '.*router'"),
        ({"keep": ["text.layer.0"]}, r"'text\.layer\.0'.*name of a module\. Did you mean 'text\.layers\.0'"),
        ({"keep": ["aten.topkk"]}, r"'aten\.topkk'.*name of an op\. Did you mean 'aten\.topk'"),
        ({"keep": ["topk"]}, r"name of a module.*To name an op, write 'aten\.topk'"),
        ({"keep": ["mylib::scan"]}, r"'mylib::scan'.*name of an op\. See"),
        ({"keep": ["aten.gelu_backward"]}, r"runs only after the forward pass"),
        ({"keep": ["aten.view"]}, r"make nothing of their own, only views"),
        ({"never": ["vision_towers.*"]}, r"never: 'vision_towers\.\*'.*Did you mean .*'vision_tower'"),
        ({"never": ["aten.topk"]}, r"never takes modules.*keep=\['aten\.topk'\]"),
        ({"keep": "*.router"}, r"keep='\*\.router' is one string.*keep=\['\*\.router'\]"),
        ({"keep": [None]}, r"keep has None in it"),
        ({"never": [""]}, r"never has '' in it.*'\*' is every module"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["plan", "smallest", "policy", "frontier"])
def test_patterns_that_match_nothing_are_quoted(call: str, pins: Any, message: str) -> None:
    profile = profile_of("both")
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: sacplan.plan(profile, "1B", **pins),
        "smallest": lambda: sacplan.plan(profile, "smallest", **pins),
        "policy": lambda: sacplan.policy("none", profile=profile, **pins),
        "frontier": lambda: sacplan.frontier(profile, **pins),
    }
    with pytest.raises(sacplan.errors.PlanError, match=message):
        calls[call]()
