"""Published steps of language models: minGPT, torchtitan, torchtune, PEFT, nanochat; two Linears of a PyTorch issue."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import sacplan
from benchmarks.harness.played import Loop
from benchmarks.harness.results import GIB, MIB
from benchmarks.models import cases
from benchmarks.models import published_networks as networks
from benchmarks.models.cases import Case, fused_adamw
from benchmarks.models.published_step import (
    COMPILE,
    GB,
    LAYERS,
    MIXED,
    Point,
    Step,
    empty,
    foreach_adamw,
    full_policy,
    in_autocast,
    offloading_policy,
    op_policy,
    step_in_backward,
)
from sacplan.core.program import Op, Phase, Program
from sacplan.profiling.optimizer_table import AdamW8bitSizes
from sacplan.record.step import call_model

# --- minGPT -----------------------------------------------------------------------------------------------

CUBLASLT_BYTES = MIB
"""cuBLASLt's workspace in torch 1.12 to 2.0, allocated and freed by each product with a bias (PyTorch #73439)."""


def _cublaslt(program: Program, op: Op) -> int:
    return CUBLASLT_BYTES if op.name == "aten.addmm.default" else 0


def _logits_and_loss(program: Program) -> Iterable[int]:
    """Return logits and loss, which minGPT's loop holds until the model of the next step has returned."""
    forward = [op for op in program.ops if op.phase == Phase.FORWARD]
    head = [op for op in forward if op.name == "aten.mm.default"][-1]
    loss = [op for op in forward if op.name == "aten.nll_loss_forward.default"][-1]
    return head.writes[0], loss.writes[0]


def _mingpt(layers: int, heads: int, width: int) -> Case:
    with torch.device("meta"):
        model = networks.MinGPT(layers, heads, width, vocabulary=3, length=11)

    # minGPT sorts the names of its parameters, all of which but the head's are in "transformer".
    def theirs(name: str) -> str:
        return name if name.startswith("lm_head") else f"transformer.{name}"

    named = sorted((theirs(name), name, p) for name, p in model.named_parameters())
    is_matrix = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    decayed = [p for _, name, p in named if name in is_matrix]
    others = [p for _, name, p in named if name not in is_matrix]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    return Case(model, (empty(64, 11), empty(64, 11)), lambda model, batch: model(*batch)[1], optimizer)


_MINGPT = functools.partial(
    Step,
    points=(
        Point(part=("before",), loop=Loop("backward", _logits_and_loss, _cublaslt)),
        Point(part=("after",), loop=Loop("step", _logits_and_loss, _cublaslt)),
    ),
    device="a100-80gb",
    workspace_bytes=8_519_680,
)

# --- torchtitan -------------------------------------------------------------------------------------------


H100_96GB = "h100-96gb-500w"
"""torchtitan's card: HBM2e, and a limit of 500 W (its ``benchmarks/llama3_h100_202412_torchtitan.md``)."""


def titan_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss as torchtitan's ``train.py`` does."""
    tokens, targets = batch
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
    del logits  # as in torchtitan: not alive during the backward pass
    return loss


def _float_logits(program: Program) -> Iterable[int]:
    """Return logits and loss, which the loop of early 2024 held until the model of the next step had returned."""
    forward = [op for op in program.ops if op.phase == Phase.FORWARD]
    loss = [op for op in forward if op.name == "aten.nll_loss_forward.default"][-1]
    upcast = [op for op in forward if op.name == "aten._to_copy.default"][-1]
    return upcast.writes[0], loss.writes[0]


def _titan(shape: networks.LlamaShape, sequences: int, length: int = 8192) -> Case:
    with torch.device("meta"):
        model = networks.Llama(shape)
    return Case(model, (empty(sequences, length), empty(sequences, length)), titan_loss, foreach_adamw)


def _kept_by_checkpointing(program: Program) -> Mapping[int, int]:
    """Return the outputs of each layer's last product, with the op before which each is dropped.

    PyTorch's selective checkpointing keeps every output that its rule marks, needed or not. The last product of a layer
    is marked, and only an addition reads it. It stays until the layer's gradients are reduced.
    """

    def layer_of(op: Op) -> str:
        fqn = program.scopes[op.scope].fqn if op.scope >= 0 else ""
        return ".".join(fqn.split(".")[:2]) if fqn.startswith("layers.") else ""

    kept: dict[str, int] = {}
    for op in program.ops:
        fqn = program.scopes[op.scope].fqn if op.scope >= 0 else ""
        is_product = op.name == "aten.mm.default" and op.phase == Phase.FORWARD and op.recomputes < 0
        if is_product and fqn.endswith("feed_forward.w2"):
            kept[layer_of(op)] = op.writes[0]
    # Layers are reduced in reverse order.
    reduced = (i for i, op in enumerate(program.ops) if op.name.startswith("fsdp.chunk_cat"))
    return dict(zip(reversed(kept.values()), reduced, strict=False))


