"""Ops on the ranks of a mesh, simulated in one process: what strategies are tested with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sacplan.core.factors.axes import Axis, take
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.placements import REPLICATED, Placement, Placements, cut, local_shape
from sacplan.distributed.sharding.strategies import AxisStrategy, axis_strategies
from sacplan.torch_compat.calls import Call, flat_tensors
from sacplan.torch_compat.ops import draws_numbers
from tests.support.local_calls import local_call
from tests.support.slices import OpCall, copied

At = tuple[int, ...]


def every_rank(mesh: Mesh) -> list[At]:
    """The positions of all ranks."""
    return list(itertools.product(*map(range, mesh.ranks)))


def scattered(t: torch.Tensor, layout: Placements, mesh: Mesh) -> dict[At, torch.Tensor]:
    """What each rank has of a tensor; summands are random."""
    partial = [axis for axis, p in enumerate(layout) if p.is_partial]
    summands: dict[At, torch.Tensor] = {(): t}
    for axis in partial:
        p, n = layout[axis], mesh.ranks[axis]
        summands = {
            (*at, i): s for at, whole in summands.items() for i, s in enumerate(_summands(whole, p, n))
        }
    parts = {at: summands[tuple(at[axis] for axis in partial)] for at in every_rank(mesh)}
    order = sorted(range(len(layout)), key=lambda a: -layout[a].outer)  # the innermost first: ``outer`` stays
    for axis in order:
        p, n = layout[axis], mesh.ranks[axis]
        if p.is_cut:
            for at, part in parts.items():
                inside = Axis(p.dim, p.outer, n, part.shape[p.dim] // (p.outer * n))
                parts[at] = take(part, inside, at[axis], at[axis] + 1)
    return {at: _as_dense_as(part, t) for at, part in parts.items()}


def _summands(t: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    if placement.reduce == "avg":
        return _summands(t * n, placement._replace(reduce="sum"), n)
    if placement.reduce == "sum":
        size = t.abs()[t.isfinite()].max() if t.isfinite().any() else 1.0
        found = [torch.randn_like(t) * size for _ in range(n - 1)]
        return [*found, t - sum(found)]
    who = torch.randint(n, t.shape)
    away = torch.rand_like(t) * (-1 if placement.reduce == "max" else 1)
    return [torch.where(who == i, t, t + away) for i in range(n)]


def _as_dense_as(part: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, its dimensions in memory in the order of the whole tensor's."""
    order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))
    dense = part.permute(order).contiguous()
    back = [order.index(d) for d in range(t.dim())]
    return dense.permute(back).clone() if dense is part.permute(order) else dense.permute(back)


def gathered(parts: dict[At, torch.Tensor], layout: Placements, mesh: Mesh) -> torch.Tensor:
    """The whole tensor; what is said to be replicated must be the same on all ranks."""
    cuts = sorted((a for a, p in enumerate(layout) if p.is_cut), key=lambda a: layout[a].outer)
    others = [a for a, p in enumerate(layout) if not p.is_cut]
    for axis in (*cuts, *others):
        p, n = layout[axis], mesh.ranks[axis]
        parts = {
            at: _joined([parts[(*at[:axis], i, *at[axis + 1 :])] for i in range(n)], p)
            for at in parts
            if at[axis] == 0
        }
    return parts[(0,) * len(layout)]


