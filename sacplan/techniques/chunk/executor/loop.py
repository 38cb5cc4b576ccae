"""The loop over slices that computes everything that is asked for.

``compute`` works in four steps:

1. Collect the ops that the values need, in the order in which they were deferred (``needed_nodes``).
2. Run the free ones. A free op whose results are read in slices only, and always the same ones, goes into the loop
   instead (``_pulled_into_loops``), so that they are never there as a whole: a causal mask, for example.
3. For each slice of the region, run all ops of the loop on slices (``_Loop``). A slice is let go of after its last use.
   Sliced results are written into tensors with the strides that were recorded. Parts of reduced ones are combined:
   ``total = combine(total, part)``, so that sums are added in the order of the slices.
4. Run the late ones.

At any time the memory is that of the results, of free values, and of one slice of what is alive. Nothing is kept from
one call to the next: what two loops need is computed twice.

``run_nodes`` is the loop alone, for ops that the caller has chosen and cut. The same code runs live on real tensors,
and on fake ones to see what it would allocate.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_map

from sacplan.core.factors.axes import put, resized_arguments, take
from sacplan.core.factors.rule import Kind
from sacplan.techniques.chunk.executor.values import (
    DeferredOp,
    DeferredTensor,
    Held,
    SlicedRegion,
    Stage,
)
from sacplan.techniques.chunk.flow import FactorCut, FlowOp, Window, cuts, slices_read
from sacplan.techniques.runtime.recording import unrecorded
from sacplan.torch_compat.ops import is_alias, tensors_in
from sacplan.torch_compat.private import storage_key

aten = torch.ops.aten

_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default))
_PRODUCT_PARTS, _FEW_ROWS = 8, 64  # at most so many parts, of at least so many rows, see _add_product
_SUMS = frozenset((Kind.SUM, Kind.MEAN))


def compute(values: Sequence[DeferredTensor]) -> list[torch.Tensor]:
    """Compute the tensors of values, in one loop over slices for each region. The values stay as they are."""
    with _as_deferred(), unrecorded():
        return _Computation(values).run()


def compute_with_memory(values: Sequence[DeferredTensor]) -> list[torch.Tensor]:
    """Compute the tensors of values as ``compute`` does; those that are views share the memory of what they view.

    In the plain step, too, a gradient and a view of it that are both in use share memory.
    """
    viewed = list(dict.fromkeys(map(viewed_by, values)))
    known = dict(zip(viewed, compute(viewed), strict=True))
    with _as_deferred(), unrecorded():
        return [_view_on(value, known) for value in values]


def viewed_by(value: DeferredTensor) -> DeferredTensor:
    """Return the value that a sliced value is a view of; itself, if it has memory of its own."""
    while (node := value.node) is not None and node.stage is Stage.LOOP and is_alias(str(node.func)):
        (value,) = node.values
    return value


def _view_on(value: DeferredTensor, known: Mapping[DeferredTensor, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of a value: a known one, or a view of one."""
    if value in known:
        return known[value]
    node = value.node
    assert node is not None
    (source,) = node.values
    base = _view_on(source, known)
    out = _call(node, lambda _: base, node.args)
    return next(t for v, t in zip(node.made, tensors_in(out), strict=True) if v is value)


def compute_whole(values: Sequence[DeferredTensor]) -> list[torch.Tensor]:
    """Compute the tensors of values on whole tensors: the ops that were deferred, each once, in their order.

    What an op makes is let go of after its last use. Executors that record a unit's forward pass see these ops as they
    see those of a module that does not run in slices, so that its outputs may be discarded and made again.
    """
    with _as_deferred():
        return _Computation(values).run_in_order()


def run_nodes(
    region: SlicedRegion,
    nodes: Sequence[DeferredOp],
    wanted: Iterable[DeferredTensor],
    buffers: Mapping[DeferredTensor, torch.Tensor],
) -> dict[DeferredTensor, torch.Tensor]:
    """Run nodes in the slices of a region, each as its cut says.

    Unlike ``compute`` it leaves autograd, autocast and dispatch modes as they are: its caller runs where such ops run.

    Args:
        region: gives the slices.
        nodes: those of the loop, in order. They run even where nobody wants what they make.
        wanted: values to return.
        buffers: the memory of some of the values that the nodes make, which the loop fills; they are returned, too.
    """
    cut = [(node, node.cut) for node in nodes]
    return _Loop(region, cut, {*wanted, *buffers}, {}, buffers).run()