BOTH = Point(unit=GIB, figure="reserved"), Point(unit=GIB, figure="reserved_expandable")


def _fully_sharded(model: Any, reshard: Literal["always", "default", "never"]) -> None:
    """Shard a model as torchtitan's ``apply_fsdp`` does: by default the last layer stays gathered after its forward.

    So does the root, whatever is asked of it, in PyTorch up to 2.7 (its pull request #155319).
    """
    last = model.layers[-1]
    for layer in model.layers:
        frees = reshard == "always" or (reshard == "default" and layer is not last)
        fully_shard(layer, mp_policy=MIXED, reshard_after_forward=frees)
    fully_shard(model, mp_policy=MIXED, reshard_after_forward=False)


def _titan822(reshard: Literal["always", "default", "never"], *, sequences: int = 1, **changes: Any) -> Step:
    made: dict[str, Any] = {
        "build": lambda: _titan(networks.LLAMA_3_8B, sequences),
        "points": (
            Point(part=("step1",), unit=GIB, figure="reserved_expandable", first=True),
            Point(part=("step10+",), unit=GIB, figure="reserved_expandable"),
        ),
        "device": H100_96GB,
        "plan": op_policy,
        "loop": Loop(until=_kept_by_checkpointing),
        "spread": functools.partial(_fully_sharded, reshard=reshard),
        "ranks": 8,
        "samples": 8192 * sequences,
    }
    return Step(**made | changes)


def _titan2412(ranks: int, **changes: Any) -> Step:
    made = {"sequences": 2, "points": BOTH, "ranks": ranks, "assumed": True}
    return _titan822("default", **made | changes)


# --- torchtune --------------------------------------------------------------------------------------------


def _loss_of_chunk(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def _tune_loss(model: nn.Module, batch: Any, of_chunk: Callable[..., torch.Tensor]) -> torch.Tensor:
    tokens, labels = batch
    labels = torch.hstack((labels[..., 1:], labels.new_full((labels.shape[0], 1), -100)))
    logits = model(tokens)
    if not isinstance(logits, list):
        logits = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(logits, labels.reshape(-1), ignore_index=-100)
        del logits
        return loss
    total = (labels != -100).sum()
    losses = [
        of_chunk(chunk.reshape(-1, chunk.shape[-1]), label.reshape(-1))
        for chunk, label in zip(logits, labels.chunk(len(logits), dim=1), strict=True)
    ]
    return torch.stack(losses).sum() / total


def _tune(chunks: int = 1, rank: int = 0, *, compiled: bool = False) -> Case:
    with torch.device("meta"):
        model = networks.Llama(dataclasses.replace(networks.LLAMA_32_3B, chunks=chunks)).in_bfloat16()
    if rank:
        model = networks.with_qlora(model, rank)
    of_chunk = torch.compile(_loss_of_chunk) if compiled else _loss_of_chunk
    loss_fn = functools.partial(_tune_loss, of_chunk=of_chunk)
    return Case(model, (empty(2, 4096), empty(2, 4096)), loss_fn, fused_adamw)


def _tune_in_backward(make: Any, *, compiled: bool = False) -> Case:
    """Return the step with an optimizer for each parameter, which steps when its gradient is there."""
    built = _tune(8, compiled=compiled)
    step_in_backward(built.model, make)
    return dataclasses.replace(built, optimizer=None)


def _tune_step(chunks: int = 1, **changes: Any) -> Step:
    made: dict[str, Any] = {
        "build": lambda: _tune(chunks, compiled="compiled" in changes),
        "points": (Point(unit=GIB, figure="active"),),
        "device": "a100-80gb",
        "samples": 2 * 4096,
    }
    return Step(**made | changes)


# --- PEFT's QLoRA with FSDP ---------------------------------------------------------------------------


_PEFT_LAYERS = "base_model.model.model.layers.*"


def _qlora_70b() -> Case:
    """Return Llama-2-70B in 4 bits, stored as bfloat16, with adapters of rank 8 on all linear layers."""
    import peft
    import transformers

    config = cases.published_config("meta-llama/Llama-2-70b-hf")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = sacplan.with_lora(
        model,
        peft.LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        ),
    )
    loss_fn = in_autocast(lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)
    return Case(model, empty(2, 2048), loss_fn, foreach_adamw)


def _peft_fsdp(offload: bool) -> Step:
    return Step(
        build=_qlora_70b,
        points=(Point(unit=GB, figure="reserved"),),
        device="a100-80gb",
        plan=functools.partial(full_policy, layers=_PEFT_LAYERS),
        fsdp=sacplan.FSDP2(2, (_PEFT_LAYERS, ""), offload_policy=CPUOffloadPolicy() if offload else None),
        assumed=True,
    )


# --- nanochat ------------------------------------------------------------------------------------------


