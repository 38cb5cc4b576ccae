"""Op graphs of GPT stacks and of multi-layer perceptrons, with roofline times at 400 TFLOP/s and 2 TB/s.

    graph = gpt(8)                              # or mlp(5)
    plan = sacplan.plan(profile_of(graph), f"{graph.store_all_peak * 6 // 10}B")
    plan.recompute_ms / graph.forward_ms

``opgraph.py`` makes a ``Profile`` of a graph, and a graph of a recorded step. ``optimum.py`` has what a plan's peak and
recomputation can be held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.graphs.opgraph import Builder, OpGraph

_FLOPS_PER_MS = 400e9
_BYTES_PER_MS = 2e9
_CAUSAL = 0.6  # time of causal flash attention over that of the full products
_BF16 = 2


def _matmul_ms(rows: int, inner: int, columns: int) -> float:
    """Return the roofline time of ``rows x inner @ inner x columns`` in bf16, without the weight's traffic."""
    flops, traffic = 2 * rows * inner * columns, (rows * inner + rows * columns) * _BF16
    return max(flops / _FLOPS_PER_MS, traffic / _BYTES_PER_MS)


def _traffic_ms(nbytes: float) -> float:
    return nbytes / _BYTES_PER_MS


def gpt(
    layers: int,
    *,
    batch: int = 8,
    length: int = 2048,
    dim: int = 2048,
    coarse: bool = False,
    ratios: Sequence[int] = (4,),
) -> OpGraph:
    """Build a pre-norm GPT stack in bf16.

    Args:
        layers, batch, length, dim: its shape.
        coarse: five forward ops a layer in place of ten, for exact optima.
        ratios: hidden width of the feed-forward over ``dim``, layer by layer in turn.
    """
    name = f"gpt{layers}{'-coarse' if coarse else ''}"
    build = Builder(name if tuple(ratios) == (4,) else f"{name}-ratios{'-'.join(map(str, ratios))}")
    rows = batch * length
    unit = rows * dim * _BF16
    shape = _GptShape(batch, length, dim)
    x = build.forward("embed", unit, _traffic_ms(2 * unit))
    layer_type = _CoarseLayer if coarse else _Layer
    stack = []
    for index in range(layers):
        stack.append(layer_type(build, shape, f"layers.{index}", ratios[index % len(ratios)], x))
        x = stack[-1].output
    build.module = ""
    build.forward("lnf", unit, _traffic_ms(2 * unit), [x])
    d = build.backward("d_loss", unit, _traffic_ms(unit), [])
    d = build.backward("d_lnf", unit, _traffic_ms(3 * unit), [x], [d])
    for layer in reversed(stack):
        d = layer.add_backward(build, d)
    return build.graph()


@dataclass(frozen=True, slots=True)
class _GptShape:
    batch: int
    length: int
    dim: int

    @property
    def rows(self) -> int:
        return self.batch * self.length

    @property
    def unit(self) -> int:
        """Bytes of one hidden state."""
        return self.rows * self.dim * _BF16

    def attention_ms(self, multiplies: int) -> float:
        """Return the time of ``multiplies * batch * length² * dim`` FLOPs at full rate."""
        return multiplies * self.batch * self.length * self.length * self.dim / _FLOPS_PER_MS

    def linear_ms(self, inner: int, outer: int) -> float:
        return _matmul_ms(self.rows, inner, outer)


