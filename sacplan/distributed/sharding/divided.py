"""Ops that exchange a little between ranks while they run on parts.

- A vocabulary, or the classes of a loss, may be cut. Each rank looks up the rows that it has, or looks at the labels
  among its own classes, which is one summand of the result. The logarithm of softmax needs one number of each row from
  each rank.
- The norm of a cut tensor comes from those of its parts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sacplan.core.factors.rule import Kind, Rule
from sacplan.distributed.sharding.linear import dtype_of
from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, Placement
from sacplan.torch_compat.calls import Call

_NONE, _MEAN = 0, 1  # at::Reduction


class Divided(NamedTuple):
    """The outputs of an op whose classes are cut.

    Attributes:
        outputs: their placements; none if they are cut with the inputs.
        reduces, inside_bytes: as in ``AxisStrategy``.
        nests: parts may be of several pieces.
    """

    outputs: tuple[Placement, ...] = ()
    reduces: tuple[int, ...] = ()
    inside_bytes: int = 0
    nests: bool = False


def nbytes(t: Any) -> int:
    """Return the bytes of an unsharded tensor, or of a description of one."""
    count: int = math.prod(t.shape) * dtype_of(t).itemsize
    return count


def norm_order(call: Call) -> float | None:
    """Return the exponent of a norm that comes from norms of parts by a sum; None for any other op."""
    if call.name not in ("linalg_vector_norm", "_foreach_norm"):
        return None
    # 0 counts elements and inf is a maximum: neither is a root of a sum of powers.
    order = float(call["ord"])
    return order if 0 < order < math.inf else None


def along_classes(call: Call, factor: int, rule: Rule, ranks: int = 1) -> Divided | None:
    """Return how an op runs if a factor is its vocabulary or its classes, and is cut; None if it is neither."""
    # The results of parts can be put together as they are: nothing special to do.
    if all(kinds[factor] is not Kind.BLOCK for kinds in rule.kinds):
        return None
    first = [f for factors in rule.inputs[0] for f in factors] if rule.inputs else []
    # Ranks exchange one number of each row: forward those of all ranks (each fills its own slot), backward a
    # sum.
    if call.name in ("_log_softmax", "_log_softmax_backward_data"):
        x = call.inputs[0]
        rows = math.prod(x.shape) // x.shape[call["dim"]]
        numbers = rows * (ranks if call.name == "_log_softmax" else 1)
        return Divided((), (), numbers * max(4, dtype_of(x).itemsize), nests=True)
    # The factor is the vocabulary, dimension 0 of the weight. A row of zeros where another rank has the word:
    # summands.
    if call.name == "embedding" and factor in first:
        return Divided((PARTIAL,))
    if call.name == "embedding_dense_backward" and any(factor in factors for factors in rule.outputs[0]):
        return Divided()
    if call.name not in (
        "nll_loss_forward",
        "nll_loss2d_forward",
        "nll_loss_backward",
        "nll_loss2d_backward",
    ):
        return None
    # Each rank has the gradient of its own classes, so the output is cut with the input.
    if call.name.endswith("backward"):
        return Divided()
    # A mean divides by the total weight, which each rank sees only a part of: that is all-reduced inside of
    # the call. The loss itself stays partial.
    if call["reduction"] == _MEAN:
        return Divided((PARTIAL, REPLICATED), (1,), nbytes(call.outputs[1]))
    return Divided((PARTIAL, REPLICATED if call["reduction"] == _NONE else PARTIAL))
