"""Losses: each element or row on its own, then a sum or a mean."""

from __future__ import annotations

from sacplan.core.factors.pointwise import broadcast, pointwise
from sacplan.core.factors.rule import Dims, Kind, Rule, RuleBuilder, register

_NONE, _MEAN = 0, 1  # at::Reduction


def _rows_and_classes(call: RuleBuilder) -> tuple[Dims, Dims, Dims]:
    """Make factors of the targets, of the scores (classes come second), and of the classes' weights."""
    scores, targets = call["self"], call["target"]
    rows = call.dims(targets.shape)
    # A single sample has no rows, and its classes are the only dimension.
    at = 1 if len(scores.shape) > 1 else 0
    classes = call.blocked(scores.shape[at : at + 1])
    return rows if at else ((),) * len(rows), (*rows[:at], *classes, *rows[at:])[: len(scores.shape)], classes


@register("nll_loss_forward", "nll_loss2d_forward")
def _nll(call: RuleBuilder) -> Rule:
    # Outputs: the loss, and the total weight of the targets, by which a mean divides. Slices have other total weights,
    # so a mean in slices is put together of other ops (``techniques/chunk/executor/losses.py``).
    rows, scores, classes = _rows_and_classes(call)
    reduction = call["reduction"]
    over = [f for factors in rows for f in factors]
    if reduction != _NONE:
        call.becomes(over, Kind.WEIGHTED_MEAN if reduction == _MEAN else Kind.SUM, 0)
        call.becomes(over, Kind.SUM, 1)
    weight = [] if call["weight"] is None else [classes]
    return call.rule([scores, rows, *weight], [rows if reduction == _NONE else (), ()])


@register("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(call: RuleBuilder) -> Rule:
    """Slices of a mean are exact: it divides by the total weight of the whole, which is an argument."""
    rows, scores, classes = _rows_and_classes(call)
    weight = [] if call["weight"] is None else [classes]
    grad = rows if call["reduction"] == _NONE else ()
    return call.rule([grad, scores, rows, *weight, ()], [scores])


@register(
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def _elementwise(call: RuleBuilder) -> Rule | None:
    reduction = call["reduction"]
    shape = tuple(call["self"].shape)
    dims = call.dims(shape)
    inputs = [broadcast(dims, shape, t.shape) for t in call.inputs]
    known = [d for d in inputs if d is not None]
    if len(known) != len(inputs):  # a target that is larger than the input: the loss has the broadcast shape
        return None
    over = [f for factors in dims for f in factors]
    if reduction != _NONE:
        call.becomes(over, Kind.MEAN if reduction == _MEAN else Kind.SUM)
    return call.rule(known, [dims if reduction == _NONE else ()])


@register(
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "soft_margin_loss_backward",
    "binary_cross_entropy_backward",
)
def _elementwise_backward(call: RuleBuilder) -> Rule | None:
    """The gradient of a mean is not sliced: it is divided by the number of elements, and a slice has fewer."""
    rule = pointwise(call)
    if rule is None or call["reduction"] != _MEAN:
        return rule
    call.becomes(range(len(rule.sizes)), Kind.BLOCK)
    return call.rule(rule.inputs, rule.outputs)
