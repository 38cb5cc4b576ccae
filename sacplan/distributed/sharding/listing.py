"""``sacplan.strategies``: how an op or a module may be spread over a mesh, and what each way costs.

The strategies of a matrix product have the names of ColossalAI: of the output, the input and the weight.
``S0S1 = S0R x RS1_2`` has the rows of input and output cut on axis 0 of the mesh, in their physical dimension 2, and
the columns of weight and output on axis 1. ``R`` is not cut. On several axes, ColossalAI has no name for rows that are
cut in two dimensions, or while another axis does nothing: such strategies are called by their layouts.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, overload

import torch

from sacplan.core.arguments import checked
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernels import fake_device
from sacplan.distributed.sharding.costs import Costs, sent
from sacplan.distributed.sharding.forms import AxisForm, Leaf, Trace, forms, local_flops, traced
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.placements import Placements, fits, format_layout, local_shape
from sacplan.errors import PlanError
from sacplan.record.fake_copy import FakeCopier
from sacplan.record.step import call_model, resolve_batch
from sacplan.torch_compat.ops import is_alias, tensors_in

if TYPE_CHECKING:
    import pandas as pd


def product_name(x: Placements, weight: Placements, rank: int, out_dim: int) -> str | None:
    """Return the name of the strategy of a product of ``x`` (..., in) and a weight; None if it has none.

    Args:
        x: placements of the input.
        weight: placements of the weight.
        rank: number of dimensions of the input; the last one is summed over.
        out_dim: the dimension of the weight that the output has: 0 for (out, in), 1 for (in, out).
    """
    rows: list[tuple[int, int]] = []
    columns, summed, idle = [], [], 0
    for axis, (p, w) in enumerate(zip(x, weight, strict=True)):
        # In a strategy with a name, each axis cuts rows, the summed dimension, columns, or nothing.
        if p.is_cut and p.dim < rank - 1 and not w.is_cut:
            rows.append((axis, p.dim))
        elif p.is_cut and w.is_cut and w.dim != out_dim:
            summed.append(axis)
        elif w.is_cut and w.dim == out_dim and not p.is_cut:
            columns.append(axis)
        elif p.is_cut or w.is_cut or p.is_partial or w.is_partial:
            return None
        else:
            idle += 1
    dims = {dim for _, dim in rows}
    # ColossalAI does not list rows that are cut in two dimensions, or while another axis is idle.
    if len(dims) > 1 or (rows and idle):
        return None
    m, n, k = _axes([axis for axis, _ in rows]), _axes(columns), _axes(summed)
    return f"{m}{n} = {m}{k} x {k}{n}" + (f"_{dims.pop()}" if dims else "")


def _axes(axes: Sequence[int]) -> str:
    return "S" + "".join(map(str, axes)) if axes else "R"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op is given, or returns.

    Attributes:
        name: of the argument or the parameter; ``"output"`` for what is returned.
        role: ``"argument"``, ``"parameter"``, ``"buffer"`` or ``"output"``.
        physical: its shape.
        logical: the shape in which it is computed with: of a Linear, those of two matrices and their product.
        layout: its placement on each axis of the mesh.
        local: the shape of one rank's part.
    """

    name: str
    role: str
    physical: tuple[int, ...]
    logical: tuple[int, ...]
    layout: Placements
    local: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {format_layout(self.layout)}"


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication of a strategy: partial tensors are all-reduced.

    Attributes:
        bytes: the bytes that each rank sends.
        ms: how long it takes; None without a device.
    """

    bytes: int
    ms: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Strategy:
    """One way to spread an op or a module over a mesh, with nothing moved between its ops.

    Attributes:
        name: that of ColossalAI where it has one: ``"S0S1 = S0R x RS1_0"``; else the layouts of operands.
        operands: the tensors that it is given, then those that it returns.
        flops: of the forward pass on each rank.
        forward: all-reduces of outputs that are partial, and those inside of ops.
        backward: all-reduces of gradients: of tensors that are replicated on an axis that cuts others.
        memory_bytes: of the operands, on each rank.
    """

    name: str
    operands: tuple[Operand, ...]
    flops: int
    forward: Communication
    backward: Communication
    memory_bytes: int

    def __getitem__(self, name: str) -> Operand:
        """Return an operand by its name."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"<{self.name}: {'; '.join(map(str, self.operands))}>"


