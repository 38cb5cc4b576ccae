"""The rules of a fake step, op by op: answers to ops that ask for data, and values made by assumption.

``data_rules`` says what they are; this is how. ``ANSWERS`` replace an op whose result has a size or a Python
value that depends on data. ``DECISIONS`` give the result of an op values that floats alone could tell.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._mode_utils import no_dispatch

from sacplan._torch.ops import tensors_in

if TYPE_CHECKING:
    from sacplan._record.fake_data import DataRules

aten = torch.ops.aten

MAX_UNDEFINED_FLOATS = 2**14
"""Of what ``empty`` makes, only small tensors are followed: most are filled with what is not known."""

NO_ANSWER = object()
"""Neither a value nor a rule: let the op run."""
UNKNOWN = object()
"""In the place of a result whose values stay unknown."""


def is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


# --- ops that ask for data ---------------------------------------------------------------------------


_UNTAGGED = (
    aten.equal.default,
    aten.allclose.default,
    aten._ctc_loss.Tensor,
    aten._ctc_loss.default,
    aten._grouped_mm.default,
)


@functools.cache
def needs_an_answer(func: Any) -> bool:
    tags = func.tags
    return (
        torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags or func in _UNTAGGED
    )


def answer_if_known(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    inputs = list(tensors_in((args, kwargs)))
    out = rules.run_on_values(func, args, kwargs, inputs)
    if out is NO_ANSWER:
        return NO_ANSWER
    resting_on = rules.rules_of(inputs)
    rules.apply_rules(resting_on, func)
    if isinstance(out, torch.Tensor):
        return rules.as_fake(out, resting_on)
    if isinstance(out, (tuple, list)):
        return type(out)(rules.as_fake(t, resting_on) for t in out)
    return out


def _scalar(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    answer = answer_if_known(rules, func, args, kwargs)
    if answer is NO_ANSWER and args[0].dtype.is_floating_point:
        rules.apply_rules(("unit value",), func)
        return 1.0
    if answer is NO_ANSWER:
        raise rules.refusal(func, args, kwargs)
    return answer


def _nonzero_of(rules: DataRules, func: Any, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, None]]:
    """Rows of indices [K, ndim] of a mask: the known ones, or all."""
    value = rules.value(mask)
    resting_on = {"all elements": None} if value is None else rules.rules_of([mask])
    rules.apply_rules(resting_on, func)
    with no_dispatch():
        rows = torch.nonzero(torch.ones(mask.shape, dtype=torch.bool) if value is None else value)
    return rows, resting_on


def _nonzero(rules: DataRules, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return rules.as_fake(*_nonzero_of(rules, func, args[0]))


def _index(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, indices = args
    masks = (torch.bool, torch.uint8)
    if not any(i is not None and i.dtype in masks for i in indices):
        return NO_ANSWER
    replaced: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in masks:
            replaced.append(index)
            continue
        rows, resting_on = _nonzero_of(rules, func, index)
        replaced.extend(rules.as_fake(column.contiguous(), resting_on) for column in _columns(rows))
    out = func(tensor, replaced)
    rules.follow(func, (tensor, replaced), {}, out)
    return out


def _columns(rows: torch.Tensor) -> list[torch.Tensor]:
    with no_dispatch():
        return [column.contiguous() for column in rows.unbind(1)]


def _masked_select(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    answer = answer_if_known(rules, func, args, kwargs)
    if answer is not NO_ANSWER:
        return answer
    tensor, mask = args
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    value = rules.value(mask)
    if value is None:
        rules.apply_rules(("all elements",), func)
        return tensor.new_empty(math.prod(shape))
    rules.apply_rules(rules.rules_of([mask]), func)
    with no_dispatch():
        count = int(value.expand(shape).sum())
    return tensor.new_empty(count)


def _ctc_loss(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    """Loss [N] and alpha [N, T, 2 * longest target + 1]; T and N from log_probs [T, N, C]."""
    log_probs, targets, _, lengths = args[:4]
    if isinstance(lengths, torch.Tensor):
        value = rules.value(lengths)
        if value is None and targets.dim() < 2:
            raise rules.refusal(func, args, kwargs)
        with no_dispatch():
            longest = targets.shape[1] if value is None else int(value.max())
    else:
        longest = max(lengths)
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


def _grouped_mm(rules: DataRules, func: Any, args: Any, kwargs: Any) -> Any:
    """torch's formula for shapes (2.13) refuses types other than bfloat16, which the kernels take."""
    if args[0].dtype == torch.bfloat16:
        return NO_ANSWER
    with rules.paused():
        like = [torch.empty_strided(m.shape, m.stride(), dtype=torch.bfloat16) for m in args[:2]]
        out = func(*like, *args[2:], **{**kwargs, "out_dtype": None})
        return torch.empty_strided(out.shape, out.stride(), dtype=kwargs.get("out_dtype") or args[0].dtype)


