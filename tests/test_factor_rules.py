"""Factor rules against the ops themselves: slices put together are the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sacplan._factors.axes import FactorAxis
from sacplan._factors.rule import rule_of
from tests.slices import OpCall, assert_well_formed, insides, run_in_slices

aten = torch.ops.aten


def assert_slices_make_the_whole(call: OpCall, draw: Any) -> None:
    whole = call.run()
    rule = rule_of(call.func, call.args, call.kwargs, whole)
    assert rule is not None
    assert_well_formed(rule, call, whole)
    for factor in rule.sliceable:
        inside = draw(st.sampled_from(list(insides(rule.sizes[factor]))))
        within = FactorAxis(factor, *inside)
        cuts = draw(st.sets(st.integers(1, within.size - 1), min_size=1, max_size=2))
        found = run_in_slices(call, rule, within, [*sorted(cuts), within.size])
        for a, b in zip(found, whole, strict=True):
            if b.dtype.is_floating_point or b.dtype.is_complex:
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)
            else:
                assert torch.equal(a, b)


@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_mm(data: Any) -> None:
    n, k, m = (data.draw(st.integers(1, 6)) for _ in range(3))
    assert_slices_make_the_whole(OpCall(aten.mm.default, (torch.randn(n, k), torch.randn(k, m)), {}), data.draw)
