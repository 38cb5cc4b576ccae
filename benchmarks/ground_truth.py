"""Predicted peaks against the CPU allocator: the profiler's allocation events of real steps.

    python -m benchmarks.ground_truth [--names gpt2 t5 bert resnet vocabulary-128k] [--json FILE]

For each model the unplanned step, then plans at three budgets between the smallest feasible peak and the unplanned
one, each run for real on this machine's CPU, dropout on, on one thread. `bits` says whether loss, all
gradients and all buffers are bit-equal to the unplanned step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers

import sacplan
from benchmarks import common
from benchmarks.common import MIB, describe, machine, on_one_thread, real_step, write_results
from examples.transformer import Transformer

Case = tuple[torch.nn.Module, Any, Callable[[torch.nn.Module, Any], torch.Tensor] | None]


def _text(batch: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, vocab, (batch, length))
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Case:
    """4 layers, width 192."""
    config = transformers.GPT2Config(
        n_layer=4, n_embd=192, n_head=4, vocab_size=4000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), _text(8, 128, 4000), None


def t5() -> Case:
    """3 + 3 layers, width 192."""
    config = transformers.T5Config(
        num_layers=3, d_model=192, d_ff=768, num_heads=4, d_kv=48, vocab_size=4000, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), _text(8, 128, 4000), None


def bert() -> Case:
    """4 layers, width 192."""
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=192, num_attention_heads=4, intermediate_size=768, vocab_size=4000
    )
    return transformers.BertForMaskedLM(config), _text(8, 128, 4000), None


def resnet() -> Case:
    """Six basic blocks, images of 96 x 96."""
    config = transformers.ResNetConfig(
        depths=[2, 2, 2], layer_type="basic", hidden_sizes=[32, 64, 128], embedding_size=32, num_labels=10
    )
    batch = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(0, 10, (8,))}
    return transformers.ResNetForImageClassification(config), batch, None


def large_vocabulary() -> Case:
    """A loss outside the model, over 128,000 words."""

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())

    model = Transformer(n_layers=3, n_heads=4, vocab_size=128_000, max_seq_len=256, dim=128)
    return model, torch.randint(0, 128_000, (2, 256)), loss_fn


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2, "t5": t5, "bert": bert, "resnet": resnet, "vocabulary-128k": large_vocabulary,
}  # fmt: skip


@on_one_thread
def rows_of(name: str) -> list[dict[str, Any]]:
    """The unplanned step and three plans."""
    torch.manual_seed(0)
    model, batch, loss_fn = CASES[name]()
    model.train()
    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device="cpu")
    plain = real_step(model, batch, loss_fn)
    unplanned = {"budget": 0, "predicted": profile.peak_bytes, "measured": plain.peak_bytes}
    rows: list[dict[str, Any]] = [unplanned | {"holds": True, "bit_equal": True, "recompute_share": 0.0}]
    smallest = sacplan.plan_smallest(profile).peak_bytes
    for share in (0.05, 0.3, 0.7):
        budget = int(smallest + share * (profile.peak_bytes - smallest))
        plan = sacplan.plan(profile, f"{budget}B")
        seen = real_step(model, batch, loss_fn, plan=plan)
        rows.append(
            {
                "budget": budget,
                "predicted": plan.peak_bytes,
                "measured": seen.peak_bytes,
                "holds": seen.peak_bytes <= budget,
                "bit_equal": seen.same_bits(plain),
                "recompute_share": plan.recompute_ms / plan.step_ms,
            }
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--names", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(machine()))
    print("figures in MiB; recompute is a share of the predicted time of the step")
    print("           model    budget  predicted   measured    error  holds   bits  recompute")
    rows = []
    for name in arguments.names:
        for row in rows_of(name):
            rows.append({"model": name} | row)
            budget = f"{row['budget'] / MIB:9.2f}" if row["budget"] else f"{'none':>9}"
            print(
                f"{name:>16} {budget} {row['predicted'] / MIB:10.2f} {row['measured'] / MIB:10.2f} "
                f"{row['predicted'] / row['measured'] - 1:+8.3%} {row['holds']!s:>6} {row['bit_equal']!s:>6} "
                f"{row['recompute_share']:10.1%}",
                flush=True,
            )
    write_results(arguments.json, rows)


if __name__ == "__main__":
    main()
