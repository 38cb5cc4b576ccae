"""How an op runs when neither the layout of a parameter nor a place decides it.

A choice depends on shapes, on the layouts of the inputs and on the mesh, and on nothing else. So every rank makes the
same one, and so does the machine that plans.

For each axis of the mesh, ``axis_strategies`` offers the strategies of the op. They are ranked (``_ranked``): first
those that leave activations where they are and redistribute parameters alone, then by the bytes that ranks send now and
will have to send for the outputs later. Partial tensors are activations as well: they are reduced where an op needs the
sum, not before. The bytes on one axis depend on what the other axes cut, so each is ranked twice: with the inputs as
they are, then with the best strategy of the others. Of the combinations, the one with the least sum of ranks whose cuts
go together is taken (``_best_first``). This is greedy: it sees one op and not those after it. A sharding asks for
another layout where that is worse (``places.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sacplan._shard.divided import nbytes, norm_order
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import (
    REPLICATED,
    Placement,
    Placements,
    WantedPlacements,
    fits,
    format_asked,
    format_layout,
)
from sacplan._shard.strategies import AxisStrategy, axis_strategies
from sacplan._torch.calls import Call, flat_tensors
from sacplan._torch.ops import aten_names, is_alias
from sacplan.errors import PlanError

_READS_NO_VALUES = aten_names(
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided"
)


class CallSharding(NamedTuple):
    """How one call of an op runs.

    Attributes:
        strategies: by axis of the mesh.
        inputs: the layout that each tensor argument must have, in the order of ``AxisStrategy.inputs``.
        outputs: the layout of each tensor returned.
    """

    strategies: tuple[AxisStrategy, ...]
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]


_MOST_CHOICES = 1 << 16
_choices: dict[Any, CallSharding] = {}


def choose(
    call: Call,
    have: Sequence[Placements],
    mesh: Mesh,
    asked: Sequence[WantedPlacements | None] | None = None,
    weights: Sequence[bool] = (),
) -> CallSharding:
    """Return how a call runs, given the layouts of its inputs.

    A tensor that is written in place keeps its layout: a copy would be written instead. So does the input of a view, if
    any strategy allows that: the view of a copy would not show later writes.

    Args:
        call: of unsharded tensors.
        have: the layout of each tensor argument; plain tensors are replicated.
        mesh: the ranks.
        asked: layouts that inputs must get; None for an input, or an axis, that may get any.
        weights: which tensor arguments are parameters, or made of nothing else.

    Raises:
        PlanError: no strategy gives the inputs the layouts that are asked for.
    """
    key = (call.key, tuple(have), mesh, None if asked is None else tuple(asked), tuple(weights))
    found = _choices.get(key)
    if found is None:
        # Shapes that vary would fill the table without end. All choices are a function of the key, so
        # forgetting them costs time only.
        if len(_choices) >= _MOST_CHOICES:
            _choices.clear()
        found = _choices[key] = _choose(
            call, tuple(have), mesh, asked or [None] * len(have), weights or [False] * len(have)
        )
    return found


def _choose(
    call: Call,
    have: tuple[Placements, ...],
    mesh: Mesh,
    asked: Sequence[WantedPlacements | None],
    weights: Sequence[bool],
) -> CallSharding:
    offered = [_offered(call, have, mesh, asked, axis) for axis in range(len(mesh.axes))]
    # First with the other axes as the inputs are, then with the best strategy of each.
    first = [
        _ranked(call, have, mesh, asked, weights, axis, offered[axis], None) for axis in range(len(offered))
    ]
    chosen = [strategies[0][1] if strategies else None for strategies in first]
    ranked = [
        _ranked(call, have, mesh, asked, weights, axis, offered[axis], chosen) for axis in range(len(offered))
    ]
    for strategies in _best_first(ranked):
        # Each axis alone divides; together they may not, as where two axes cut one dimension.
        inputs = tuple(zip(*(s.inputs for s in strategies), strict=True))
        outputs = tuple(zip(*(s.outputs for s in strategies), strict=True))
        tensors = zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
        if all(fits(t.shape, layout, mesh.ranks) for t, layout in tensors):
            return CallSharding(strategies, inputs, outputs)
    raise PlanError(_no_strategy(call, have, mesh, asked))


_SHOWN = 4  # tensors that an error shows; the others are counted


def _no_strategy(
    call: Call, have: Sequence[Placements], mesh: Mesh, asked: Sequence[WantedPlacements | None]
) -> str:
    shapes = [
        f"{tuple(t.shape)} as {format_layout(layout)}"
        + ("" if wanted is None else f", asked as {format_asked(wanted)}")
        for t, layout, wanted in zip(call.inputs, have, asked, strict=True)
    ]
    # A fused optimizer has hundreds.
    more = f" and {len(shapes) - _SHOWN} more tensors" if len(shapes) > _SHOWN else ""
    found = ", ".join(shapes[:_SHOWN]) + more
    why, remedy = "no strategy has such inputs", "leave the sharding to the search of sacplan.plan"
    if call.written:
        why = "it writes a tensor in place, which cannot be moved"
        remedy = "write the result to a new tensor"
    return f"{call.func} on {found} cannot run on mesh {mesh}: {why}. Ask for other layouts at this call, or {remedy}."


def _offered(
    call: Call, have: tuple[Placements, ...], mesh: Mesh, asked: Sequence[WantedPlacements | None], axis: int
) -> list[AxisStrategy]:
    """Return the strategies on one axis that leave written tensors where they are, and do what is asked."""
    here = [layout[axis] for layout in have]
    returned = [here[i] for i in call.written] if _returns_what_it_writes(call.func) else []
    if mesh.ranks[axis] == 1:  # all placements are the same, so nothing moves
        others = (REPLICATED,) * (len(call.outputs) - len(returned))
        return [AxisStrategy(tuple(here), (*returned[: len(call.outputs)], *others))]
    # No values are read, so nothing can be wrong about them, and nothing has to move.
    if call.func._schema.name in _READS_NO_VALUES:
        return [_reads_no_values(call, here)]
    wanted = [None if layout is None else layout[axis] for layout in asked]
    if call.func._schema.name.startswith(_OF_LISTS):
        found: Sequence[AxisStrategy] = [_by_position(call, here)]
    else:
        # What is asked for is offered even if the input does not have it yet: it will be redistributed.
        may_have = [{p} if p_asked is None else {p, p_asked} for p, p_asked in zip(here, wanted, strict=True)]
        found = axis_strategies(call, mesh.ranks[axis], may_have)
    # What is written cannot move: the copy would be written instead.
    fixed = {i: here[i] for i in call.written}
    fixed |= {i: placement for i, placement in enumerate(wanted) if placement is not None}
    return [
        s
        for s in found
        if all(s.inputs[i] == placement for i, placement in fixed.items())
        and all(o == placement for o, placement in zip(s.outputs, returned, strict=False))
    ]


_OF_LISTS = ("aten::_foreach_", "aten::_fused_")
_REDUCE_LISTS = aten_names("_foreach_norm _foreach_max")


def _by_position(call: Call, here: Sequence[Placement]) -> AxisStrategy:
    """Return the strategy of an op on lists: tensors at one position are placed as the one that is written there."""
    if call.func._schema.name in _REDUCE_LISTS:
        return _norms(call, here)
    at: list[int | None] = []
    for value in (*call.args, *call.kwargs.values()):
        lists = isinstance(value, (tuple, list))
        at.extend(i if lists else None for i, _ in enumerate(flat_tensors([value])))
    # Written tensors first, since they decide for their position. Then any tensor there.
    lies: dict[int, Placement] = {}
    shapes: dict[int, Any] = {}
    for i in (*call.written, *range(len(here))):
        if (position := at[i]) is not None:
            lies.setdefault(position, REPLICATED if here[i].is_partial else here[i])
            shapes.setdefault(position, call.inputs[i].shape)
    # Counts of steps are scalars, replicated beside parts of parameters.
    inputs = [
        REPLICATED if position is None or t.shape != shapes[position] else lies[position]
        for t, position in zip(call.inputs, at, strict=True)
    ]
    return AxisStrategy(tuple(inputs), tuple(lies[i] for i in range(len(call.outputs))))


def _norms(call: Call, here: Sequence[Placement]) -> AxisStrategy:
    """Return the strategy that takes norms of parts, so that gradients need not be gathered to be clipped."""
    whole = (REPLICATED,) * len(call.outputs)
    # A norm that does not come from norms of parts by a sum, such as a maximum: everything is gathered.
    if norm_order(call) is None:
        return AxisStrategy((REPLICATED,) * len(here), whole)
    inputs = tuple(p if p.is_cut else REPLICATED for p in here)
    cut = tuple(i for i, p in enumerate(inputs) if p.is_cut)
    return AxisStrategy(inputs, whole, reduces=cut, inside_bytes=sum(nbytes(call.outputs[i]) for i in cut))


def _returns_what_it_writes(func: Any) -> bool:
    return any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)


def _reads_no_values(call: Call, here: Sequence[Placement]) -> AxisStrategy:
    """Return the strategy of a factory that reads only the shape and dtype of a tensor: nothing moves."""
    # A result of another shape cannot be cut alike. And of summands the result would be added up: ones on
    # each rank are not ones.
    same = [tuple(t.shape) == tuple(call.inputs[0].shape) and not here[0].is_partial for t in call.outputs]
    return AxisStrategy(tuple(here), tuple(here[0] if s else REPLICATED for s in same))


_Preference = tuple[float, ...]


def _ranked(
    call: Call,
    have: tuple[Placements, ...],
    mesh: Mesh,
    asked: Sequence[WantedPlacements | None],
    weights: Sequence[bool],
    axis: int,
    strategies: Sequence[AxisStrategy],
    others: Sequence[AxisStrategy | None] | None,
) -> list[tuple[_Preference, AxisStrategy]]:
    """Rank the strategies on one axis, the best first.

    By: inputs of a view that move; whether activations are sent; bytes sent now and later, more on slow axes; bytes
    of outputs; compute; the order in which they are offered.
    """
    # Axis 0 has the slowest links. Here a factor of 2 is enough to prefer the faster axis; the path of a
    # redistribution weighs by ``SLOWER``.
    n, slowness = mesh.ranks[axis], 2.0 ** (len(mesh.axes) - 1 - axis)
    elsewhere = [(j, r) for j, r in enumerate(mesh.ranks) if j != axis]
    # Parts into which other axes cut: inputs as they have them (first pass), or by their best strategies
    # (second pass).
    if others is None:
        parts = [math.prod(r for j, r in elsewhere if layout[j].is_cut) for layout in have]
        results = [1] * len(call.outputs)
    else:
        known = [(s, r) for j, r in elsewhere if (s := others[j]) is not None]
        parts = [math.prod(r for s, r in known if s.inputs[i].is_cut) for i in range(len(have))]
        results = [math.prod(r for s, r in known if s.outputs[i].is_cut) for i in range(len(call.outputs))]
    sizes = [nbytes(t) / p for t, p in zip(call.inputs, parts, strict=True)]
    made = [nbytes(t) / p for t, p in zip(call.outputs, results, strict=True)]
    view = is_alias(str(call.func))
    was_cut = [
        layout[axis].is_cut or (wanted is not None and (p := wanted[axis]) is not None and p.is_cut)
        for layout, wanted in zip(have, asked, strict=True)
    ]
    ranked: list[tuple[_Preference, AxisStrategy]] = []
    for position, s in enumerate(strategies):
        moves = [
            moved_bytes(layout[axis], to, size, n)
            for layout, to, size in zip(have, s.inputs, sizes, strict=True)
        ]
        follows = any(was and p.is_cut for was, p in zip(was_cut, s.inputs, strict=True))
        later = sum(
            _later(o, size, n, follows)
            for o, size in zip(s.outputs, made, strict=True)
            if o.is_cut or not view  # a view of summands adds none
        )
        held = sum(size / n if o.is_cut else size for o, size in zip(s.outputs, made, strict=True))
        rank = (
            # The order of the tuple is the rule, see above. Every entry is a sum over axes in
            # ``_best_first``, so all are floats.
            float(view and any(moves)),
            float(
                any(
                    not weight and is_sent(layout[axis], to)
                    for layout, to, weight in zip(have, s.inputs, weights, strict=True)
                )
            ),
            (sum(moves) + later + 2 * s.inside_bytes * (n - 1) / n) * slowness,
            held,
            1 / n if s.cut is not None else 1.0,
            float(position),
        )
        ranked.append((rank, s))
    ranked.sort(key=lambda found: found[0])
    return ranked


def is_sent(source: Placement, target: Placement) -> bool:
    """Whether a redistribution on one axis takes a collective."""
    return source != target and source != REPLICATED


_LOCAL = 1e-3
"""A byte that is copied or cleared by a rank itself, over one that is sent."""


def moved_bytes(source: Placement, target: Placement, size: float, n: int) -> float:
    """Return the bytes that each rank sends for a redistribution on one axis; a few where it only cuts or clears.

    Args:
        source, target: of the tensor.
        size: its bytes, without the parts that other axes cut off.
        n: ranks of the axis.
    """
    if source == target:
        return 0.0
    share = size * (n - 1) / n
    if source.is_cut:
        # All-to-all: each rank sends all but one of the n parts of its own part.
        if target.is_cut and target.dim != source.dim:
            return share / n
        return share + (0.0 if target == REPLICATED else size * _LOCAL)
    if source.is_partial:
        # To other summands, such as from sums to maxima: reduced first, then cleared on all ranks but one.
        if target.is_partial:
            return 2 * share + size * _LOCAL
        return share if target.is_cut else 2 * share
    # From replicated: a rank only cuts, or clears, what it has.
    return size * _LOCAL / (n if target.is_cut else 1)


def _later(output: Placement, size: float, n: int, follows: bool) -> float:
    """Estimate the bytes that an output costs later: summands will be reduced, and new cuts be gathered.

    The factors are a little above 1, so that reducing or gathering the inputs now wins where both move as much.
    ``follows``: an input that was cut stays cut, and the output follows it.
    """
    if output.is_partial:
        return 1.01 * moved_bytes(output, REPLICATED, size, n)
    if output.is_cut and not follows:
        return 1.5 * moved_bytes(output, REPLICATED, size, n)
    return 0.0


def _best_first(
    ranked: Sequence[Sequence[tuple[_Preference, AxisStrategy]]],
) -> Iterator[tuple[AxisStrategy, ...]]:
    """Yield combinations of one strategy for each axis, the least sum of ranks first."""
    # An axis without a strategy: no combination.
    if not all(ranked):
        return

    def rank(at: tuple[int, ...]) -> _Preference:
        return tuple(map(sum, zip(*(ranked[axis][i][0] for axis, i in enumerate(at)), strict=True)))

    start = (0,) * len(ranked)
    # Best-first over the grid of indices: each list is sorted, so a combination never ranks before those with
    # a smaller index on one axis. The heap holds the frontier, and ``seen`` keeps a combination from being
    # reached in two ways.
    queue, seen = [(rank(start), start)], {start}
    while queue:
        _, at = heapq.heappop(queue)
        yield tuple(ranked[axis][i][1] for axis, i in enumerate(at))
        for axis, i in enumerate(at):
            following = (*at[:axis], i + 1, *at[axis + 1 :])
            if i + 1 < len(ranked[axis]) and following not in seen:
                seen.add(following)
                heapq.heappush(queue, (rank(following), following))
