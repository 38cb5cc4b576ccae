"""Are predicted peaks of five larger models those of the CPU's allocator?

    python -m benchmarks.ground_truth [--names gpt2 t5 bert resnet vocabulary-128k] [--json FILE]

A row is a step of a model, run for real on this machine's CPU, dropout on, on one thread: without a plan, then with
plans at three budgets between the smallest feasible peak and the unplanned one. Measured is the peak of the profiler's
allocation events. ``holds`` says whether it is within the budget, ``bit_equal`` whether loss, all gradients and all
buffers are those of the unplanned step bit by bit. ``benchmarks.real_models`` has sixty smaller models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget, budget_at
from benchmarks.harness.results import MIB, Row
from benchmarks.harness.steps import on_one_thread
from benchmarks.harness.table import Table
from benchmarks.models.cases import Case
from examples.transformer import Transformer


def _text() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 4000, (8, 128))
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Case:
    """Build GPT-2 with 4 layers of width 192."""
    config = transformers.GPT2Config(
        n_layer=4, n_embd=192, n_head=4, vocab_size=4000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return Case(transformers.GPT2LMHeadModel(config), _text())


def t5() -> Case:
    """Build T5 with 3 + 3 layers of width 192."""
    config = transformers.T5Config(
        num_layers=3, d_model=192, d_ff=768, num_heads=4, d_kv=48, vocab_size=4000, decoder_start_token_id=0
    )
    return Case(transformers.T5ForConditionalGeneration(config), _text())


def bert() -> Case:
    """Build BERT with 4 layers of width 192."""
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=192, num_attention_heads=4, intermediate_size=768, vocab_size=4000
    )
    return Case(transformers.BertForMaskedLM(config), _text())


def resnet() -> Case:
    """Build a ResNet of six basic blocks, for images of 96 x 96."""
    config = transformers.ResNetConfig(
        depths=[2, 2, 2], layer_type="basic", hidden_sizes=[32, 64, 128], embedding_size=32, num_labels=10
    )
    batch = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(0, 10, (8,))}
    return Case(transformers.ResNetForImageClassification(config), batch)


def large_vocabulary() -> Case:
    """Build a model with its loss outside, over 128,000 words."""

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())

    model = Transformer(n_layers=3, n_heads=4, vocab_size=128_000, max_seq_len=256, dim=128)
    return Case(model, torch.randint(0, 128_000, (2, 256)), loss_fn)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2, "t5": t5, "bert": bert, "resnet": resnet, "vocabulary-128k": large_vocabulary,
}  # fmt: skip

_TABLE = Table(
    ("model", ">16"), ("budget", ">9.2f"), ("predicted", ">10.2f"), ("measured", ">10.2f"), ("error", ">+8.3%"),
    ("holds", ">6"), ("bits", ">6"), ("recompute", ">10.1%"),
)  # fmt: skip


@on_one_thread
def rows_of(name: str) -> list[Row]:
    """Run the unplanned step and three plans of a model."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    profile = case.profile("cpu")
    plain = case.step()
    unplanned = {"budget": 0, "predicted": profile.peak_bytes, "measured": plain.peak_bytes}
    rows = [{"model": name} | unplanned | {"holds": True, "bit_equal": True, "recompute_share": 0.0}]
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    for share in (0.05, 0.3, 0.7):
        budget = budget_at(share, smallest, profile.peak_bytes)
        plan = sacplan.plan(profile, as_budget(budget))
        seen = case.step(plan=plan)
        rows.append(
            {
                "model": name,
                "budget": budget,
                "predicted": plan.peak_bytes,
                "measured": seen.peak_bytes,
                "holds": seen.peak_bytes <= budget,
                "bit_equal": seen.same_bits(plain),
                "recompute_share": plan.recompute_ms / plan.step_ms,
            }
        )
    return rows


def _line(row: Row) -> str:
    predicted, measured = row["predicted"], row["measured"]
    return _TABLE.row(
        row["model"], row["budget"] / MIB if row["budget"] else "none", predicted / MIB, measured / MIB,
        predicted / measured - 1, str(row["holds"]), str(row["bit_equal"]), row["recompute_share"],
    )  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    parser.choice("--names", CASES)
    torch.set_num_threads(1)
    arguments = parser.begin()
    print("figures in MiB; recompute is a share of the predicted time of the step")
    print(_TABLE.head)
    run_cases(arguments.names, rows_of, _line, arguments.json)


if __name__ == "__main__":
    main()
