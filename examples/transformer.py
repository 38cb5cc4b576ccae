"""Plan a transformer for an H100 and check the plan, without a GPU.

    python examples/transformer.py [--out OUT]

1. The classical interface on the model of PyTorch's "ILP for Auto SAC" example (PR #137908): three estimators, the
   module graph, and ``sac_milp`` at 1.75 GiB.
2. ``profile``, ``plan``, ``apply`` and ``verify`` on the same model, for an H100.
3. The same for a GPT-2 of Hugging Face in bfloat16 with AdamW, if transformers is installed.

The script prints tables, and writes a picture of memory over the step without and with a plan to the folder OUT.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import sacplan

GIB = 2**30


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], self.n_heads, -1)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.wo(y.transpose(1, 2).reshape(x.shape)))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden, dim)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads, dropout)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """A pre-norm transformer language model; the output projection is tied to the token embedding."""

    def __init__(
        self,
        n_layers: int = 4,
        n_heads: int = 12,
        vocab_size: int = 8192,
        max_seq_len: int = 1024,
        dim: int = 768,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dim, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def classical(budget_gib: float) -> None:
    """Run the three estimators and the mixed-integer program, as in PyTorch's example."""
    print("1. The classical interface, on the kernels of an H100, nothing computed")
    with sacplan.fake_device("h100"):
        model = Transformer()
        batch = torch.randint(0, 8192, (8, 1024))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        held = None

        def step() -> None:
            nonlocal held
            held = model(batch)  # the caller keeps the output until the next step, as the original did
            held.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        mem_tracker = sacplan.MemTracker()
        mem_tracker.track_external(model, optimizer)
        with mem_tracker:
            step()
            mem_tracker.reset_mod_stats()
            step()
        runtime_estimator = sacplan.RuntimeEstimator()
        with runtime_estimator(estimate_mode_type="operator-level-cost-model"):
            step()
        sac_estimator = sacplan.SACEstimator()
        with sac_estimator(estimate_mode_type="operator-level-cost-model"):
            model(batch)
        info = sacplan.aggregate_stats(model, mem_tracker, runtime_estimator, sac_estimator)
    graph = sacplan.parse_module_info(info)
    peak_bytes, compute_ms = sacplan.get_peak_memory_runtime_baseline(graph)
    print(f"   without checkpointing: peak_mem {peak_bytes / GIB:.2f} GiB, compute_time {compute_ms:.2f} ms")
    ac_decisions, recomputation_ms, peak_bytes = sacplan.sac_milp(graph, memory_budget=budget_gib)
    print(
        f"   sac_milp(graph, {budget_gib}):  peak_mem {peak_bytes / GIB:.2f} GiB, "
        f"recomputation_time {recomputation_ms:.2f} ms"
    )
    print(f"   ac_decisions: { {fqn: round(ratio, 4) for fqn, ratio in ac_decisions.items()} }")
    tracked = mem_tracker.peak_bytes / GIB
    print(
        f"   (with the optimizer's state, which these figures leave out, the tracked peak is {tracked:.2f} GiB)\n"
    )


def sum_of_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of PyTorch's example."""
    logits: torch.Tensor = model(tokens)
    return logits.sum()


def main_road(
    model: nn.Module,
    batch: object,
    budgets: list[float | str],
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: object = None,
) -> tuple[sacplan.Profile, list[sacplan.Plan]]:
    """Profile once, plan for each budget, and check each plan with a fake step."""
    profile = sacplan.profile(model, batch, loss_fn, optimizer, device="h100")
    print(f"   {profile}")
    plans, rows = [], []
    for budget in budgets:
        plan = sacplan.plan(profile, budget)
        checked = sacplan.verify(model, batch, plan, loss_fn, optimizer)
        plans.append(plan)
        rows.append(
            {
                "budget GiB": (plan.budget_bytes or 0) / GIB,
                "planned peak GiB": plan.peak_bytes / GIB,
                "fake step GiB": checked.peak_bytes / GIB,
                "holds": checked.within_budget,
                "recompute ms": plan.recompute_ms,
                "of the step": f"{plan.recompute_ms / plan.step_ms:.1%}",
                "of its FLOPs": f"{plan.recompute_flops / plan.step_flops:.1%}",
                "units": len(plan.units),
            }
        )
    print("   " + pd.DataFrame(rows).round(4).to_string(index=False).replace("\n", "\n   ") + "\n")
    return profile, plans


def picture(profile: sacplan.Profile, plan: sacplan.Plan, path: Path) -> None:
    """Draw memory over the step by kind, without and with the plan, and the budget."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sacplan.Report(profile, plan).memory_figure(columns=1).savefig(path, dpi=180)
    print(f"   picture: {path}\n")


def hugging_face() -> None:
    """Plan a GPT-2 with 124 million parameters, made without weights."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, logging
    except ImportError:
        print("3. transformers is not installed; `pip install sacplan[examples]` for the Hugging Face part")
        return
    logging.set_verbosity_error()
    print("3. GPT-2 of Hugging Face (bfloat16, on the meta device), batch 16 x 1024, AdamW")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config()).bfloat16()
    tokens = torch.randint(0, 50257, (16, 1024))
    main_road(
        model.train(),
        {"input_ids": tokens, "labels": tokens},
        ["85%", "70%", "55%"],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    out = parser.parse_args().out
    classical(1.75)
    print("2. profile, plan, apply, verify: the same model, its output freed")
    with torch.device("meta"):
        model = Transformer()
    tokens = torch.randint(0, 8192, (8, 1024))
    profile, plans = main_road(model, tokens, [1.75, 1.5, 1.25, 1.0, 0.8], sum_of_logits)
    picture(profile, plans[3], out / "transformer_memory.png")
    hugging_face()


if __name__ == "__main__":
    main()
