"""Ops run in slices along a factor, and put together as the rule says: what rules are tested with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sacplan.core.factors.axes import FactorAxis, from_factor, put, resized_arguments, take
from sacplan.core.factors.rule import Kind, Rule, rule_of
from sacplan.torch_compat.calls import flat_tensors


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
        parts = run_slice(call, rule, within, start, stop)
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
    return results


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)  # does not depend on the factor
    return a


_COMBINED = {
    Kind.PASS: _same,
    Kind.SUM: torch.add,
    Kind.MAX: torch.maximum,
    Kind.MIN: torch.minimum,
}


def run_slice(call: OpCall, rule: Rule, within: FactorAxis, start: int, stop: int) -> list[torch.Tensor]:
    """What the op returns for one slice of its inputs."""
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
    """Sizes are products of factors, and a factor is in at most one dimension of a tensor, and in some tensor."""
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
    assert set(sliceable(rule)) <= {
        f for dims in rule.inputs + rule.outputs for factors in dims for f in factors
    }


def sliceable(rule: Rule) -> tuple[int, ...]:
    """The factors of which a loop over slices makes all outputs."""
    return tuple(
        f
        for f, size in enumerate(rule.sizes)
        if size > 1 and all(kinds[f].makes_the_whole for kinds in rule.kinds)
    )


Cut = Callable[[int], tuple[tuple[int, int, int], list[int]]]
"""From the size of a factor to what is sliced of it, (outer, size, inner), and where slices end."""


def assert_slices_make_the_whole(call: OpCall, cut: Cut, tolerance: float = 2e-5) -> int:
    """The number of factors that were sliced."""
    whole = call.run()
    rule = rule_of(call.func, call.args, call.kwargs, whole)
    assert_well_formed(rule, call, whole)
    for factor in sliceable(rule):
        inside, ends = cut(rule.sizes[factor])
        found = run_in_slices(call, rule, FactorAxis(factor, *inside), ends)
        for a, b in zip(found, whole, strict=True):
            exact = not (b.is_floating_point() or b.is_complex())
            close = 0.0 if exact else max(tolerance, 8 * torch.finfo(b.dtype).eps)
            torch.testing.assert_close(a, b, rtol=close, atol=close, equal_nan=True)
    return len(sliceable(rule))


def calls_of_the_database(samples_of_each: int) -> Iterator[OpCall]:
    """Calls of ops that have rules, from the samples in PyTorch's op database and their gradients."""
    database = pytest.importorskip("benchmarks.models.op_samples")
    seen = _Calls()
    for op in database.op_database():
        dtype = database.type_for(op)
        wants = dtype.is_floating_point and op.supports_autograd
        for given in itertools.islice(_samples(op, dtype, wants), samples_of_each):
            with contextlib.suppress(Exception), seen:  # some samples are of what an op refuses
                out = given.output_process_fn_grad(op(given.input, *given.args, **given.kwargs))
                summed = [t.sum() for t in flat_tensors(out) if t.requires_grad]
                if summed:
                    sum(t.real if t.is_complex() else t for t in summed).backward()
        yield from seen.calls
        seen.calls.clear()


def _samples(op: Any, dtype: torch.dtype, wants_gradient: bool) -> Iterator[Any]:
    try:
        # ``op.sample_inputs`` looks at the whole stack for each sample, which takes ten times as long in pytest.
        for given in op.sample_inputs_func(op, "cpu", dtype, wants_gradient):
            if any(
                t.numel() > 1 for t in flat_tensors([given.input])
            ):  # of a scalar there is nothing to slice
                yield given
    except (RuntimeError, NotImplementedError, ImportError):  # it needs another build, or a library
        return


class _Calls(TorchDispatchMode):
    """Calls that have rules and leave no more to the imagination than small dense tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.no_grad():
            call = OpCall(func, *tree_map(_dense, (args, kwargs or {})))
        out = func(*args, **kwargs or {})
        tensors = [*flat_tensors((args, kwargs or {})), *flat_tensors(out)]
        usual = all(t.layout is torch.strided and not t.is_nested and t.numel() < 4000 for t in tensors)
        signature = str((func, tree_map(_described, (args, kwargs))))
        if usual and signature not in self._seen and "empty" not in str(func):
            self._seen.add(signature)
            if rule_of(func, args, kwargs or {}, out):
                self.calls.append(call)
        return out


def _described(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _dense(value: Any) -> Any:
    return (
        value.detach().clone() if isinstance(value, torch.Tensor) and value.layout is torch.strided else value
    )
