"""The rules of a fake step, op by op: answers to ops that ask for data, and values that are assumed.

``data_rules`` documents them. To add one, decorate a function with the ops that it is for:

    @answer(aten.nonzero.default)    # replaces an op whose result has a size or Python value that depends on data
    def _nonzero(values, func, args, kwargs): ...        # the result, NewArguments, or NO_ANSWER

    @assume(aten.topk.default)       # values for the fake result of an op whose inputs are not known
    def _topk(values, args, kwargs, out): ...            # (real values in the result's order, name of the rule)

    @spread(aten.uniform_.default)   # numbers for an op that fills its first argument at random
    def _uniform(target, low=0.0, high=1.0): ...
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from sacplan.device.kernels import active_cuda
from sacplan.record.checks import outcome_that_passes
from sacplan.record.fake_values import DESCRIPTIONS, NO_ANSWER, PARAMETERS, KnownValues, is_float
from sacplan.torch_compat.ops import RuleTable, op_named, tensors_in
from sacplan.torch_compat.private import ranks_of_group

aten = torch.ops.aten

MAX_UNDEFINED_FLOATS = 2**14
"""Most floats of an ``empty`` tensor that is followed: larger ones are mostly filled with unknown values."""

UNKNOWN = object()
"""Stands for a result whose values stay unknown."""


@dataclass(frozen=True, slots=True)
class NewArguments:
    """An answer: run the op on these arguments instead."""

    args: tuple[Any, ...]


answer: RuleTable[Callable[[KnownValues, Any, Any, Any], Any]] = RuleTable()
assume: RuleTable[Callable[[KnownValues, Any, Any, Any], tuple[Any, str]]] = RuleTable()
spread: RuleTable[Callable[..., None]] = RuleTable()


# --- ops that ask for data ---------------------------------------------------------------------------


# Ops that depend on data without PyTorch's tags for it; fake kernels of the last two refuse what real ones take.
_UNTAGGED = (
    aten.equal.default,
    aten.allclose.default,
    aten._ctc_loss.Tensor,
    aten._ctc_loss.default,
    aten._grouped_mm.default,
    aten.histc.default,
)


@functools.cache
def needs_an_answer(func: Any) -> bool:
    """Whether an op has a result whose size or Python value depends on data, by PyTorch's tags, or is listed above."""
    tags = func.tags
    return (
        torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags or func in _UNTAGGED
    )


