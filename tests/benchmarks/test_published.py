"""``benchmarks.published``: what others have measured on GPUs, beside what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks import published
from benchmarks.harness.played import Loop, allocator_figures
from benchmarks.harness.results import GIB, MIB, ROOT
from benchmarks.models import published_networks as networks
from benchmarks.models.published_steps import STEPS
from benchmarks.published import page, published_rows, read_page_rows, rows_of


def test_the_page_is_what_the_figures_give() -> None:
    assert published.PAGE.read_text(encoding="utf-8") == page(*read_page_rows())


def test_the_table_of_what_offloading_changes() -> None:
    rows = read_page_rows()[0]
    text = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    assert published.offloading_table(rows) in text
    by_id = {row["id"]: row for row in rows}
    without, with_it = (by_id[name] for name in published.OFFLOADED["torchtune, inputs of layers"])
    saved = [without[key] - with_it[key] for key in ("published_bytes", "predicted_bytes")]
    assert "{:.2f} GiB as published, and {:.2f} as predicted".format(*(n / GIB for n in saved)) in text


@pytest.mark.parametrize("name", ["ao-vitg-none", "ao-vitg-offload", "ao-vitg-offload_gradients"])
def test_an_optimizer_on_the_host_is_predicted_to_twelve_thousandths(name: str) -> None:
    (row,) = rows_of(name, published_rows()[name])
    assert abs(row["error"]) < 12e-3


def test_every_published_row_is_built_or_says_why_not() -> None:
    rows = published_rows()
    assert STEPS.keys() <= rows.keys()
    for name, row in rows.items():
        assert ("not_built" in row) != (name in STEPS), name
        assert row["source_repo"], name
        assert row["rebuild"] or "not_built" in row, name


def test_no_figure_stands_without_its_step() -> None:
    rows, _ = read_page_rows()
    assert {row["id"] for row in rows} == STEPS.keys()


@pytest.mark.parametrize("name", ["mingpt-nano", "pt-74443-pow2"])
def test_small_steps_are_predicted_to_the_byte(name: str) -> None:
    rows = rows_of(name, published_rows()[name])
    assert rows
    assert all(row["predicted_bytes"] == row["published_bytes"] for row in rows)


def test_gpt2_xl_is_predicted_to_a_hundredth_of_a_percent() -> None:
    for row in rows_of("mingpt-xl", published_rows()["mingpt-xl"]):
        assert abs(row["error"]) < 1e-4


def test_resnet_101_is_predicted_to_two_thousandths() -> None:
    (row,) = rows_of("flashoptim-resnet101", published_rows()["flashoptim-resnet101"])
    assert abs(row["error"]) < 2e-3


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (networks.resnet101, 44_549_160),
        (lambda: networks.Llama(networks.LLAMA_2_7B), 6_738_415_616),
        (lambda: networks.Llama(networks.LLAMA_3_8B), 8_030_261_248),
        (lambda: networks.Llama(networks.LLAMA_32_3B), 3_212_749_824),
        (lambda: networks.Nanochat(20, 1280, 10, 65536, 2048), 560_988_160),
        # DINOv2's own, for images of 518 x 518, less its mask token and 1,113 positions, with a classifier.
        (lambda: networks.vit_giant(45), 1_136_480_768 - 1114 * 1536 + 45 * 1537),
    ],
)
def test_models_have_the_published_number_of_parameters(make: Any, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


def test_the_first_step_has_no_state_until_the_optimizer_runs() -> None:
    run = allocator_figures(_two_linears(rows=8192))
    # Parameters, gradients and states are 8 MiB each way. The first forward and backward pass have none of the states.
    assert run.first.tensors < run.steady.tensors
    assert run.steady.allocated >= run.steady.tensors
    assert run.steady.reserved >= run.steady.allocated


def test_gradients_that_stay_are_there_during_the_forward_pass() -> None:
    profile = _two_linears(rows=8192)
    dropped, late, kept = (
        allocator_figures(profile, loop=Loop(gradients)).steady.tensors
        for gradients in ("step", "backward", "never")
    )
    assert late - dropped <= 8 * MIB
    assert kept - dropped == 8 * MIB  # of both layers, beside the new gradient of one


def test_what_something_holds_beyond_its_last_use_counts_until_it_is_dropped() -> None:
    profile = _two_linears(rows=8192)
    program = profile.program
    products = [i for i, op in enumerate(program.ops) if op.name == "aten.mm.default"]
    (out,) = program.ops[products[1]].writes  # the model's output
    plain, dropped, kept = (
        allocator_figures(profile, loop=Loop(until=lambda _, until=until: until)).end
        for until in ({}, {out: len(program.ops) - 1}, {out: len(program.ops)})
    )
    assert dropped == plain  # before the last op of the step
    assert kept == plain + 32 * MIB  # not in this step


def test_streams_of_fsdp_have_pools_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        batch = torch.empty(64, 1024)
    profile = sacplan.profile(
        model,
        batch,
        lambda model, batch: model(batch).sum(),
        device="h100",
        ranks=sacplan.FSDP2(2, ["*", ""]),
    )
    run = allocator_figures(profile)
    # Two gathered layers at a time and the gradients of one are in pools that serve nothing else.
    assert run.steady.reserved > run.steady.allocated + 2 * MIB


def _two_linears(rows: int = 64) -> sacplan.Profile:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
        batch = torch.empty(rows, 1024)
    return sacplan.profile(
        model,
        batch,
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        device="a100-80gb",
    )