class ShardedSizes(torch.optim.Optimizer):
    """The state that rank 0 of several has in nanochat's optimizers, with an update of the same sizes.

    Embedding and head have two states of a slice of their rows; of the matrices of one shape every ``ranks``-th has a
    momentum. Gradients are averaged in place. Buffers of collectives and Muon's own iterations are left out.
    """

    def __init__(self, parameters: Any, ranks: int = 8) -> None:
        super().__init__(parameters, {"ranks": ranks})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's share."""
        for group in self.param_groups:
            seen: dict[torch.Size, int] = {}
            for p in group["params"]:
                if max(p.shape) > 16 * min(p.shape):
                    share, names = p[: len(p) // group["ranks"]], ["exp_avg", "exp_avg_sq"]
                else:
                    seen[p.shape] = seen.get(p.shape, 0) + 1
                    if (seen[p.shape] - 1) % group["ranks"]:
                        continue
                    share, names = p, ["momentum"]
                state, gradient = self.state[p], p.grad[: len(share)]
                for name in names:
                    if name not in state:
                        state[name] = torch.zeros_like(share)
                    state[name].lerp_(gradient, 0.1)
                share.add_(state[names[0]], alpha=-0.1)


def _nanochat() -> Case:
    with torch.device("meta"):
        model = networks.Nanochat(layers=20, width=1280, heads=10, vocabulary=65536, length=2048)
    return Case(model, (empty(32, 2048), empty(32, 2048)), in_autocast(call_model), ShardedSizes)


# --- PyTorch's issue 74443 ----------------------------------------------------------------------------


def _two_linears() -> Case:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    return Case(model, empty(4, 256, 1024, dtype=torch.float32), lambda model, x: model(x).sum())


def _sum(program: Program) -> Iterable[int]:
    """Return the loss, a sum, which a variable of the script holds."""
    return [op for op in program.ops if op.name == "aten.sum.default"][-1].writes


LANGUAGE: dict[str, Step] = {
    "mingpt-nano": _MINGPT(
        build=lambda: _mingpt(3, 3, 48),
    ),
    "mingpt-xl": _MINGPT(
        build=lambda: _mingpt(48, 25, 1600),
    ),
    "titan822-default": _titan822("default"),
    "titan822-always": _titan822("always"),
    "titan822-never": _titan822("never"),
    "titan808-compile": _titan822(
        "default",
        points=(Point(part=("bf16 compile",), unit=GIB, figure="reserved_expandable"),),
        compiled=[LAYERS],
        loop=Loop(),
    ),
    "titan2412-8gpu-FSDP": _titan2412(8),
    "titan2412-8gpu-FSDP+compile": _titan2412(8, compiled=[LAYERS], loop=Loop()),
    "titan2412-128gpu-FSDP": _titan2412(128),
    "titan165-fsdp": _titan822(
        "default",
        build=lambda: _titan(networks.LLAMA_2_7B, 8, 2048),
        points=(
            Point(part=("FSDP2 AC", 0), unit=0.01 * 95.0396 * GIB, figure="active"),
            Point(part=("FSDP2 AC", 1), unit=0.01 * 95.0396 * GIB, figure="reserved"),
        ),
        plan=full_policy,
        loop=Loop(held=_float_logits),
        samples=8 * 2048,
        assumed=True,
    ),
    "peft-qlora-70b-fsdp": _peft_fsdp(offload=False),
    "peft-qlora-70b-fsdp-offload": _peft_fsdp(offload=True),
    "tune-3b-+_packed": _tune_step(),
    "tune-3b-+_compile": _tune_step(
        compiled=[LAYERS],
    ),
    "tune-3b-+_chunked_CE": _tune_step(8, compiled=[LAYERS]),
    "tune-3b-+_activation_checkpointing": _tune_step(8, plan=full_policy, compiled=[LAYERS]),
    "tune-3b-QLoRA": _tune_step(
        build=lambda: _tune(8, rank=64),
        plan=offloading_policy,
        missing=COMPILE,
        assumed=True,
    ),
    "tune-3b-+_optimizer_in_backward": _tune_step(
        build=lambda: _tune_in_backward(fused_adamw, compiled=True), plan=full_policy, compiled=[LAYERS]
    ),
    "tune-3b-+_activation_offloading": _tune_step(
        build=lambda: _tune_in_backward(fused_adamw), plan=offloading_policy, missing=COMPILE
    ),
    "tune-3b-+_8-bit_AdamW": _tune_step(
        build=lambda: _tune_in_backward(AdamW8bitSizes), plan=offloading_policy, missing=COMPILE
    ),
    "nanochat-d20": Step(
        build=_nanochat,
        points=(Point(unit=MIB),),
        device="h100",
        compiled=True,
    ),
    "pt-74443-pow2": Step(
        build=_two_linears,
        points=(Point(part=("memory2 (after bwd)",), figure="end"),),
        device="a100-80gb",
        workspace_bytes=0,
        loop=Loop(held=_sum),
    ),
}