class _Layer:
    """A layer of ten forward ops and eight backward ones."""

    def __init__(self, build: Builder, shape: _GptShape, fqn: str, ratio: int, x: int) -> None:
        self.shape, self.fqn, self.ratio, self.x = shape, fqn, ratio, x
        a, dim, linear = shape.unit, shape.dim, shape.linear_ms
        build.module = f"{fqn}.attn"
        self.ln1 = build.forward("ln1", a, _traffic_ms(2 * a), [x])
        self.qkv = build.forward("qkv", 3 * a, linear(dim, 3 * dim), [self.ln1])
        self.attn = build.forward("attn", a, shape.attention_ms(4) * _CAUSAL, [self.qkv])
        proj = build.forward("proj", a, linear(dim, dim), [self.attn])
        self.add1 = build.forward("add1", a, _traffic_ms(3 * a), [x, proj])
        build.module = f"{fqn}.mlp"
        self.ln2 = build.forward("ln2", a, _traffic_ms(2 * a), [self.add1])
        self.fc1 = build.forward("fc1", ratio * a, linear(dim, ratio * dim), [self.ln2])
        self.gelu = build.forward("gelu", ratio * a, _traffic_ms(2 * ratio * a), [self.fc1])
        fc2 = build.forward("fc2", a, linear(ratio * dim, dim), [self.gelu])
        self.output = build.forward("add2", a, _traffic_ms(3 * a), [self.add1, fc2])

    def add_backward(self, build: Builder, d: int) -> int:
        shape, r = self.shape, self.ratio
        a, dim, linear = shape.unit, shape.dim, shape.linear_ms
        build.module = f"{self.fqn}.mlp"
        inner = build.backward("d_fc2", r * a, 2 * linear(r * dim, dim), [self.gelu], [d])
        inner = build.backward("d_gelu", r * a, _traffic_ms(3 * r * a), [self.fc1], [inner])
        inner = build.backward("d_fc1", a, 2 * linear(dim, r * dim), [self.ln2], [inner])
        d = build.backward("d_ln2", a, _traffic_ms(4 * a), [self.add1], [inner, d])
        build.module = f"{self.fqn}.attn"
        inner = build.backward("d_proj", a, 2 * linear(dim, dim), [self.attn], [d])
        time_ms = shape.attention_ms(10) * _CAUSAL
        inner = build.backward("d_attn", 3 * a, time_ms, [self.attn, self.qkv], [inner])
        inner = build.backward("d_qkv", a, 2 * linear(dim, 3 * dim), [self.ln1], [inner])
        return build.backward("d_ln1", a, _traffic_ms(4 * a), [self.x], [inner, d])


class _CoarseLayer:
    """The same layer as five forward ops and four backward ones."""

    def __init__(self, build: Builder, shape: _GptShape, fqn: str, ratio: int, x: int) -> None:
        self.shape, self.fqn, self.ratio, self.x = shape, fqn, ratio, x
        a, dim, linear = shape.unit, shape.dim, shape.linear_ms
        build.module = f"{fqn}.attn"
        self.qkv = build.forward("ln1+qkv", 3 * a, linear(dim, 3 * dim) + _traffic_ms(2 * a), [x])
        self.attn = build.forward("attn", a, shape.attention_ms(4) * _CAUSAL, [self.qkv])
        self.add1 = build.forward("proj+add", a, linear(dim, dim) + _traffic_ms(3 * a), [self.attn, x])
        build.module = f"{fqn}.mlp"
        hidden = linear(dim, ratio * dim) + _traffic_ms(2 * a)
        self.fc1 = build.forward("ln2+fc1", ratio * a, hidden, [self.add1])
        out = linear(ratio * dim, dim) + _traffic_ms((2 * ratio + 3) * a)
        self.output = build.forward("gelu+fc2+add", a, out, [self.fc1, self.add1])

    def add_backward(self, build: Builder, d: int) -> int:
        shape, r = self.shape, self.ratio
        a, dim, linear = shape.unit, shape.dim, shape.linear_ms
        build.module = f"{self.fqn}.mlp"
        hidden = 2 * linear(r * dim, dim) + _traffic_ms(5 * r * a)
        inner = build.backward("d_fc2+gelu", r * a, hidden, [self.fc1], [d])
        d = build.backward(
            "d_fc1+ln2", a, 2 * linear(dim, r * dim) + _traffic_ms(4 * a), [self.add1], [inner, d]
        )
        build.module = f"{self.fqn}.attn"
        attention = 2 * linear(dim, dim) + shape.attention_ms(10) * _CAUSAL
        inner = build.backward("d_proj+attn", 3 * a, attention, [self.attn, self.qkv], [d])
        time_ms = 2 * linear(dim, 3 * dim) + _traffic_ms(4 * a)
        return build.backward("d_qkv+ln1", a, time_ms, [self.x], [inner, d])


def mlp(layers: int, *, rows: int = 65536, dim: int = 1024) -> OpGraph:
    """Build a stack of linear layers with ReLU in bf16."""
    build = Builder(f"mlp{layers}")
    a, linear = rows * dim * _BF16, _matmul_ms(rows, dim, dim)
    x = build.forward("in", a, _traffic_ms(a))
    stack = []
    for index in range(layers):
        build.module = f"layers.{index}"
        y = build.forward("linear", a, linear, [x])
        z = build.forward("relu", a, _traffic_ms(2 * a), [y])
        stack.append((build.module, x, z))
        x = z
    build.module = ""
    d = build.backward("d_loss", a, _traffic_ms(a), [])
    for build.module, x, z in reversed(stack):
        d = build.backward("d_relu", a, _traffic_ms(3 * a), [z], [d])
        d = build.backward("d_linear", a, 2 * linear, [x], [d])
    return build.graph()