@contextlib.contextmanager
def _as_deferred() -> Iterator[None]:
    """Run ops as they were deferred: below autograd and autocast, which have seen them already."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        if torch._C._is_any_autocast_enabled():
            stack.enter_context(torch._C._DisableAutocast())
        yield


class _Computation:
    """One call of ``compute``.

    Attributes:
        known: by value, the tensor, once it is there.
    """

    def __init__(self, values: Sequence[DeferredTensor]) -> None:
        self.values = list(values)
        self.known: dict[DeferredTensor, torch.Tensor] = {}
        self.nodes = needed_nodes(values)

    def run(self) -> list[torch.Tensor]:
        pulled = _pulled_into_loops(self.nodes, self.values)
        loops: dict[SlicedRegion, list[tuple[DeferredOp, FactorCut | None]]] = defaultdict(list)
        for node in self.nodes:
            if node in pulled:
                region, cut = pulled[node]
                loops[region].append((node, cut))
            elif node.stage is Stage.LOOP:
                loops[_region_of(node)].append((node, node.cut))
            elif node.stage is Stage.FREE:
                self._run_whole(node)
        # Loops make what is asked for, and what late nodes read. All else lives for one slice.
        late = [node for node in self.nodes if node.stage is Stage.LATE]
        wanted = {v for v in self.values if not v.begins}
        wanted.update(v for node in late for v in node.values if not v.begins)
        for region, nodes in loops.items():
            self.known.update(_Loop(region, nodes, wanted, self.known, {}).run())
        last = {v: node for node in late for v in node.values}
        for node in late:
            self._run_whole(node)
            for v in node.values:
                if last[v] is node and v not in self.values:
                    self.known.pop(v, None)
        return [self.known[v] if v in self.known else v.whole() for v in self.values]

    def run_in_order(self) -> list[torch.Tensor]:
        last = {
            x: node
            for node in self.nodes
            for x in (*node.inputs, *node.made)
            if isinstance(x, DeferredTensor)
        }
        for node in self.nodes:
            self._run_whole(node)
            for v in [v for v in self.known if last[v] is node and v not in self.values]:
                del self.known[v]
        return [self.known[v] if v in self.known else v.whole() for v in self.values]

    def _run_whole(self, node: DeferredOp) -> None:
        out = _call(node, lambda x: _whole(x, self.known, node), node.args)
        for v, t in zip(node.made, tensors_in(out), strict=True):
            if v is not None:
                self.known[v] = t


_Slice = DeferredTensor | tuple[DeferredTensor, Window | None]
"""A slice that the loop holds for a while: of what it makes, or (with a window) of what is there before it."""


class _Loop:
    """One loop over the slices of a region.

    Attributes:
        begins: by value that is there before the loop, its tensor.
        results: by value that is wanted, its tensor with what the slices have given so far.
        last: by slice, the last node that uses it. A slice of a value that is there before the loop, and not sliced
            itself, may be a copy: it is taken once for all that read it.
        buffers: memory of results that is there from the start. The first slice overwrites it.
        starting: whether the first slice is running.
    """

    def __init__(
        self,
        region: SlicedRegion,
        nodes: Sequence[tuple[DeferredOp, FactorCut | None]],
        wanted: set[DeferredTensor],
        known: Mapping[DeferredTensor, torch.Tensor],
        buffers: Mapping[DeferredTensor, torch.Tensor],
    ) -> None:
        self.region, self.nodes, self.known, self.buffers = region, nodes, known, buffers
        # Taken once for all slices: ``whole`` may have a saved-tensor hook recompute the tensor.
        self.begins = {v: v.whole() for node, _ in nodes for v in node.values if v.begins}
        self.results = dict(buffers)
        self.windows = [_slices_read(node, cut) for node, cut in nodes]
        self.made = [node.made for node, _ in nodes]
        self.wanted = wanted
        self.last: dict[_Slice, int] = {}
        uses: list[dict[_Slice, int]] = []
        for i, (node, _) in enumerate(nodes):
            used: list[_Slice] = []
            for x, window in zip(node.inputs, self.windows[i], strict=True):
                if isinstance(x, DeferredTensor):
                    used.append((x, window) if x in self.begins else x)
            used += [v for v in self.made[i] if v is not None]
            uses.append(dict.fromkeys(used, i))
            self.last.update(uses[i])
        self.ends = [[key for key in used if self.last[key] == i] for i, used in enumerate(uses)]
        self.starting = True

    def run(self) -> dict[DeferredTensor, torch.Tensor]:
        self.region.tally.loops += 1
        for start, stop in self.region.slices():
            self._run_slice(start, stop)
            self.starting = False
        return {v: t if t.dtype == v.dtype else t.to(v.dtype) for v, t in self._finished()}

    def _finished(self) -> Iterator[tuple[DeferredTensor, torch.Tensor]]:
        """Yield the results and let go of each, so that only one at a time exists in two types, if types differ."""
        while self.results:
            yield self.results.popitem()

    def _run_slice(self, start: int, stop: int) -> None:
        slices: dict[_Slice, torch.Tensor] = {}
        for i, (node, cut) in enumerate(self.nodes):
            self._run_node(i, node, cut, slices, start, stop)
            for key in self.ends[i]:
                slices.pop(key, None)

    def _run_node(
        self,
        i: int,
        node: DeferredOp,
        cut: FactorCut | None,
        slices: dict[_Slice, torch.Tensor],
        start: int,
        stop: int,
    ) -> None:
        made = self.made[i]
        args: Sequence[Any] = node.args
        length = stop - start
        if cut is not None:
            begin, end = Window(cut.axis, cut.start).clip(start, stop)  # type: ignore[arg-type]
            length = end - begin
            if not length and any(v is not None and v.combined is not None for v in made):
                return  # outside of the window of a shifted tensor; the maximum of nothing, for one, is an error
            assert node.rule is not None
            args = resized_arguments(node.rule, args, cut.axis, length)
        windows = iter(self.windows[i])

        def given(x: DeferredTensor | Held) -> torch.Tensor:
            window = next(windows)
            if isinstance(x, DeferredTensor):
                if x in slices:
                    return slices[x]
                if window is not None and x in self.begins and not x.sliced:
                    if (x, window) not in slices:
                        slices[x, window] = take(self.begins[x], window.axis, *window.clip(start, stop))
                    return slices[x, window]
            t = self.begins[x] if x in self.begins else _whole(x, self.known, node)
            return t if window is None else take(t, window.axis, *window.clip(start, stop))

        if node.move:
            (x,) = node.values
            out: Any = _moved(node, given(x), x, made[0], start, stop)
        # The gradient of a weight: made apart and then added, it would take the weight's size a second time.
        elif node.func is aten.mm.default and self._adds_products(made[0]):
            self._add_product(made[0], *map(given, node.inputs))
            return
        else:
            out = _call(node, given, args, is_one_row=cut is not None and length == 1)
        for v, t in zip(made, tensors_in(out), strict=True):
            if v is None:
                continue
            if v in self.wanted:
                self._keep(v, t, node, length, start, stop)
            if self.last[v] > i or v in self.buffers:  # a buffer's slice is let go of after the inputs
                slices[v] = t

    def _adds_products(self, v: DeferredTensor | None) -> TypeGuard[DeferredTensor]:
        """Whether products of slices are added to memory that the loop itself allocates for the sum."""
        return v in self.wanted and v not in self.buffers and v.combined is Kind.SUM

    def _add_product(self, v: DeferredTensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a matrix product to what earlier slices gave, without a temporary of its size.

        ``addmm`` adds in the type of the product. If the sum has a wider type, rows are multiplied and added part by
        part, so that the temporary is one part.
        """
        dtype = _sum_type(v)
        if dtype != v.dtype:
            if v not in self.results:
                self.results[v] = torch.zeros(v.shape, dtype=dtype, device=v.device)
            rows = max(_FEW_ROWS, -(-v.shape[0] // _PRODUCT_PARTS))
            for total, part in zip(self.results[v].split(rows), left.split(rows), strict=True):
                total.add_(torch.mm(part, right))
        elif v in self.results:
            torch.addmm(self.results[v], left, right, out=self.results[v])
        else:
            self.results[v] = torch.mm(left, right)

    def _keep(
        self, v: DeferredTensor, t: torch.Tensor, node: DeferredOp, length: int, start: int, stop: int
    ) -> None:
        if v.window is not None:
            if v not in self.results:
                self.results[v] = torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device)
            begin, end = v.window.clip(start, stop)
            if begin < end:
                put(self.results[v], v.window.axis, begin, end, t)
            return
        if v.combined is None:  # free, but made in the loop
            raise AssertionError(f"{node.func} makes a whole tensor in the loop")
        if v.combined is Kind.MEAN:
            assert node.cut is not None
            # The mean of the whole is the sum of the slices' means, each by its share of the axis.
            t = t * (length / node.cut.axis.size)
        total = self.results.get(v)
        if total is None:
            dtype = v.dtype if v.combined is Kind.PASS else _sum_type(v)
            # The part becomes the total, to which later parts are added in place: it must not be an input itself.
            shared = {storage_key(x.tensor.untyped_storage()) for x in node.inputs if isinstance(x, Held)}
            fresh = storage_key(t.untyped_storage()) not in shared
            self.results[v] = t.to(dtype) if t.dtype != dtype else t if fresh else t.clone()
        elif v in self.buffers and self.starting:
            total.copy_(t)
        elif v.combined is Kind.PASS:
            return  # every slice gives the same
        elif v.combined in _SUMS:
            total.add_(t)
        else:
            combine = torch.maximum if v.combined is Kind.MAX else torch.minimum
            if v in self.buffers:
                total.copy_(combine(total, t))
            else:
                self.results[v] = combine(total, t)


def _sum_type(value: DeferredTensor) -> torch.dtype:
    """Return the type in which a value's parts are added: float32 for those of half precision."""
    return torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype


# --- nodes


def needed_nodes(values: Sequence[DeferredTensor]) -> list[DeferredOp]:
    """Return the nodes that values need, in the order in which they were deferred."""
    # By number, since a node can be reached in several ways, and sorted by it, nodes are in an order that can run.
    found: dict[int, DeferredOp] = {}
    waiting = [v for v in values if v.node is not None]
    while waiting:
        node = waiting.pop().node
        if node is not None and node.number not in found:
            found[node.number] = node
            waiting.extend(node.values)
    return [found[number] for number in sorted(found)]


def _region_of(node: DeferredOp) -> SlicedRegion:
    return next(v.region for v in node.values if v.sliced)


def _slices_read(node: DeferredOp, cut: FactorCut | None) -> list[Window | None]:
    if node.move:
        return [x.window if isinstance(x, DeferredTensor) else None for x in node.inputs]
    return slices_read(node.rule, cut, len(node.inputs))


def _pulled_into_loops(
    nodes: Sequence[DeferredOp], values: Sequence[DeferredTensor]
) -> dict[DeferredOp, tuple[SlicedRegion, FactorCut]]:
    """Return the free nodes that run in a loop, each with its region and cut.

    Args:
        nodes: in the order in which they were deferred.
        values: those that are asked for as a whole.
    """
    free = [node for node in nodes if node.stage is Stage.FREE]
    others = [node for node in nodes if node.stage is not Stage.FREE]
    region_of = {node: _region_of(node) for node in nodes if node.stage is Stage.LOOP}
    found: dict[DeferredOp, tuple[SlicedRegion, FactorCut]] = {}
    for region in dict.fromkeys(region_of.values()):
        asked: dict[Hashable, set[Window | None]] = defaultdict(set, {v: {None} for v in values})
        for node in others:
            # What another loop reads, or a late node, is there as a whole.
            for x, window in zip(node.inputs, _slices_read(node, node.cut), strict=True):
                asked[x].add(window if region_of.get(node) is region else None)
        pulled = cuts([FlowOp(node.rule, node.inputs, node.made) for node in free], asked)
        found.update((free[i], (region, cut)) for i, cut in pulled.items())
    return found


def _call(node: DeferredOp, given: Any, args: Sequence[Any], *, is_one_row: bool = False) -> Any:
    """Run the op on what ``given`` says its tensors are; ``is_one_row``: they are slices of length 1."""
    args, kwargs = tree_map(
        lambda x: given(x) if isinstance(x, (DeferredTensor, Held)) else x, (tuple(args), node.kwargs)
    )
    if node.func in _VIEWS:
        out = args[0].reshape(args[1])  # the strides of a slice may rule out a view
        return _as_a_row_of_many(out) if is_one_row else out
    return node.func(*args, **kwargs)


def _as_a_row_of_many(t: torch.Tensor) -> torch.Tensor:
    """Return the same tensor; one image [1, C, H, W] with the first stride that it would have among others.

    A view may leave another first stride. Kernels choose a memory format by it, and the ops that were recorded for all
    rows hold for the format of all rows only: ``native_group_norm`` would refuse its input.
    """
    if t.dim() < 4 or t.shape[0] != 1 or not t.numel():
        return t
    shape, stride = t.shape, t.stride()
    row = 1 + sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True))
    return t if stride[0] == row else t.as_strided(shape, (row, *stride[1:]))


