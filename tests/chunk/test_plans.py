"""Training plans with chunks: what they predict, what the step takes, what gradients it gives, and what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from benchmarks.models.chunk_models import TRAINING, Case
from sacplan.core.decisions import Chunk
from sacplan.device.devices import resolve_device
from sacplan.techniques.chunk.entries import loss_chunks
from tests.support.chunks import close, step
from tests.support.steps import assert_predicted
from tests.zoo.language_models import LM, Tempered, cross_entropy, tokens
from tests.zoo.layers import FromFunction

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.usefixtures("no_cublas_workspaces"),
]

BOTH = ("recompute", "chunk")
VOCAB = 1003
CLOSE = 1e-6  # relative difference of the gradients that are summed up slice by slice, float32


def of_unit(model: nn.Module, units: list[str]) -> set[str]:
    """Parameters of modules, and those that are tied to them, by the names that the model gives them."""
    inside = {id(p) for unit in units for p in model.get_submodule(unit).parameters()}
    return {name for name, p in model.named_parameters() if id(p) in inside}


def check_predicted(case: Case, plan: sacplan.Plan) -> None:
    """What the plan says is what a fake step and a real one take."""
    assert_predicted(case.model, case.batch, plan, case.loss_fn, case.optimizer)
    seen = sacplan.verify(case.model, case.batch, plan, case.loss_fn, case.optimizer)
    assert seen.step_ms == pytest.approx(plan.planned_ms, rel=1e-6)


def check_gradients(case: Case, plan: sacplan.Plan, elsewhere: float = 0.0) -> None:
    """Loss and gradients are those of the step without the plan.

    Args:
        case, plan: the step.
        elsewhere: what gradients of parameters outside of the chunks may be off by.
    """
    backward = {chunk for chunk in plan.chunks if chunk.span == "backward"}
    if backward and not elsewhere:
        # Rows of products in the middle of the model round otherwise. Without these chunks, every bit is compared.
        profile = sacplan.profile(
            case.model, case.batch, case.loss_fn, device="cpu", optimizer=case.optimizer
        )
        check_gradients(case, plan_with(profile, [one for one in plan.decisions if one not in backward]))
        elsewhere = 5 * CLOSE
    loss_fn = case.loss_fn or (lambda model, batch: model(**batch).loss)
    expected = step(case.model, case.batch, loss_fn)
    with sacplan.apply(case.model, plan):
        got = step(case.model, case.batch, loss_fn)
    if any(chunk.span == "module" for chunk in plan.chunks):
        elsewhere = max(elsewhere, 5 * CLOSE)  # rows of products in the middle of the model
    near = of_unit(case.model, [chunk.unit for chunk in plan.chunks])
    close(got, expected, near=("",) if elsewhere else tuple(near), rtol=max(CLOSE, elsewhere))


# --- twelve architectures

FAST = ("gpt2",)


@functools.cache
def profiled(name: str) -> tuple[Case, sacplan.Profile]:
    """The case, and its step on a CPU."""
    case = TRAINING[name]()
    return case, sacplan.profile(case.model, case.batch, case.loss_fn, device="cpu")


@functools.cache
def planned(name: str) -> tuple[Case, sacplan.Plan, sacplan.Plan, sacplan.Plan]:
    """The case; the smallest plans without chunks and with them; and one between the two."""
    case, profile = profiled(name)
    alone = sacplan.plan(profile, "smallest")
    smallest = sacplan.plan(profile, "smallest", techniques=BOTH)
    assert smallest.peak_bytes < 0.6 * alone.peak_bytes
    budget = (alone.peak_bytes + smallest.peak_bytes) // 2
    with pytest.raises(sacplan.InfeasibleBudget, match=r"recompute.*chunk.*the budget holds"):
        sacplan.plan(profile, f"{budget}B")
    between = sacplan.plan(profile, f"{budget}B", techniques=BOTH)
    return case, alone, smallest, between


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TRAINING]
)
def test_budgets_that_recomputation_cannot_hold(name: str) -> None:
    case, alone, smallest, between = planned(name)
    assert between.peak_bytes <= between.budget_bytes < alone.peak_bytes
    assert between.chunks
    assert between.gradients == smallest.gradients == "close"
    assert alone.gradients == "bit-equal"
    check_predicted(case, between)
    check_gradients(case, between)


@pytest.mark.slow
def test_a_budget_costs_no_more_than_it_needs() -> None:
    """Half way down little is recomputed: slices are nearly enough, and few of them."""
    _, _, smallest, between = planned("gpt2")
    assert between.recompute_ms < smallest.recompute_ms / 4
    few, many = (
        {chunk.unit: chunk.slices for chunk in plan.chunks}["lm_head"] for plan in (between, smallest)
    )
    assert few < many
    assert 0 < between.added_ms < smallest.added_ms


def test_files_and_words(tmp_path: Path) -> None:
    case, alone, _, between = planned("gpt2")
    between.save(tmp_path / "plan.json")
    again = sacplan.Plan.load(tmp_path / "plan.json")
    assert again == between
    assert again.chunks == between.chunks
    assert again.added_ms == between.added_ms
    check_gradients(case, again)
    (chunk,) = between.chunks
    assert f"chunks of up to {chunk.slices} slices" in repr(between)
    assert "chunks" not in repr(alone)


def test_what_chunks_would_reach_is_said() -> None:
    """By the planner's own search: about as far as the smallest plan, for which narrower planners are asked as well."""
    _, alone, smallest, _ = planned("gpt2")
    _, profile = profiled("gpt2")
    with pytest.raises(sacplan.InfeasibleBudget) as error:
        sacplan.plan(profile, f"{smallest.peak_bytes // 2}B")
    said = re.search(r"'chunk'\) a search reaches .*? \((\d+) bytes\)", str(error.value))
    assert said is not None
    assert smallest.peak_bytes <= int(said[1]) <= 1.02 * smallest.peak_bytes < alone.peak_bytes


