"""What runs a step on several ranks: where the peaks of sacplan, FSDP2 and DDP differ, buffer by buffer.

Each of them is the allocator's, to the byte: see ``tests/shard/test_programs.py``, ``test_fully_shard.py`` and
``test_fsdp_plans.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks import layouts
from sacplan._plan.meshes import spread_of
from sacplan._plan.reading import ranks_text
from sacplan._program.liveness import Fold
from sacplan._program.program import Event, Phase, Program, StorageKind
from sacplan._ranks.ranks import Ranks
from tests.support.ranks import of_one_rank, optimizer_of
from tests.zoo import language_models as models
from tests.zoo.layers import FromFunction

RANKS, ROWS, LENGTH, VOCAB = 4, 8, 512, 2048
UNITS = ["lm.layers.*", ""]
ROOT = Path(__file__).parents[2]

BUFFERS = {
    "_c10d_functional.all_gather_into_tensor.default": "gathered",
    "fsdp.all_gather_copy_in.default": "gathered by a unit",
    "fsdp.split_with_sizes_copy.default": "parameters of a unit",
    "fsdp.chunk_cat.default": "gradients of a unit",
}
"""What is alive only because ranks gather and reduce, by the op that makes it."""


def model() -> nn.Module:
    """Computes its loss, as those of ``transformers`` do. The logits outweigh all else, so the peak is in the loss."""
    lm = models.LM(layers=3, dim=32, heads=4, vocab=VOCAB)
    return FromFunction(lambda self, tokens: models.cross_entropy(self.lm, tokens), lm=lm)


def profiled(rows: int) -> sacplan.Profile:
    batch = models.tokens(rows, LENGTH, VOCAB)
    return sacplan.profile(model(), batch, lambda model, b: model(b), optimizer_of, device="h100")


@pytest.fixture(scope="module")
def ranks(no_cublas_workspaces: None) -> dict[str, sacplan.Profile]:
    """One rank each, by who runs it: sacplan from the batch of all ranks, PyTorch from that of one."""
    whole, own = profiled(ROWS), profiled(ROWS // RANKS)
    return {
        "fsdp by sacplan": spread_of(whole, "fsdp", {"dp": RANKS}).profile,
        "fsdp by FSDP2": of_one_rank(own, RANKS, UNITS),
        "ddp by sacplan": spread_of(whole, "ddp", {"dp": RANKS}).profile,
        "ddp by DDP": of_one_rank(own, RANKS, None),
    }


def at_peak(program: Program) -> tuple[str, Counter[str]]:
    """The op of the peak, and the bytes of what is alive there."""
    made = {s: op.name for op in program.ops for s in op.writes}
    fold, peak, found = Fold(program), 0, Counter[str]()
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP and fold.noted > peak:
            peak, where = fold.noted, program.ops[arg].name
            found = Counter(workspace=fold.noted - fold.live)
            for s, holders in fold.holders.items():
                if holders:
                    found[_label(program, s, made)] += program.storage_bytes[s]
    assert sum(found.values()) == peak == program.footprint.peak_bytes
    return where, found


def _label(program: Program, s: int, made: dict[int, str]) -> str:
    if s in made:
        return BUFFERS.get(made[s], "computed")
    kind = program.storage_kinds[s]
    return {StorageKind.OTHER: "batch", StorageKind.GRADIENT: "buckets"}.get(kind, "kept between steps")


def test_what_runs_a_step_has_a_name(ranks: dict[str, sacplan.Profile]) -> None:
    for name, rank in ranks.items():
        run_by = name.partition(" by ")[2]
        assert rank.ranks.run_by == run_by
        assert f"run by {run_by} (" in ranks_text(rank.ranks)
        assert f"run by {run_by}" in rank.assumptions[0]
    assert Ranks.of().run_by is None


def test_fsdp_is_run_with_other_buffers_by_sacplan_and_by_fsdp2(ranks: dict[str, sacplan.Profile]) -> None:
    where, ours = at_peak(ranks["fsdp by sacplan"].program)
    also, theirs = at_peak(ranks["fsdp by FSDP2"].program)
    assert where == also == "aten._log_softmax_backward_data.default"
    named = list(model().named_parameters())
    last = [p for name, p in named if name.startswith("lm.layers.2.")]
    outside = [p for name, p in named if not name.startswith("lm.layers.")]
    assert theirs - ours == {
        "parameters of a unit": _rounded(outside),  # the root's, from forward to backward
        "gathered by a unit": _rounded(last, together=True),  # ahead of the last layer's backward
    }
    assert set(ours - theirs) == {"batch"}  # of all ranks


def test_ddp_is_run_with_buckets_by_pytorch(ranks: dict[str, sacplan.Profile]) -> None:
    where, ours = at_peak(ranks["ddp by sacplan"].program)
    also, theirs = at_peak(ranks["ddp by DDP"].program)
    assert where == also == "aten._log_softmax_backward_data.default"
    assert theirs - ours == {"buckets": _rounded(list(model().parameters()), together=True)}
    assert set(ours - theirs) == {"batch"}


def test_not_only_the_schedule_differs(ranks: dict[str, sacplan.Profile]) -> None:
    """Why both are not one rewrite with other times of gathering: sacplan's placed tensors run other ops."""
    added = {
        name: Counter(
            op.name
            for op in rank.program.ops
            if op.phase == Phase.BACKWARD and op.name.startswith("aten.add")
        )
        for name, rank in ranks.items()
    }
    in_place, n = "aten.add_.Tensor", added["fsdp by FSDP2"]["aten.add_.Tensor"]
    assert n > 0
    assert added["ddp by DDP"][in_place] == n
    for name in ("fsdp by sacplan", "ddp by sacplan"):
        assert added[name][in_place] == 0
        assert added[name]["aten.add.Tensor"] == added["fsdp by FSDP2"]["aten.add.Tensor"] + n


