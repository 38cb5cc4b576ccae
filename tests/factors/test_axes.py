"""Axes: where slices of a factor lie in tensors, also inside dimensions that merge several."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sacplan.core.factors.axes import Axis, FactorAxis, from_factor, into_factor, put, resized_arguments, take
from sacplan.core.factors.rule import Rule, rule_of
from tests.support.slices import insides

aten = torch.ops.aten


def all_axes(shape: tuple[int, ...]) -> list[Axis]:
    return [Axis(dim, *inside) for dim, n in enumerate(shape) for inside in insides(n)]


def chosen(axis: Axis, shape: tuple[int, ...], start: int, stop: int) -> list[int]:
    """The indices along the axis's dimension that a slice has, by counting."""
    return [i for i in range(shape[axis.dim]) if start <= i // axis.inner % axis.size < stop]


@pytest.mark.parametrize("axis", all_axes((3, 12)))
def test_take_and_put(axis: Axis) -> None:
    x = torch.randn(3, 12)
    start, stop = axis.size // 2, axis.size
    indices = torch.tensor(chosen(axis, (3, 12), start, stop))
    expected = x.index_select(axis.dim, indices)
    assert torch.equal(take(x, axis, start, stop), expected)
    buffer = torch.zeros(3, 12)
    put(buffer, axis, start, stop, expected)
    assert torch.equal(buffer, torch.zeros(3, 12).index_copy(axis.dim, indices, expected))


def test_a_slice_of_whole_steps_is_a_view() -> None:
    x = torch.randn(4, 6)
    assert take(x, Axis(0, 1, 2, 2), 1, 2).data_ptr() == x[2:].data_ptr()
    assert take(x, Axis(1, 2, 3, 1), 0, 3)._base is not None


def test_into_a_factor_and_back() -> None:
    """All factors of all axes of a dimension of 24 = 2 x 3 x 4, beside one of 5."""
    dims, sizes = ((3,), (0, 1, 2)), (2, 3, 4, 5)
    found = set()
    for axis in all_axes((5, 24)):
        within = into_factor(dims, sizes, axis)
        if within is None:
            continue
        assert within.outer * within.size * within.inner == sizes[within.factor]
        assert from_factor(dims, sizes, within) == axis
        found.add(within)
    everything = {FactorAxis(f, *inside) for f, n in enumerate(sizes) for inside in insides(n)}
    assert found == everything


def test_an_axis_across_factors_is_in_none() -> None:
    dims, sizes = ((0, 1),), (2, 3)
    assert into_factor(dims, sizes, Axis(0, 1, 6, 1)) is None
    assert into_factor(dims, sizes, Axis(0, 1, 2, 3)) == FactorAxis(0, 1, 2, 1)
    assert into_factor(dims, sizes, Axis(0, 2, 3, 1)) == FactorAxis(1, 1, 3, 1)
    assert from_factor(((1,),), sizes, FactorAxis(0, 1, 2, 1)) is None


def rule_for(op: Any, *args: Any) -> Rule:
    found = rule_of(op, args, {}, op(*args))
    assert found is not None
    return found


def test_sizes_in_arguments() -> None:
    x = torch.randn(2, 6, 5)
    rule = rule_for(aten.view.default, x, [12, -1])
    batch = into_factor(rule.inputs[0], rule.sizes, Axis(0, 1, 2, 1))
    assert batch is not None
    assert resized_arguments(rule, (x, [12, -1]), batch, 1)[1] == [6, -1]
    rows = into_factor(rule.inputs[0], rule.sizes, Axis(1, 2, 3, 1))
    assert rows is not None
    assert from_factor(rule.outputs[0], rule.sizes, rows) == Axis(0, 4, 3, 1)
    assert resized_arguments(rule, (x, [12, -1]), rows, 2)[1] == [8, -1]
    rule = rule_for(aten.new_empty_strided.default, x, [2, 6, 5], [5, 10, 1])  # dimensions 1, 0, 2 by stride
    assert [
        resized_arguments(rule, (x, [2, 6, 5], [5, 10, 1]), FactorAxis(f, 1, rule.sizes[f], 1), 1)[1:]
        for f in rule.sliceable
    ] == [[[1, 6, 5], [5, 5, 1]], [[2, 1, 5], [5, 10, 1]], [[2, 6, 1], [1, 2, 1]]]
    assert rule_of(aten.new_empty_strided.default, (x, [2, 6], [12, 2]), {}, [x[..., 0]]) is None
    rule = rule_for(aten.slice.Tensor, x, 1, 0, 6)
    within = into_factor(rule.inputs[0], rule.sizes, Axis(1, 1, 6, 1))
    assert within is not None
    assert resized_arguments(rule, (x, 1, 0, 6), within, 4)[3] == 4


@st.composite
def chains(draw: Any) -> tuple[torch.Tensor, list[tuple[Any, tuple[Any, ...]]]]:
    """A tensor and views of it, one after the other, that merge, split and move dimensions."""
    shape = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=4))
    x = torch.arange(math.prod(shape)).view(shape)
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    for _ in range(draw(st.integers(1, 5))):
        op = draw(st.sampled_from([aten.permute.default, aten.unsqueeze.default, aten.reshape.default]))
        if op is aten.permute.default:
            args: tuple[Any, ...] = (draw(st.permutations(range(len(shape)))),)
            shape = [shape[d] for d in args[0]]
        elif op is aten.unsqueeze.default:
            args = (draw(st.integers(0, len(shape))),)
            shape.insert(args[0], 1)
        else:
            at = draw(st.integers(0, len(shape) - 1))
            if draw(st.booleans()) and at + 1 < len(shape):
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            else:
                part = draw(st.sampled_from([i for i in range(1, shape[at] + 1) if shape[at] % i == 0]))
                shape[at : at + 1] = [part, shape[at] // part]
            args = (list(shape),)
        steps.append((op, args))
    return x, steps


@given(chain=chains(), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_an_axis_through_a_chain_of_views(chain: Any, data: st.DataObject) -> None:
    """A slice of the input becomes the slice of the output that the rules say, as far as they follow it."""
    x, steps = chain
    axis = data.draw(st.sampled_from(all_axes(tuple(x.shape))))
    start = data.draw(st.integers(0, axis.size - 1))
    stop = data.draw(st.integers(start + 1, axis.size))
    part = take(x, axis, start, stop)
    for op, args in steps:
        whole = op(x, *args)
        rule = rule_of(op, (x, *args), {}, whole)
        assert rule is not None
        within = into_factor(rule.inputs[0], rule.sizes, axis)
        if within is None or not rule.may_slice(within.factor):
            return
        _, *resized = resized_arguments(rule, (x, *args), within, stop - start)
        part = op(part, *resized)
        found = from_factor(rule.outputs[0], rule.sizes, within)
        assert found is not None
        x, axis = whole, found
        assert torch.equal(part, take(x, axis, start, stop))


def test_batch_and_sequence_merged() -> None:
    """The rows of a model with more than one sample, as Hugging Face's losses see them."""
    logits = torch.randn(3, 8, 5)
    rule = rule_for(aten.view.default, logits, [24, 5])
    sequence = into_factor(rule.inputs[0], rule.sizes, Axis(1, 1, 8, 1))
    assert sequence is not None
    axis = from_factor(rule.outputs[0], rule.sizes, sequence)
    assert axis == Axis(0, 3, 8, 1)
    pieces = [take(logits.view(24, 5), axis, a, b) for a, b in itertools.pairwise((0, 3, 8))]
    assert [len(piece) for piece in pieces] == [9, 15]
    assert torch.equal(pieces[0].view(3, 3, 5), logits[:, :3])