def answer_if_known(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer an op with the values of its inputs, if all are known."""
    inputs = tensors_in((args, kwargs))
    out = values.run_on_values(func, args, kwargs, inputs)
    if out is NO_ANSWER:
        return NO_ANSWER
    # A result is only as certain as its inputs: what they rest on is noted, and the result rests on it, too.
    resting_on = values.rules_of(inputs)
    values.apply_rules(resting_on, func)
    if isinstance(out, torch.Tensor):
        return values.as_fake(out, resting_on)
    if isinstance(out, (tuple, list)):
        return type(out)(values.as_fake(t, resting_on) for t in out)
    return out


@answer(aten._local_scalar_dense.default)
def _scalar(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    # A check in user code (``if x.isnan().any(): raise``) passes in a step worth recording. This comes before the
    # known value, since a value by a rule is only assumed: if a check fails on it, the rule was wrong.
    if args[0].dtype == torch.bool and (
        values.value(args[0]) is None or values.rules_of(args[:1]).keys() & DESCRIPTIONS.keys()
    ):
        passes = outcome_that_passes()
        if passes is not None:
            values.apply_rules(("checks pass",), func)
            return passes
    known = answer_if_known(values, func, args, kwargs)
    # An unknown float is mostly logged. An unknown integer or truth value would decide a size or a branch,
    # so there is no rule for it.
    if known is NO_ANSWER and args[0].dtype.is_floating_point and PARAMETERS not in values.rules_of(args[:1]):
        values.apply_rules(("unit value",), func)
        return 1.0
    if known is NO_ANSWER:
        raise values.refusal(func, args, kwargs)
    return known


def _nonzero_of(values: KnownValues, func: Any, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, None]]:
    """Return rows of indices [K, ndim] of the elements of a mask that are true; of all if it is not known."""
    value = values.value(mask)
    resting_on = {"all elements": None} if value is None else values.rules_of([mask])
    values.apply_rules(resting_on, func)
    with no_dispatch():
        rows = torch.nonzero(torch.ones(mask.shape, dtype=torch.bool) if value is None else value)
    return rows, resting_on


@answer(aten.nonzero.default)
def _nonzero(values: KnownValues, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return values.as_fake(*_nonzero_of(values, func, args[0]))


@answer(aten.index.Tensor)
def _index(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    # Only masks make the size depend on data. Each becomes the indices of its true elements, one for each dimension of
    # the mask, and FakeTensorMode runs the op on these.
    tensor, indices = args
    masks = (torch.bool, torch.uint8)
    if not any(i is not None and i.dtype in masks for i in indices):
        return NO_ANSWER
    replaced: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in masks:
            replaced.append(index)
            continue
        rows, resting_on = _nonzero_of(values, func, index)
        with no_dispatch():
            columns = [column.contiguous() for column in rows.unbind(1)]
        replaced.extend(values.as_fake(column, resting_on) for column in columns)
    return NewArguments((tensor, replaced))


@answer(aten.masked_select.default)
def _masked_select(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    known = answer_if_known(values, func, args, kwargs)
    if known is not NO_ANSWER:
        return known
    # The values of the tensor are not known, but those of the mask may be: then the size is exact.
    tensor, mask = args
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    value = values.value(mask)
    if value is None:
        values.apply_rules(("all elements",), func)
        return tensor.new_empty(math.prod(shape))
    values.apply_rules(values.rules_of([mask]), func)
    with no_dispatch():
        count = int(value.expand(shape).sum())
    return tensor.new_empty(count)


@answer(aten._ctc_loss.Tensor, aten._ctc_loss.default)
def _ctc_loss(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Return loss [N] and alpha [N, T, 2 * longest target + 1]; T and N from log_probs [T, N, C]."""
    # Alpha depends on the longest target. With padded targets [N, S] it has at most S elements; for targets in one row
    # only the lengths tell.
    log_probs, targets, _, lengths = args[:4]
    if isinstance(lengths, torch.Tensor):
        value = values.value(lengths)
        if value is None and targets.dim() < 2:
            raise values.refusal(func, args, kwargs)
        with no_dispatch():
            longest = targets.shape[1] if value is None else int(value.max())
    else:
        longest = max(lengths)
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


@answer(aten._grouped_mm.default)
def _grouped_mm(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Return outputs of types other than bfloat16: the kernels take them, torch's fake kernel (2.13) refuses them."""
    if args[0].dtype == torch.bfloat16:
        return NO_ANSWER  # torch's own fake kernel takes these
    with values.paused():
        like = [torch.empty_strided(m.shape, m.stride(), dtype=torch.bfloat16) for m in args[:2]]
        out = func(*like, *args[2:], **{**kwargs, "out_dtype": None})
        return torch.empty_strided(out.shape, out.stride(), dtype=kwargs.get("out_dtype") or args[0].dtype)


@answer(aten.histc.default)
def _histc(values: KnownValues, func: Any, args: Any, kwargs: Any) -> Any:
    """Count integers, as routers do with the experts chosen: CUDA takes them, kernels of a CPU refuse them."""
    if args[0].dtype.is_floating_point or active_cuda() is None:
        return NO_ANSWER
    chosen, bins = values.value(args[0]), _argument(args, kwargs, 1, "bins", 100)
    with no_dispatch():
        counts = None if chosen is None else func(chosen.double(), *args[1:], **kwargs).to(args[0].dtype)
    return values.as_fake_like(torch.Size([bins]), (1,), args[0].dtype, counts, values.rules_of(args[:1]))


# --- ops whose result gets a value by a rule ------------------------------------------------------------
# Each: (values, args, kwargs, fake result) -> (real values in the result's order, name of the rule), with no mode on.

CONTENTS_UNDEFINED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.empty_permuted.default,
    }
)
CHANGES_STORAGE = frozenset(
    {
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
        aten.resize_.default,
    }
)


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def balanced_indices(shape: tuple[int, ...], dim: int, candidates: int) -> torch.Tensor:
    """Return int64 of ``shape``: slot j along ``dim`` of row r chooses (r * k + j) mod ``candidates``."""
    # Counting through all slots in order, modulo the candidates: each is chosen as often as any other, up to one.
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    dim %= len(shape)
    k = shape[dim]
    rest = [n for i, n in enumerate(shape) if i != dim]
    flat = torch.arange(math.prod(rest) * k) % max(1, candidates)
    return flat.reshape(*rest, k).movedim(-1, dim).contiguous()


