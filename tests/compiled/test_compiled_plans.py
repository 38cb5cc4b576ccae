"""A plan for a compiled step holds its budget compiled, which a dry run of the step with the plan shows."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.nn import functional as F

import sacplan
from sacplan.errors import PlanError
from tests.compiled.test_compiled_steps import BATCH, BLOCKS, WHOLE, model, profile_of
from tests.support.steps import grads_of
from tests.zoo.language_models import TokenModel, cross_entropy, tokens
from tests.zoo.layers import FromFunction


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [True, False])
def test_a_plan_holds_its_budget_compiled(blocks: bool) -> None:
    profile = profile_of(blocks)
    plan = sacplan.plan(profile, "80%")
    assert plan.decisions
    assert plan.peak_bytes <= plan.budget_bytes == int(0.8 * profile.peak_bytes)
    assert sacplan.verify(model(), BATCH, plan, cross_entropy).peak_bytes == plan.peak_bytes
    real = sacplan.verify(model(), BATCH, plan, cross_entropy, run="real")
    assert real.peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_a_budget_that_no_compiled_step_holds_is_infeasible() -> None:
    with pytest.raises(sacplan.InfeasibleBudget, match="compiled step") as error:
        sacplan.plan(profile_of(True), "30%")
    assert 0.3 < error.value.smallest_feasible_bytes / profile_of(True).peak_bytes < 1


def test_a_profile_from_a_file_has_no_model_to_run(tmp_path: Path) -> None:
    profile_of(True).save(tmp_path / "profile.json")
    loaded = sacplan.Profile.load(tmp_path / "profile.json")
    assert loaded == profile_of(True)
    with pytest.raises(PlanError, match="has no model"):
        sacplan.plan(loaded, "80%")


def test_a_policy_has_the_peak_of_the_compiled_step() -> None:
    profile = profile_of(True)
    full = sacplan.policy("full", profile=profile)
    assert full.status == "policy"
    assert profile.footprint(full).peak_bytes == full.peak_bytes == profile.timeline(full).total_bytes.max()
    assert full.peak_bytes < profile.peak_bytes
    with pytest.raises(PlanError, match="not decisions of one"):
        profile.footprint(full.decisions)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("modules", [["layers.*"], [""]])
def test_fit_says_what_the_compiled_step_takes_and_its_largest_batches(modules: list[str]) -> None:
    compile, n_bytes = {**BLOCKS, "modules": modules}, 3 * 2**20
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def profiled(n: int) -> sacplan.Profile:
        return sacplan.profile(model(), tokens(n, 64), cross_entropy, sgd, device="cpu", compile=compile)

    found = sacplan.fit(
        model(), lambda n: tokens(n, 64), "cpu", cross_entropy, "sgd", "3MiB", batch=4, compile=compile
    )
    as_it_is, planned, *_ = found.rows
    profile = profiled(4)
    assert (as_it_is.peak_bytes, as_it_is.fits) == (profile.peak_bytes, False)
    assert (planned.peak_bytes, planned.fits) == (sacplan.plan(profile, "3MiB").peak_bytes, True)
    assert f"compile={compile!r}" in found.code
    assert as_it_is.largest_batch is not None
    assert planned.largest_batch is not None
    edge = [profiled(as_it_is.largest_batch + more).peak_bytes for more in (0, 1)]
    assert edge[0] <= n_bytes < edge[1]
    largest = profiled(planned.largest_batch)
    plan = sacplan.plan(largest, "3MiB")
    verified = sacplan.verify(model(), tokens(planned.largest_batch, 64), plan, cross_entropy, sgd)
    assert verified.peak_bytes == plan.peak_bytes <= n_bytes
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(profiled(planned.largest_batch + 1), "3MiB")


def test_fit_answers_for_a_compiled_step_on_one_device() -> None:
    with pytest.raises(PlanError, match="2 devices"):
        sacplan.fit(model(), lambda n: tokens(n, 64), devices=2, compile=True)


class Layers(nn.Module):
    """Layers that drop things, and a loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 256) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.layers, self.down, strict=True):
            x = x + nn.functional.dropout(down(nn.functional.gelu(up(x)).square()), 0.1, self.training)
        return x.square().mean()


