"""What the recorded figures of long sequences with offloading show, and the table that the page makes of them."""

from __future__ import annotations

import pytest

from benchmarks import offloaded_sequences
from benchmarks.harness.results import GIB, RESULTS, ROOT, Row, read_results
from benchmarks.models import chunk_models
from sacplan._chunk.chunk_entry import CannotChunk
from sacplan._chunk.rest import training_chunk
from sacplan._program.decisions import Chunk

ROWS: list[Row] = read_results(RESULTS / "offloaded_sequences.json")[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_predicted_is_the_fake_step_on_device_and_host(row: Row) -> None:
    assert row["fake_peak_bytes"] == row["peak_bytes"]
    assert row["fake_host_bytes"] == row["host_bytes"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_both_budgets_hold(row: Row) -> None:
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["host_bytes"] + row["optimizer_host_bytes"] <= row["host_budget_bytes"]


def test_the_table_of_the_page() -> None:
    assert offloaded_sequences.table(ROWS) in (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")


def test_why_gemma_stops() -> None:
    """One layer shows what the page says of attention that computes whole scores. All layers are alike."""
    case = chunk_models.gemma_2_2b(32768, layers=1)
    profile = case.profile("h100")
    program = profile.program
    (backward,) = (
        op
        for op in program.ops
        if op.name == "aten._softmax_backward_data.default"
        and program.scopes[op.scope].fqn == "model.layers.0.self_attn"
    )
    touched = {*backward.reads, *backward.writes}
    taken = sum(program.storage_bytes[s] for s in touched) + backward.workspace_bytes
    assert taken == 4 * (4 * 8 * 32768**2)  # float32 scores of eight heads
    page = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    assert f"four float32 copies of them, {taken // GIB} GiB" in " ".join(page.split())
    chunk = Chunk("model.layers.0.self_attn", "module", 16, 1)
    with pytest.raises(CannotChunk, match="cannot run in slices: its arguments are sliced in different ways"):
        training_chunk(program, chunk, profile.spec)