def _joined(parts: list[torch.Tensor], p: Placement) -> torch.Tensor:
    if p.is_cut:
        pieces = [t.unflatten(p.dim, (p.outer, t.shape[p.dim] // p.outer)) for t in parts]
        return torch.cat(pieces, p.dim + 1).flatten(p.dim, p.dim + 1)
    if p.is_partial:
        combine = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}[p.reduce]
        whole = parts[0]
        for part in parts[1:]:
            whole = combine(whole, part)
        return whole / len(parts) if p.reduce == "avg" else whole
    for part in parts[1:]:
        assert_equal(part, parts[0], "ranks disagree on what is replicated")
    return parts[0]


def assert_equal(
    a: torch.Tensor, b: torch.Tensor, message: str = "", computed_from: Sequence[torch.Tensor] = ()
) -> None:
    """Within what rounding explains: integers are the same, sums of doubles nearly."""
    close = 1e-5 if torch.float32 in (t.dtype for t in (a, *computed_from)) else 1e-10
    largest = b.abs()[b.isfinite()] if b.is_floating_point() else b.new_empty(0)
    atol = close * max(1.0, float(largest.max())) if len(largest) else close  # summands are as large
    torch.testing.assert_close(
        a, b, rtol=close, atol=atol, equal_nan=True, msg=lambda text: f"{message}\n{text}"
    )


class _Lockstep:
    """All-reduces of ranks that run one after the other: each run gets one collective further."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.seen, self.done = mesh, [], []  # type: ignore[var-annotated]
        self.at: At = ()
        self.count = 0

    def reduce(self, t: torch.Tensor, axis: int) -> torch.Tensor:
        self.count += 1
        while len(self.seen) < self.count:
            self.seen.append({})
        self.seen[self.count - 1][self.at] = t.clone()
        if self.count > len(self.done):
            return t
        group = [(*self.at[:axis], i, *self.at[axis + 1 :]) for i in range(self.mesh.ranks[axis])]
        return torch.stack([self.done[self.count - 1][other] for other in group]).sum(0)


def run_on_ranks(call: OpCall, chosen: Sequence[AxisStrategy], mesh: Mesh) -> tuple[list[Any], int]:
    """What a call returns, and then what it has written, put together from what the ranks have; and its collectives.

    Args:
        call: on whole tensors.
        chosen: by axis.
        mesh: whose ranks are simulated.
    """
    whole = call.run()
    inputs = list(flat_tensors([*call.args, *call.kwargs.values()]))
    layouts = [tuple(s.inputs[i] for s in chosen) for i in range(len(inputs))]
    given = [scattered(t, layout, mesh) for t, layout in zip(inputs, layouts, strict=True)]
    for t, layout, parts in zip(inputs, layouts, given, strict=True):
        assert {tuple(p.shape) for p in parts.values()} == {local_shape(t.shape, layout, mesh.ranks)}
    local = local_call(Call(call.func, call.args, call.kwargs, whole), chosen, mesh)
    written = Call(call.func, call.args, call.kwargs).written
    ranks = _Lockstep(mesh)
    results: dict[At, list[torch.Tensor]] = {}
    while True:
        for at in every_rank(mesh):
            ranks.at, ranks.count = at, 0
            mine = [parts[at].clone(memory_format=torch.preserve_format) for parts in given]
            args, kwargs = with_tensors((list(call.args), call.kwargs), iter(mine))
            out = local.run(args, kwargs, ranks.reduce, at)
            if is_empty(call.func):  # its elements are whatever is there
                tree_map(lambda t: t.zero_(), out)
            results[at] = [*flat_tensors(out), *(mine[i] for i in written)]
        if len(ranks.done) == ranks.count:
            break
        ranks.done.append(ranks.seen[len(ranks.done)])
    out_layouts = [tuple(s.outputs[i] for s in chosen) for i in range(len(whole))]
    out_layouts += [layouts[i] for i in written]
    found = [
        gathered({at: parts[i] for at, parts in results.items()}, layout, mesh)
        for i, layout in enumerate(out_layouts)
    ]
    return found, ranks.count


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, tensors) for item in value)
    if isinstance(value, dict):
        return {name: with_tensors(item, tensors) for name, item in value.items()}
    return value


def assert_right(call: OpCall, chosen: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """What the ranks compute is what the op computes, and nothing is reduced that the strategy does not say."""
    args, kwargs = copied((call.args, call.kwargs))
    whole = list(flat_tensors(call.func(*args, **kwargs)))
    inputs = list(flat_tensors([*args, *kwargs.values()]))
    whole += [inputs[i] for i in Call(call.func, args, kwargs).written]
    found, collectives = run_on_ranks(call, chosen, mesh)
    assert collectives == sum(s.inside_bytes > 0 for s in chosen)
    if is_empty(call.func):
        whole = [torch.zeros_like(t) for t in whole]
    for i, (a, b) in enumerate(zip(found, whole, strict=True)):
        assert a.shape == b.shape
        assert_equal(a, b, f"{described(call)} by {shown(chosen)}: output {i}", inputs)


def is_empty(func: Any) -> bool:
    """Whether an op returns memory as it is."""
    return "empty" in str(func)


def shown(chosen: Sequence[AxisStrategy]) -> str:
    """A strategy in a message."""
    columns = zip(*(s.inputs for s in chosen), strict=True), zip(*(s.outputs for s in chosen), strict=True)
    inputs, outputs = (" ".join("".join(map(str, layout)) for layout in column) for column in columns)
    return f"{inputs} -> {outputs}"


def described(call: OpCall) -> str:
    """A call in a message."""
    return f"{call.func}{tree_map(_shape, tuple(call.args))}{tree_map(_shape, call.kwargs) or ''}"


def _shape(value: Any) -> Any:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else value


def all_placements(t: torch.Tensor, ranks: int) -> list[Placement]:
    """Everything that a tensor may have on an axis."""
    found = [REPLICATED]
    for dim, n in enumerate(t.shape):
        found += [cut(dim, outer) for outer in range(1, n + 1) if n % (outer * ranks) == 0]
    if t.is_floating_point() or t.is_complex():
        found += [Placement("P", reduce=reduce) for reduce in ("sum", "avg", "max", "min")]
    return found


def offered(call: OpCall, ranks: int) -> tuple[AxisStrategy, ...]:
    """The strategies of a call on one axis, whose inputs may lie in any way."""
    args, kwargs = copied((call.args, call.kwargs))
    out = call.func(*args, **kwargs)
    inputs = list(flat_tensors([*call.args, *call.kwargs.values()]))
    available = [all_placements(t, ranks) for t in inputs]
    return axis_strategies(Call(call.func, call.args, call.kwargs, out), ranks, available)


def assert_all_right(call: OpCall, ranks: int) -> int:
    """The number of strategies on one axis, each of which is right."""
    mesh = Mesh.of(ranks)
    strategies = offered(call, ranks)
    for strategy in strategies:
        assert_right(call, [strategy], mesh)
    return len(strategies)


class Recorded(TorchDispatchMode):
    """Calls of ops that draw no numbers, one of each kind; arguments as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, OpCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = OpCall(func, *tree_map(_kept, (args, kwargs)))
        out = func(*args, **kwargs)
        is_made = func.namespace == "aten" and any(True for _ in flat_tensors(out))
        if is_made and not draws_numbers(func, args, kwargs):
            self.calls.setdefault(described(call), call)
        return out


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