class Wide(Layers):
    """One of these layers, without the loss."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down[0](nn.functional.gelu(self.layers[0](x)).square())


BY_INDUCTOR: dict[str, Any] = {"modules": [""], "backend": "inductor", "options": {"fallback_random": True}}


@functools.cache
def graph_plan() -> tuple[Layers, torch.Tensor, sacplan.Plan]:
    torch.manual_seed(0)
    found, x = Layers(), torch.randn(1024, 64)
    profile = sacplan.profile(found, x, device="cpu", compile=BY_INDUCTOR)
    return found, x, sacplan.plan(profile, "85%")


def compiled_step(found: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    torch.compiler.reset()
    torch.manual_seed(0)
    found.compile(backend="inductor", options=BY_INDUCTOR["options"])
    found(x).backward()
    grads = tuple(p.grad.clone() for p in found.parameters() if p.grad is not None)
    found.zero_grad(set_to_none=True)
    found._compiled_call_impl = None
    return grads


@pytest.mark.slow
def test_a_plan_for_inductor_says_what_its_graphs_save(tmp_path: Path) -> None:
    found, x, plan = graph_plan()
    assert plan.peak_bytes <= plan.budget_bytes
    assert [type(one).__name__ for one in plan.decisions] == ["Partition"]
    plan.save(tmp_path / "plan.json")
    plan = sacplan.Plan.load(tmp_path / "plan.json")
    assert sacplan.verify(found, x, plan).peak_bytes == plan.peak_bytes
    assert sacplan.verify(found, x, plan, run="real").peak_bytes == plan.peak_bytes
    assert plan.gradients == "close"
    alone = compiled_step(found, x)
    with sacplan.apply(found, plan), warnings.catch_warnings():
        warnings.simplefilter("error", sacplan.SacplanWarning)
        torch.testing.assert_close(compiled_step(found, x), alone)
        compiled_step(found, x[:512])  # other sizes save the same values
    other = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with sacplan.apply(found, plan), pytest.warns(sacplan.SacplanWarning, match="does not know"):
        compiled_step(FromFunction(lambda self, x: self.inner(x).sum(), inner=other), x)
    assert config.custom_partitioner_fn is None


class Scores(Layers):
    """A model that returns more than its loss, as those of transformers do."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.head = nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.head(x)
        return {"scores": scores, "loss": scores.sigmoid().square().mean() + super().forward(x)}


def profile_of_scores(layers: int) -> sacplan.Profile:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)["loss"]  # type: ignore[no-any-return]

    return sacplan.profile(Scores(layers), torch.randn(1024, 64), loss_fn, device="cpu", compile=BY_INDUCTOR)


@pytest.mark.slow
def test_what_a_model_returns_beside_its_loss_is_let_go_where_that_takes_less() -> None:
    profile = profile_of_scores(1)
    plan = sacplan.plan(profile, "75%")
    # The scores and what the activation function reads. If the scores counted as there anyway, more would be saved.
    assert plan.peak_bytes <= profile.peak_bytes - 4 * 1024 * (2048 + 256)


@pytest.mark.slow
def test_the_smallest_peak_is_the_same_whatever_the_budget() -> None:
    profile, other = profile_of_scores(0), profile_of_scores(0)
    smallest = {sacplan.plan(profile, "smallest").peak_bytes}
    for budget in ("10%", "50%"):
        with pytest.raises(sacplan.InfeasibleBudget) as error:
            sacplan.plan(other, budget)
        smallest.add(error.value.smallest_feasible_bytes)
    assert smallest == {profile.peak_bytes - 4 * 1024 * 2048}  # the scores


class Between(TokenModel):
    """Compiled blocks between wide layers that run eagerly."""

    def __init__(self, vocab: int) -> None:
        super().__init__([Wide(), Wide()], 64, vocab)
        self.stem = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Sigmoid(), nn.Linear(512, 64))
        self.neck = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Tanh(), nn.Linear(512, 64)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.neck(x))  # type: ignore[no-any-return]


@functools.cache
def between(vocab: int, backend: str) -> tuple[Between, torch.Tensor, sacplan.Profile]:
    torch.manual_seed(0)
    found, batch = Between(vocab), tokens(8, 64, vocab=vocab)
    compile = {"modules": ["layers.*"], "backend": backend}
    return found, batch, sacplan.profile(found, batch, cross_entropy, device="cpu", compile=compile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "budget", "techniques", "kinds"),
    [
        (256, "60%", None, {"Partition", "Recompute"}),
        (256, "60%", ["recompute", "offload"], {"Partition", "Offload"}),
        (2048, "55%", ["recompute", "chunk"], {"Partition", "Chunk"}),
        (2048, "60%", ["recompute", "chunk", "offload"], {"Partition", "Chunk", "Offload"}),
    ],
)
def test_graphs_are_partitioned_and_what_runs_eagerly_beside_them_is_planned(
    vocab: int, budget: str, techniques: list[str] | None, kinds: set[str]
) -> None:
    found, batch, profile = between(vocab, "inductor")
    plan = sacplan.plan(profile, budget, techniques=techniques)
    assert {type(one).__name__ for one in plan.decisions} == kinds
    assert plan.peak_bytes <= plan.budget_bytes == int(int(budget[:-1]) / 100 * profile.peak_bytes)
    assert sacplan.verify(found, batch, plan, cross_entropy).peak_bytes == plan.peak_bytes
    real = sacplan.verify(found, batch, plan, cross_entropy, run="real").peak_bytes
    # Copies on a CPU stay in the same memory. They and the peak may be largest at different times.
    assert real <= plan.peak_bytes + plan.host_bytes
    if not plan.host_bytes:
        assert real == plan.peak_bytes
    eager = grads_of(found, batch, cross_entropy)
    for layer in found.layers:
        layer.compile(backend="inductor")
    try:
        torch.compiler.reset()
        with sacplan.apply(found, plan):
            torch.testing.assert_close(grads_of(found, batch, cross_entropy), eager)
    finally:
        for layer in found.layers:
            layer._compiled_call_impl = None


