"""Factor rules against the ops themselves: what is computed in slices and put together is the whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from sacplan.core.elements import Tensor
from sacplan.core.factors.rule import _FORMULAS, Kind, formula_of, register, rule_of
from tests.support.slices import (
    OpCall,
    assert_slices_make_the_whole,
    calls_of_the_database,
    insides,
    sliceable,
)

aten = torch.ops.aten


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def integers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


MASKS = (2, 3, 5, 7), (1, 1, 1, 7), (2, 1, 5, 7), None


def attention_calls() -> Iterator[OpCall]:
    """Attention of CPUs, with a mask, a causal one, and none, forward and backward."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for shape, causal in [*((shape, False) for shape in MASKS), (None, True)]:
        q, k, v = normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 8)
        mask = None if shape is None else normal(*shape)
        yield OpCall(forward, (q, k, v, 0.0, causal), {"attn_mask": mask})
        yield OpCall(aten._scaled_dot_product_attention_math.default, (q, k, v, mask, 0.0, causal), {})
        given = {"attn_mask": None if mask is None else mask.expand(2, 3, 5, 7)}
        out, sums = forward(q, k, v, 0.0, causal, **given)
        yield OpCall(backward, (normal(*out.shape), q, k, v, out, sums, 0.0, causal), given)


def other_calls() -> Iterator[OpCall]:
    """Calls of ops that the database does not run on a CPU, or whose samples have nothing to slice."""
    yield from attention_calls()
    yield OpCall(aten.view.dtype, (normal(2, 3), torch.int32), {})
    yield OpCall(aten.scalar_tensor.default, (2.5,), {})
    yield from (OpCall(op, (normal(2, 3, 5),), {}) for op in (aten.tril.default, aten.triu.default))


def sliced(calls: Iterable[OpCall]) -> Counter[str]:
    """Cut every factor of each call unevenly, also where what is cut lies inside a dimension; factors by op."""
    cuts = random.Random(0)

    def cut(size: int) -> tuple[tuple[int, int, int], list[int]]:
        inside = cuts.choice([(1, size, 1), *insides(size)])
        ends = {cuts.randint(1, inside[1] - 1) for _ in range(2)}
        return inside, [*sorted(ends), inside[1]]

    found: Counter[str] = Counter()
    for call in calls:
        found[str(call.func)] += assert_slices_make_the_whole(call, cut)
        tried.add(formula_of(call.func))
    return found