ANSWERS: dict[Any, Callable[[DataRules, Any, Any, Any], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.nonzero.default: _nonzero,
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten._grouped_mm.default: _grouped_mm,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss.default: _ctc_loss,
}


# --- ops whose result gets a value by a rule ------------------------------------------------------------
# Each: (rules, args, kwargs, fake result) -> (real values in the result's order, name of the rule).

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
    """int64 of ``shape``: slot j along ``dim`` of row r chooses (r * k + j) mod ``candidates``."""
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    dim %= len(shape)
    k = shape[dim]
    rest = [n for i, n in enumerate(shape) if i != dim]
    flat = torch.arange(math.prod(rest) * k) % max(1, candidates)
    return flat.reshape(*rest, k).movedim(-1, dim).contiguous()


def _size(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() else 1


def _decide_topk(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    dim = _argument(args, kwargs, 2, "dim", -1)
    with no_dispatch():
        return (UNKNOWN, balanced_indices(tuple(out[1].shape), dim, _size(args[0], dim))), "balanced"


def _decide_multinomial(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    with no_dispatch():
        return (balanced_indices(tuple(out.shape), -1, args[0].shape[-1]),), "balanced"


def _one_of(candidates: int, shape: tuple[int, ...]) -> torch.Tensor:
    with no_dispatch():
        return (torch.arange(math.prod(shape)) % max(1, candidates)).reshape(shape)


def _decide_argmax(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    dim = _argument(args, kwargs, 1, "dim", None)
    return (_one_of(args[0].numel() if dim is None else _size(args[0], dim), tuple(out.shape)),), "balanced"


def _decide_max(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    return (
        UNKNOWN,
        _one_of(_size(args[0], _argument(args, kwargs, 1, "dim", -1)), tuple(out[1].shape)),
    ), "balanced"


def _decide_sort(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    tensor = args[0]
    dim = _argument(args, kwargs, 1, "dim", -1)
    with no_dispatch():
        order = torch.arange(_size(tensor, dim))
        if tensor.dim():
            order = order.reshape([-1 if i == dim % tensor.dim() else 1 for i in range(tensor.dim())])
            order = order.expand(tensor.shape).contiguous()
        else:
            order = order.reshape(())
    return (UNKNOWN, order), "in order"


_GOLDEN = (math.sqrt(5) - 1) / 2


def even_spread(shape: tuple[int, ...]) -> torch.Tensor:
    """float64 in (0, 1): multiples of the golden ratio, the first is 1/2."""
    return ((0.5 + torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN) % 1.0).reshape(shape)


def _decide_rand(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    with no_dispatch():
        return (even_spread(tuple(out.shape)).to(out.dtype),), "even spread"


def _decide_randint(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    low, high = (args[0], args[1]) if isinstance(args[1], int) else (0, args[0])
    with no_dispatch():
        return ((low + even_spread(tuple(out.shape)) * (high - low)).floor().to(out.dtype),), "even spread"


def _decide_randperm(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    with no_dispatch():
        return (even_spread(tuple(out.shape)).argsort().to(out.dtype),), "even spread"


def _decide_bernoulli(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    p = rules.value(args[0]) if len(args) < 2 else args[1]
    if p is None:
        return None, ""
    with no_dispatch():
        return ((even_spread(tuple(out.shape)) < p).to(out.dtype),), "even spread"


def _decide_empty(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    if is_float(out) and out.numel() > MAX_UNDEFINED_FLOATS:
        return None, ""
    with no_dispatch():
        return (torch.zeros(out.shape, dtype=out.dtype),), ""


def _decide_filled(position: int, name: str, fill: float | None) -> Callable[..., Any]:
    """``full`` and its relatives made like a tensor whose values are not known."""

    def decide(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
        value = _argument(args, kwargs, position, name, None) if fill is None else fill
        with no_dispatch():
            return (torch.full(out.shape, value, dtype=out.dtype),), ""

    return decide


def _decide_comparison(same: bool, infinite: bool) -> Callable[..., Any]:
    """Of finite floats: ``x op x`` is ``same``, ``x op inf`` is ``infinite``."""

    def decide(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
        left, right = args[0], args[1]
        if not left.dtype.is_floating_point:
            return None, ""
        if right is left:
            answer = same
        elif isinstance(right, float) and math.isinf(right):
            answer = infinite
        else:
            return None, ""
        with no_dispatch():
            return (torch.full(out.shape, answer, dtype=torch.bool),), "finite"

    return decide


def _decide_every(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    if args[0].dtype != torch.bool:
        return None, ""
    with no_dispatch():
        return (torch.ones(out.shape, dtype=torch.bool),), "all elements"


def _decide_not_finite(rules: DataRules, args: Any, kwargs: Any, out: Any) -> Any:
    with no_dispatch():
        return (torch.zeros(out.shape, dtype=torch.bool),), "finite"


DECISIONS: dict[Any, Callable[..., Any]] = {
    aten.topk.default: _decide_topk,
    aten.multinomial.default: _decide_multinomial,
    aten.argmax.default: _decide_argmax,
    aten.argmin.default: _decide_argmax,
    aten.max.dim: _decide_max,
    aten.min.dim: _decide_max,
    aten.sort.default: _decide_sort,
    aten.sort.stable: _decide_sort,
    aten.rand.default: _decide_rand,
    aten.rand.generator: _decide_rand,
    aten.rand_like.default: _decide_rand,
    aten.randint.default: _decide_randint,
    aten.randint.low: _decide_randint,
    aten.randperm.default: _decide_randperm,
    aten.bernoulli.default: _decide_bernoulli,
    aten.bernoulli.p: _decide_bernoulli,
    aten.eq.Tensor: _decide_comparison(True, False),
    aten.ne.Tensor: _decide_comparison(False, True),
    aten.eq.Scalar: _decide_comparison(True, False),
    aten.ne.Scalar: _decide_comparison(False, True),
    **dict.fromkeys(
        (aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims),
        _decide_every,
    ),
    aten.isnan.default: _decide_not_finite,
    aten.isinf.default: _decide_not_finite,
    aten.zeros_like.default: _decide_filled(0, "", 0),
    aten.ones_like.default: _decide_filled(0, "", 1),
    aten.full_like.default: _decide_filled(1, "fill_value", None),
    aten.new_zeros.default: _decide_filled(0, "", 0),
    aten.new_ones.default: _decide_filled(0, "", 1),
    aten.new_full.default: _decide_filled(2, "fill_value", None),
    **dict.fromkeys(CONTENTS_UNDEFINED, _decide_empty),
}


def _spread_uniform(target: torch.Tensor, low: float = 0.0, high: float = 1.0) -> None:
    target.copy_(low + even_spread(tuple(target.shape)) * (high - low))


def _spread_bernoulli(target: torch.Tensor, p: float = 0.5) -> None:
    target.copy_(even_spread(tuple(target.shape)) < p)


IN_PLACE_SPREADS: dict[Any, Callable[..., None]] = {
    aten.uniform_.default: _spread_uniform,
    aten.bernoulli_.float: _spread_bernoulli,
}
