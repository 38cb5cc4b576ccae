"""Run one op of a traced step for real, on made-up operands.

A fake step has no data, so an op that is to be run gets operands of the same shape, stride and dtype. Real
tensors on the right device are copied with their values; for the rest values are made up:

- floats lie in [0.1, 0.9): valid as a probability, under a logarithm, a root, a division. Square matrices of
  ``linalg_`` and Cholesky ops get a heavy diagonal;
- integers that an op indexes with (``embedding``, ``gather``, class targets, pooling, ...) are random and in
  range, see ``_BOUNDS``; offsets and lengths rise evenly, see ``_RISING``; other integers are 1 (0 would
  divide), or 0 where their name is that of an index;
- bools are half true; where the size of a result depends on them, as many are true as the result has rows.

To add a rule for an op's integers, add a line to ``_BOUNDS`` or ``_RISING``.

Where an op refuses these operands, all of them are zeros, and the op is tried once more (not on CUDA, where
an error may end the context).

Private PyTorch API, tried on 2.11 and 2.13: ``_disable_current_modes``, ``unset_fake_temporarily``,
``_DisableAutocast``, ``DisableTorchFunction``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from sacplan.torch_compat.autograd import why_no_hooks
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import op_traits


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def outside_of_the_trace(device: torch.device) -> Iterator[None]:
    """Switch off fake modes, dispatch modes, autograd and autocast inside, and restore generators after.

    Where an op switches autograd on inside, it keeps tensors as it would without the recorder's hooks. Inside of
    ``torch.func.grad`` there are no such hooks, and none are allowed.
    """
    indices = [device.index or 0] if device.type == "cuda" else []
    with (
        _disable_current_modes(),
        unset_fake_temporarily(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        torch.random.fork_rng(devices=indices),
        torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
        if why_no_hooks() is None
        else nullcontext(),
    ):
        yield


# ---------------------------------------------------------------------------------------------------------
# Operands: the integers that an op takes for positions. Names are those of the schemas.

_Arguments = Mapping[str, Any]
_T = TypeVar("_T")


def _rules(
    *lines: tuple[str, str, Callable[[_Arguments], _T]],
) -> dict[tuple[str, str], Callable[[_Arguments], _T]]:
    """Return rules by (op, argument), from lines of (ops, argument, rule); each rule sees the arguments by name."""
    return {(op, argument): rule for ops, argument, rule in lines for op in ops.split()}


def _along_dim(a: _Arguments) -> int:
    shape = a["self"].shape
    return int(shape[a["dim"]]) if shape else 1


def _plane(dims: int) -> Callable[[_Arguments], int]:
    return lambda a: math.prod(a["self"].shape[-dims:])


_INDEXED = (
    "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill index_reduce"
)
_BOUNDS = _rules(
    ("embedding _embedding_bag _embedding_bag_forward_only", "indices", lambda a: a["weight"].shape[0]),
    ("embedding_renorm_", "indices", lambda a: a["self"].shape[0]),
    (
        "embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward",
        "indices",
        lambda a: a["num_weights"],
    ),
    ("take put_", "index", lambda a: a["self"].numel()),
    ("index_select_backward", "index", lambda a: a["self_sizes"][a["dim"]]),
    ("value_selecting_reduction_backward", "indices", lambda a: a["sizes"][a["dim"]]),
    ("nll_loss_forward nll_loss_backward", "target", lambda a: a["self"].shape[-1]),
    ("nll_loss2d_forward nll_loss2d_backward", "target", lambda a: a["self"].shape[1]),
    ("multi_margin_loss multi_margin_loss_backward", "target", lambda a: a["self"].shape[-1]),
    ("max_pool2d_with_indices_backward adaptive_max_pool2d_backward", "indices", _plane(2)),
    ("max_pool3d_with_indices_backward adaptive_max_pool3d_backward", "indices", _plane(3)),
    ("fractional_max_pool2d_backward", "indices", _plane(2)),
    ("max_unpool2d max_unpool3d", "indices", lambda a: math.prod(a["output_size"])),
    (_INDEXED, "index", _along_dim),
    (_INDEXED.replace(" ", "_ ") + "_", "index", _along_dim),
)
"""Values are drawn from [0, bound)."""

_BAGS = "_embedding_bag _embedding_bag_forward_only _embedding_bag_backward"
_FLASH = "_flash_attention_forward _flash_attention_backward"
_EFFICIENT = "_efficient_attention_forward _efficient_attention_backward"
_RISING = _rules(
    ("_grouped_mm", "offs", lambda a: (_groups_total(a) // max(1, a["offs"].numel()), _groups_total(a))),
    ("_ctc_loss _ctc_loss_backward", "input_lengths", lambda a: (a["log_probs"].shape[0],) * 2),
    ("_ctc_loss _ctc_loss_backward", "target_lengths", lambda a: (_target_length(a),) * 2),
    (_BAGS, "offsets", lambda a: (0, _last_offset(a))),
    (
        "_embedding_bag_backward _embedding_bag_dense_backward",
        "offset2bag",
        lambda a: (0, max(0, a["grad"].shape[0] - 1)),
    ),
    (_FLASH, "cum_seq_q", lambda a: (0, a["query"].shape[0])),
    (_FLASH, "cum_seq_k", lambda a: (0, a["key"].shape[0])),
    (_EFFICIENT, "cu_seqlens_q", lambda a: (0, a["query"].shape[1])),
    (_EFFICIENT, "cu_seqlens_k", lambda a: (0, a["key"].shape[1])),
)
"""(first, last): the values rise evenly from one to the other."""


def _last_offset(a: _Arguments) -> int:
    bags = a["offsets"].numel()
    return int((bags - 1) * a["indices"].numel() // max(1, bags))


def _groups_total(a: _Arguments) -> int:
    """Return the size that is divided among the groups: rows of a 2-D operand, or columns of the second one."""
    first, second = a["self"], a["mat2"]
    if first.dim() == 2 and second.dim() == 2:
        return int(first.shape[1])
    return int(first.shape[0] if first.dim() == 2 else second.shape[-1])


def _target_length(a: _Arguments) -> int:
    targets = a["targets"]
    if targets.dim() == 2:
        return int(targets.shape[1])
    batch = a["log_probs"].shape[1] if a["log_probs"].dim() == 3 else 1
    return int(targets.numel() // max(1, batch))


_INDEX_OPS = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_POSITION_NAMES = frozenset(
    ("index", "indices", "target", "targets", "row_indices", "col_indices", "crow_indices", "ccol_indices")
)
_ON_THE_HOST = frozenset(
    (op, name)
    for op in ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
    for name in ("philox_seed", "philox_offset")
)
"""(op, argument) that CUDA's kernel reads through a host pointer (attention_backward.cu)."""