def test_autocast_casts_shards_or_what_was_gathered() -> None:
    """sacplan gathers half of the bytes that FSDP2 does."""

    def profiled_in_bfloat16(rows: int) -> sacplan.Profile:
        def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(batch)  # type: ignore[no-any-return]

        batch = models.tokens(rows, LENGTH, VOCAB)
        return sacplan.profile(model(), batch, loss_fn, optimizer_of, device="h100")

    head = VOCAB * 32
    whole, own = profiled_in_bfloat16(ROWS), profiled_in_bfloat16(ROWS // RANKS)
    for rank, n in (
        (spread_of(whole, "fsdp", {"dp": RANKS}).profile, head // RANKS),
        (of_one_rank(own, RANKS, UNITS), head),
    ):
        casts = [
            op for op in rank.program.ops if op.name == "aten._to_copy.default" and op.phase == Phase.FORWARD
        ]
        weights = {rank.program.storage_bytes[s] for op in casts for s in op.writes}
        assert 2 * n in weights


def _rounded(parameters: list[nn.Parameter], *, together: bool = False) -> int:
    """Bytes as the allocator of a GPU gives them out: of one buffer, or of one each."""
    sizes = [p.nbytes for p in parameters]
    return sum(-(-size // 512) * 512 for size in ([sum(sizes)] if together else sizes))


def test_the_page_says_where_the_peaks_of_llama_come_from() -> None:
    """The rows of the benchmark differ by these buffers, to the byte, and the page has the figures."""
    runs = json.loads((ROOT / "benchmarks/results/layouts.json").read_text(encoding="utf-8"))["rows"]
    page = " ".join((ROOT / "docs/which-parallelism.md").read_text(encoding="utf-8").split())
    (run,) = (run for run in runs if (run["shape"], run["devices"]) == ("8b", 8))
    peaks = {
        (row["name"], row["run_by"]): row["unplanned_peak_bytes"]
        for row in run["rows"]
        if row["mesh"] == {"dp": 8}
    }
    sizes: dict[str, int] = Counter()
    for name, p in _llama().named_parameters():
        sizes[".".join(name.split(".")[:3]) if ".layers." in name else "outside"] += p.nbytes
    batch = 8 * run["sequences"] * run["length"]  # 64-bit numbers
    others = batch - batch // 8
    outside, layer, gradients = sizes["outside"], sizes["model.layers.31"], sum(sizes.values())
    assert peaks["fsdp", "FSDP2"] - peaks["fsdp", "sacplan"] == outside + layer - others
    assert peaks["ddp", "DDP"] - peaks["ddp", "sacplan"] == gradients - others
    for n_bytes in (outside, layer, others):
        assert f"{n_bytes / 2**20:,.1f} MiB" in page
    for n_bytes in (gradients, *peaks.values()):
        assert f"{n_bytes / 2**30:.1f} GiB" in page


def _llama() -> Any:
    with torch.device("meta"):
        return layouts.model_of("8b")
