"""Do inference steps in slices stay within their budgets, and how far are their outputs from the plain ones?

    python -m benchmarks.chunked_inference [case ...]

A row is a case at a budget, or at its smallest peak. It has what the plan predicts, what the profiler measures on the
CPU, in how many stretches the model runs, and how far the output is from the plain step's. Budgets and peaks are MiB of
what the step allocates: parameters and inputs are not counted. Cases that are named are only printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import MIB, RESULTS, Row
from benchmarks.harness.steps import tensors_of
from benchmarks.harness.table import markdown_head, markdown_line
from benchmarks.models.cases import Case
from sacplan.record.step import Step, call_model
from tests.zoo.wide import EagerAttention, Evoformer, UNet

FIGURES = RESULTS / "chunked_inference.json"


def gpt(width: int, heads: int, tokens: int) -> Case:
    """Build two layers of GPT-2 without the head."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=width, n_layer=2, n_head=heads, n_positions=tokens, attn_implementation="eager", use_cache=False
    )  # fmt: skip
    return Case(transformers.GPT2Model(config), {"input_ids": torch.randint(0, 50000, (1, tokens))})


def vit() -> Case:
    """Build ViT-L/16 at 384 x 384."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, image_size=384,
        patch_size=16, attn_implementation="eager",
    )  # fmt: skip
    return Case(transformers.ViTModel(config), {"pixel_values": torch.randn(1, 3, 384, 384)})


def evoformer() -> Case:
    """Build a block that mixes a table of 32 x 64 and one of 64 x 64."""
    return Case(Evoformer(), (torch.randn(1, 32, 64, 256), torch.randn(1, 64, 64, 128)))


CASES: dict[str, tuple[Callable[[], Case], tuple[float, ...]]] = {
    "attention 512 x 256": (lambda: Case(EagerAttention(256, 8), torch.randn(1, 512, 256)), (8, 4, 2.5, 1.6)),
    "GPT 96 wide, 512": (lambda: gpt(96, 4, 512), (8, 6, 3)),
    "GPT 768 wide, 1024": (lambda: gpt(768, 12, 1024), (67.5, 54, 27, 13.5)),
    "Evoformer block": (evoformer, (24, 20, 16, 13)),
    "U-Net 64 x 64": (
        lambda: Case(UNet(), (torch.randn(1, 3, 64, 64), torch.tensor([7]))), (300, 150, 100)
    ),
    "ViT-L/16 at 384": (vit, (32, 20)),
}  # fmt: skip


def output_of(case: Case) -> list[torch.Tensor]:
    """Run the forward pass and return its tensors."""
    with torch.no_grad():
        return tensors_of(Step(case.model, case.batch, call_model, None, "inference").run())


def rows_of(name: str) -> Iterator[Row]:
    """Yield a row for each budget, and one for the smallest peak."""
    make, budgets = CASES[name]
    torch.manual_seed(0)
    case = make()
    case.model.eval()
    profile = sacplan.profile(case.model, case.batch, device="cpu", mode="inference")
    base = profile.program.liveness.initial_bytes
    plain = output_of(case)
    smallest, search_s = timed(lambda: sacplan.plan(profile, "smallest"))
    for budget in (*budgets, None):
        asked = smallest.peak_bytes if budget is None else base + int(budget * MIB)
        row: dict[str, Any] = {
            "case": name,
            "plain_mib": (profile.peak_bytes - base) / MIB,
            "budget_mib": (asked - base) / MIB if budget is None else budget,
            "is_smallest": budget is None,
        }
        (plan, peak_bytes), planned_s = timed(lambda asked=asked: plan_or_least(profile, asked))
        if plan is None:
            yield row | {"smallest_mib": (peak_bytes - base) / MIB}
            continue
        fake, real = case.verify(plan), case.verify(plan, run="real")
        with sacplan.apply(case.model, plan):
            sliced = output_of(case)
        yield row | {
            "predicted_mib": (plan.peak_bytes - base) / MIB,
            "same_as_fake_step": fake.peak_bytes == plan.peak_bytes,
            "measured_mib": (real.peak_bytes - base) / MIB,
            "within": real.within_budget,
            "stretches": len(plan.decisions),
            "difference": max(float((a - b).abs().max()) for a, b in zip(plain, sliced, strict=True)),
            "planning_s": planned_s + (search_s if budget is None else 0.0),
        }


_HEADS = (
    "case", "plain", "budget", "predicted", "measured", "within", "stretches", "difference", "planning s",
)  # fmt: skip


def _line(row: Row) -> str:
    budget = f"{row['budget_mib']:.2f}" + (" (smallest)" if row["is_smallest"] else "")
    cells = [row["case"], f"{row['plain_mib']:.2f}", budget]
    if "measured_mib" not in row:
        return markdown_line([*cells, f"infeasible, smallest {row['smallest_mib']:.2f}", *[""] * 5])
    return markdown_line(
        [
            *cells, f"{row['predicted_mib']:.3f}", f"{row['measured_mib']:.3f}", "yes" if row["within"] else "NO",
            f"{row['stretches']}", f"{row['difference']:.1e}", f"{row['planning_s']:.2f}",
        ]
    )  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}", metavar="case")
    arguments = parser.begin()
    path = arguments.json or (None if arguments.names else FIGURES)
    print("\n".join(markdown_head(_HEADS)))
    run_cases(arguments.names or CASES, rows_of, _line, path, torch=torch.__version__)


if __name__ == "__main__":
    main()
