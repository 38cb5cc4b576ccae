"""The ops that Liger-Kernel's benchmarks time, in plain PyTorch, as its scripts build them.

    for row in read_rows():
        case = build(row.op, row.size, row.config, row.gpu)

A case is what one row of ``benchmarks/data/op_benchmarks.csv`` has run. Scripts do not always time the op alone:

- ``triton.testing.do_bench`` lets go of the gradients in ``grad_to_none`` before the clock starts. All others are there
  from the round before, so that autograd adds to them: a kernel that reads two tensors and writes one.
- Where a script draws the output's gradient inside of the function that it times (``torch.randn_like``), ``full``
  contains that.
- The input of ``jsd`` is a ``log_softmax`` that was taken before the clock started. Its backward pass is timed.
- The script of ``megatron_swiglu`` runs forward and backward pass under the name ``backward``, too.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
            or ``"drawn in full"``: within the time of ``full``.
        backward_is_full: the row ``backward`` contains the forward pass.
    """

    forward: Forward
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    idle: dict[str, nn.Module] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    prepare: Callable[[OpCase], dict[str, torch.Tensor]] | None = None
    grad_to_none: tuple[str, ...] = ()
    gradient: str = "ones"
    backward_is_full: bool = False
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def round(self, mark: Callable[[str], None]) -> None:
        """Run one round; ``mark`` is told what begins: ``forward``, ``draw``, ``backward``, ``end``."""
        for name in self.grad_to_none:
            self.leaves[name].grad = None
        mark("forward")
        out = self.forward(self)
        mark("draw")
        gradient = torch.randn_like(out) if self.gradient.startswith("drawn") else None
        mark("backward")
        if self.gradient == "sum":
            out.sum().backward()
        else:
            out.backward(gradient, retain_graph=True)
        mark("end")


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
# The cases. Each takes the size that varies, the config of the row and the GPU.

Config = Mapping[str, Any]
CASES: dict[str, Callable[[int, Config, str], OpCase]] = {}


def _case(
    *names: str,
) -> Callable[[Callable[[int, Config, str], OpCase]], Callable[[int, Config, str], OpCase]]:
    def register(make: Callable[[int, Config, str], OpCase]) -> Callable[[int, Config, str], OpCase]:
        CASES.update(dict.fromkeys(names, make))
        return make

    return register


def build(op: str, size: int, config: str, gpu: str) -> OpCase:
    """Build the case of a row, on the default device or in the fake mode that is on."""
    case = CASES[op](size, json.loads(config), gpu)
    for leaf in case.leaves.values():
        leaf.requires_grad_()
    if case.prepare is not None:
        case.made = case.prepare(case)
    return case


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config["dtype"].removeprefix("torch."))  # type: ignore[no-any-return]


@_case("cross_entropy")
def _cross_entropy(vocabulary: int, config: Config, gpu: str) -> OpCase:
    rows = config["B"] * config["T"]
    return OpCase(
        lambda c: F.cross_entropy(c.leaves["x"], c.given["target"]),
        leaves={"x": torch.empty(rows, vocabulary)},
        given={"target": torch.zeros(rows, dtype=torch.long)},
    )


@_case("embedding")
def _embedding(vocabulary: int, config: Config, gpu: str) -> OpCase:
    return OpCase(
        lambda c: c.modules["embedding"](c.given["ids"]),
        modules={"embedding": nn.Embedding(vocabulary, config["D"])},
        idle={"liger": nn.Embedding(vocabulary, config["D"])},
        given={"ids": torch.zeros(config["B"], config["T"], dtype=torch.long)},
        gradient="drawn in full",
    )


@_case("fused_linear_cross_entropy")
def _linear_cross_entropy(rows: int, config: Config, gpu: str) -> OpCase:
    width, vocabulary, dtype = config["H"], config["V"], _dtype(config)
    heads = [nn.Linear(width, vocabulary, bias=False, dtype=dtype) for _ in range(2)]
    return OpCase(
        lambda c: F.cross_entropy(c.modules["head"](c.leaves["x"]), c.given["target"]),
        leaves={"x": torch.empty(rows, width, dtype=dtype)},
        modules={"head": heads[0]},
        idle={"liger": heads[1]},
        given={"target": torch.zeros(rows, dtype=torch.long)},
    )


@_case("group_norm")
def _group_norm(channels: int, config: Config, gpu: str) -> OpCase:
    groups = channels // config["channels_per_group"]
    return OpCase(
        lambda c: c.modules["norm"](c.leaves["x"]),
        leaves={"x": torch.empty(config["M"], channels, config["H"])},
        modules={"norm": nn.GroupNorm(groups, channels)},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("jsd")
def _jsd(size: int, config: Config, gpu: str) -> OpCase:
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
        gradient="drawn" if newer else "ones",
    )


@_case("layer_norm")
def _layer_norm(width: int, config: Config, gpu: str) -> OpCase:
    return OpCase(
        lambda c: c.modules["norm"](c.leaves["x"]),
        leaves={"x": torch.empty(config["M"], width, dtype=_dtype(config))},
        modules={"norm": nn.LayerNorm(width)},
        idle={"liger": nn.LayerNorm(width)},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("rms_norm")
def _rms_norm(width: int, config: Config, gpu: str) -> OpCase:
    return OpCase(
        lambda c: c.modules["norm"](c.leaves["x"]),
        leaves={"x": torch.empty(config["M"], width, dtype=_dtype(config))},
        modules={"norm": LlamaRMSNorm(width)},
        idle={"liger": LlamaRMSNorm(width)},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("megatron_swiglu")
def _megatron_swiglu(inner: int, config: Config, gpu: str) -> OpCase:
    def forward(c: OpCase) -> torch.Tensor:
        gate, up = torch.chunk(c.leaves["x"], 2, -1)
        return F.silu(gate) * up

    return OpCase(
        forward,
        leaves={"x": torch.empty(config["S"], config["B"], 2 * inner, dtype=torch.bfloat16)},
        grad_to_none=("x",),
        gradient="sum",
        backward_is_full=True,
    )


@_case("relu_squared")
def _relu_squared(width: int, config: Config, gpu: str) -> OpCase:
    return OpCase(
        lambda c: torch.square(F.relu(c.leaves["x"])),
        leaves={"x": torch.empty(config["M"], width, dtype=_dtype(config))},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("softmax")
def _softmax(width: int, config: Config, gpu: str) -> OpCase:
    return OpCase(
        lambda c: torch.softmax(c.leaves["x"], -1),
        leaves={"x": torch.empty(config["M"], width, dtype=_dtype(config))},
        grad_to_none=("x",),
        gradient="drawn",
    )


@_case("swiglu", "tiled_swiglu")
def _swiglu(length: int, config: Config, gpu: str) -> OpCase:
    width, batch = config["hidden_size"], config.get("bsz") or config["B"]
    return OpCase(
        lambda c: c.modules["mlp"](c.leaves["x"]),
        leaves={"x": torch.empty(batch, length, width, dtype=torch.bfloat16)},
        modules={"mlp": GatedMLP(width, config["intermediate_size"])},
        grad_to_none=("x",),
        gradient="drawn in full",
    )