class Strategies(Sequence[Strategy]):
    """The strategies of one call, also by name.

    Attributes:
        what: the op or module.
        mesh: the ranks.
    """

    def __init__(self, what: str, mesh: Mesh, found: Sequence[Strategy]) -> None:
        self.what, self.mesh, self._found = what, mesh, tuple(found)

    @overload
    def __getitem__(self, key: int | str) -> Strategy: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Strategy, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Strategy | tuple[Strategy, ...]:
        if isinstance(key, str):
            for strategy in self._found:
                if strategy.name == key:
                    return strategy
            raise KeyError(key)
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all strategies."""
        return tuple(s.name for s in self._found)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each, by ``name``: layouts of operands, ``flops``, bytes, and ms where a device is known."""
        import pandas as pd

        rows = []
        for s in self._found:
            row: dict[str, Any] = {"name": s.name}
            row |= {operand.name: format_layout(operand.layout) for operand in s.operands}
            row |= {"flops": s.flops, "forward_bytes": s.forward.bytes, "backward_bytes": s.backward.bytes}
            if s.forward.ms is not None:
                row |= {"forward_ms": s.forward.ms, "backward_ms": s.backward.ms}
            rows.append(row | {"memory_bytes": s.memory_bytes})
        return pd.DataFrame(rows).set_index("name")

    def __repr__(self) -> str:
        title = f"{len(self)} strategies of {self.what} on {self.mesh}"
        return "\n".join([title, *map(repr, self._found)])


@checked(PlanError)
def strategies(
    op: torch.nn.Module | Callable[..., Any],
    tensors: Any,
    mesh: Mesh | Mapping[str, int] | int,
    *,
    device: str | DeviceSpec | None = None,
) -> Strategies:
    """Return the ways to spread an op or a module over a mesh of ranks, without moving tensors between its ops.

        sacplan.strategies(torch.nn.Linear(16, 32), torch.empty(4, 4, 4, 16), {"dp": 2, "tp": 2})
        sacplan.strategies(torch.ops.aten.bmm.default, (a, b), 4, device="h100").to_frame()

    On one axis each operand is replicated or cut along a dimension, in the ways in which the factor rules of the ops
    let results be put together; on several axes all combinations are listed that fit together. A dimension is cut
    only if the ranks divide it. Nothing is computed.

    Args:
        op: a module, an op of ``torch.ops``, or a function of tensors.
        tensors: what it is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments. Meta
            tensors will do.
        mesh: number of ranks by name of the axis, the slowest link first: ``{"dp": 2, "tp": 4}``. A number is one axis.
        device: name or spec of the device whose links give the times; None: bytes alone.

    Returns:
        The strategies in order, the first one with everything replicated.

    Raises:
        PlanError: ``mesh`` is no mesh, or there are thousands of ways.
        TraceError: the batch holds no tensor, or the module cannot be copied.
    """
    ranks = Mesh.of(mesh)
    spec = None if device is None else resolve_device(device)
    what = type(op).__name__ if isinstance(op, torch.nn.Module) else getattr(op, "__name__", str(op))
    with fake_device(spec or "cpu"):
        copier = FakeCopier()
        # Copies on fake tensors: the module's own parameters are not touched, and nothing is computed.
        batch = copier.tree(resolve_batch(tensors))
        # A module has state besides its arguments. An op or a function has arguments only.
        if isinstance(op, torch.nn.Module):
            module = copier.model(op)
            trace = traced(
                lambda: call_model(module, batch), [*_arguments(module.forward, batch), *_state(module)]
            )
        elif callable(op):
            function = cast("torch.nn.Module", op)  # it is called in the same way
            trace = traced(lambda: call_model(function, batch), list(_arguments(op, batch)))
        else:
            raise PlanError(
                f"op is {op!r}; give a module, an op such as torch.ops.aten.mm.default, or a function."
            )
        return Strategies(what, ranks, list(_all(trace, ranks, spec)))


def _arguments(called: Any, batch: Any) -> Iterator[Leaf]:
    """Yield the tensors among the arguments, named as the parameters are."""
    # Keyword arguments have their names; positional ones get those of the signature.
    if isinstance(batch, Mapping):
        named = list(batch.items())
    else:
        values = batch if isinstance(batch, (tuple, list)) else (batch,)
        named = list(zip(_parameter_names(called, len(values)), values, strict=True))
    for name, value in named:
        found = list(tensors_in(value))
        for i, t in enumerate(found):
            yield Leaf(name if len(found) == 1 else f"{name}[{i}]", "argument", t)


