"""``plan``: the closed loop, exactly reachable choices, files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import assert_carried_out
from tests.support.steps import mean_square as loss_fn
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=4, dim=128, vocab=1000)
    return sacplan.profile(model, tokens(8, 128, 1000), loss_fn=cross_entropy, device="h100")


def test_budgets_are_gib_text_or_shares(profile: sacplan.Profile) -> None:
    by_share = sacplan.plan(profile, "75%")
    by_bytes = sacplan.plan(profile, f"{by_share.budget_bytes}B")
    by_gib = sacplan.plan(profile, by_share.budget_bytes / 2**30)
    assert by_share.budget_bytes == profile.peak_bytes * 3 // 4
    assert by_share == by_bytes == by_gib
    assert by_share.provenance.techniques == ("recompute",)  # what keeps every bit of the gradients


def test_units_list_what_they_keep_and_discard(profile: sacplan.Profile) -> None:
    plan = sacplan.plan(profile, "60%")
    assert plan.units
    for fqn, unit in plan.units.items():
        assert plan.discarded[fqn]
        assert 0 < unit.discard_ratio <= 1
        assert not set(plan.discarded[fqn]) & set(unit.kept)
    assert set(plan.op_decisions.values()) == {"keep", "discard"}
    assert plan.recompute_ms == pytest.approx(sum(u.recompute_ms for u in plan.units.values()))
    names = list(plan.units)
    assert not any(a != b and (b == "" or a.startswith(b + ".")) for a in names for b in names)


def test_fewest_flops_or_least_time(profile: sacplan.Profile) -> None:
    for budget in ("75%", "55%"):
        time = sacplan.plan(profile, budget)
        flops = sacplan.plan(profile, budget, objective="flops")
        assert flops.peak_bytes <= time.budget_bytes
        assert flops.recompute_flops <= time.recompute_flops
        assert time.recompute_ms <= flops.recompute_ms * 1.01
    with pytest.raises(sacplan.errors.PlanError, match=r"objective 'watts'.*'time' and 'flops'"):
        sacplan.plan(profile, "75%", objective="watts")  # type: ignore[arg-type]


def test_no_plan_undercuts_its_bound(profile: sacplan.Profile) -> None:
    bounds = []
    for budget in ("90%", "75%", "60%", "50%"):
        plan = sacplan.plan(profile, budget)
        assert 0 <= plan.lower_bound_ms <= plan.recompute_ms
        bounds.append(plan.lower_bound_ms)
    assert bounds == sorted(bounds)
    assert bounds[-1] > 0.75 * plan.recompute_ms


def test_plans_are_frozen(profile: sacplan.Profile) -> None:
    plan = sacplan.plan(profile, "70%")
    with pytest.raises(AttributeError):
        plan.peak_bytes = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.units["x"] = None  # type: ignore[index]


def test_frontier(profile: sacplan.Profile) -> None:
    frame = sacplan.frontier(profile, points=4)
    assert {"milp", "greedy"} <= set(frame["solver"])
    assert (frame["peak_bytes"] <= frame["budget_bytes"]).all()
    milp = frame[frame["solver"] == "milp"].set_index("budget_bytes")["recompute_ms"]
    for row in frame.itertuples():
        if row.budget_bytes in milp.index:
            assert milp[row.budget_bytes] <= row.recompute_ms * 1.01
    policies = frame[frame["status"] == "policy"]
    assert len(policies)
    assert set(policies["peak_bytes"]) <= set(milp.index)  # each is compared with a plan for its own peak


def test_a_step_that_fits_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither options nor effects are worked out before it is known that a plan is needed."""
    from sacplan.planning.context import PlanningContext

    def never(self: PlanningContext, size: int) -> None:
        raise AssertionError("effects were asked for")

    monkeypatch.setattr(PlanningContext, "effects", never)
    profile = sacplan.profile(LM(), torch.randint(0, 128, (4, 32)), device="cpu")
    assert sacplan.plan(profile, "100%").status == "unplanned"


