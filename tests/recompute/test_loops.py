"""Training loops as people write them, with a plan on the model: the same bits as without it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import bit_equal, grads_of
from tests.zoo.language_models import LM, cross_entropy

# Plans are used in other steps than those that they were made for.
pytestmark = pytest.mark.filterwarnings("ignore:the step is not the one")

VOCAB = 64


def make_model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB)


def batches(*rows: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n, 24), generator=generator) for n in rows]


def plan_for(model: LM) -> sacplan.Plan:
    """Each of the layers discards something, and the layers are units on their own."""
    profile = sacplan.profile(model, batches(8)[0], cross_entropy, device="cpu")
    plan = sacplan.policy("selective", 1, profile=profile)
    assert list(plan.units) == ["layers.0", "layers.1"]
    assert set(plan.discarded) == set(plan.units)
    return plan


@pytest.fixture(scope="module")
def plan() -> sacplan.Plan:
    return plan_for(make_model())


@pytest.fixture
def pair(plan: sacplan.Plan) -> Iterator[tuple[LM, LM]]:
    """The same model without the plan and with it."""
    plain, planned = make_model(), make_model()
    sacplan.apply(planned, plan)
    yield plain, planned
    assert recomputes(planned)  # whatever the loop did, the plan is still on


def recomputes(model: nn.Module) -> bool:
    """Whether a step of this model runs more than the plain one does."""

    def flops(m: nn.Module) -> int:
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            grads_of(m, batches(8)[0], cross_entropy)
        return counter.get_total_flops()

    return flops(model) > flops(make_model())


Loop = Callable[[LM], list[torch.Tensor]]


def accumulation(model: LM) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for i, batch in enumerate(batches(8, 8, 8, 8)):
        loss = cross_entropy(model, batch) / 2
        loss.backward()
        found.append(loss.detach())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return found


def accumulation_in_one_backward(model: LM) -> list[torch.Tensor]:
    losses = [cross_entropy(model, batch) for batch in batches(8, 8, 8)]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses]


def autocast_and_scaler(model: LM) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for batch in batches(8, 8, 8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        scaler.step(optimizer)
        scaler.update()
    return found


def weights_loaded_on_the_way(model: LM) -> list[torch.Tensor]:
    found = grads_of(model, batches(8)[0], cross_entropy)
    file = io.BytesIO()
    torch.save({n: p * 2 for n, p in model.state_dict().items()}, file)
    file.seek(0)
    assert not model.load_state_dict(torch.load(file)).missing_keys
    found += grads_of(model, batches(8)[0], cross_entropy)
    fresh = {n: torch.full_like(p, 0.01) for n, p in model.state_dict().items()}
    model.load_state_dict(fresh, assign=True)
    return found + grads_of(model, batches(8)[0], cross_entropy)


LOOPS: list[Loop] = [
    accumulation,
    accumulation_in_one_backward,
    autocast_and_scaler,
    weights_loaded_on_the_way,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_gives_the_same_bits(pair: tuple[LM, LM], loop: Loop) -> None:
    found = []
    for model in pair:
        torch.manual_seed(3)
        values = [t.detach().clone() for t in loop(model)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([*values, *grads, *model.parameters(), torch.rand(())])
        model.zero_grad()
    assert bit_equal(*found)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_whole_model_that_is_saved_keeps_its_plan(pair: tuple[LM, LM], after_a_step: bool) -> None:
    plain, planned = pair
    if after_a_step:
        grads_of(planned, batches(8)[0], cross_entropy)
    loaded = saved(planned)
    assert recomputes(loaded)
    assert bit_equal(*(grads_of(m, batches(8)[0], cross_entropy) for m in (plain, loaded)))


def test_batches_of_many_lengths(pair: tuple[LM, LM]) -> None:
    """What a unit learns of its calls does not grow with them."""
    _, planned = pair
    for length in range(4, 14):
        grads_of(planned, batches(4)[0][:, :length], cross_entropy)
    for layer in planned.layers:
        assert len(vars(layer)["forward"]._schedules) == 1
