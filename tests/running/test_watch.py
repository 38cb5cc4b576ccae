"""Calls of a planned model that are larger than its plan was made for are said before they run; smaller ones hold."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.decisions import Recompute
from sacplan.core.model_calls import larger_than
from sacplan.running.watch import InputWatch, compiled_otherwise
from sacplan.techniques.registry import why_uncompiled
from tests.support.chunks import loss_in_slices
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FeedForward

ROWS, TOKENS, VOCAB = 6, 48, 64


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB)


@functools.cache
def plan_of(device: str = "cpu", technique: str = "recompute") -> sacplan.Plan:
    profile = sacplan.profile(
        model(), tokens(ROWS, TOKENS, VOCAB), cross_entropy, torch.optim.AdamW, device=device
    )
    if technique == "chunk":
        return loss_in_slices(profile, 4)
    return sacplan.plan(profile, "smallest", "greedy")


def step(rows: int, length: int, net: nn.Module | None = None) -> None:
    net = model() if net is None else net
    cross_entropy(net, tokens(rows, length, VOCAB)).backward()
    net.zero_grad()


def said_of(sizes: list[tuple[int, int]], net: nn.Module | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows, length in sizes:
            step(rows, length, net)
    found = [str(one.message) for one in said]
    return [one for one in found if "larger than the plan" in one]  # a step of one token runs other ops


def test_a_larger_batch_is_said_once_and_with_what_the_plan_holds() -> None:
    with sacplan.apply(model(), plan_of()):
        (said,) = said_of([(ROWS, TOKENS), (2, TOKENS), (ROWS, 64), (ROWS, 64), (ROWS, 50), (1, 8)])
    assert "argument 0 is [6, 64], and the plan holds up to [6, 48]" in said
    assert "budget" not in said or "its budget is" in said
    assert "data loader" in said
    assert said_of([(ROWS, 64)]) == []  # the hook went with the plan


def test_more_and_shorter_samples_are_larger_too() -> None:
    """Kernels of attention pad each sample: on an H100 this takes 1.4 % more, of as many tokens."""
    shape, plan = (36, 8), plan_of("h100")
    here = sacplan.profile(model(), tokens(*shape, VOCAB), cross_entropy, torch.optim.AdamW, device="h100")
    assert here.footprint(plan).peak_bytes > plan.peak_bytes
    with sacplan.apply(model(), plan_of()):
        assert len(said_of([shape])) == 1


@pytest.mark.parametrize(
    "shape",
    [
        (6, 47),
        (5, 33),
        (6, 2),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(6, 24), (3, 48), (1, 2)]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("device", "technique"), [("cpu", "recompute"), ("h100", "recompute"), ("cpu", "chunk")], ids=str
)
def test_a_shorter_batch_takes_no_more_than_planned(
    shape: tuple[int, int], device: str, technique: str
) -> None:
    plan = plan_of(device, technique)
    batch = tokens(*shape, VOCAB)
    assert larger_than((("[0]", shape),), [call.tensors for call in plan.fingerprint.calls]) is None
    here = sacplan.profile(model(), batch, cross_entropy, torch.optim.AdamW, device=device)
    assert here.footprint(plan).peak_bytes <= plan.peak_bytes


def test_gradients_that_the_plan_does_not_know_are_said() -> None:
    batch = tokens(ROWS, TOKENS, VOCAB)
    with sacplan.apply(model(), plan_of()):
        cross_entropy(model(), batch).backward()
        with pytest.warns(sacplan.SacplanWarning, match="gradients of an earlier batch.*accumulation_steps="):
            cross_entropy(model(), batch).backward()
        cross_entropy(model(), batch).backward()  # once is enough
    model().zero_grad()
    profile = sacplan.profile(model(), batch, cross_entropy, device="cpu", accumulation_steps=2)
    with sacplan.apply(model(), sacplan.plan(profile, "100%")):
        cross_entropy(model(), batch).backward()
        cross_entropy(model(), batch).backward()
    model().zero_grad()


def test_evaluation_is_not_watched() -> None:
    with sacplan.apply(model(), plan_of()), torch.no_grad():
        model()(tokens(ROWS, 2 * TOKENS, VOCAB))


def test_a_copy_and_a_pickle_of_the_hook_go_on_watching() -> None:
    with sacplan.apply(model(), plan_of()):
        twin = copy.deepcopy(model())
    assert len(said_of([(ROWS, 64)], twin)) == 1
    watch = pickle.loads(pickle.dumps(InputWatch(plan_of())))
    with pytest.warns(sacplan.SacplanWarning, match=r"\[7, 48\]"):
        watch(model(), (tokens(7, TOKENS, VOCAB),), {})


def test_the_plans_file_has_the_calls(tmp_path: Any) -> None:
    plan_of().save(tmp_path / "plan.json")
    loaded = sacplan.Plan.load(tmp_path / "plan.json")
    assert loaded.fingerprint.calls == plan_of().fingerprint.calls != ()
    with sacplan.apply(model(), loaded):
        assert len(said_of([(ROWS, 64)])) == 1


def test_keywords_and_nested_tensors_have_names() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(
            self, images: list[torch.Tensor], *, mask: torch.Tensor, scale: float = 1.0
        ) -> torch.Tensor:
            return (self.layer(torch.cat(images)) * mask[:, None] * scale).sum()

    def batch(n: int, m: int) -> dict[str, Any]:
        return {"images": [torch.ones(n, 4), torch.ones(m, 4)], "mask": torch.ones(n + m)}

    net = Takes()
    plan = sacplan.plan(sacplan.profile(net, batch(3, 5), device="cpu"), "100%")
    with sacplan.apply(net, plan):
        net(**batch(3, 2))
        with pytest.warns(sacplan.SacplanWarning, match=r"batch\['images'\]\[0\] is \[4, 4\]"):
            net(**batch(4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "in place", "layers", "evaluation", "not"])
def test_a_plan_of_an_eager_step_warns_before_its_first_compiled_one(how: str) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(*(FeedForward(16, dropout=0.0) for _ in range(2)))
    batch = torch.randn(64, 16)
    profile = sacplan.profile(net, batch, lambda m, x: m(x).sum(), device="cpu")
    with (
        sacplan.apply(net, sacplan.plan(profile, "smallest", "greedy")),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        called: Any = net
        if how in ("whole", "evaluation"):
            called = torch.compile(net, backend="aot_eager")
        elif how == "in place":
            net.compile(backend="aot_eager")
        elif how == "layers":
            for layer in net:
                layer.compile(backend="aot_eager")
        with torch.set_grad_enabled(how != "evaluation"):
            for rows in (64, 64, 32):  # the last one is traced anew
                called(batch[:rows])
    found = [str(one.message) for one in said if "not compiled" in str(one.message)]
    assert len(found) == (how in ("whole", "in place", "layers"))
    assert all("is not promised" in one for one in found)


def test_what_cannot_be_compiled_is_said() -> None:
    chunked = compiled_otherwise(plan_of(technique="chunk"))
    assert "torch.compile cannot keep slices" in chunked
    assert "cannot" not in compiled_otherwise(plan_of())
    assert "recomputes a value only once" in why_uncompiled((Recompute("", "aten.mm.default", 0, times=2),))
    assert issubclass(sacplan.errors.ChunkError, sacplan.SacplanError)


@pytest.mark.slow
def test_a_compiled_model_is_left_alone() -> None:
    torch._dynamo.reset()
    with sacplan.apply(model(), plan_of()):
        compiled = torch.compile(model(), backend="aot_eager", fullgraph=False)
        assert said_of([(ROWS, TOKENS), (ROWS, 64)], compiled) == []
