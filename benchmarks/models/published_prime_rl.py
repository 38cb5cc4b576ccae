"""Published steps of prime-rl's trainers: Qwen3-30B-A3B on eight GPUs and Qwen3-0.6B on one, some with adapters.

Written down from its code of January 2026: experts, head, loss, adapters and calls of ``fully_shard``. A step adds up
two micro-batches. As many tokens go to each expert. Of the loss of reinforcement learning only the mean is here: its
other ops read and make a number for each token. Attention is that of transformers; flash attention saves as much. On an
H100, FlashAttention-3 ran, whose rates cuDNN's attention has here. Offloading has no stream of its own (``use_streams``
is off in ``act_offloading.py``).

Layers of Qwen3-0.6B were to be compiled, and were not: flash attention of transformers 4.56.1 asks the GPU whether
positions are packed (``_is_packed_sequence``), Dynamo cannot trace that within a checkpoint, and then runs all of the
checkpoint in eager mode (``torch/utils/checkpoint.py``). Each micro-batch ends with ``loss.item()``.

Up to June 2026 the trainer of reinforcement learning looked for the ends of responses token by token, and asked the GPU
for a value at each (``get_response_lengths`` in ``trainer/utils.py``, gone with #2723).

Layers are checkpointed as there, by PyTorch's ``checkpoint_wrapper``, and recorded with it. It runs a layer again at
once, while variables of its code hold tensors that the backward pass does not need, so the backward pass finds holes
in the allocator's segments that are too small for what it asks: 1.3 GiB of 31.6 with adapters on the experts.

With ``lora``, each layer has four adapters, of which fake data uses the first. No run is ever made there that would own
an optimizer, so that gradients stay and nothing is updated (``optim.py``, ``runs.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks.harness.played import Loop
from benchmarks.harness.results import GIB
from benchmarks.models.cases import Case, published_config
from benchmarks.models.published_step import (
    COMPILE,
    MIXED,
    Point,
    Step,
    empty,
    foreach_adamw,
    full_policy,
    offloading_policy,
)
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec, resolve_device

_LAYERS = "model.layers.*"
_CHUNK = 2048
"""Words of the head that a trainer of reinforcement learning computes at a time."""


def _grouped(rows: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        rows = torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    return rows


class _Adapters(nn.Module):
    """The four adapters of a weight, or of one weight for each expert, of which the first is used."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        *experts, wide, narrow = weight.shape
        self.a, self.b = (
            nn.ParameterList(nn.Parameter(torch.empty(*experts, *shape)) for _ in range(4))
            for shape in ((rank, narrow), (wide, rank))
        )


class _Adapted(nn.Module):
    """A linear layer with adapters, all of them in one product; on cards before Hopper one after the other."""

    def __init__(self, base: nn.Linear, rank: int, grouped: bool) -> None:
        super().__init__()
        self.base, self.adapters, self.grouped = base, _Adapters(base.weight, rank), grouped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        out = self.base(rows)
        a, b = torch.stack([*self.adapters.a]), torch.stack([*self.adapters.b])
        if self.grouped:
            ends = torch.full((4,), len(rows), dtype=torch.int32, device=x.device)
            added = _grouped(rows, ends, a, b)
        else:
            parts = rows.split([len(rows), 0, 0, 0])
            added = torch.cat([part @ a[i].t() @ b[i].t() for i, part in enumerate(parts)])
        return (out + rows.new_ones(len(rows), 1) * added).view(*x.shape[:-1], -1)