def _parameter_names(called: Any, n: int) -> list[str]:
    # An ``OpOverload`` has no Python signature, but a schema.
    if isinstance(called, torch._ops.OpOverload):
        return [a.name for a in called._schema.arguments[:n]]
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # written in C
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(n)]


def _state(module: torch.nn.Module) -> Iterator[Leaf]:
    for name, parameter in module.named_parameters():
        yield Leaf(name, "parameter", parameter)
    for name, buffer in module.named_buffers():
        yield Leaf(name, "buffer", buffer)


def _all(trace: Trace, mesh: Mesh, spec: DeviceSpec | None) -> Iterator[Strategy]:
    """Yield one strategy for each combination of forms that fits. Several cuts of one dimension are nested."""
    listing = _Listing(trace, mesh, None if spec is None else Costs(mesh, spec))
    seen = set()
    for chosen in itertools.product(*(forms(trace, n, _nested(mesh, i)) for i, n in enumerate(mesh.ranks))):
        alike = tuple(tuple((p.kind, p.dim) for p in form.of(listing.tensors)) for form in chosen)
        # ``outer`` follows from the order of axes: forms that differ in it alone are one strategy on this
        # mesh.
        if alike not in seen and listing.fits(chosen):
            seen.add(alike)
            yield listing.strategy(chosen)


def _nested(mesh: Mesh, axis: int) -> list[int]:
    """Return the numbers of parts into which the axes before this one may have cut a dimension."""
    before = mesh.ranks[:axis]
    # An axis of the mesh may be cut inside of any combination of the axes before it.
    return sorted(
        {math.prod(some) for k in range(len(before) + 1) for some in itertools.combinations(before, k)}
    )


class _Listing:
    """Describes strategies of one trace."""

    def __init__(self, trace: Trace, mesh: Mesh, costs: Costs | None) -> None:
        self.trace, self.mesh, self.costs = trace, mesh, costs
        several = len(trace.outputs) > 1
        outputs = [
            Leaf(f"output {i}" if several else "output", "output", t) for i, t in enumerate(trace.outputs)
        ]
        self.operands = [*trace.leaves, *outputs]
        self.tensors = [operand.tensor for operand in self.operands]
        self._logical = [trace.logical(t) for t in self.tensors]
        self._trained = list(_trained(trace))
        self._product = _product(trace)
        # All tensors between the ops as well: a strategy must fit in each of them.
        self._shapes = {id(t): t.shape for op in trace.ops for t in (*op.inputs, *op.outputs)}

    def fits(self, chosen: Sequence[AxisForm]) -> bool:
        """Whether the cuts of all axes fit together, in all tensors."""
        return all(
            fits(shape, tuple(form.places[t] for form in chosen), self.mesh.ranks)
            for t, shape in self._shapes.items()
        )

    def strategy(self, chosen: Sequence[AxisForm]) -> Strategy:
        """Return a strategy and its costs."""
        layouts = list(zip(*(form.of(self.tensors) for form in chosen), strict=True))
        operands = tuple(
            Operand(leaf.name, leaf.role, tuple(t.shape), tuple(logical), layout, self._local(t, layout))
            for leaf, t, logical, layout in zip(
                self.operands, self.tensors, self._logical, layouts, strict=True
            )
        )
        return Strategy(
            self._name(layouts),
            operands,
            local_flops(self.trace, chosen, self.mesh.ranks),
            self._forward(chosen, layouts),
            self._backward(chosen),
            sum(map(self._bytes, self.tensors, layouts)),
        )

    def _local(self, t: torch.Tensor, layout: Placements) -> tuple[int, ...]:
        return local_shape(t.shape, layout, self.mesh.ranks)

    def _bytes(self, t: torch.Tensor, layout: Placements) -> int:
        return math.prod(self._local(t, layout)) * t.element_size()

    def _name(self, layouts: Sequence[Placements]) -> str:
        n = len(self.trace.leaves)
        # A name of ColossalAI if there is one, else the layouts.
        if self._product is not None:
            x, weight, out_dim = self._product
            found = product_name(layouts[x], layouts[weight], self.tensors[x].dim(), out_dim)
            if found is not None:
                return found
        # Such as "S0,R x R,S1 -> S0,S1".
        inputs, outputs = (" x ".join(map(format_layout, some)) for some in (layouts[:n], layouts[n:]))
        return f"{inputs} -> {outputs}"

    def _forward(self, chosen: Sequence[AxisForm], layouts: Sequence[Placements]) -> Communication:
        n = len(self.trace.leaves)
        reduced = [
            (self._bytes(t, layout), axis)
            for t, layout in zip(self.tensors[n:], layouts[n:], strict=True)
            for axis, placement in enumerate(layout)
            if placement.is_partial
        ]
        for axis, form in enumerate(chosen):
            reduced += [(s.inside_bytes, axis) for s in form.taken if s.inside_bytes]
        return self._all_reduced(reduced)

    def _backward(self, chosen: Sequence[AxisForm]) -> Communication:
        """Return the all-reduces of gradients: of replicated tensors that ranks read with parts of others."""
        reduced = []
        for t, maker, readers in self._trained:
            (layout,) = zip(*(form.of([t]) for form in chosen), strict=True)
            for axis, (placement, form) in enumerate(zip(layout, chosen, strict=True)):
                is_made_whole = maker is None or form.taken[maker].cut is None
                # Each rank reads the whole tensor with its part of another one: it has a summand of the gradient.
                if placement.kind == "R" and is_made_whole and any(form.taken[i].cut for i in readers):
                    reduced.append((self._bytes(t, layout), axis))
        return self._all_reduced(reduced)

    def _all_reduced(self, what: Sequence[tuple[int, int]]) -> Communication:
        n_bytes = sum(n * sent("all_reduce", self.mesh.ranks[axis]) for n, axis in what)
        # Without a device there are bytes and no times.
        if self.costs is None:
            return Communication(int(n_bytes), None)
        return Communication(
            int(n_bytes), sum(self.costs.collective_ms("all_reduce", n, axis) for n, axis in what)
        )