@pytest.mark.slow
def test_the_default_asks_rotor_before_it_gives_up() -> None:
    """A chain that is so long that running each op at most twice is not enough."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(20)))
    batch = torch.randn(2048, 16)

    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    twice = sacplan.plan(profile, "smallest", "milp").peak_bytes
    smallest = sacplan.plan(profile, "smallest")
    assert smallest.solver == "rotor"
    assert smallest.peak_bytes < 0.8 * twice
    assert all(
        sacplan.plan(profile, "smallest", one).peak_bytes >= smallest.peak_bytes
        for one in ("greedy", "rotor")
    )
    for budget in (smallest.peak_bytes, (smallest.peak_bytes + twice) // 2):
        plan = sacplan.plan(profile, f"{budget}B")
        assert plan.solver == "rotor"
        assert plan.peak_bytes <= budget
        assert sacplan.verify(model, batch, plan, loss_fn).peak_bytes == plan.peak_bytes
    assert sacplan.plan(profile, f"{twice}B").solver != "rotor"
    with pytest.raises(sacplan.InfeasibleBudget, match="greedy and milp, then rotor") as info:
        sacplan.plan(profile, f"{smallest.peak_bytes - 1}B")
    assert info.value.smallest_feasible_bytes == smallest.peak_bytes
    assert "solver=" not in str(info.value)
    assert sacplan.frontier(profile, 2, ["milp"], policies=False)["budget_bytes"].min() == twice


@pytest.mark.slow
def test_ranks_may_be_said_to_plan(tmp_path: Path) -> None:
    """The same plan as from a profile that was made for these ranks."""
    model, batch = LM(layers=1), torch.randint(0, 128, (4, 32))
    whole = sacplan.profile(model, batch, optimizer=torch.optim.AdamW, device="cpu")
    for ranks in (sacplan.DDP(2), sacplan.FSDP2(4)):
        early = sacplan.profile(model, batch, optimizer=torch.optim.AdamW, device="cpu", ranks=ranks)
        late = sacplan.plan(whole, "smallest", "greedy", ranks=ranks)
        assert late == sacplan.plan(early, "smallest", "greedy")
        assert late.ranks == early.ranks
        assert late.baseline_peak_bytes == early.peak_bytes
        assert sacplan.plan(whole, "smallest", "greedy", ranks=early.ranks) == late
    with pytest.raises(sacplan.errors.TraceError, match="no module matches"):
        sacplan.plan(whole, "50%", ranks=sacplan.FSDP2(2, ["nowhere"]))
    whole.save(tmp_path / "profile.json")
    with pytest.raises(sacplan.errors.PlanError, match="a profile from a file does not have: give ranks="):
        sacplan.plan(tmp_path / "profile.json", "80%", ranks=sacplan.FSDP2(4))


def test_a_plan_can_be_copied_and_pickled() -> None:
    profile = sacplan.profile(LM(), torch.randint(0, 128, (4, 32)), device="cpu")
    plan = sacplan.plan(profile, "smallest", "greedy")
    assert plan.decisions
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert again == plan
        assert again.units == plan.units
        assert again.provenance == plan.provenance


def in_parts() -> nn.Module:
    """Its loss calls the parts, and never the model: no module is around all of them."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    body = nn.Sequential(*(layer() for _ in range(3)))
    return nn.ModuleDict({"embed": nn.Embedding(99, 32), "body": body, "head": nn.Linear(32, 99)})


def loss_of_parts(model: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = model.body(model.embed(batch).tanh())
    return nn.functional.cross_entropy(model.head(hidden.sin()).flatten(0, 1), batch.flatten())


def test_a_loss_that_calls_parts_of_the_model() -> None:
    torch.manual_seed(0)
    model, batch = in_parts(), torch.randint(0, 99, (4, 96))
    profile = sacplan.profile(model, batch, loss_of_parts, device="cpu")
    assert profile.program.outermost_modules == ("embed", "body", "head")
    assert len(sacplan.frontier(profile))
    assert sacplan.Report(profile).peak
    for plan in (sacplan.plan(profile, "smallest"), sacplan.plan(profile, "90%")):
        assert plan.discarded
        assert_carried_out(model, batch, plan, loss_of_parts)


@pytest.mark.parametrize("inside", [False, True], ids=["beside the model", "in it too"])
def test_a_loss_that_calls_the_model_and_a_part_of_it(inside: bool) -> None:
    """A perceptual loss. The model and the part are both units unless one runs in the other."""

    def distance(model: Any, x: torch.Tensor) -> torch.Tensor:
        wanted, made = model.part(x), model(x)
        return ((made if inside else model.part(made)) - wanted).square().mean()

    torch.manual_seed(0)
    model = FromFunction(
        lambda self, x: self.part(self.net(x)) if inside else self.net(x),
        net=nn.Sequential(nn.Linear(16, 32), nn.Sigmoid(), nn.Linear(32, 16)),
        part=nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16), nn.Tanh()),
    )
    batch = torch.randn(512, 16)
    profile = sacplan.profile(model, batch, distance, device="cpu")
    smallest = sacplan.plan(profile, "smallest")
    assert smallest.peak_bytes <= 0.75 * profile.peak_bytes
    assert set(smallest.units) == ({"net", "part"} if inside else {"", "part"})
    assert_carried_out(model, batch, smallest, distance)