class _Experts(nn.Module):
    """A mixture of experts whose scores are multiplied in float32, with adapters of a rank, or of 0."""

    def __init__(self, dim: int, hidden: int, experts: int, chosen: int, rank: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, hidden, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        weights = self.named_parameters(recurse=False) if rank else ()
        self.adapters = nn.ModuleDict({name: _Adapters(weight, rank) for name, weight in weights})
        self.chosen = chosen

    def _product(self, rows: torch.Tensor, name: str, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows times a weight; with adapters, before it what the code of prime-rl has in variables."""
        base = _grouped(rows, ends, getattr(self, name))
        if name not in self.adapters:
            return (base,)
        own = self.adapters[name]
        added = _grouped(rows, ends, own.a[0], own.b[0])
        return base, added, base + 2.0 * added

    def _run(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate = self._product(rows, "w1", ends)
        up = self._product(rows, "w3", ends)
        hidden = F.silu(gate[-1]) * up[-1]
        down = self._product(hidden, "w2", ends)
        return down[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        scores, experts = torch.topk(F.softmax(self.gate(tokens).float(), dim=1), k=self.chosen, dim=1)
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        counts = torch.histc(experts.view(-1).float(), bins=len(self.w1), min=0, max=len(self.w1))
        order = torch.argsort(experts.view(-1), stable=True)
        scores = scores.view(-1)[order]
        index = (order // self.chosen).reshape(-1, 1).expand(-1, x.shape[-1])
        rows = torch.gather(tokens, dim=0, index=index)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        out = self._run(rows, ends)
        out = (out.float() * scores.reshape(-1, 1)).to(x.dtype)
        return torch.zeros_like(tokens).scatter_add(dim=0, index=index, src=out).reshape(x.shape)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of the targets; the logits of a chunk of words are there at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        n = len(hidden)
        most = torch.full((n,), float("-inf"), device=hidden.device)
        total, weighted, of_target = (torch.zeros(n, device=hidden.device) for _ in range(3))
        for part in weight.split(_CHUNK):
            logits = (hidden @ part.t()).float().mul_(1.0)
            larger = torch.maximum(most, torch.amax(logits, dim=-1))
            scale, exp = torch.exp(most - larger), torch.exp(logits - larger.unsqueeze(-1))
            total = total * scale + exp.sum(dim=-1)
            weighted = weighted * scale + (exp * logits).sum(dim=-1)
            most = larger
        log_total = most + torch.log(total)
        ctx.save_for_backward(hidden, weight, targets, log_total)
        return of_target - log_total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _, log_total = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for part, of_part in zip(weight.split(_CHUNK), of_weight.split(_CHUNK), strict=True):
            logits = (hidden @ part.t()).float().mul_(1.0)
            probability = torch.exp(logits - log_total.unsqueeze(-1))
            of_logits = ((-grads[0]).unsqueeze(-1) * probability).mul_(1.0)
            of_hidden.add_(of_logits.to(hidden.dtype) @ part)
            of_part.add_(of_logits.to(weight.dtype).t() @ hidden)
        return of_hidden, of_weight, None


class _LogProbs(nn.Linear):
    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _ChunkedLogProbs.apply(hidden.flatten(0, 1), self.weight, targets.flatten()).view(
            targets.shape
        )  # type: ignore[no-untyped-call]


class _Qwen3(nn.Module):
    """A Qwen3 with a head that returns logits, or log-probabilities of targets."""

    def __init__(self, config: Any, head: type[nn.Linear], rank: int, grouped: bool) -> None:
        import transformers

        super().__init__()
        self.model = transformers.AutoModel.from_config(config)
        if config.model_type == "qwen3_moe":
            experts = config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
            for layer in self.model.layers:
                layer.mlp = _Experts(config.hidden_size, *experts, rank)
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if rank:
            _adapt(self, rank, grouped)

    def forward(self, tokens: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids=tokens).last_hidden_state, *targets)


def _adapt(model: _Qwen3, rank: int, grouped: bool) -> None:
    """Give linear layers of attention and of dense layers adapters, and freeze all but adapters."""
    for holder in [*model.model.layers.modules()]:
        for name, linear in [*holder.named_children()]:
            if name.endswith("_proj"):
                setattr(holder, name, _Adapted(linear, rank, grouped))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapters" in name)


_qwen3_06b = functools.partial(published_config, "Qwen/Qwen3-0.6B")
_qwen3_30b = functools.partial(published_config, "Qwen/Qwen3-30B-A3B")


def _build(
    config: Callable[[], Any],
    head: type[nn.Linear],
    length: int,
    parts: int = 2,
    rank: int = 0,
    grouped: bool = True,
) -> Case:
    with torch.device("meta"):
        model = _Qwen3(config(), head, rank, grouped)
    batch = tuple((empty(1, length), empty(1, length)) for _ in range(parts))
    loss_fn = _fine_tuning if head is nn.Linear else _reinforcement
    return Case(model, batch, loss_fn, None if rank else _clipped)


def _fine_tuning(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss as ``sft/train.py`` does: ``out`` keeps the logits until the next ones are there."""
    for last, (tokens, targets) in enumerate(batch):
        out = model(tokens).float()
        loss = F.cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="none").mean() / len(batch)
        if not last:
            loss.backward()
    return loss


def _reinforcement(model: nn.Module, batch: Any) -> torch.Tensor:
    for left, micro_batch in zip(reversed(range(len(batch))), batch, strict=True):
        loss = model(*micro_batch).mean()
        if left:
            loss.backward()
    return loss


def _last_logits(program: Program) -> Iterable[int]:
    """Return the logits of the last micro-batch, which ``out`` holds over the optimizer's step."""
    log_softmax = [op for op in program.ops if op.name == "aten._log_softmax.default"][-1]
    return log_softmax.reads


def _clipped(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    made = foreach_adamw(parameters)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)

    made.register_step_pre_hook(clip)
    return made


def _fully_sharded(model: Any) -> None:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for module in (*model.model.layers, *([] if tied else [model.model.embed_tokens])):
        fully_shard(module, mp_policy=MIXED)
    if not tied:
        fully_shard([model.lm_head, model.model.norm], mp_policy=MIXED, reshard_after_forward=False)
    fully_shard(model, mp_policy=MIXED)


def _flash_attention_3(device: str) -> DeviceSpec:
    """Return a device on which cuDNN's attention is as fast as FlashAttention-3, where it runs.

    Its paper (Shah et al., 2024), figures 5 and 6: with heads of 128 and 16,384 tokens, 648 and 561 TFLOP/s on an H100.
    Steps are taken to reach as much: softmax leaves the matrix units idle, so that power does not limit the clock.
    """
    spec = resolve_device(device)
    reached = 1e-12 * spec.reached_flops(torch.bfloat16)
    if spec.capability != (9, 0):
        return spec
    shares = {"cudnn_attention": 648 / reached, "cudnn_attention_backward": 561 / reached}
    return dataclasses.replace(spec, matrix_shares=shares)


def _checkpointed(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, layer in model.model.layers.named_children():
        model.model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    _fully_sharded(model)


def _step(config: Callable[[], Any], head: type[nn.Linear], length: int, device: str, **changes: Any) -> Step:
    made: dict[str, Any] = {
        "build": functools.partial(_build, config, head, length),
        "points": (Point(unit=GIB, figure="reserved_expandable"),),
        "device": _flash_attention_3(device),
        "loop": Loop(held=_last_logits) if head is nn.Linear else Loop(),
        "spread": _checkpointed,
        "ranks": 1 if config is _qwen3_06b else 8,
        "missing": COMPILE,
        "asks": 0 if head is nn.Linear else 2 * (length - 1),
    }
    return Step(**made | changes)


def _micro_batch(config: Callable[[], Any], length: int, device: str, rank: int = 0, **changes: Any) -> Step:
    """Return one of two micro-batches, beside the gradients of the other one."""
    build = functools.partial(_build, config, _LogProbs, length, 1, rank, device != "rtx-a6000")
    loop = Loop(gradients="never")
    return _step(config, _LogProbs, length, device, build=build, loop=loop, asks=length - 1, **changes)


def prime_rl(row: Mapping[str, Any]) -> Step:
    """Return the step of a row that is a time: ids, positions, targets and a mask are copied for each token."""
    setting = row["setting"]
    head = nn.Linear if setting["trainer"] == "sft" else _LogProbs
    tokens = 2 * setting["seq"]
    return _step(
        _qwen3_06b, head, setting["seq"], row["device"],
        points=(), missing="", samples=tokens, pageable_bytes=25 * tokens, group="prime-rl, Qwen3-0.6B",
        spread=_fully_sharded, plan=functools.partial(full_policy, layers=_LAYERS),
    )  # fmt: skip


_OFFLOADING: dict[str, Any] = {
    "spread": _fully_sharded,
    "plan": functools.partial(offloading_policy, layers=_LAYERS, stash=0, ahead=0),
    "one_stream": True,
}
PRIME_RL: dict[str, Step] = {
    "prime-rl-sft-Qwen3-30B-A3B-16384": _step(_qwen3_30b, nn.Linear, 16384, "h200"),
    "prime-rl-rl-Qwen3-30B-A3B-16384-8xH100": _step(_qwen3_30b, _LogProbs, 16384, "h100"),
    "prime-rl-rl-Qwen3-30B-A3B-16384-8xH200": _step(_qwen3_30b, _LogProbs, 16384, "h200"),
    "prime-rl-rl-Qwen3-30B-A3B-65536-8xH200": _step(_qwen3_30b, _LogProbs, 65536, "h200"),
    "prime-rl-rl-Qwen3-30B-A3B-16384-r16-8xH100": _micro_batch(_qwen3_30b, 16384, "h100", 16),
    "prime-rl-rl-Qwen3-30B-A3B-16384-r16-8xH200": _micro_batch(_qwen3_30b, 16384, "h200", 16),
    "prime-rl-rl-Qwen3-30B-A3B-65536-r16-8xH100": _micro_batch(_qwen3_30b, 65536, "h100", 16),
    "prime-rl-rl-Qwen3-30B-A3B-65536-r16-8xH200": _micro_batch(_qwen3_30b, 65536, "h200", 16),
    "prime-rl-sft-Qwen3-0.6B-8192": _step(_qwen3_06b, nn.Linear, 8192, "h100"),
    "prime-rl-sft-Qwen3-0.6B-16384": _step(_qwen3_06b, nn.Linear, 16384, "h100"),
    "prime-rl-sft-Qwen3-0.6B-8192-a6000": _step(_qwen3_06b, nn.Linear, 8192, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-16384": _step(_qwen3_06b, _LogProbs, 16384, "h100"),
    "prime-rl-rl-Qwen3-0.6B-16384-a6000": _step(_qwen3_06b, _LogProbs, 16384, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-65536-a6000": _step(_qwen3_06b, _LogProbs, 65536, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-65536": _micro_batch(_qwen3_06b, 65536, "h100", samples=65536),
    "prime-rl-rl-Qwen3-0.6B-65536-offload": _micro_batch(
        _qwen3_06b, 65536, "h100", samples=65536, **_OFFLOADING
    ),
    "prime-rl-rl-Qwen3-0.6B-16384-r16": _micro_batch(_qwen3_06b, 16384, "h100", 16),
    "prime-rl-rl-Qwen3-0.6B-16384-r16-a6000": _micro_batch(_qwen3_06b, 16384, "rtx-a6000", 16),
    "prime-rl-rl-Qwen3-0.6B-65536-r16": _micro_batch(_qwen3_06b, 65536, "h100", 16),
    "prime-rl-rl-Qwen3-0.6B-65536-r16-offload": _micro_batch(_qwen3_06b, 65536, "h100", 16, **_OFFLOADING),
    "prime-rl-rl-Qwen3-0.6B-65536-r16-a6000": _micro_batch(_qwen3_06b, 65536, "rtx-a6000", 16),
}
