"""The strategies of an op on one axis of a mesh, from its factor rule.

A factor is a dimension that tensors of an op share. If the op is spread along one, its inputs are cut along the
dimensions that carry the factor. Its outputs are cut likewise, or partial if the factor is summed over. A view
also takes a partial input. On a mesh of several axes, an op has one such strategy for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sacplan.core.factors.axes import Axis, FactorAxis, from_factor, into_factor
from sacplan.core.factors.pointwise import pointwise
from sacplan.core.factors.rule import Kind, Rule, RuleBuilder, formula_of, rule_of
from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, Placement, cut
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import aten_names, is_alias, op_traits


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """How one call of an op runs on the ranks of one axis.

    Attributes:
        inputs: placement of each tensor argument, in the order of positions, then keywords, lists flattened.
        outputs: placement of each tensor returned.
        cut: the factor of which each rank has a part; None where all ranks do the same, or view their summands.
        inside_bytes: of all that is all-reduced as a part of the call, as unsharded tensors: the total weight of a mean
            over labels, and what ranks that have parts of the classes tell each other. There are no other collectives.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    cut: FactorAxis | None = None
    inside_bytes: int = 0


# Elementwise ops that draw numbers, for which ``rule_of`` has no rule.
_DRAWING = aten_names(
    """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ native_dropout normal_ rand_like randint_like
    randn_like random_ uniform_"""
)

# Products with a bias, by its argument: if ranks have summands of the product, they have summands of the bias.
_ADDED = {"addmm": "self", "baddbmm": "self", "addmv": "self", "convolution": "bias"}

_NONE, _MEAN = 0, 1  # at::Reduction


def _rule(call: Call) -> Rule | None:
    """Return the factor rule of a call, also where it draws random numbers: parts draw their own."""
    func = call.func
    # ``rule_of`` has no rule for ops that draw, since slices on one device must draw the numbers of the whole. Ranks
    # need not: each draws for its own part.
    rule = rule_of(func, call.args, call.kwargs, call.returned)
    if rule is None and func.namespace == "aten":
        formula = formula_of(func) if "dropout_p" in call.arguments else None
        if func._schema.name in _DRAWING:
            formula = pointwise
        builder = RuleBuilder(func, call.args, call.kwargs, call.returned)
        return formula(builder) if formula is not None and call.outputs else None
    return rule


def axis_strategies(
    call: Call, ranks: int, available: Sequence[Collection[Placement]]
) -> tuple[AxisStrategy, ...]:
    """Return the ways in which one call of an op may run on the ranks of one axis.

    Args:
        call: of unsharded tensors, in a forward pass: formulas of backward passes only run on whole tensors.
        ranks: of the axis.
        available: by tensor argument, the placements that it may have on this axis. Cuts inside a dimension
            (``outer`` above 1) and inputs that are partial are offered only where an argument may have them.

    Returns:
        The first has all tensors replicated; then cuts, by factor; then views of what is partial. Arguments that
        are written in place may have to keep their placements (see ``Call.written``), which is not checked.
    """
    found = [AxisStrategy((REPLICATED,) * len(call.inputs), (REPLICATED,) * len(call.outputs))]
    if "_backward" in call.name:
        return tuple(found)
    rule = _rule(call)
    if rule is not None:
        for within in _cuts(rule, call, ranks, available):
            strategy = _along(rule, call, within)
            if strategy is not None and _is_offered(strategy, available):
                found.append(strategy)
    # Not for a view as another type: the sum of reinterpreted bits is not the reinterpreted sum.
    if is_alias(str(call.func)) and call.outputs[0].dtype == call.inputs[0].dtype:
        partial = [p for p in available[0] if p.is_partial]
        found.extend(AxisStrategy((p,), (p,) * len(call.outputs)) for p in partial)
    # The result is written onto the first input, so both have one placement.
    if op_traits(call.func).in_place:
        found = [s for s in found if s.inputs[:1] == s.outputs[:1]]
    return tuple(dict.fromkeys(found))


