"""The ops that Liger-Kernel's benchmarks time, in plain PyTorch, as its scripts build them.

    for row in read_rows():
        case = build(row.op, row.size, row.config, row.metric)

A case is what one row of ``benchmarks/data/op_benchmarks.csv`` has run. Scripts do not always time the op alone:

- ``triton.testing.do_bench`` lets go of the gradients in ``grad_to_none`` before the clock starts. All others are there
  from the round before, so that autograd adds to them: a kernel that reads two tensors and writes one.
- Where a script draws the output's gradient inside of the function that it times (``torch.randn_like``), ``full``
  contains that.
- The input of ``jsd`` is a ``log_softmax`` that was taken before the clock started. Its backward pass is timed.
- The script of ``megatron_swiglu`` runs forward and backward pass under the name ``backward``, too.

Peaks are those of other rounds. Most scripts let no gradient go, so that all of them are there from the second round
on, beside the new ones. A case also has what else is on the device, such as the module of the other implementation.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PATH = Path(__file__).parents[1] / "data" / "op_benchmarks.csv"
GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA B200": "b200",
}
"""Devices of sacplan by the names of the table's boards."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One figure.

    Attributes:
        op, mode, metric, size, config: see ``benchmarks/data/README.md``; the config as text, so that rows can be keys.
        gpu: the device's name in sacplan.
        measured: milliseconds or MiB.
    """

    op: str
    mode: str
    metric: str
    size: int
    config: str
    gpu: str
    measured: float


def read_rows(metric: str | None = None) -> list[PublishedRow]:
    """Return the rows of the table, those of one metric if it is given."""
    with PATH.open(encoding="utf-8", newline="") as file:
        rows = [
            PublishedRow(
                op=r["op"], mode=r["mode"], metric=r["metric"], size=int(float(r["x_value"])),
                config=r["config"], gpu=GPUS[r["gpu"]], measured=float(r["median"]),
            )
            for r in csv.DictReader(file)
        ]  # fmt: skip
    return [row for row in rows if metric is None or row.metric == metric]


Forward = Callable[["OpCase"], torch.Tensor]


@dataclass(slots=True)
class OpCase:
    """What a row times: a forward pass, and the backward pass from it.

    Attributes:
        forward: the timed forward pass.
        leaves: inputs that want gradients, by name.
        modules: modules that run, by name; their parameters want gradients.
        idle: modules of the other implementation, which the script has put on the device as well.
        given: inputs that want none.
        prepare: makes inputs from leaves, before the clock starts.
        grad_to_none: the leaves whose gradients are let go before each round.
        gradient: of the output: ``"ones"`` of a scalar, ``"sum"`` of all elements, ``"drawn"`` before the clock starts,
            ``"drawn in full"`` within each round, or ``"ones in full"``.
        retain_graph: the graph stays after the backward pass.
        backward_is_full: the row ``backward`` contains the forward pass.
        peak_by_mode: peaks of ``forward`` and ``backward`` are those of one pass; otherwise they are of both.
        peak_to_none: gradients are let go where peaks are measured, too.
        left_bytes: on the device from before, when peaks are measured.
        made: what ``prepare`` has made.
    """

    forward: Forward
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    idle: dict[str, nn.Module] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    prepare: Callable[[OpCase], dict[str, torch.Tensor]] | None = None
    grad_to_none: tuple[str, ...] = ()
    gradient: str = "ones"
    retain_graph: bool = True
    backward_is_full: bool = False
    peak_by_mode: bool = False
    peak_to_none: bool = False
    left_bytes: int = 0
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def on(self, model: nn.Module) -> OpCase:
        """Return this case on the tensors and modules that a model has under the same names, prepared again."""
        case = replace(
            self,
            leaves={name: getattr(model, name) for name in self.leaves},
            given={name: getattr(model, name) for name in self.given},
            modules={name: getattr(model, name) for name in self.modules},
        )
        if case.prepare is not None:
            case.made = case.prepare(case)
        return case

    def timed_round(self, mark: Callable[[str], None]) -> None:
        """Run one round; ``mark`` is told what begins: ``forward``, ``draw``, ``backward``, ``end``."""
        self._let_go()
        mark("forward")
        out = self.forward(self)
        mark("draw")
        gradient = self._gradient_like(out)
        mark("backward")
        self._backward(out, gradient)
        mark("end")

    def peak_rounds(self, mode: str) -> None:
        """Run two rounds as where peaks are measured. The second one is like all that follow."""
        if not self.peak_by_mode:
            mode = "full"
        in_rounds = self.gradient.endswith("in full") and mode == "full"
        # Otherwise it is made before the first round. It is like the first leaf, which has the output's size.
        before = mode != "forward" and not in_rounds and self.leaves
        given = self._gradient_like(next(iter(self.leaves.values()))) if before else None
        kept = self.forward(self) if mode == "backward" else None
        for _ in range(2):
            if self.peak_to_none:
                self._let_go()
            out = self.forward(self) if kept is None else kept
            if mode != "forward":
                self._backward(out, self._gradient_like(out) if in_rounds else given)
            del out

    def _let_go(self) -> None:
        for name in self.grad_to_none:
            self.leaves[name].grad = None

    def _gradient_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.gradient.startswith("drawn"):
            return torch.randn_like(tensor, requires_grad=False)
        return torch.ones_like(tensor, requires_grad=False) if self.gradient == "ones in full" else None

    def _backward(self, out: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if self.gradient == "sum":
            out = out.sum()
        out.backward(gradient, retain_graph=self.retain_graph)


class LlamaRMSNorm(nn.Module):
    """The RMS norm of transformers' Llama: statistics in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class GatedMLP(nn.Module):
    """The MLP of transformers' Llama, without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ---------------------------------------------------------------------------------------------------------
# The cases. Each takes the size that varies, the config of the row and its metric.

Config = Mapping[str, Any]
Make = Callable[[int, Config, str], "OpCase"]
CASES: dict[str, Make] = {}


def _case(*names: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES.update(dict.fromkeys(names, make))
        return make

    return register


def build(op: str, size: int, config: str, metric: str) -> OpCase:
    """Build the case of a row, on the default device or in the fake mode that is on."""
    case = CASES[op](size, json.loads(config), metric)
    for leaf in case.leaves.values():
        leaf.requires_grad_()
    if case.prepare is not None:
        case.made = case.prepare(case)
    return case


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config["dtype"].removeprefix("torch."))  # type: ignore[no-any-return]


@_case("cross_entropy")
def _cross_entropy(vocabulary: int, config: Config, metric: str) -> OpCase:
    rows = config["B"] * config["T"]
    return OpCase(
        lambda c: F.cross_entropy(c.leaves["x"], c.given["target"]),
        leaves={"x": torch.empty(rows, vocabulary)},
        given={"target": torch.zeros(rows, dtype=torch.long)},
    )


@_case("embedding")
def _embedding(vocabulary: int, config: Config, metric: str) -> OpCase:
    return OpCase(
        lambda c: c.modules["embedding"](c.given["ids"]),
        modules={"embedding": nn.Embedding(vocabulary, config["D"])},
        idle={"liger": nn.Embedding(vocabulary, config["D"])},
        given={"ids": torch.zeros(config["B"], config["T"], dtype=torch.long)},
        gradient="drawn in full",
        retain_graph=False,
        left_bytes=_compiled_embeddings(config["D"]),
    )


def _compiled_embeddings(width: int) -> int:
    """Return the bytes of earlier rows that stay in the script's process.

    It compiles a module for each size as well. We take it that the compiler's cache keeps what it has compiled last:
    weights of the larger width from a forward pass, weights and gradients from a full one, and after the first width's
    peaks weights and gradients of that. The published peaks are above those of a row alone by exactly as much.
    """
    words = sum(2**i for i in range(10, 18))
    return words * 4 * (3 * 4096 + (2 * 768 if width == 4096 else 0))


@_case("fused_linear_cross_entropy")
def _linear_cross_entropy(rows: int, config: Config, metric: str) -> OpCase:
    width, vocabulary, dtype = config["H"], config["V"], _dtype(config)
    heads = [nn.Linear(width, vocabulary, bias=False, dtype=dtype) for _ in range(2)]
    return OpCase(
        lambda c: F.cross_entropy(c.modules["head"](c.leaves["x"]), c.given["target"]),
        leaves={"x": torch.empty(rows, width, dtype=dtype)},
        modules={"head": heads[0]},
        idle={"liger": heads[1]},
        given={"target": torch.zeros(rows, dtype=torch.long)},
        retain_graph=False,
    )


@_case("group_norm")
def _group_norm(channels: int, config: Config, metric: str) -> OpCase:
    groups = channels // config["channels_per_group"]
    return OpCase(
        lambda c: c.modules["norm"](c.leaves["x"]),
        leaves={"x": torch.empty(config["M"], channels, config["H"])},
        modules={"norm": nn.GroupNorm(groups, channels)},
        idle={"liger": nn.GroupNorm(groups, channels)},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("jsd")
def _jsd(size: int, config: Config, metric: str) -> OpCase:
    # The script of 2026 takes rows as the size that varies, adds up the loss in another way, and draws a gradient.
    newer = "vocab_size" in config
    rows, vocabulary = (size, config["vocab_size"]) if newer else (config["B"] * config["T"], size)

    # The script takes the logarithm of ``m`` twice.
    def forward(c: OpCase) -> torch.Tensor:
        p, q = c.given["p"], c.made["q"]
        m = torch.lerp(torch.exp(q), torch.exp(p), 0.5)
        if not newer:
            kl = functools.partial(F.kl_div, reduction="batchmean", log_target=True)
            return 0.5 * kl(torch.log(m), p) + 0.5 * kl(torch.log(m), q)
        kl = functools.partial(F.kl_div, reduction="none", log_target=True)
        losses = 0.5 * kl(torch.log(m), p).sum(-1) + 0.5 * kl(torch.log(m), q).sum(-1)
        return (losses / rows).sum()

    return OpCase(
        forward,
        leaves={"x": torch.empty(rows, vocabulary)},
        given={"p": torch.empty(rows, vocabulary)},
        prepare=lambda c: {"q": c.leaves["x"].log_softmax(-1)},
        gradient="drawn in full" if newer else "ones",
    )


@_case("layer_norm")
def _layer_norm(
    width: int, config: Config, metric: str, make: Callable[[int], nn.Module] = nn.LayerNorm
) -> OpCase:
    return OpCase(
        lambda c: c.modules["norm"](c.leaves["x"]),
        leaves={"x": torch.empty(config["M"], width, dtype=_dtype(config))},
        modules={"norm": make(width)},
        idle={"liger": make(width)},
        grad_to_none=("x",),
        gradient="drawn",
    )


CASES["rms_norm"] = functools.partial(_layer_norm, make=LlamaRMSNorm)


@_case("megatron_swiglu")
def _megatron_swiglu(inner: int, config: Config, metric: str) -> OpCase:
    def forward(c: OpCase) -> torch.Tensor:
        gate, up = torch.chunk(c.leaves["x"], 2, -1)
        return F.silu(gate) * up

    return OpCase(
        forward,
        leaves={"x": torch.empty(config["S"], config["B"], 2 * inner, dtype=torch.bfloat16)},
        grad_to_none=("x",),
        gradient="sum",
        retain_graph=False,
        peak_to_none=True,
        backward_is_full=True,
    )


@_case("softmax")
def _elementwise(
    width: int,
    config: Config,
    metric: str,
    op: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.softmax(x, -1),
) -> OpCase:
    """Run an op of one tensor. Where these scripts measure peaks, it is a single row."""
    shape = (config["M"], width) if metric == "speed" else (width,)
    return OpCase(
        lambda c: op(c.leaves["x"]),
        leaves={"x": torch.empty(shape, dtype=_dtype(config))},
        grad_to_none=("x",),
        gradient="drawn" if metric == "speed" else "ones in full",
    )


CASES["relu_squared"] = functools.partial(_elementwise, op=lambda x: torch.square(F.relu(x)))


@_case("swiglu", "tiled_swiglu")
def _swiglu(length: int, config: Config, metric: str) -> OpCase:
    width, batch = config["hidden_size"], config.get("bsz") or config["B"]
    return OpCase(
        lambda c: c.modules["mlp"](c.leaves["x"]),
        leaves={"x": torch.empty(batch, length, width, dtype=torch.bfloat16)},
        modules={"mlp": GatedMLP(width, config["intermediate_size"])},
        grad_to_none=("x",),
        gradient="drawn in full",
        peak_by_mode=True,
    )