UNKNOWN_LAYOUT = ("_cudnn_rnn_backward", "miopen_rnn_backward", "_thnn_fused_lstm_cell_backward")
"""Ops that take a workspace that only their forward op can fill; a wrong size reads out of bounds on a GPU."""


class RealOp:
    """One op with real arguments on ``device``; calling it runs it. A tensor given twice is made once.

    Args:
        call: the traced op. What it returned tells sizes that depend on data.
        device: where it is to run.
        zeros: whether operands are zeros in place of made-up values.
    """

    def __init__(self, call: Call, device: torch.device, *, zeros: bool = False) -> None:
        self.func = call.func
        self._device = device
        self._zeros = zeros
        self._op = call.func._schema.name.split("::")[-1]
        self._made: dict[int, torch.Tensor] = {}
        self._out = call.returned
        self._by_name = call.arguments
        self.args = [self._value(value, name) for name, value in zip(self._by_name, call.args, strict=False)]
        self.kwargs = {name: self._value(value, name) for name, value in call.kwargs.items()}

    def __call__(self) -> Any:
        """Run the op."""
        if self._op == "mkldnn_rnn_layer":
            # The op keeps a workspace for the backward pass only where autograd is on.
            with torch.enable_grad():
                return self.func(*self.args, **self.kwargs)
        return self.func(*self.args, **self.kwargs)

    def _value(self, value: Any, name: str, position: int = 0) -> Any:
        if self._op == "_cudnn_rnn" and name == "weight_buf":
            return None  # the flat copy of the weights, which a fake step does not have: the op makes its own
        if isinstance(value, torch.Tensor):
            made = self._made.get(id(value))
            if made is None:
                made = self._made[id(value)] = self._tensor(value, name, position)
            return made
        if isinstance(value, (list, tuple)):
            return type(value)([self._value(item, name, i) for i, item in enumerate(value)])
        if isinstance(value, torch.device) and value.type == "cpu":
            return self._device
        if isinstance(value, torch.Generator):
            return None
        return value

    def _tensor(self, like: torch.Tensor, name: str, position: int) -> torch.Tensor:
        """Make a tensor of the same shape, strides and dtype, over as much storage as the elements span."""
        if like.layout is not torch.strided:
            # Sparse tensors are real ones. Only an op that writes gets a copy: copying changes how indices lie.
            return like.detach().clone() if op_traits(self.func).written_names else like.detach()
        shape, stride = [int(n) for n in like.shape], [int(n) for n in like.stride()]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        # In this order: special arguments, then real values, then made-up ones.
        if (self._op, name) in _ON_THE_HOST:
            return torch.ones(shape, dtype=like.dtype)
        if self._op == "mkldnn_rnn_layer_backward" and name == "workspace" and isinstance(like, FakeTensor):
            return self._rnn_workspace()
        # A copy, since the op may write it, and the user still needs the values.
        if not isinstance(like, FakeTensor) and like.device.type == self._device.type:
            flat = like.detach().as_strided((span,), (1,), like.storage_offset()).clone()
        elif self._zeros:
            flat = torch.zeros(span, dtype=like.dtype, device=self._device)
        elif like.dtype == torch.bool:
            flat = self._bools(like, span, name, position)
        elif like.dtype.is_floating_point or like.dtype.is_complex:
            flat = self._floats(like.dtype, span)
        else:
            flat = self._integers(like, span, name, position)
        # Strides are part of what is measured: a kernel may copy an operand that is not contiguous.
        made = flat.as_strided(shape, stride)
        if self._needs_diagonal(made, like):
            made.diagonal(dim1=-2, dim2=-1).fill_(made.shape[-1])
        return made

    def _floats(self, dtype: torch.dtype, span: int) -> torch.Tensor:
        if dtype.is_complex:
            return torch.view_as_complex(self._floats(dtype.to_real(), 2 * span).view(-1, 2))
        if dtype.itemsize == 1:  # float8 has no random fill
            return torch.empty(span, dtype=torch.float32, device=self._device).uniform_(0.1, 0.9).to(dtype)
        return torch.empty(span, dtype=dtype, device=self._device).uniform_(0.1, 0.9)

    def _needs_diagonal(self, made: torch.Tensor, like: torch.Tensor) -> bool:
        return (
            not self._zeros
            and isinstance(like, FakeTensor)
            and made.is_floating_point()
            and made.dim() >= 2
            and made.shape[-1] == made.shape[-2]
            and ("linalg" in self._op or "cholesky" in self._op or "triangular" in self._op)
        )

    def _integers(self, like: torch.Tensor, span: int, name: str, position: int) -> torch.Tensor:
        # In this order: values that must rise, values below a bound, and else a constant. A number out of range is an
        # error on a CPU. On CUDA it may end the context of the process.
        flat = torch.empty(span, dtype=like.dtype, device=self._device)
        rising = _RISING.get((self._op, name))
        if rising is not None:
            first, last = rising(self._by_name)
            return flat.copy_(torch.linspace(first, last, span, dtype=torch.float64).floor())
        bound = None
        if self._op in _INDEX_OPS and name == "indices":
            bound = self._indexed_size(position)
        elif (rule := _BOUNDS.get((self._op, name))) is not None:
            bound = rule(self._by_name)
        if bound is None:
            return flat.fill_(0 if name in _POSITION_NAMES else 1)
        return flat.random_(0, max(1, int(bound)))

    def _indexed_size(self, position: int) -> int:
        """Return the size of the dimension that the index at ``position`` of ``x[..., index, ...]`` is for.

        A mask before it takes as many dimensions as it has, every other index one.
        """
        dim = 0
        for before in self._by_name["indices"][:position]:
            dim += before.dim() if before is not None and before.dtype in (torch.bool, torch.uint8) else 1
        return int(self._by_name["self"].shape[dim])

    def _bools(self, like: torch.Tensor, span: int, name: str, position: int) -> torch.Tensor:
        count = self._true_count(name, position)
        # No result depends on the number, or elements share memory (expanded), so that they cannot be set one by one.
        if count is None or span != like.numel():
            return torch.rand(span, device=self._device) < 0.5
        flat = torch.zeros(span, dtype=torch.bool, device=self._device)
        flat[torch.randperm(span, device=self._device)[:count]] = True
        return flat

    def _true_count(self, name: str, position: int) -> int | None:
        """Return how many elements of a mask are true, if the size of a result tells; else None."""
        a = self._by_name
        # In turn: one row of the result for each true element; as many rows as the values to be put; and no more true
        # elements than the source of ``masked_scatter`` can serve.
        if self._op in ("nonzero", "masked_select") and isinstance(self._out, torch.Tensor):
            return int(self._out.shape[0])
        if self._op in _INDEX_OPS and name == "indices":
            if self._op in ("index", "_unsafe_index"):
                return int(self._out.shape[position])
            values = a["values"]
            return int(values.shape[0]) if values.dim() and values.shape[0] != 1 else None
        if self._op in ("masked_scatter", "masked_scatter_") and name == "mask":
            return int(min(a["mask"].numel(), a["source"].numel()) // 2)
        return None

    def _rnn_workspace(self) -> torch.Tensor:
        """Return a workspace filled by the forward op, as no other can; a wrong size is read out of bounds."""
        a = self._by_name
        given = [a["input"], a["weight1"], a["weight2"], a["weight3"], a["weight4"], a["hx_"], a["cx_tmp"]]
        real = [self._value(t, f"rnn_{i}") for i, t in enumerate(given)]
        names = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional",
                 "batch_first", "train")  # fmt: skip
        with torch.enable_grad():
            workspace: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(*real, *(a[n] for n in names))[
                3
            ]
        return workspace


def run_for_real(call: Call, device: torch.device, measure: Callable[[RealOp], _T]) -> _T:
    """Return ``measure(op)``, where ``op()`` runs the call on real operands, outside of all modes that are on.

    Raises:
        RUN_ERRORS: the op refuses made-up values, and zeros.
    """
    with outside_of_the_trace(device):
        for zeros in (False, True):
            op = RealOp(call, device, zeros=zeros)
            try:
                return measure(op)
            except RUN_ERRORS:
                # Zeros were the last attempt. On CUDA there is one attempt: an error may have ended the context.
                if zeros or device.type == "cuda":
                    raise
            del op
    raise AssertionError  # not reached


RUN_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""Errors of an op that does not accept its operands; running out of memory is one of them."""


def first_line(error: Exception) -> str:
    """Return the first line of a message, or the error's type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