def _whole(
    x: DeferredTensor | Held, known: Mapping[DeferredTensor, torch.Tensor], node: DeferredOp
) -> torch.Tensor:
    if isinstance(x, Held):
        return x.checked(node.func)
    return known[x] if x in known else x.whole()


def _moved(
    node: DeferredOp,
    t: torch.Tensor,
    source: DeferredTensor,
    target: DeferredTensor | None,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Run a slice along the axis, or the backward of one, on one slice of the region: an overlap of two windows."""
    assert source.window is not None
    assert target is not None
    assert target.window is not None
    dim = source.window.axis.dim
    here, there = _reach(source.window, start, stop), _reach(target.window, start, stop)
    if node.func is aten.slice.Tensor:
        return t.narrow(dim, min(max(there[0] - here[0], 0), t.shape[dim]), there[1] - there[0])
    shape = list(t.shape)
    shape[dim] = there[1] - there[0]
    out = t.new_zeros(shape)
    if t.shape[dim]:
        out.narrow(dim, here[0] - there[0], t.shape[dim]).copy_(t)
    return out


def _reach(window: Window, start: int, stop: int) -> tuple[int, int]:
    """Return the part of a slice of the region that a window has, in the region's indices."""
    begin = max(start, window.start)
    return begin, max(begin, min(stop, window.start + window.axis.size))
