"""FLOPs of ops: by the formulas of ``torch.utils.flop_counter``, and what these lack or get wrong.

A multiply-add is two, and causal attention counts in full. Only matrix products, convolutions and attention have a
formula, as there. To add one, decorate a function with the names of its ops. It gets the arguments of the call by name:

    @flops("aten::_cudnn_rnn")
    def _rnn(a):
        return 2 * rows * weights

Private PyTorch API, tried on 2.11 and 2.13: ``torch.utils.flop_counter.flop_registry``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils import flop_counter

from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import RuleTable, aten_names

Arguments = Mapping[str, Any]
flops: RuleTable[Callable[[Arguments], int]] = RuleTable()
"""By schema name; these take precedence over torch's registry."""


# torch's own formulas for attention refuse grouped queries before 2.12: ours take precedence.
ATTENTION = aten_names("""
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
""")


@flops(*ATTENTION)
def _attention(a: Arguments) -> int:
    """Count 2 B H Sq Sk (D + Dv) FLOPs: per query head, the scores Q K^T over D, and their product with the values."""
    (batch, heads, seq_q, dim), (seq_k, dim_v) = a["query"].shape, a["value"].shape[-2:]
    return int(2 * batch * heads * seq_q * seq_k * (dim + dim_v))


@flops(*(f"{name}_backward" for name in ATTENTION))
def _attention_backward(a: Arguments) -> int:
    """Count 2 B H Sq Sk (3 D + 2 Dv) FLOPs, in five products.

    The scores again, dQ and dK take 2 B H Sq Sk D each; dV and the gradient of the scores 2 B H Sq Sk Dv each.
    """
    (batch, heads, seq_q, dim), (seq_k, dim_v) = a["query"].shape, a["value"].shape[-2:]
    return int(2 * batch * heads * seq_q * seq_k * (3 * dim + 2 * dim_v))


@flops("aten::_grouped_mm", "aten::_scaled_grouped_mm")
def _grouped_mm(a: Arguments) -> int:
    """Count the products [M, K] x [E, K, N], [E, M, K] x [K, N], [E, M, K] x [E, K, N], or [M, T] x [T, N] by group."""
    left, right = a["self"], a["mat2"]
    columns = right.shape[-1]
    if left.dim() == 2:
        return int(2 * left.shape[0] * left.shape[1] * columns)
    # The columns of a 2-D right operand are divided among the groups, so all groups together are one product.
    groups = left.shape[0] if right.dim() == 3 else 1
    return int(2 * groups * left.shape[1] * left.shape[2] * columns)


@flops("aten::addmm_", "aten::baddbmm_")
def _product_in_place(a: Arguments) -> int:
    """Count 2 M N K FLOPs, times the batch. PyTorch's registry has these ops out of place only."""
    left, right = (a["mat1"], a["mat2"]) if "mat1" in a else (a["batch1"], a["batch2"])
    return int(2 * left.numel() * right.shape[-1])


@flops("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit")
def _product_4bit(a: Arguments) -> int:
    """Count 2 M N K FLOPs for [..., K] times a packed weight whose shape was [N, K]."""
    return int(2 * a["A"].numel() * a["shapeB"][0])


@flops("aten::_cudnn_rnn")
def _rnn(a: Arguments) -> int:
    """Count 2 FLOPs per row of the input and weight element; input [T, N, C], [N, T, C], or packed [rows, C]."""
    rows = a["input"].numel() // max(1, a["input"].shape[-1])
    return int(2 * rows * sum(w.numel() for w in a["weight"] if w.dim() == 2))


@flops("aten::convolution_backward")
def _convolution_backward(a: Arguments) -> int:
    """Count 2 FLOPs for each element of the result and of one filter, for each gradient that is wanted.

    PyTorch's registry counts the weight's gradient as if there were one group.
    """
    result = a["input"] if a["transposed"] else a["grad_output"]
    return int(2 * result.numel() * math.prod(a["weight"].shape[1:]) * sum(a["output_mask"][:2]))


@flops(
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
)
def _chunked_loss(a: Arguments) -> int:
    """Count the product for the logits, and one for each gradient, which this loss takes in its forward pass.

    Without a reduction there are the logits alone, and the backward pass is seen op by op.
    """
    gradients = bool(a.get("compute_input_grad")) + bool(a.get("compute_linear_weight_grad"))
    return int(2 * a["input"].numel() * a["linear_weight"].shape[0] * (1 + gradients))


@flops("aten::_cudnn_rnn_backward")
def _rnn_backward(a: Arguments) -> int:
    return 2 * _rnn(a)


def op_flops(call: Call) -> int:
    """Return the FLOPs of one call of an op as ``FlopCounterMode`` counts them; 0 for ops without a formula."""
    # Ours first: torch's formulas for attention refuse grouped queries before 2.12, and torch has none for some ops.
    own = flops.get(call.func._schema.name)
    if own is not None:
        return own(call.arguments)
    formula = flop_counter.flop_registry.get(call.func._overloadpacket)
    return 0 if formula is None else int(formula(*call.args, **call.kwargs, out_val=call.returned))
