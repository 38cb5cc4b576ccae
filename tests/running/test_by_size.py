"""Several plans on one model: each call runs with the first plan that was made for one as large."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from benchmarks.harness.steps import run_peaks
from sacplan.errors import PlanError
from sacplan.questions.certify import certify
from tests.zoo.language_models import LM, cross_entropy, tokens

BATCH, SHORT, LONG, VOCAB = 4, 24, 96, 64


def make_batch(n: int, seq: int) -> torch.Tensor:
    return tokens(n, seq, VOCAB)


def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB)


@pytest.fixture(scope="module")
def plans() -> list[sacplan.Plan]:
    lengths = [SHORT] * 12 + [LONG] * 4
    how = {"loss_fn": cross_entropy, "optimizer": torch.optim.AdamW, "batch": BATCH, "seed": None}
    whole = certify(model(), make_batch, lengths, "cpu", **how).rows[0].allocated_bytes
    found = certify(model(), make_batch, lengths, "cpu", budget=f"{int(0.8 * whole)}B", buckets=2, **how)
    assert [one.shapes for one in found.plans] == [((BATCH, SHORT),), ((BATCH, LONG),)]
    return [one.plan for one in found.plans]


def trained(net: LM, sizes: list[int]) -> list[int]:
    """Train on batches of these lengths; return the FLOPs of each step."""
    torch.manual_seed(1)  # of the batches
    optimizer, flops = torch.optim.AdamW(net.parameters()), []
    for length in sizes:
        with FlopCounterMode(display=False) as counter:
            cross_entropy(net, make_batch(BATCH, length)).backward()
        flops.append(counter.get_total_flops())
        optimizer.step()
        optimizer.zero_grad()
    return flops


def test_each_step_has_the_plan_for_its_length(plans: list[sacplan.Plan]) -> None:
    sizes = [LONG, SHORT, LONG]
    plain, planned = model(), model()
    own = trained(plain, sizes)
    with sacplan.apply(planned, plans) as handle:
        assert set(handle.units) == set(plans[1].units)
        flops = trained(planned, sizes)
        assert not handle.differences
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))
    short, long = plans
    assert [n - m for n, m in zip(flops, own, strict=True)] == [long.recompute_flops, 0, long.recompute_flops]
    assert long.recompute_flops > 0
    # In the first step, memory of the optimizer's state is not there from the beginning.
    batches = (make_batch(BATCH, length) for length in (SHORT, *sizes))
    peaks = run_peaks(model(), batches, 4, torch.optim.AdamW, cross_entropy, plans)
    assert peaks[1:] == [long.peak_bytes, short.peak_bytes, long.peak_bytes]


def test_nothing_is_left(plans: list[sacplan.Plan]) -> None:
    net = model()
    before = [dict(module.__dict__) for module in net.modules()]
    handle = sacplan.apply(net, plans)
    with pytest.raises(PlanError, match="applied to this model already"):
        sacplan.apply(net, plans)
    handle.remove()
    assert [module.__dict__ for module in net.modules()] == before
    with pytest.raises(PlanError, match="applied to this model already"), sacplan.apply(net, plans[1]):
        sacplan.apply(net, plans)


def test_a_backward_pass_goes_on_with_its_own_plan(plans: list[sacplan.Plan]) -> None:
    net, plain = model(), model()
    batches = [make_batch(BATCH, length) for length in (LONG, SHORT, LONG)]

    def backward(one: LM) -> None:
        torch.manual_seed(1)  # of dropout
        for loss in [cross_entropy(one, batch) for batch in batches]:
            loss.backward()

    backward(plain)
    with sacplan.apply(net, plans):
        backward(net)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_a_copy_has_the_plans(plans: list[sacplan.Plan]) -> None:
    net = model()
    with sacplan.apply(net, plans):
        twin = copy.deepcopy(net)
    for length in (SHORT, LONG):
        cross_entropy(twin, make_batch(BATCH, length)).backward()
    chosen = twin.get_submodule(next(iter(plans[1].units))).__dict__["forward"]
    assert chosen.module is not net
    assert chosen._watch is next(iter(twin._forward_pre_hooks.values()))
    assert chosen._watch.index == 1


def test_what_no_plan_was_made_for_is_said(plans: list[sacplan.Plan]) -> None:
    net = model()
    with sacplan.apply(net, plans), warnings.catch_warnings():
        warnings.simplefilter("error")
        cross_entropy(net, make_batch(BATCH, LONG))
        with pytest.raises(sacplan.SacplanWarning, match=r"is \[5, 96\], and the plan holds up to \[4, 96\]"):
            cross_entropy(net, make_batch(BATCH + 1, LONG))


def test_several_plans_cannot_be_compiled(plans: list[sacplan.Plan]) -> None:
    net = model()
    with sacplan.apply(net, plans), pytest.raises(PlanError, match="has several plans"):
        torch.compile(net, backend="eager")(make_batch(BATCH, LONG))


def test_what_is_no_plan_is_refused(plans: list[sacplan.Plan]) -> None:
    with pytest.raises(PlanError, match="no plan was given"):
        sacplan.apply(model(), [])
    with pytest.raises(PlanError, match="plan"):
        sacplan.apply(model(), [plans[0], 3])  # type: ignore[list-item]
