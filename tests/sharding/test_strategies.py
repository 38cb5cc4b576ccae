"""Strategies of ops on simulated ranks: what each says, against the op on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, cut
from sacplan.distributed.sharding.strategies import AxisStrategy, axis_strategies
from sacplan.torch_compat.calls import Call
from tests.support.op_steps import STEPS, below, calls_of, ignored, x
from tests.support.placed import assert_all_right, assert_right, offered
from tests.support.slices import OpCall

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def doubles() -> Any:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", STEPS)
def test_every_strategy_is_right(name: str) -> None:
    found = [assert_all_right(call, 2) for call in calls_of(STEPS[name])]
    assert sum(n > 1 for n in found) >= 0.5 * len(found)


def strategy_of(call: OpCall, *inputs: Any) -> AxisStrategy:
    """The one on two ranks whose inputs lie so."""
    return next(s for s in offered(call, 2) if s.inputs == inputs)


def mm() -> OpCall:
    return OpCall(aten.mm.default, (x(4, 6), x(6, 8)), {})


def addmm() -> OpCall:
    return OpCall(aten.addmm.default, (x(8), x(4, 6), x(6, 8)), {})


def nll(labels: torch.Tensor, reduction: int = 1) -> OpCall:
    return OpCall(aten.nll_loss_forward.default, (x(8, 6), labels, None, reduction, -100), {})


R, P = REPLICATED, PARTIAL
WRONG: dict[str, Callable[[], tuple[OpCall, AxisStrategy]]] = {
    "a product's rows said to be summands": lambda: (
        call := mm(), replace(strategy_of(call, cut(0), R), outputs=(P,))
    ),
    "a sum over ranks said to be whole": lambda: (
        call := mm(), replace(strategy_of(call, cut(1), cut(0)), outputs=(R,))
    ),
    "every rank adds the bias": lambda: (
        call := addmm(), replace(strategy_of(call, P, cut(1), cut(0)), inputs=(R, cut(1), cut(0)))
    ),
    "both factors of a product are summands": lambda: (mm(), AxisStrategy((P, P), (P,))),
    "a function of a sum is the sum of the function": lambda: (
        OpCall(aten.exp.default, (x(4, 6),), {}), AxisStrategy((P,), (P,))
    ),
    "a mean of parts is not scaled": lambda: (
        call := OpCall(aten.mean.dim, (x(4, 6), [0]), {}), replace(strategy_of(call, cut(0)), outputs=(P,))
    ),
    "the other half of a dimension": lambda: (
        call := OpCall(aten.view.default, (x(4, 6, 8), [24, 8]), {}),
        replace(strategy_of(call, cut(1)), outputs=(cut(0),)),
    ),
    "a mean over labels, weighed by ranks": lambda: (
        call := nll(ignored(6, 8)), replace(strategy_of(call, cut(0), cut(0)), outputs=(P, P), inside_bytes=0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_strategy_is_found(what: str) -> None:
    call, strategy = WRONG[what]()
    assert strategy not in offered(call, 2)
    with pytest.raises(AssertionError):
        assert_right(call, [strategy], Mesh.of(2))


def strategies_of(func: Any, *args: Any, available: Sequence[Any] = (), **kwargs: Any) -> list[str]:
    """As text: inputs, then outputs."""
    call = Call(func, args, kwargs, func(*args, **kwargs))
    found = axis_strategies(call, 2, available or [[R, P]] * len(call.inputs))
    assert set(found[0].inputs + found[0].outputs) == {R}
    return [f"{' '.join(map(str, s.inputs))} -> {' '.join(map(str, s.outputs))}" for s in found]


def test_what_is_offered() -> None:
    a, b = x(4, 6), x(6, 8)
    product = ["R R -> R", "S0 R -> S0", "S1 S0 -> P", "R S1 -> S1"]
    assert strategies_of(aten.mm.default, a, b) == product
    assert strategies_of(aten.amax.default, a, [1]) == ["R -> R", "S0 -> S0", "S1 -> Pmax"]
    assert strategies_of(aten.any.dim, a > 0, 1) == ["R -> R", "S0 -> S0"]  # no partial truth
    assert strategies_of(aten._softmax.default, a, 1, False) == ["R -> R", "S0 -> S0"]
    assert strategies_of(aten.mm.default, x(3, 5), x(5, 7)) == ["R R -> R"]
    assert strategies_of(aten.add.Tensor, a, 1.0) == ["R -> R", "S0 -> S0", "S1 -> S1"]
    assert strategies_of(aten.t.default, a)[-1] == "P -> P"
    assert strategies_of(aten.view.dtype, a, torch.int64)[-1] == "S1 -> S1"


def test_a_vocabulary_and_classes_may_be_cut() -> None:
    weight, ids, labels = x(12, 8), below(12, 4, 6), ignored(6, 8)
    scores = x(8, 6)
    assert "S0 R -> P" in strategies_of(aten.embedding.default, weight, ids)
    assert "S1 -> S1" in strategies_of(aten._log_softmax.default, scores, 1, False)
    assert "S1 R -> P R" in strategies_of(aten.nll_loss_forward.default, scores, labels, None, 1, -100)
    assert "S1 R S0 -> P P" in strategies_of(aten.nll_loss_forward.default, scores, labels, x(6), 2, -100)
    (told,) = [
        s
        for s in offered(OpCall(aten._log_softmax.default, (scores, 1, False), {}), 2)
        if s.inputs == (cut(1),)
    ]
    assert told.inside_bytes == 2 * 8 * 8  # one double for each rank and row


def test_classes_that_are_ignored_may_be_classes() -> None:
    scores, labels = x(8, 6), below(6, 8)
    for ignore in (0, 2, 5):
        assert_all_right(
            OpCall(aten.nll_loss_forward.default, (scores, labels, x(6).exp(), 1, ignore), {}), 2
        )


def test_cuts_inside_a_dimension_are_offered_where_an_input_has_them() -> None:
    merged = x(24, 8)
    assert strategies_of(aten.view.default, merged, [4, 6, 8]) == ["R -> R", "S0 -> S0", "S1 -> S2", "P -> P"]
    found = strategies_of(aten.view.default, merged, [4, 6, 8], available=[[cut(0, 4)]])
    assert found == ["R -> R", "S0 -> S0", "S0/4 -> S1", "S1 -> S2"]


def test_ops_that_draw_may_be_cut() -> None:
    a = x(4, 6)
    assert strategies_of(aten.native_dropout.default, a, 0.5, True) == [
        "R -> R R",
        "S0 -> S0 S0",
        "S1 -> S1 S1",
    ]
    assert strategies_of(aten.bernoulli_.float, a, 0.5) == ["R -> R", "S0 -> S0", "S1 -> S1"]


def test_backward_formulas_run_on_whole_tensors() -> None:
    a, b = x(4, 6), x(4, 6)
    assert strategies_of(aten.gelu_backward.default, a, b) == ["R R -> R"]
    assert strategies_of(aten._log_softmax_backward_data.default, a, b, 1, torch.float64) == ["R R -> R"]


def test_what_an_op_writes_stays_where_it_is() -> None:
    a, b = x(4, 6), x(4, 6)
    for func in (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default):
        found = axis_strategies(Call(func, (a, b), {}, a), 2, [[R], [R]])
        assert len(found) > 2
        assert all(s.inputs[0] == s.outputs[0] for s in found)
        assert Call(func, (a, b), {}).written == (0,)
    norm = aten.native_batch_norm.default
    stats = (x(6), x(6))
    assert Call(norm, (a, None, None, *stats, True, 0.1, 1e-5), {}).written == (1, 2)
    assert Call(norm, (a, None, None, *stats, False, 0.1, 1e-5), {}).written == ()


def test_a_mean_over_labels_that_are_left_out_reduces_their_weight() -> None:
    strategy = strategy_of(nll(ignored(6, 8)), cut(0), cut(0))
    assert (strategy.outputs, strategy.inside_bytes) == ((P, R), 8)
    assert not any(s.inside_bytes for s in offered(nll(below(6, 8), reduction=2), 2))
