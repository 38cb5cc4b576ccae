"""The engine without autograd: ops deferred one by one, as a planner does, and what then runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sacplan._chunk.executor import losses  # noqa: F401  (registers what it rewrites)
from sacplan._chunk.executor.lazy import Lazy, defer, free, root
from sacplan._chunk.executor.loop import compute
from sacplan._chunk.executor.values import SlicedRegion
from sacplan._device.devices import resolve_device
from sacplan._device.kernels import fake_device
from sacplan._factors.axes import Axis
from sacplan._record.recorder import Recorder
from sacplan._torch.fake_tensors import FakeTensorMode
from sacplan._torch.flops import flop_counter
from sacplan.errors import ChunkError
from tests.support.chunks import VOCAB, chunked, plain_loss, step
from tests.zoo.language_models import LM, tokens

aten = torch.ops.aten


class Ops(TorchDispatchMode):
    """The ops that ran, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out


def region_of(x: torch.Tensor, slices: int = 4, dim: int = 1) -> tuple[SlicedRegion, Lazy]:
    region = SlicedRegion(x.shape[dim], slices)
    return region, root(region, x, Axis(dim, 1, x.shape[dim], 1))


def deferred(ran: list[tuple[Any, Any, Any, Any]], start: torch.Tensor, lazy: Lazy) -> dict[int, Lazy]:
    """By ``id`` of a recorded tensor, what the same ops make of a lazy input."""
    found = {id(start): lazy}
    for func, args, kwargs, out in ran:
        if not any(id(t) in found for t in tree_leaves((args, kwargs))):
            continue
        args, kwargs = tree_map(lambda t: found.get(id(t), t), (args, kwargs))
        made = defer(func, args, kwargs)
        found.update(
            (id(t), x)
            for t, x in zip(tree_leaves(out), tree_leaves(made), strict=True)
            if isinstance(x, Lazy)
        )
    return found