def same_indices(shape: tuple[int, ...], dim: int, candidates: int) -> torch.Tensor:
    """Return int64 of ``shape``: slot j along ``dim`` of every row chooses j mod ``candidates``."""
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    dim %= len(shape)
    slots = torch.arange(shape[dim]) % max(1, candidates)
    view = [-1 if d == dim else 1 for d in range(len(shape))]
    return slots.reshape(view).expand(shape).contiguous()


def _chosen(
    values: KnownValues, shape: tuple[int, ...], dim: int, candidates: int
) -> tuple[torch.Tensor, str]:
    """Return which candidates each row chooses, and the rule."""
    indices = same_indices if values.routing == "worst" else balanced_indices
    return indices(shape, dim, candidates), values.routing


def _size(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


@assume(aten.topk.default)
def _decide_topk(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    dim = _argument(args, kwargs, 2, "dim", -1)
    chosen, rule = _chosen(values, tuple(out[1].shape), dim, _size(args[0], dim))
    return (UNKNOWN, chosen), rule


@assume(aten.multinomial.default)
def _decide_multinomial(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    chosen, rule = _chosen(values, tuple(out.shape), -1, args[0].shape[-1])
    return (chosen,), rule


def _one_of(values: KnownValues, candidates: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, str]:
    """Return one candidate for each place: as ``_chosen`` with one slot in each row."""
    flat, rule = _chosen(values, (math.prod(shape), 1), -1, candidates)
    return flat.reshape(shape), rule


@assume(aten.argmax.default, aten.argmin.default)
def _decide_argmax(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    dim = _argument(args, kwargs, 1, "dim", None)
    candidates = args[0].numel() if dim is None else _size(args[0], dim)
    chosen, rule = _one_of(values, candidates, tuple(out.shape))
    return (chosen,), rule


@assume(aten.max.dim, aten.min.dim)
def _decide_max(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    candidates = _size(args[0], _argument(args, kwargs, 1, "dim", -1))
    chosen, rule = _one_of(values, candidates, tuple(out[1].shape))
    return (UNKNOWN, chosen), rule


_CHOOSE = (_decide_topk, _decide_multinomial, _decide_argmax, _decide_max)
CHOICES = frozenset(str(op) for op, rule in assume.items() if rule in _CHOOSE)
"""Ops that choose among candidates, as in ``Op.name``: where a step has none of them, it routes nothing."""


@assume(aten.sort.default, aten.sort.stable)
def _decide_sort(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    dim = _argument(args, kwargs, 1, "dim", -1)
    return (UNKNOWN, same_indices(tuple(out[1].shape), dim, _size(args[0], dim))), "in order"


@assume(
    *filter(
        None, map(op_named, ("_c10d_functional.all_to_all_single.default", "c10d.alltoall_base_.default"))
    )
)
def _decide_exchanged(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    """Let each rank send to this one what this one sends to itself, such as counts of the tokens that follow."""
    # The first argument of the op in place is where it writes.
    in_place = isinstance(args[1], torch.Tensor)
    sent, group, sizes = (args[1], args[2], args[4]) if in_place else (args[0], args[3], args[2])
    sent, ranks = values.value(sent), ranks_of_group(group)
    if sent is None or ranks is None:
        return None, ""
    own = sent.split(sizes or len(sent) // len(ranks))[ranks.index(torch.distributed.get_rank())]
    return (torch.cat([own] * len(ranks)),), "alike ranks"


_GOLDEN = (math.sqrt(5) - 1) / 2


def even_spread(shape: tuple[int, ...]) -> torch.Tensor:
    """Return float64 in (0, 1), spread evenly for any number of elements: 1/2 plus multiples of the golden ratio."""
    return ((0.5 + torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN) % 1.0).reshape(shape)


@assume(aten.rand.default, aten.rand.generator, aten.rand_like.default)
def _decide_rand(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    return (even_spread(tuple(out.shape)).to(out.dtype),), "even spread"


@assume(aten.randint.default, aten.randint.low)
def _decide_randint(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    low, high = (args[0], args[1]) if isinstance(args[1], int) else (0, args[0])
    return ((low + even_spread(tuple(out.shape)) * (high - low)).floor().to(out.dtype),), "even spread"


@assume(aten.randperm.default)
def _decide_randperm(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    return (even_spread(tuple(out.shape)).argsort().to(out.dtype),), "even spread"


@assume(aten.bernoulli.default, aten.bernoulli.p)
def _decide_bernoulli(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    p = values.value(args[0]) if len(args) < 2 else args[1]
    if p is None:  # what is drawn with unknown probabilities is not known either
        return None, ""
    return ((even_spread(tuple(out.shape)) < p).to(out.dtype),), "even spread"


@assume(*CONTENTS_UNDEFINED)
def _decide_empty(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    if is_float(out) and out.numel() > MAX_UNDEFINED_FLOATS:
        return None, ""
    # Zeros stand for arbitrary contents, so that a tensor that is filled later in known steps stays known. No rule is
    # noted: reading it before would be an error in the code.
    return (torch.zeros(out.shape, dtype=out.dtype),), ""


def _decide_filled(
    position: int, fill: int | None, values: KnownValues, args: Any, kwargs: Any, out: Any
) -> tuple[Any, str]:
    """Fill the result of ``full_like`` and its relatives: the values of the tensor that it is like do not matter."""
    if not values.follows(out):  # no memory is taken for what would be forgotten
        return None, ""
    value = _argument(args, kwargs, position, "fill_value", None) if fill is None else fill
    if fill == 0 and out.numel():  # an empty array cannot be viewed as another type
        # The system provides these zeros once they are touched; most are forgotten before, by an unknown write.
        memory = torch.from_numpy(np.zeros(out.numel() * out.element_size(), np.uint8))
        return (memory.view(out.dtype).view(out.shape),), ""
    return (torch.full(out.shape, value, dtype=out.dtype),), ""


def _decide_comparison(
    is_equal: bool, values: KnownValues, args: Any, kwargs: Any, out: Any
) -> tuple[Any, str]:
    """Compare finite floats other than zero: ``x`` equals ``x``, and neither infinity nor 0."""
    # Any other comparison depends on the values, and has no rule.
    left, right = args[0], args[1]
    is_infinite = isinstance(right, float) and math.isinf(right)
    # Models find padding this way, since it is zeros.
    is_zero = isinstance(right, (int, float)) and right == 0
    if not left.dtype.is_floating_point or not (right is left or is_infinite or is_zero):
        return None, ""
    found = torch.full(out.shape, (right is left) == is_equal, dtype=torch.bool)
    return (found,), "not zero" if is_zero else "finite"


@assume(aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims)
def _decide_every(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    if args[0].dtype != torch.bool:  # the rule is about masks; whether numbers are all nonzero has none
        return None, ""
    return (torch.ones(out.shape, dtype=torch.bool),), "all elements"


@assume(aten.isnan.default, aten.isinf.default)
def _decide_not_finite(values: KnownValues, args: Any, kwargs: Any, out: Any) -> tuple[Any, str]:
    return (torch.zeros(out.shape, dtype=torch.bool),), "finite"


assume(aten.eq.Tensor, aten.eq.Scalar)(functools.partial(_decide_comparison, True))
assume(aten.ne.Tensor, aten.ne.Scalar)(functools.partial(_decide_comparison, False))
_FILLED = {
    aten.zeros_like.default: (0, 0),
    aten.ones_like.default: (0, 1),
    aten.full_like.default: (1, None),
    aten.new_zeros.default: (0, 0),
    aten.new_ones.default: (0, 1),
    aten.new_full.default: (2, None),
}
for _op, (_position, _fill) in _FILLED.items():
    assume[_op] = functools.partial(_decide_filled, _position, _fill)
IGNORES_VALUES = CONTENTS_UNDEFINED | _FILLED.keys()
"""Ops on tensors whose values do not matter."""


@spread(aten.uniform_.default)
def _spread_uniform(target: torch.Tensor, low: float = 0.0, high: float = 1.0) -> None:
    target.copy_(low + even_spread(tuple(target.shape)) * (high - low))


@spread(aten.bernoulli_.float)
def _spread_bernoulli(target: torch.Tensor, p: float = 0.5) -> None:
    target.copy_(even_spread(tuple(target.shape)) < p)
