"""Scaled dot-product attention: queries (batch, heads, queries, size), keys and values (batch, groups, keys, size)."""

from __future__ import annotations

from typing import Any

from sacplan.core.factors.pointwise import broadcast
from sacplan.core.factors.rule import Dims, Kind, Rule, RuleBuilder, register

_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class _Attention:
    """The factors of one call.

    Batch and heads pass; where several heads share keys and values, groups of heads do. Queries pass unless the mask
    is causal, which says by position what a query may see.

    Attributes:
        understood: whether all masks are broadcast to the weights, or empty.
    """

    def __init__(self, call: RuleBuilder) -> None:
        # Blocked: heads within a group, which share its keys; keys, over which softmax normalizes; head sizes, over
        # which the scores are summed.
        q, k, v = call["query"], call["key"], call["value"]
        self._call = call
        self.understood = True
        self._weights_shape = (*q.shape[:3], k.shape[2])
        self.batch, self.groups = call.factor(q.shape[0]), call.factor(k.shape[1])
        self.heads = self.groups + call.factor(q.shape[1] // k.shape[1], Kind.BLOCK)
        self.rows, self._keys = call.factor(q.shape[2]), call.factor(k.shape[2], Kind.BLOCK)
        size, out_size = call.factor(q.shape[3], Kind.BLOCK), call.factor(v.shape[3], Kind.BLOCK)
        self.query: Dims = (self.batch, self.heads, self.rows, size)
        self.key: Dims = (self.batch, self.groups, self._keys, size)
        self.value: Dims = (self.batch, self.groups, self._keys, out_size)
        self.out: Dims = (self.batch, self.heads, self.rows, out_size)
        self.weights: Dims = (self.batch, self.heads, self.rows, self._keys)

    def mask(self, t: Any) -> Dims:
        """Return the factors of a mask, which is broadcast, or empty."""
        found = broadcast(self.weights, self._weights_shape, t.shape)
        self.understood &= found is not None or 0 in t.shape
        return self._call.blocked(t.shape) if found is None else found

    def statistics(self, t: Any) -> Dims:
        """Return the factors of a logsumexp [batch, heads, queries].

        Efficient attention pads the queries to a multiple of 32, so a slice of them is not a slice of the whole.
        """
        # Three cases: as computed; padded, so that rows must be whole; any other shape, of which nothing is known.
        batch, heads, rows, _ = self._weights_shape
        if tuple(t.shape) in ((batch, heads, rows), (batch, heads, rows, 1)) and not self._pads:
            return (self.batch, self.heads, self.rows, ())[: len(t.shape)]
        if tuple(t.shape[:2]) == (batch, heads):
            return (self.batch, self.heads, *self._call.blocked(t.shape[2:]))
        return self._call.blocked(t.shape)

    @property
    def _pads(self) -> bool:
        return "efficient" in self._call.name

    def rows_pass(self, statistics: Any) -> bool:
        """Whether queries can be sliced."""
        return not (self._call["is_causal"] or (self._pads and statistics.shape[-1]))

    def inputs(self, **more: Dims) -> list[Dims]:
        """Return the factors of all tensor arguments."""
        known = {"query": self.query, "key": self.key, "value": self.value, **more}
        return [
            self.mask(t)
            if name in ("attn_mask", "attn_bias", "dropout_mask")
            else known.get(name) or self._call.blocked(t.shape)
            for name, t in self._call.named_inputs
        ]


@register(*_KERNELS, "_scaled_dot_product_attention_math")
def _attention(call: RuleBuilder) -> Rule | None:
    attention = _Attention(call)
    inputs = attention.inputs()
    _, second, *others = call.outputs
    if call.name == "_scaled_dot_product_attention_math":
        outputs = [attention.out, attention.weights]
        may_cut = not call["is_causal"]
    else:
        outputs = [attention.out, attention.statistics(second), *(call.blocked(o.shape) for o in others)]
        may_cut = attention.rows_pass(second)
    if not may_cut:
        call.becomes(attention.rows, Kind.BLOCK)
    return call.rule(inputs, outputs) if attention.understood else None


@register(*(f"{kernel}_backward" for kernel in _KERNELS))
def _attention_backward(call: RuleBuilder) -> Rule | None:
    """Gradients of keys and values are sums over queries, that of a mask over what it is broadcast to."""
    # The outputs below count on the gradients of query, key and value.
    if not all(call.arguments.get("grad_input_mask", (True,))[:3]):
        return None
    attention = _Attention(call)
    out = attention.out
    inputs = attention.inputs(
        out=out, grad_out=out, grad_out_=out, logsumexp=attention.statistics(call["logsumexp"])
    )
    outputs = [attention.query, attention.key, attention.value]
    for bias in call.outputs[3:]:
        # What the mask is broadcast along is summed in its gradient. An empty one is no gradient: any slice gives it.
        outputs.append(attention.mask(bias))
        absent = {f for dim in attention.weights for f in dim} - {f for dim in outputs[3] for f in dim}
        call.becomes(absent, Kind.SUM if 0 not in bias.shape else Kind.PASS, 3)
    if attention.rows_pass(call["logsumexp"]):
        call.becomes(attention.rows, Kind.SUM, 1, 2)
    else:
        call.becomes(attention.rows, Kind.BLOCK, *range(len(outputs)))
    if "max_q" in call.arguments:
        call.resize("max_q", None, attention.rows)
    return call.rule(inputs, outputs) if attention.understood else None
