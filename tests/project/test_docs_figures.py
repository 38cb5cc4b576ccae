"""Figures in sentences of the README and the documentation are those of the committed results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.gpu_times import in_words
from benchmarks.harness.results import GIB, RESULTS, ROOT, Row, read_results
from sacplan.device.eager import RECOMPUTED_US, WATCHED_US


def rows_of(name: str) -> list[Row]:
    return read_results(RESULTS / f"{name}.json")[1]


def row(rows: list[Row], **known: Any) -> Row:
    """The only row with these values."""
    (found,) = (each for each in rows if all(each[name] == value for name, value in known.items()))
    return found


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def planning() -> Iterator[tuple[str, str]]:
    rows = rows_of("planning_time")
    stopped = row(rows, who="prototype", layers=32)
    assert stopped["result"].startswith("stopped after 120 s")
    yield (
        "docs/alternatives.md",
        "with 32 layers it was stopped after 120 s, where sacplan took "
        f"{row(rows, who='sacplan', layers=32)['all']:.2f} s",
    )


def layouts() -> Iterator[tuple[str, str]]:
    seconds = [each["processor_seconds"] for each in rows_of("layouts")]
    yield "docs/which-parallelism.md", f"took {min(seconds):.0f} to {max(seconds):.0f} s of processor time"


def modes() -> Iterator[tuple[str, str]]:
    for each in rows_of("modes"):
        plan = each["best"]
        assert plan["lower_bound_share"] <= plan["recompute_share"] <= each["recompute_share"]
    yield "docs/modes.md", "a plan takes no more time than any mode at the same peak"


def frontier() -> Iterator[tuple[str, str]]:
    rows = [each for each in rows_of("frontier") if each["model"] == "gpt2"]
    for said, who, setting in (
        ("`torch.utils.checkpoint` on every layer", "checkpoint", "every layer"),
        ("selective contexts, every second matmul", "by op", "every second matmul"),
        ("`activation_memory_budget=0.5`", "compile", "0.5"),
        ("`activation_memory_budget=0.4`", "compile", "0.4"),
        ("PyTorch's prototype at 70 %", "prototype", "70%"),
    ):
        rival, ours = row(rows, who=who, setting=setting), row(rows, versus=f"{who} {setting}")
        yield (
            "docs/alternatives.md",
            f"| {said} | {rival['peak_gib']:.3f} | {rival['recompute_percent']:.2f} | "
            f"{ours['recompute_percent']:.2f} |",
        )
    full = row(rows, who="checkpoint", setting="every layer")
    ours = row(rows, versus="checkpoint every layer")
    yield (
        "README.md",
        f"Checkpointing every layer of GPT-2 repeats {full['recompute_percent']:.1f} % of the step's FLOPs, a plan "
        f"with the same peak {ours['recompute_percent']:.1f} %",
    )


def rivals() -> Iterator[tuple[str, str]]:
    rows = rows_of("frontier")
    theirs = {(r["model"], f"{r['who']} {r['setting']}"): r for r in rows if r["who"] != "sacplan"}
    beside = [r for r in rows if r["versus"]]
    more = [r["recompute_percent"] - theirs[r["model"], r["versus"]]["recompute_percent"] for r in beside]
    no_worse = sum(each <= 1e-9 for each in more)
    yield (
        "README.md",
        f"Of {len(beside)} settings of other tools on five models, {no_worse} cost as much or more for the same peak; "
        f"the others cost less by {max(more):.2f} % of the step's FLOPs at most",
    )


def architectures() -> Iterator[tuple[str, str]]:
    rows = [each for each in rows_of("compatibility") if each["status"] == "trained"]
    steps = [step for each in rows for step in each["steps"]]
    planned = [step for step in steps if step["budget"] != "none"]
    assert all(step["predicted_bytes"] == step["measured_bytes"] for step in steps)
    assert all(step["measured_bytes"] <= step["budget_bytes"] and step["bit_equal"] for step in planned)
    yield (
        "README.md",
        f"In {len(steps):,} real steps of {len(rows)} architectures, predicted and measured peaks are the same to the "
        f"byte. All {len(planned):,} steps with a plan stay within the budget, with the same loss and gradients, bit "
        "by bit",
    )


def fit_time() -> Iterator[tuple[str, str]]:
    rows = rows_of("fit_time")
    llama = [each for each in rows if "Llama" in each["verdict"]]
    both = [[each["seconds"] for each in llama if each["sizes"] == sizes] for sizes in (True, False)]
    with_sizes, without = (f"{min(each):.0f} to {max(each):.0f}" for each in both)
    first = [each["first_row_seconds"] for each in rows]
    yield "docs/fit.md", f"the first row {min(first):.1f} to {max(first):.1f} s after the process begins"
    yield (
        "docs/fit.md",
        f"For Llama-3-8B, on a machine with two cores, the command takes {with_sizes} s, and {without} s with "
        "`--no-sizes`",
    )
    seconds = [row(rows, device="h100", seq=8192, sizes=sizes)["seconds"] for sizes in (True, False)]
    yield (
        "README.md",
        f"The `fit` command above takes {seconds[0]:.0f} s on two CPU cores, and {seconds[1]:.0f} s with `--no-sizes`",
    )


OFFLOADED = (
    ("ao-vitg-none", "ao-vitg-offload"),
    ("ao-vitg-none", "ao-vitg-offload_gradients"),
    ("prime-rl-rl-Qwen3-0.6B-65536", "prime-rl-rl-Qwen3-0.6B-65536-offload"),
)
"""Published steps without and with offloading."""


def published() -> Iterator[tuple[str, str]]:
    rows = rows_of("published")
    titan = [each for each in rows if each["id"].startswith("titan822-")]
    assert len(titan) == 6
    rates = [each for each in rows if "published_per_s" in each and each["kind"] != "compiled"]
    off = [r["predicted_per_s"] / r["published_per_s"] - 1 for r in rates if r["id"].startswith("titan")]
    assert len(off) == 6
    ops = read_results(RESULTS / "published_ops.json")[0]["times"]
    worst, missing = 0.0, 0.0
    for without, with_it in OFFLOADED:
        plain, offloaded = row(rows, id=without), row(rows, id=with_it)
        worst = max(worst, abs(offloaded["error"]))
        added = [plain[key] / offloaded[key] - 1 for key in ("published_per_s", "predicted_per_s")]
        missing = max(missing, added[0] - added[1])
        assert with_it.startswith("ao-") or abs(added[0] - added[1]) < 0.01
    said = f"peak within {worst:.1%} of the prediction, and take up to {missing:.1%} of the step more time"
    yield "docs/offload.md", said.replace("%", " %")
    yield (
        "README.md",
        "the memory that torchtitan reserves for Llama-3-8B on eight H100 is predicted to within "
        f"{100 * max(abs(each['error']) for each in titan):.1f} %, its tokens per second to within "
        f"{100 * max(map(abs, off)):.0f} % (on a card whose matmul rate is fitted to one of six settings), and "
        f"{ops['rows']} times of single ops on five GPUs with a median error of {100 * ops['median']:.1f} %.",
    )


def swaps() -> Iterator[tuple[str, str]]:
    rows = rows_of("published_swaps")
    gib = [f"{each['peak_bytes'] / GIB:.1f}" for each in rows]
    yield "docs/offload.md", f"predicted are {', '.join(gib[:3])} and {gib[3]} GiB"
    yield "docs/offload.md", f"predicted are {', '.join(gib[4:6])} and {gib[6]} GiB"
    # What a card holds beyond the sum of tensors, CUDA's context among it.
    assert all(0 < each["published_gb"] - each["peak_bytes"] / GIB < 3 for each in rows)


def other_packages() -> Iterator[tuple[str, str]]:
    rows = rows_of("zoo")
    errors = [max(abs(s["predicted_bytes"] - s["measured_bytes"]) for s in each["steps"]) for each in rows]
    assert {*errors} == {0, 8}
    timm = sum(each["model_type"].startswith("timm/") and "+" not in each["model_type"] for each in rows)
    yield (
        "docs/figures.md",
        f"{len(rows)} models of timm ({timm}), torchvision, torch_geometric, diffusers and PEFT: {errors.count(0)} are "
        "exact to the byte in every step, the other one 8 bytes off",
    )


def verdicts() -> Iterator[tuple[str, str]]:
    rows = rows_of("verdicts")
    full = row(rows, id="8B, full, one of 80 GB")
    before, planned = full["as_it_is"], full["plan"]
    assert (before["fits"], planned["fits"], planned["optimizer"]) == (False, True, "adamw-fused")
    yield "README.md", full["command"]
    yield (
        "README.md",
        f"A step of Llama-3-8B on 8,192 tokens needs {before['peak_bytes'] / GIB:.2f} GiB. With a plan and fused "
        f"AdamW it needs {planned['peak_bytes'] / GIB:.2f} GiB and fits on one 80 GB H100. By the cost model it "
        f"takes {planned['step_ms']:,.0f} ms, where the step that does not fit would take {before['step_ms']:,.0f}",
    )
    found = row(rows, id="8B, QLoRA")
    assert (found["as_it_is"]["fits"], found["recommended"]["fits"]) == (False, True)
    yield "docs/lora.md", "four samples of 1,024 tokens and a plan, Llama-3-8B fits an RTX 4090"


def on_gpu() -> Iterator[tuple[str, str]]:
    rows = [each for each in rows_of("gpu_h100") if "plans" in each]
    steps = [step for each in rows for step in (each, *each["plans"])]
    errors = sorted(abs(step["predicted_peak_bytes"] / step["measured_peak_bytes"] - 1) for step in steps)
    assert errors[-1] < 0.0035
    assert errors[len(errors) // 2] < 0.00002
    plans = rows_of("gpu_plans_h100")
    whole = row(plans, part="limit")
    predicted, measured = (f"{whole[f'{how}_peak_bytes'] / GIB:.2f} GiB" for how in ("predicted", "measured"))
    assert predicted == measured
    ms = f"{whole['measured_ms']:,.0f} ms where {whole['predicted_ms']:,.0f} were predicted"
    yield (
        "README.md",
        f"{len(steps)} peaks of {len(rows)} models in eager mode, without a plan and with two, are predicted to within "
        "0.35 %, half of them to within 0.002 %. Llama-3-8B with a plan for the whole card took "
        f"{measured}, as predicted, and {ms}",
    )
    blocks, reserved = (
        [whole[who]["steps"][f"max_memory_{what}"] for who in ("predicted_allocator", "allocator")]
        for what in ("allocated", "reserved")
    )
    assert abs(blocks[0] - blocks[1]) == 512
    yield (
        "docs/gpu.md",
        f"{predicted} predicted, {measured} measured; `max_memory_allocated` is right to 512 bytes, and "
        f"{reserved[0] / GIB:.2f} GiB were predicted to be reserved where {reserved[1] / GIB:.2f} GiB were. A step "
        f"took {whole['measured_ms']:,.0f} ms, for which the cost model says {whole['predicted_ms']:,.0f} ms",
    )
    outside = read_results(RESULTS / "gpu_plans_h100.json")[0]["outside_allocator"]["after_ten_models"]
    yield "docs/no_gpu.md", f"on an H100, after ten models, {outside / GIB:.2f}, which the margin covers"
    same = [each for each in plans if each["part"] == "bits"]
    assert all(each["deterministic"] and each["bits"] for each in same)
    yield "docs/gpu.md", f"bit by bit, for all {len(same)} models"
    compiled = [each for each in plans if each["part"] == "compiled"]
    assert len(compiled) == 2
    assert all(abs(r["predicted_peak_bytes"] / r["measured_peak_bytes"] - 1) < 0.0003 for r in compiled)
    slower = max(step["measured_ms"] / each["measured_ms"] for each in rows for step in each["plans"])
    yield "docs/gpu.md", f"with a plan they take up to {slower:.1f} times as long as without one"
    yield "README.md", f"Small steps take up to {slower:.1f} times as long with a plan"
    issued = (
        f"{RECOMPUTED_US:.0f} us of the host's processor for each such op, and {WATCHED_US:.0f} us for each op of the "
        "forward pass"
    )
    yield "docs/alternatives.md", issued
    yield "docs/gpu.md", in_words(rows_of("gpu_times_h100"))


SOURCES: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
    planning, layouts, modes, frontier, rivals, architectures, fit_time, published, swaps,
    other_packages, verdicts, on_gpu,
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_page_says_what_the_results_are(source: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for page, sentence in source():
        assert sentence in text_of(page), f"{page} should say: {sentence}"