def a_step(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> tuple[Ops, torch.Tensor]:
    """Forward and backward of a head, op by op."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    with Ops() as ops:
        loss = F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten())
        x.grad, w.grad = torch.autograd.grad(loss, [x, w])
    return ops, x


def test_recorded_ops_forward_and_backward() -> None:
    torch.manual_seed(0)
    hidden, w, labels = torch.randn(2, 24, 16), torch.randn(50, 16), torch.randint(0, 50, (2, 24))
    ops, x = a_step(hidden, w, labels)
    region, lazy = region_of(hidden)
    found = deferred(ops.ran, x, lazy)
    wanted = {
        id(t): (t, found[id(t)])
        for *_, out in ops.ran[-6:]
        for t in tree_leaves(out)
        if id(t) in found and tuple(t.shape) in ((2, 24, 16), (50, 16))
    }
    assert {tuple(t.shape) for t, _ in wanted.values()} == {(2, 24, 16), (50, 16)}
    with Ops() as seen:
        got = compute([y.value for _, y in wanted.values()])
    assert region.tally.loops == 1
    assert not region.tally.whole
    for (t, _), computed in zip(wanted.values(), got, strict=True):
        torch.testing.assert_close(computed, t)
        assert computed.stride() == t.stride()
    sizes = [t.numel() for *_, out in seen.ran for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    assert max(sizes) < 2 * 24 * 50  # no logits


def test_modes_see_ops_when_they_run_and_not_before() -> None:
    x, w = torch.randn(4, 32, 8), torch.randn(8, 100)
    _, lazy = region_of(x, slices=8)
    with Ops() as seen:
        y = defer(aten.view.default, (lazy, [128, 8]), {})
        y = defer(aten.mm.default, (y, w), {})
        y = defer(aten.exp.default, (y,), {})
        total = defer(aten.sum.dim_IntList, (y, [1]), {})
    assert not any(func is not aten.detach.default for func, *_ in seen.ran)
    with Ops() as seen:
        (got,) = compute([total.value])
    assert sum(func is aten.mm.default for func, *_ in seen.ran) == 8
    torch.testing.assert_close(got, (x.view(128, 8) @ w).exp().sum(1))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_fake_tensors_under_a_recorder(device: str) -> None:
    """What the recorder sees is what a planner splices into a program."""
    spec = resolve_device(device)
    with fake_device(device) as mode:
        assert isinstance(mode, FakeTensorMode)
        x, w = torch.empty(2, 64, 32), torch.empty(32, 1000)
        recorder = Recorder(
            cost=lambda *_: (0, 0.0),
            workspace=lambda *_: 0,
            round_bytes=spec.allocation_round_bytes,
            saved="observe",
        )
        recorder.track_tensors([x, w])
        region = SlicedRegion(64, 16)
        with recorder:
            lazy = root(region, x, Axis(1, 1, 64, 1))
            flat = defer(aten.view.default, (lazy, [128, 32]), {})
            scores = defer(aten._log_softmax.default, (defer(aten.mm.default, (flat, w), {}), 1, False), {})
            assert not [op for op in recorder._ops if op.name != "aten.detach.default"]
            total = defer(aten.sum.default, (scores,), {})
            gradient = defer(aten.expand.default, (free(region, torch.ones(())), [128, 1000]), {})
            back = defer(aten._log_softmax_backward_data.default, (gradient, scores, 1, torch.float32), {})
            grad = defer(aten.mm.default, (back, w.t()), {})
            computed = compute([total.value, grad.value])
            del flat, scores, gradient, back
        program = recorder.program()
    assert [tuple(t.shape) for t in computed] == [(), (128, 32)]
    assert region.tally.loops == 1
    largest = max(program.storage_bytes[s] for op in program.ops for s in op.writes)
    assert largest < 128 * 1000 * 4 / 8
    assert sum(op.name == "aten._log_softmax.default" for op in program.ops) == 16


def test_intermediates_go_with_the_tensors_that_refer_to_them() -> None:
    x = torch.randn(2, 16, 8)
    _, lazy = region_of(x)
    y = defer(aten.exp.default, (lazy,), {})
    z = defer(aten.sum.default, (y,), {})
    alive = weakref.ref(y.value)
    del y, lazy
    assert alive() is not None
    z.value.settle(compute([z.value])[0])
    assert alive() is None
    torch.testing.assert_close(z + 0, x.exp().sum())


def test_what_was_changed_since_is_an_error() -> None:
    x, w = torch.randn(2, 16, 8), torch.randn(16, 8)
    _, lazy = region_of(x)
    y = defer(aten.mul.Tensor, (lazy, w), {})
    w.add_(1)
    with pytest.raises(ChunkError, match=r"aten\.mul\.Tensor .*changed in place"):
        compute([y.value])


def test_memory_that_was_freed_is_an_error() -> None:
    x, w = torch.randn(2, 16, 8), torch.randn(16, 8)
    _, lazy = region_of(x)
    y = defer(aten.mul.Tensor, (lazy, w), {})
    w.untyped_storage().resize_(0)
    with pytest.raises(ChunkError, match="was freed"):
        compute([y.value])


@pytest.mark.parametrize(
    ("func", "kind"), [("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("amin", torch.amin)]
)
@pytest.mark.parametrize("slices", [1, 3, 16])
def test_reductions_over_slices(func: str, kind: Any, slices: int) -> None:
    x = torch.randn(2, 16, 8)
    _, lazy = region_of(x, slices)
    torch.testing.assert_close(kind(lazy * 2, 1) + 0, kind(x * 2, 1))
    torch.testing.assert_close(kind(lazy[:, 3:11], (0, 1)) + 0, kind(x[:, 3:11], (0, 1)))


@pytest.mark.parametrize("begin", [0, 1, 5])
@pytest.mark.parametrize("end", [16, -1, 9])
@pytest.mark.parametrize("slices", [2, 5, 16])
def test_slices_along_the_axis(begin: int, end: int, slices: int) -> None:
    x = torch.randn(2, 16, 3)
    region, lazy = region_of(x, slices)
    y = lazy[:, begin:end].exp()
    size = y.shape[1]
    back = defer(aten.slice_backward.default, (y, [2, 16, 3], 1, begin, begin + size, 1), {})
    assert not region.tally.whole
    expected = torch.zeros_like(x)
    expected[:, begin : begin + size] = x[:, begin:end].exp()
    torch.testing.assert_close(torch.stack([back, back]) + 0, torch.stack([expected, expected]))
    torch.testing.assert_close(y.cos() + 0, x[:, begin:end].exp().cos())


def test_flops_of_a_chunked_step_are_those_of_the_plain_one() -> None:
    torch.manual_seed(0)
    model, batch = LM(layers=1, dim=32, heads=2, vocab=VOCAB), tokens(2, 48, VOCAB)
    with flop_counter() as plain:
        step(model, batch, plain_loss)
    with chunked(model), flop_counter() as counter:
        step(model, batch, plain_loss)
    assert counter.get_total_flops() == plain.get_total_flops()


def test_anomaly_detection() -> None:
    torch.manual_seed(0)
    model, batch = LM(layers=1, dim=32, heads=2, vocab=VOCAB), tokens(2, 48, VOCAB)
    plain = step(model, batch, plain_loss)
    with chunked(model), torch.autograd.set_detect_anomaly(True):
        got = step(model, batch, plain_loss)
    for name, value in plain.items():
        torch.testing.assert_close(got[name], value)
