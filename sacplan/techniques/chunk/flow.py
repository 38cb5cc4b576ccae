"""How an op is cut if slices of some of its tensors are there, or are asked for.

A factor rule says how the dimensions of an op's tensors belong together. So an op is cut along one factor, and a slice
of one tensor tells the slices of all others that have this factor:

- forward, from what it reads (``cut_of_inputs``): ops that are deferred one by one after the input of a module;
- backward, from what its readers ask for (``cuts``): ops that belong to a loop since all that they make is read in it,
  always in the same slices. An op whose results are read in two ways, or as a whole, runs before the loop.

The planner goes through a recorded program (``regions.py``), the executor through the ops that it has deferred.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from sacplan.core.factors.axes import Axis, FactorAxis, from_factor, into_factor
from sacplan.core.factors.rule import Dims, Kind, Rule


class Window(NamedTuple):
    """The part of a region's axis that a sliced tensor has.

    Attributes:
        axis: where it lies in the tensor.
        start: the index in the region's axis at which it begins; a shifted tensor begins later.
    """

    axis: Axis
    start: int = 0

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return a slice [``start``, ``stop``) of the region in the tensor's indices, cut off where the tensor ends."""
        # A slice that misses the tensor is empty.
        size = self.axis.size
        return max(0, min(size, start - self.start)), max(0, min(size, stop - self.start))


class FactorCut(NamedTuple):
    """The factor along which an op is sliced, and where the factor begins in the region's axis."""

    axis: FactorAxis
    start: int = 0


@functools.lru_cache(maxsize=1 << 16)
def _cut(dims: Dims, sizes: tuple[int, ...], window: Window) -> FactorCut | None:
    axis = into_factor(dims, sizes, window.axis)
    return None if axis is None else FactorCut(axis, window.start)


@functools.lru_cache(maxsize=1 << 16)
def window_of(dims: Dims, sizes: tuple[int, ...], cut: FactorCut) -> Window | None:
    """Return the part of a tensor that a slice of an op reads or makes; None if that is all of it."""
    axis = from_factor(dims, sizes, cut.axis)
    return None if axis is None else Window(axis, cut.start)


def cut_of_inputs(rule: Rule | None, windows: Iterable[Window | None]) -> FactorCut | None:
    """Return the cut of an op that reads its inputs in these windows (None: all of it); None if there is none."""
    if rule is None:
        return None  # it must see whole tensors
    pairs = zip(rule.inputs, windows, strict=True)
    found = {_cut(dims, rule.sizes, window) for dims, window in pairs if window is not None}
    # No cut: an input is cut where the rule has no factor (None), or two inputs along different factors.
    return found.pop() if len(found) == 1 else None


def _cut_of_outputs(rule: Rule | None, asked: Iterable[Collection[Window | None]]) -> FactorCut | None:
    """Return the cut of an op whose outputs are asked for in these windows (None: all of it); None if there is none."""
    if rule is None:
        return None  # it must see whole tensors
    found = {
        None if window is None else _cut(dims, rule.sizes, window)
        for dims, windows in zip(rule.outputs, asked, strict=True)
        for window in windows
    }
    return found.pop() if len(found) == 1 else None


def slices_made(rule: Rule, cut: FactorCut) -> list[tuple[Window | None, Kind | None]] | None:
    """Return for each output of a sliced op the part that one slice makes, or how the parts are combined.

    None: the op cannot be sliced so.
    """
    found: list[tuple[Window | None, Kind | None]] = []
    for i, dims in enumerate(rule.outputs):
        kind = rule.kind(cut.axis.factor, i)
        if not kind.makes_the_whole:
            return None
        window = window_of(dims, rule.sizes, cut)
        found.append((window, kind if window is None else None))
    return found


def slices_read(rule: Rule | None, cut: FactorCut | None, n_inputs: int) -> list[Window | None]:
    """Return by input of an op the part that one slice reads; None: all of it."""
    if rule is None or cut is None:
        return [None] * n_inputs
    return [window_of(dims, rule.sizes, cut) for dims in rule.inputs]