def _cuts(
    rule: Rule, call: Call, ranks: int, available: Sequence[Collection[Placement]]
) -> dict[FactorAxis, None]:
    """Return the cuts of factors: even ones, and those at which an argument may be cut already."""
    found: dict[FactorAxis, None] = {}
    for factor, size in enumerate(rule.sizes):
        if size and size % ranks == 0:
            found[FactorAxis(factor, 1, ranks, size // ranks)] = None
    for t, dims, placements in zip(call.inputs, rule.inputs, available, strict=True):
        for p in sorted(placements):
            # Not a cut, or one that this shape does not have.
            if not p.is_cut or p.dim >= len(t.shape) or t.shape[p.dim] % (p.outer * ranks):
                continue
            axis = Axis(p.dim, p.outer, ranks, t.shape[p.dim] // (p.outer * ranks))
            # None: the dimension is made of several factors, and the cut goes through more than one.
            within = into_factor(dims, rule.sizes, axis) if axis.inner else None
            if within is not None:
                found[within] = None
    return found


def _is_offered(strategy: AxisStrategy, available: Sequence[Collection[Placement]]) -> bool:
    inside = [(i, p) for i, p in enumerate(strategy.inputs) if p.outer > 1]
    return not inside or any(p in available[i] for i, p in inside)


def _along(rule: Rule, call: Call, within: FactorAxis) -> AxisStrategy | None:
    """Return the strategy that gives each rank a part of a factor; None if the results cannot be put together."""

    def placement(dims: Any) -> Placement:
        axis = from_factor(dims, rule.sizes, within)
        return REPLICATED if axis is None else cut(axis.dim, axis.outer)

    inputs, outputs = [placement(dims) for dims in rule.inputs], [placement(dims) for dims in rule.outputs]
    kinds = [rule.kind(within.factor, i) for i in range(len(outputs))]
    # First, since these ops have ``BLOCK`` factors, which are refused below, and yet known ways to combine their parts.
    classes = _along_classes(call, within, rule) if Kind.BLOCK in kinds else None
    if classes is not None:
        of_classes, inside_bytes = classes
        return AxisStrategy(tuple(inputs), of_classes or tuple(outputs), within, inside_bytes)
    # A product whose summed dimension is cut, plus a bias: a whole bias would be added once for each rank.
    added = _added(call, kinds, inputs)
    if added is not None:
        inputs[added], outputs[0] = PARTIAL, PARTIAL
        return AxisStrategy(tuple(inputs), tuple(outputs), within)
    inside_bytes = 0
    for i, kind in enumerate(kinds):
        if kind is Kind.BLOCK:  # parts cannot be put together
            return None
        # This output is cut along the factor, or does not depend on it.
        if outputs[i].is_cut or kind is Kind.PASS:
            continue
        # Outputs of integers, such as indices, cannot be partial.
        if not (call.outputs[i].is_floating_point() or call.outputs[i].is_complex()):
            return None
        outputs[i] = _PARTIAL[kind]
    # The next output is the total weight, which must be known on all ranks to divide by.
    for i, kind in enumerate(kinds):
        if kind is Kind.WEIGHTED_MEAN:
            outputs[i + 1] = REPLICATED
            inside_bytes += call.outputs[i + 1].nbytes
    return AxisStrategy(tuple(inputs), tuple(outputs), within, inside_bytes)


def _along_classes(call: Call, within: FactorAxis, rule: Rule) -> tuple[tuple[Placement, ...], int] | None:
    """Return how an op runs whose vocabulary, or whose classes, are cut; None if the factor is neither.

    Each rank looks up the rows that it has, or looks at the labels among its own classes, which is one summand of the
    result. The logarithm of softmax needs one number of each row from each rank.

    Returns:
        The placements of the outputs, empty where they are cut with the inputs; and the bytes that are exchanged.
    """
    if call.name == "_log_softmax":
        x = call.inputs[0]
        rows = math.prod(x.shape) // x.shape[call["dim"]]
        return (), rows * within.size * max(4, x.itemsize)
    # The classes of a rank would be several pieces, and the code counts them from one beginning.
    if within.outer > 1:
        return None
    # The factor is the vocabulary, dimension 0 of the weight. A row of zeros where another rank has the word: summands.
    if call.name == "embedding" and any(within.factor in factors for factors in rule.inputs[0]):
        return (PARTIAL,), 0
    if call.name not in ("nll_loss_forward", "nll_loss2d_forward"):
        return None
    # A mean divides by the total weight. Each rank sees a part of it, which is all-reduced inside of the call. The loss
    # itself stays partial.
    if call["reduction"] == _MEAN:
        return (PARTIAL, REPLICATED), call.outputs[1].nbytes
    return (PARTIAL, REPLICATED if call["reduction"] == _NONE else PARTIAL), 0


_PARTIAL = {
    Kind.SUM: PARTIAL,
    Kind.MEAN: Placement("P", reduce="avg"),
    Kind.WEIGHTED_MEAN: PARTIAL,
    Kind.MAX: Placement("P", reduce="max"),
    Kind.MIN: Placement("P", reduce="min"),
}


def _added(call: Call, kinds: Sequence[Kind], inputs: Sequence[Placement]) -> int | None:
    """Return the position of a bias that is added to partial products; None where there is none."""
    name = _ADDED.get(call.name)
    names = [name for name, _ in call.named_inputs]
    if name not in names or kinds != [Kind.BLOCK]:
        return None
    at = names.index(name)
    # Both matrices are cut, and the bias is not: this is the factor that is summed over.
    return at if all(p.is_cut != (i == at) for i, p in enumerate(inputs)) else None