def _readers(trace: Trace, t: torch.Tensor) -> Iterator[int]:
    """Yield the ops that compute with a tensor or a view of it."""
    for i, op in enumerate(trace.ops):
        if any(other is t for other in op.inputs):
            # A view is no reader: the ops that read the view are.
            if is_alias(str(op.func)):
                for result in op.outputs:
                    yield from _readers(trace, result)
            else:
                yield i


def _trained(trace: Trace) -> Iterator[tuple[torch.Tensor, int | None, list[int]]]:
    """Yield the tensors that have gradients and are no views, with the op that made each and those that read it."""
    leaves = [
        leaf.tensor for leaf in trace.leaves if leaf.role != "buffer" and leaf.tensor.is_floating_point()
    ]
    for t in leaves:
        yield t, None, list(_readers(trace, t))
    known = {id(t) for t in leaves}
    for i, op in enumerate(trace.ops):
        if any(id(t) in known for t in op.inputs):
            made = [t for t in op.outputs if t.is_floating_point() and id(t) not in known]
            known.update(map(id, made))
            # A view's gradient is that of its base, which has an entry already.
            if not is_alias(str(op.func)):
                yield from ((t, i, list(_readers(trace, t))) for t in made)


def _product(trace: Trace) -> tuple[int, int, int] | None:
    """Return input and weight of the one matrix product among the leaves, and the output dimension of the weight.

    The input's last dimension is summed over, and the weight may be transposed.
    """
    products = [
        op for op in trace.ops if op.func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
    ]
    computing = [op for op in trace.ops if not is_alias(str(op.func))]
    # ColossalAI names one product, with only views around it.
    if len(products) != 1 or len(computing) != 1:
        return None
    x, of_x = _leaf_behind(trace, products[0].inputs[-2])
    weight, of_weight = _leaf_behind(trace, products[0].inputs[-1])
    # Both must come from leaves through plain views: another order of dimensions, or a computed operand, has no
    # such name.
    if (
        x is None
        or weight is None
        or not {"view", "_unsafe_view"} >= set(of_x)
        or not {"t"} >= set(of_weight)
    ):
        return None
    # ``mm`` takes (in, out): without a transpose dimension 1 of the weight is the output's, with one it is
    # dimension 0.
    return x, weight, 1 - len(of_weight) % 2


def _leaf_behind(trace: Trace, t: torch.Tensor) -> tuple[int | None, list[str]]:
    """Follow the first inputs of ops back from a tensor: to which leaf (its index; None: to none), and by which ops.

    The caller checks that the ops are views.
    """
    through = []
    maker = {id(o): op for op in trace.ops for o in op.outputs}
    while id(t) in maker:
        through.append(maker[id(t)].func._schema.name.removeprefix("aten::"))
        t = maker[id(t)].inputs[0]
    return next((i for i, leaf in enumerate(trace.leaves) if leaf.tensor is t), None), through