@pytest.mark.slow
def test_compiled_blocks_without_gradients_have_nothing_to_plan() -> None:
    found = TokenModel([Wide(), Wide()], 64, 256).requires_grad_(False)
    found.head.requires_grad_(True)
    compile = {"modules": ["layers.*"], "backend": "inductor"}
    profile = sacplan.profile(found, tokens(8, 64, vocab=256), cross_entropy, device="cpu", compile=compile)
    with pytest.raises(sacplan.InfeasibleBudget) as error:
        sacplan.plan(profile, "50%")
    assert error.value.smallest_feasible_bytes == profile.peak_bytes


@pytest.mark.slow
def test_tags_in_compiled_blocks_go_with_every_technique_outside_of_them() -> None:
    found, batch, profile = between(256, "aot_eager")
    plan = sacplan.plan(profile, "60%", techniques=["recompute", "offload"])
    units = {
        type(one).__name__: {d.unit for d in plan.decisions if type(d) is type(one)} for one in plan.decisions
    }
    assert units == {"Recompute": {"layers.0", "layers.1"}, "Offload": {"stem"}}
    real = sacplan.verify(found, batch, plan, cross_entropy, run="real").peak_bytes
    assert real - plan.host_bytes <= plan.peak_bytes <= plan.budget_bytes


def test_nothing_runs_in_slices_or_on_the_host_in_a_model_that_is_compiled_whole() -> None:
    profile = sacplan.profile(model(), BATCH, cross_entropy, device="cpu", compile=WHOLE)
    for technique, why in (("chunk", "cannot keep slices"), ("offload", "cannot copy to the host")):
        with pytest.raises(PlanError, match=f"compiled as a whole. torch.compile {why}"):
            sacplan.plan(profile, "80%", techniques=["recompute", technique])


@pytest.mark.slow
def test_fit_has_rows_of_slices_outside_of_what_is_compiled() -> None:
    found, _, profile = between(2048, "inductor")
    compile = {"modules": ["layers.*"], "backend": "inductor"}
    budget = f"{int(0.55 * profile.peak_bytes)}B"
    verdict = sacplan.fit(
        found, lambda n: tokens(n, 64, vocab=2048), "cpu", cross_entropy, "sgd", budget,
        batch=8, compile=compile, sizes=False,
    )  # fmt: skip
    rows = {row.way: row for row in verdict.rows}
    assert list(rows) == ["as it is", "plan", "chunked loss", "plan + chunked loss"]
    assert [row.fits for row in verdict.rows] == [False, False, True, True]
    plan = sacplan.plan(profile, budget, techniques=["recompute", "chunk"])
    assert rows["plan + chunked loss"].peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_no_unit_of_a_plan_is_around_a_graph_break() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        x = x.sigmoid() * x.exp()  # an op of the model itself, which only a unit around all can run again
        torch._dynamo.graph_break()
        return self.down(x).sum()

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Sigmoid())

    found, x = FromFunction(forward, up=block(), down=block()), torch.randn(512, 16)
    profile = sacplan.profile(found, x, device="cpu", compile=WHOLE)
    assert "" in sacplan.plan(profile.uncompiled, "smallest").units
    plan = sacplan.plan(profile, "smallest")
    assert plan.units
    assert "" not in plan.units
    assert sacplan.verify(found, x, plan, run="real").peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_an_op_in_whose_place_the_compiler_traces_others_stays() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        wide = [F.interpolate(layer(x), scale_factor=2, mode="bilinear") for layer in self.children()]
        return sum(each.sin().exp().sigmoid().sin().sum() for each in wide)

    found = FromFunction(forward, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(3, 8, 3))
    x = torch.rand(4, 3, 24, 24)
    profile = sacplan.profile(found, x, device="cpu", compile=WHOLE)

    def resampled(plan: sacplan.Plan) -> bool:
        return any("upsample" in str(decision) for decision in plan.decisions)

    assert resampled(sacplan.plan(profile.uncompiled, "smallest"))
    plan = sacplan.plan(profile, "smallest")
    assert plan.decisions
    assert not resampled(plan)
    assert sacplan.verify(found, x, plan, run="real").peak_bytes == plan.peak_bytes < profile.peak_bytes
