"""Inference in slices, measured: ``python -m benchmarks.chunked_inference [case ...]``.

For each case and budget, in MiB of what the step allocates (parameters and inputs not counted): what a plan predicts,
what the profiler measures on the CPU, how far the output is from that of the plain step. Then the smallest peak,
planned for at exactly that. Writes ``benchmarks/results/chunked_inference.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import sacplan
from sacplan._record.step import Step, call_model
from tests.zoo.wide import Attention, Evoformer, UNet

MIB = 2**20
RESULTS = Path(__file__).parent / "results" / "chunked_inference.json"

Case = tuple[torch.nn.Module, Any]


def gpt(width: int, heads: int, tokens: int) -> Case:
    """Two layers of GPT-2 without the head."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=width,
        n_layer=2,
        n_head=heads,
        n_positions=tokens,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.GPT2Model(config), {"input_ids": torch.randint(0, 50000, (1, tokens))}


def vit() -> Case:
    """ViT-L/16 at 384 x 384."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, image_size=384,
        patch_size=16, attn_implementation="eager",
    )  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": torch.randn(1, 3, 384, 384)}


CASES: dict[str, tuple[Callable[[], Case], tuple[float, ...]]] = {
    "attention 512 x 256": (lambda: (Attention(256, 8), torch.randn(1, 512, 256)), (8, 4, 2.5, 1.6)),
    "GPT 96 wide, 512": (lambda: gpt(96, 4, 512), (8, 6, 3)),
    "GPT 768 wide, 1024": (lambda: gpt(768, 12, 1024), (67.5, 54, 27, 13.5)),
    "Evoformer block": (
        lambda: (Evoformer(), (torch.randn(1, 32, 64, 256), torch.randn(1, 64, 64, 128))),
        (24, 20, 16, 13),
    ),
    "U-Net 64 x 64": (lambda: (UNet(), (torch.randn(1, 3, 64, 64), torch.tensor([7]))), (300, 150, 100)),
    "ViT-L/16 at 384": (vit, (32, 20)),
}


def output_of(model: torch.nn.Module, batch: Any) -> list[torch.Tensor]:
    """The tensors of the forward pass."""
    with torch.no_grad():
        out = Step(model, batch, call_model, None, "inference").run()
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """One for each budget, and one for the smallest peak."""
    make, budgets = CASES[name]
    torch.manual_seed(0)
    model, batch = make()
    model.eval()
    profile = sacplan.profile(model, batch, device="cpu", mode="inference")
    base = profile.program.liveness.initial_bytes
    plain = output_of(model, batch)
    began = time.perf_counter()
    smallest = sacplan.plan_smallest(profile)
    search_s = time.perf_counter() - began
    for budget in (*budgets, None):
        asked = base + int(budget * MIB) if budget is not None else smallest.peak_bytes
        row: dict[str, Any] = {
            "case": name,
            "plain_mib": (profile.peak_bytes - base) / MIB,
            "budget_mib": budget if budget is not None else (asked - base) / MIB,
            "is_smallest": budget is None,
        }
        began = time.perf_counter()
        try:
            plan = sacplan.plan(profile, f"{asked}B")
        except sacplan.InfeasibleBudget as error:
            yield row | {"smallest_mib": (error.smallest_feasible_bytes - base) / MIB}
            continue
        planned_s = time.perf_counter() - began + (search_s if budget is None else 0.0)
        fake = sacplan.verify(model, batch, plan)
        real = sacplan.verify(model, batch, plan, run="real")
        with sacplan.apply(model, plan):
            sliced = output_of(model, batch)
        yield row | {
            "predicted_mib": (plan.peak_bytes - base) / MIB,
            "same_as_fake_step": fake.peak_bytes == plan.peak_bytes,
            "measured_mib": (real.peak_bytes - base) / MIB,
            "within": real.within_budget,
            "stretches": len(plan.decisions),
            "difference": max(float((a - b).abs().max()) for a, b in zip(plain, sliced, strict=True)),
            "planning_s": planned_s,
        }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    budget = f"{row['budget_mib']:.2f}" + (" (smallest)" if row["is_smallest"] else "")
    start = f"| {row['case']} | {row['plain_mib']:.2f} | {budget} |"
    if "measured_mib" not in row:
        return f"{start} infeasible, smallest {row['smallest_mib']:.2f} | | | | | |"
    return (
        f"{start} {row['predicted_mib']:.3f} | {row['measured_mib']:.3f} | {'yes' if row['within'] else 'NO'} | "
        f"{row['stretches']} | {row['difference']:.1e} | {row['planning_s']:.2f} |"
    )


def main(names: list[str]) -> None:
    """Print the table, write the figures."""
    print("| case | plain | budget | predicted | measured | within | stretches | difference | planning s |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for name in names or CASES:
        for row in rows_of(name):
            print(line(row), flush=True)
            found.append(row)
    if not names:
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