tried: set[Any] = set()
"""Formulas whose slices have been put together."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("samples", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_slices_make_the_whole(samples: int) -> None:
    """Each op of PyTorch's database that runs, forward or backward, on PyTorch's own samples; and some more."""
    torch.manual_seed(0)
    tried.clear()
    found = sliced(calls_of_the_database(samples)) + sliced(other_calls())
    assert len(+found) > 300
    missing = {name for name, formula in _FORMULAS.items() if formula not in tried}
    # The first has no kernel for CPUs (tests/factors/test_kernels.py), and of the second there is nothing to compare.
    assert missing == {"_grouped_mm", "new_empty_strided"}


# Sizes are primes, which name the dimensions; 4 = 2 x 2 where there are groups.
PASSES: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.mm.default, (normal(2, 3), normal(3, 5)), "2 3 5"),
    (aten.addmm.default, (normal(5), normal(2, 3), normal(3, 5)), "2 5"),
    (aten.add.Tensor, (normal(2, 3), normal(3)), "2 3"),
    (aten.view.default, (normal(2, 3, 5), [6, 5]), "2 3 5"),
    (aten.view.default, (normal(2, 15, 7), [2, 5, 3, 7]), "2 3 5 7"),
    (aten.view.default, (normal(2, 6, 10), [2, 4, 15]), "2"),
    (aten.repeat.default, (normal(2, 3), [5, 1, 7]), "2 3 5 7"),
    (aten.split.Tensor, (normal(2, 3, 5), 2, 1), "2 5"),
    (aten.cat.default, ([normal(2, 3), normal(2, 5)], 1), "2"),
    (aten._softmax.default, (normal(2, 3, 5), -1, False), "2 3"),
    (aten.sum.dim_IntList, (normal(2, 3, 5), [1]), "2 3 5"),
    (aten.max.dim, (normal(2, 3, 5), 1), "2 5"),
    (aten.native_layer_norm.default, (normal(2, 3, 5), [5], None, None, 1e-5), "2 3"),
    (aten.native_group_norm.default, (normal(3, 4, 5, 7), None, None, 3, 4, 35, 2, 1e-5), "2 3"),
    (aten.embedding.default, (normal(11, 3), integers(11, 2, 5)), "2 3 5"),
    (aten.embedding_dense_backward.default, (normal(2, 5, 3), integers(11, 2, 5), 11, -1, False), "2 3 5"),
    (aten.index.Tensor, (normal(7, 11, 3), [None, integers(11, 2, 5)]), "2 3 5 7"),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 8)),
        "2 3 5",
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(2, 3, 5, 8), normal(2, 3, 5, 8), normal(2, 3, 5, 8), 0.0, True),
        "2 3",  # a causal mask says by position what a query may see
    ),
    (
        aten.convolution.default,
        (normal(2, 3, 8, 8), normal(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        "2 3 5",
    ),
    (
        aten.convolution.default,
        (normal(2, 3, 7, 11), normal(5, 3, 1, 1), normal(5), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        "2 5 7 11",
    ),
    (aten.nll_loss_forward.default, (normal(5, 7), integers(7, 5), None, 1, -100), ""),
    (aten.nll_loss_forward.default, (normal(5, 7), integers(7, 5), None, 2, -100), "5"),
    (aten.mse_loss_backward.default, (normal(), normal(2, 3), normal(2, 3), 1), ""),
    (aten.mse_loss_backward.default, (normal(), normal(2, 3), normal(2, 3), 2), "2 3"),
    (aten.squeeze.default, (normal(1, 3),), ""),
]


@pytest.mark.parametrize(("op", "args", "sizes"), PASSES)
def test_what_may_be_sliced(op: Any, args: tuple[Any, ...], sizes: str) -> None:
    rule = rule_of(op, args, {}, op(*args))
    assert rule is not None
    assert sorted(rule.sizes[f] for f in sliceable(rule)) == [int(size) for size in sizes.split()]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.native_dropout.default, (normal(4), 0.5, True)),
        (aten.bernoulli.default, (torch.rand(4),)),
        (aten.randn_like.default, (normal(4),)),
        (
            aten._scaled_dot_product_attention_math.default,
            (*(normal(1, 1, 4, 8) for _ in range(3)), None, 0.5),
        ),
        (aten.masked_select.default, (normal(4), normal(4) > 0)),
        (aten.index.Tensor, (normal(4), [normal(4) > 0])),
        (aten.linalg_inv_ex.default, (torch.eye(4),)),
        (aten.view.dtype, (normal(4, 2), torch.int16)),
    ],
)
def test_no_rule(op: Any, args: tuple[Any, ...]) -> None:
    """Random numbers, sizes that depend on data, and what no formula knows."""
    assert rule_of(op, args, {}, op(*args)) is None


def test_descriptions_of_tensors_do() -> None:
    """Values are not looked at, and types may be names, as in recorded programs."""
    described = Tensor(0, "float32", (4, 6), (6, 1), 0)
    indices = Tensor(1, "int64", (3,), (1,), 0)
    found = rule_of(
        aten.index.Tensor, [described, [None, indices]], {}, [Tensor(2, "float32", (4, 3), (3, 1), 0)]
    )
    assert found is not None
    assert found.sizes[found.outputs[0][1][0]] == 3
    mask = Tensor(1, "bool", (6,), (1,), 0)
    assert rule_of(aten.index.Tensor, [described, [None, mask]], {}, [described]) is None


def test_an_op_has_one_formula() -> None:
    with pytest.raises(ValueError, match="mm has a formula"):
        register("mm")(lambda call: None)


def test_rows_of_a_mean_are_added_by_weight() -> None:
    """What is known of its parts is their sums and weights; the mean of a slice is no part of it."""
    scores, targets = normal(4, 5), torch.tensor([1, -100, 2, 0])
    args = (scores, targets, None, 1, -100)
    rule = rule_of(aten.nll_loss_forward.default, args, {}, aten.nll_loss_forward(*args))
    assert rule is not None
    assert sliceable(rule) == ()
    ((rows,),) = (factors for factors in rule.inputs[1])
    assert (rule.kind(rows, 0), rule.kind(rows, 1)) == (Kind.WEIGHTED_MEAN, Kind.SUM)