class FlowOp(NamedTuple):
    """An op to be cut. What it reads and makes is named by keys of the caller's choice."""

    rule: Rule | None
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]


def cuts(ops: Sequence[FlowOp], asked: Mapping[Hashable, Collection[Window | None]]) -> dict[int, FactorCut]:
    """Return by index into ``ops`` the cut of each op that can be cut.

    First backwards, so that all readers of a tensor are known before its maker. What an op that is not cut reads, or
    what two ops read in different ways, is made as a whole. Then forward through ops whose results nobody asks for.
    What one of these cannot read in slices is made as a whole, too, and both passes start again.

    Args:
        ops: in the order in which they run.
        asked: by tensor the slices that others than these ops ask for; None: all of it.
    """
    whole: set[Hashable] = set()
    while True:
        wanted: dict[Hashable, set[Window | None]] = defaultdict(set, {t: {None} for t in whole})
        for t, windows in asked.items():
            wanted[t].update(windows)
        found: dict[int, FactorCut] = {}
        made: dict[Hashable, Window | None] = {}
        unasked: list[int] = []
        for i, op in reversed(list(enumerate(ops))):
            of_outputs = [wanted[t] for t in op.outputs]
            if not any(of_outputs):
                unasked.append(i)
                continue
            if (cut := _possible(op, _cut_of_outputs(op.rule, of_outputs), made)) is not None:
                found[i] = cut
            for t, window in zip(op.inputs, slices_read(op.rule, cut, len(op.inputs)), strict=True):
                wanted[t].add(window)
        n_whole = len(whole)
        for i in reversed(unasked):
            op, read = ops[i], {t: made[t] for t in ops[i].inputs if t in made}
            # What slices are combined to (None) is there only after the loop.
            sliced = read and None not in read.values()
            cut = cut_of_inputs(op.rule, map(read.get, op.inputs)) if sliced else None
            if (cut := _possible(op, cut, made)) is not None:
                found[i] = cut
            else:
                whole.update(read)
        if len(whole) == n_whole:
            return found


def _possible(op: FlowOp, cut: FactorCut | None, made: dict[Hashable, Window | None]) -> FactorCut | None:
    """Return a cut of an op, and note in ``made`` what its slices make; None if the op cannot be cut so."""
    slices = slices_made(op.rule, cut) if op.rule is not None and cut is not None else None
    if slices is None:
        return None
    made.update((t, window) for t, (window, _) in zip(op.outputs, slices, strict=True))
    return cut


def axes_of(rule: Rule, splits: Mapping[int, Collection[tuple[int, ...]]]) -> Iterator[Axis]:
    """Yield the axes of an op's first output: its factors, and parts of these that other ops see (``splits_of``)."""
    for dim, factors in enumerate(rule.outputs[0]):
        sizes = [rule.sizes[f] for f in factors]
        for axis in _parts_of(Axis(dim, 1, math.prod(sizes), 1), sizes):
            yield axis
            for split in splits.get(axis.size, ()):
                yield from _parts_of(axis, split)


def splits_of(rules: Iterable[Rule]) -> dict[int, dict[tuple[int, ...], None]]:
    """Return by size of a dimension the factors that some op splits such a dimension into.

    A dimension of batch times sequence is one factor to a matrix product. Only a view elsewhere shows both factors.
    """
    found: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)
    for rule in dict.fromkeys(rules):
        for factors in chain(*rule.inputs, *rule.outputs):
            if len(factors) > 1:
                sizes = tuple(rule.sizes[f] for f in factors)
                found[math.prod(sizes)][sizes] = None
    return found


def _parts_of(axis: Axis, sizes: Sequence[int]) -> Iterator[Axis]:
    """Yield the parts of an axis with these sizes, which multiply to its size; parts of size 1 are left out."""
    before, after = axis.outer, axis.size * axis.inner
    for size in sizes:
        after //= max(1, size)
        if size > 1:
            yield Axis(axis.dim, before, size, after)
        before *= size
