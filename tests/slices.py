"""Ops run in slices along a factor, and put together as the rule says: what rules are tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sacplan._factors.axes import FactorAxis, from_factor, put, resized_arguments, take
from sacplan._factors.rule import Kind, Rule, flat_tensors, rule_of


@dataclass
class OpCall:
    """One call of an op on real tensors."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    kernel: Any = None
    """What computes it, where this device has none."""

    def run(self) -> list[torch.Tensor]:
        return list(flat_tensors((self.kernel or self.func)(*copied(self.args), **copied(self.kwargs))))


def copied(value: Any) -> Any:
    """Arguments that an op may write to."""
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, value)


def insides(size: int) -> Iterator[tuple[int, int, int]]:
    """All (outer, size, inner) whose product this is, of which a slice can be taken."""
    for outer in range(1, size + 1):
        for inner in range(1, size // outer + 1):
            if size % (outer * inner) == 0 and size // (outer * inner) > 1:
                yield outer, size // (outer * inner), inner


def run_in_slices(call: OpCall, rule: Rule, within: FactorAxis, cuts: Sequence[int]) -> list[torch.Tensor]:
    """What the op returns, from its results on slices that end at ``cuts``.

    The last slice ends at the size of the axis.
    """
    whole = call.run()
    results: list[torch.Tensor | None] = [None] * len(whole)
    start = 0
    for stop in cuts:
        parts = _run_slice(call, rule, within, start, stop)
        assert len(parts) == len(rule.outputs)
        for i, (part, dims) in enumerate(zip(parts, rule.outputs, strict=True)):
            kind, axis = rule.kind(within.factor, i), from_factor(dims, rule.sizes, within)
            so_far = results[i]
            if axis is not None:
                assert kind is Kind.PASS
                results[i] = torch.empty_like(whole[i]) if so_far is None else so_far
                put(results[i], axis, start, stop, part)
            elif kind is Kind.MEAN:
                weighed = part * ((stop - start) / within.size)
                results[i] = weighed if so_far is None else so_far + weighed
            elif so_far is None:
                results[i] = part
            else:
                results[i] = _COMBINED[kind](so_far, part)
        start = stop
    assert start == within.size
    for i in range(len(results)):
        if rule.kind(within.factor, i) is Kind.WEIGHTED_MEAN:
            results[i] = results[i] / results[1]
    return results


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert torch.equal(a, b), "an output that should not depend on the factor does"
    return a


_COMBINED = {
    Kind.PASS: _same,
    Kind.SUM: torch.add,
    Kind.WEIGHTED_MEAN: torch.add,
    Kind.MAX: torch.maximum,
    Kind.MIN: torch.minimum,
}


def _run_slice(call: OpCall, rule: Rule, within: FactorAxis, start: int, stop: int) -> list[torch.Tensor]:
    dims_of_inputs = iter(rule.inputs)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        axis = from_factor(next(dims_of_inputs), rule.sizes, within)
        return value if axis is None else take(value, axis, start, stop)

    args = resized_arguments(rule, call.args, within, stop - start)
    args, kwargs = tree_map(cut, (args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs).run()


def assert_well_formed(rule: Rule, call: OpCall, outputs: Sequence[torch.Tensor]) -> None:
    """Sizes are products of factors, and a factor is in at most one dimension of a tensor."""
    inputs = list(flat_tensors((tuple(call.args), call.kwargs)))
    assert len(rule.inputs) == len(inputs)
    assert len(rule.outputs) == len(rule.kinds) == len(outputs)
    for t, dims in zip([*inputs, *outputs], rule.inputs + rule.outputs, strict=True):
        assert len(dims) == t.dim()
        for n, factors in zip(t.shape, dims, strict=True):
            assert torch.Size([rule.sizes[f] for f in factors]).numel() == n
        used = [f for factors in dims for f in factors]
        assert len(set(used)) == len(used)
    assert all(len(kinds) == len(rule.sizes) for kinds in rule.kinds)


Cut = Callable[[int], tuple[tuple[int, int, int], list[int]]]
"""From the size of a factor to what is sliced of it, (outer, size, inner), and where slices end."""


def assert_slices_make_the_whole(call: OpCall, cut: Cut, tolerance: float = 2e-5) -> int:
    """The number of factors that were sliced."""
    whole = call.run()
    rule = rule_of(call.func, call.args, call.kwargs, whole)
    assert rule is not None
    assert_well_formed(rule, call, whole)
    for factor in rule.sliceable:
        inside, ends = cut(rule.sizes[factor])
        found = run_in_slices(call, rule, FactorAxis(factor, *inside), ends)
        for a, b in zip(found, whole, strict=True):
            exact = not (b.is_floating_point() or b.is_complex())
            tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(a, b, equal_nan=True, check_stride=False, **tolerances)
    return len(rule.sliceable)
