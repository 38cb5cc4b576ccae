"""Published steps of prime-rl's trainers, all parameters trained: Qwen3-30B-A3B on eight GPUs, Qwen3-0.6B on one.

Written down from its code of January 2026: experts, head, loss and calls of ``fully_shard``. A step adds up two
micro-batches. As many tokens go to each expert. Of the loss of reinforcement learning only the mean is here: its other
ops read and make a number for each token. Attention is that of transformers; flash attention saves as much. On an H100,
FlashAttention-3 ran, for which cuDNN's stands here. Offloading has no stream of its own (``use_streams`` is off in
``act_offloading.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sacplan
from benchmarks.harness.played import Loop
from benchmarks.harness.results import GIB
from benchmarks.models.published_step import (
    COMPILE,
    Built,
    Point,
    Step,
    empty,
    foreach_adamw,
    offloading_policy,
)
from sacplan.core.program import Program

_LAYERS = "model.layers.*"
_CHUNK = 2048
"""Words of the head that a trainer of reinforcement learning computes at a time."""


class _Experts(nn.Module):
    """A mixture of experts whose scores are multiplied in float32."""

    def __init__(self, dim: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, hidden, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.chosen = chosen

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
        hidden = F.silu(torch._grouped_mm(rows, self.w1.transpose(-2, -1), offs=ends))
        hidden = hidden * torch._grouped_mm(rows, self.w3.transpose(-2, -1), offs=ends)
        out = torch._grouped_mm(hidden, self.w2.transpose(-2, -1), offs=ends)
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


class _Small(nn.Module):
    """Qwen3-0.6B with a head that returns logits, or log-probabilities of targets."""

    def __init__(self, head: type[nn.Linear]) -> None:
        import transformers

        super().__init__()
        config = transformers.Qwen3Config(
            vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=3072, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.model = transformers.Qwen3Model(config)
        self.lm_head = head(1024, 151936, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids=tokens).last_hidden_state, *targets)


class _Large(_Small):
    """The same of Qwen3-30B-A3B."""

    def __init__(self, head: type[nn.Linear]) -> None:
        import transformers

        nn.Module.__init__(self)
        config = transformers.Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True, use_cache=False,
        )  # fmt: skip
        self.model = transformers.Qwen3MoeModel(config)
        for layer in self.model.layers:
            layer.mlp = _Experts(2048, 768, 128, 8)
        self.lm_head = head(2048, 151936, bias=False)


def _build(made: type[_Small], head: type[nn.Linear], length: int, parts: int = 2) -> Built:
    with torch.device("meta"):
        model = made(head)
    batch = tuple((empty(1, length), empty(1, length)) for _ in range(parts))
    loss_fn = _fine_tuning if head is nn.Linear else _reinforcement
    return Built(model=model, batch=batch, loss_fn=loss_fn, optimizer=_clipped)


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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for module in (*model.model.layers, *([] if tied else [model.model.embed_tokens])):
        fully_shard(module, mp_policy=policy)
    if not tied:
        fully_shard([model.lm_head, model.model.norm], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)


def _step(head: type[nn.Linear], length: int, device: str, **changes: Any) -> Step:
    made: dict[str, Any] = {
        "build": functools.partial(_build, _Large, head, length),
        "points": (Point(unit=GIB, figure="reserved_expandable"),),
        "device": device,
        "plan": lambda profile: sacplan.policy("full", profile=profile, layers=_LAYERS),
        "loop": Loop(held=_last_logits) if head is nn.Linear else Loop(),
        "spread": _fully_sharded,
        "ranks": 8,
        "missing": COMPILE,
    }
    return Step(**made | changes)


def _small(head: type[nn.Linear], length: int, device: str, **changes: Any) -> Step:
    build = functools.partial(_build, _Small, head, length)
    return _step(head, length, device, **{"build": build, "ranks": 1} | changes)


def _micro_batch(**changes: Any) -> Step:
    """Return one of two micro-batches of 65,536 tokens, beside the gradients of the other one."""
    build = functools.partial(_build, _Small, _LogProbs, 65536, 1)
    return _small(
        _LogProbs, 65536, "h100", build=build, loop=Loop(gradients="never"), samples=65536, **changes
    )


def prime_rl(row: Mapping[str, Any]) -> Step:
    """Return the step of a row that is a time."""
    setting = row["setting"]
    head = nn.Linear if setting["trainer"] == "sft" else _LogProbs
    return _small(
        head, setting["seq"], row["device"],
        points=(), compiled=[_LAYERS], missing="", samples=2 * setting["seq"], group="prime-rl, Qwen3-0.6B",
    )  # fmt: skip


PRIME_RL: dict[str, Step] = {
    "prime-rl-sft-Qwen3-30B-A3B-16384": _step(nn.Linear, 16384, "h200"),
    "prime-rl-rl-Qwen3-30B-A3B-16384-8xH100": _step(_LogProbs, 16384, "h100"),
    "prime-rl-rl-Qwen3-30B-A3B-16384-8xH200": _step(_LogProbs, 16384, "h200"),
    "prime-rl-rl-Qwen3-30B-A3B-65536-8xH200": _step(_LogProbs, 65536, "h200"),
    "prime-rl-sft-Qwen3-0.6B-8192": _small(nn.Linear, 8192, "h100"),
    "prime-rl-sft-Qwen3-0.6B-16384": _small(nn.Linear, 16384, "h100"),
    "prime-rl-sft-Qwen3-0.6B-8192-a6000": _small(nn.Linear, 8192, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-16384": _small(_LogProbs, 16384, "h100"),
    "prime-rl-rl-Qwen3-0.6B-16384-a6000": _small(_LogProbs, 16384, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-65536-a6000": _small(_LogProbs, 65536, "rtx-a6000"),
    "prime-rl-rl-Qwen3-0.6B-65536": _micro_batch(),
    "prime-rl-rl-Qwen3-0.6B-65536-offload": _micro_batch(
        plan=functools.partial(offloading_policy, layers=_LAYERS, stash=0, ahead=0), one_stream=True
    ),
}