# --- steps of many kinds: planned, exact and right, or refused

Loss = Callable[[nn.Module, Any], torch.Tensor]


def lm(**more: Any) -> LM:
    torch.manual_seed(0)
    return LM(**{"layers": 1, "dim": 32, "heads": 2, "vocab": VOCAB, **more})


def batch_of(rows: int = 2, length: int = 48) -> torch.Tensor:
    torch.manual_seed(1)
    return tokens(rows, length, VOCAB)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, logits.shape[-1])


def in_bfloat16(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, x)


def at_the_end(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Most slices are empty."""
    return F.cross_entropy(flat(model(x)[:, -8:]), x[:, -8:].flatten())


def with_hidden_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Something else reads what enters the head."""
    h = model.norm(model.layers[0](model.embed(x)))
    return F.cross_entropy(flat(model.head(h)), x.flatten()) + 1e-3 * h.square().mean()


def with_auxiliary(model: Any, x: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x) + 0.01 * model.auxiliary


def with_values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits, values = model(x)
    return F.cross_entropy(flat(logits), x.flatten()) + values.square().mean()


def with_two_heads(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = model(x)
    return F.cross_entropy(flat(first), x.flatten()) + F.cross_entropy(
        flat(second[:, :-2]), x[:, 2:].flatten()
    )


def second_head(outputs: int) -> nn.Module:
    def forward(self: FromFunction, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.layers[0](self.embed(x)))
        return self.head(h), self.second(h)

    return FromFunction(forward, **dict(lm().named_children()), second=nn.Linear(32, outputs))


def auxiliary() -> nn.Module:
    """As of experts."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](self.embed(x))
        self.auxiliary = h.softmax(-1).mean((0, 1)).square().sum()
        return self.head(self.norm(h))

    return FromFunction(forward, **dict(lm().named_children()))


def pixels() -> nn.Module:
    """A head on [batch, height, width, channels]."""
    torch.manual_seed(0)
    return FromFunction(
        lambda self, x: self.head(self.body(x).relu().permute(0, 2, 3, 1)),
        body=nn.Conv2d(3, 8, 3, padding=1),
        head=nn.Linear(8, 200),
    )


def of_pixels(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = flat(model(x))
    return F.cross_entropy(logits, torch.arange(len(logits)) % 200)


STEPS: dict[str, Callable[[], Case]] = {
    "with an optimizer": lambda: Case(lm(), batch_of(), cross_entropy, torch.optim.AdamW),
    "the last tokens alone": lambda: Case(lm(), batch_of(), at_the_end),
    "a penalty on what enters": lambda: Case(lm(), batch_of(), with_hidden_penalty),
    "an auxiliary loss": lambda: Case(auxiliary(), batch_of(), with_auxiliary),
    "a head of values": lambda: Case(second_head(1), batch_of(), with_values),
    "two heads": lambda: Case(second_head(VOCAB), batch_of(), with_two_heads),
    "pixels": lambda: Case(pixels(), torch.randn(2, 3, 8, 20), of_pixels),
}


def least(case: Case, device: str = "cpu") -> sacplan.Plan:
    profile = sacplan.profile(case.model, case.batch, case.loss_fn, device=device, optimizer=case.optimizer)
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=BOTH)
    assert plan.chunks
    assert plan.peak_bytes < sacplan.plan(profile, "smallest", "greedy").peak_bytes
    return plan


SLOWER = set(STEPS) - {"two heads"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOWER else name for name in STEPS]
)
def test_steps_of_many_kinds(name: str) -> None:
    case = STEPS[name]()
    plan = least(case)
    check_predicted(case, plan)
    check_gradients(case, plan)


def by_sample(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient needs the sum of each sample, so the loop runs twice."""
    losses = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
    return losses.mean(1).exp().mean()


@pytest.mark.slow
def test_a_loss_that_needs_whole_sums_first() -> None:
    case = Case(lm(), batch_of(4, 32), by_sample)
    plan = least(case)
    check_predicted(case, plan)
    check_gradients(case, plan, elsewhere=1e-5)  # the sums, and so all that follows, are rounded otherwise


def reasons(case: Case) -> str:
    profile = sacplan.profile(case.model, case.batch, case.loss_fn, device="cpu", optimizer=case.optimizer)
    found = loss_chunks(profile.program, resolve_device("cpu"))
    assert not found.chunks
    assert found.refused
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=BOTH)
    assert not plan.chunks
    assert plan.gradients == "bit-equal"
    return "\n".join(f"{unit}: {why}" for unit, why in found.refused.items())


def in_micro_batches(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(cross_entropy(model, part) / 2 for part in x.chunk(2))  # type: ignore[return-value]


def chosen_tokens(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(flat(model(x)), x.flatten(), reduction="none")
    return losses[(x % 3 > 0).flatten()].mean()


def written(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    logits[..., 7] = -1e4
    return F.cross_entropy(flat(logits), x.flatten())


def kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.logits = model(x)  # type: ignore[assignment]
    return F.cross_entropy(flat(model.logits), x.flatten())  # type: ignore[arg-type]


def with_dropout_behind() -> LM:
    model = lm()
    model.head = nn.Sequential(nn.Linear(32, VOCAB), nn.Dropout(0.1))  # type: ignore[assignment]
    return model


def tempered() -> LM:
    torch.manual_seed(0)
    return Tempered(layers=1, dim=32, heads=2, vocab=VOCAB)


REFUSED: dict[str, tuple[Callable[[], LM], Loss, str]] = {
    "micro-batches": (lm, in_micro_batches, "'head' is called 2 times"),
    "a choice by data": (lm, chosen_tokens, "its shape depends on data"),
    "writing to logits": (lm, written, "there are views"),
    "logits that are kept": (lm, kept, "when the backward pass is over"),
    "random numbers for logits": (with_dropout_behind, cross_entropy, "bernoulli_"),
    "a parameter elsewhere": (tempered, cross_entropy, "did not enter 'head'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, loss_fn, why = REFUSED[name]
    assert why in reasons(Case(make(), batch_of(4, 24), loss_fn))


def test_a_gradient_that_is_taken_inside_a_forward_pass_is_refused() -> None:
    """It is asked for by name, and the loop would compute those of the bias and of the input as well."""

    def force(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(self.linear(x).tanh().pow(3).sum(), self.linear.weight)
        return F.linear(self.stem(x), found).pow(2).mean()

    model = FromFunction(force, stem=nn.Linear(8, 8), linear=nn.Linear(8, 8))
    profile = sacplan.profile(model, torch.randn(4, 6, 8, requires_grad=True), device="cpu")
    with pytest.raises(sacplan.errors.PlanError, match="is taken inside a forward pass"):
        plan_with(profile, [Chunk("linear", "rest", 2, 1)])


def test_a_module_that_two_backward_passes_run_through_is_refused() -> None:
    """The loss function calls ``backward`` itself: the node of the loop would run twice, and the program shows one."""

    def two_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        hidden.square().mean().backward(retain_graph=True)
        return hidden.sin().mean()

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.Linear(8, 8))
    profile = sacplan.profile(model, torch.randn(16, 8), two_losses, device="cpu")
    with pytest.raises(sacplan.errors.PlanError, match="is taken inside a forward pass"):
        plan_with(profile, [Chunk("0", "module", 4, 0)])
