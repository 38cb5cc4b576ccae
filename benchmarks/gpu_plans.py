"""Do plans hold on a CUDA device where a step is compiled, offloads on real streams, or needs the whole card?

    python -m benchmarks.gpu_plans [--parts compiled offload bits limit] [--names llama ...] [--json FILE]
    python -m benchmarks.gpu_plans --predict    # today's time of the whole card's step, with no GPU

A row is a model in bfloat16 with AdamW and a plan, or with none. Its peak, what the allocator reports and its time are
predicted and measured as in ``gpu.py``. ``bits``: whether loss and gradients are those of the step without the plan,
compiled as it is. Compiled steps are predicted by a dry run of the compiler, without kernels.

- ``compiled``: models of ``gpu_models.py`` as a whole with inductor, without a plan and at two budgets;
- ``offload``: three of them with plans that recompute, that offload, and that do both;
- ``bits``: gradients with a plan under ``torch.use_deterministic_algorithms``, for which cuBLAS wants
  ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment;
- ``limit``: Llama-3-8B on 8,192 tokens with fused AdamW, which does not fit an 80 GB card without a plan.

A row that fails says so, and the others go on.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from msgspec import structs

import sacplan
from benchmarks import gpu
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget, budget_at
from benchmarks.harness.results import RESULTS, Row, read_results, write_results
from benchmarks.models import cases, gpu_models
from benchmarks.models.cases import Case
from sacplan.device.devices import resolve_device
from sacplan.device.timing import run_seconds
from sacplan.record.compiled import really_compiled
from sacplan.record.step import Step, default_loss

FIGURES = RESULTS / "gpu_plans_h100.json"
COMPILED = ("gpt2", "llama", "bert", "t5", "vit", "resnet50", "mamba")
BITS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet50")
OFFLOADED = ("llama", "gpt2", "vit")
SHARES = {"60%": 0.6, "20%": 0.2}
CHOICES = (("recompute",), ("offload",), ("recompute", "offload"))


def _case(name: str) -> tuple[Case, gpu.Memory]:
    own = gpu.memory_before()
    model, batch, loss_fn = gpu_models.build(name, "cuda", torch.bfloat16, False)
    return Case(model, batch, loss_fn, torch.optim.AdamW), own


def compiled(name: str) -> Iterator[Row]:
    """Yield rows of a model that is compiled as a whole."""
    case, own = _case(name)
    profile = case.profile("cuda", compile=True)
    compilation = profile.fingerprint.setup.compiled
    loss_fn = case.loss_fn or default_loss
    step = Step(case.model, case.batch, loss_fn, None)
    yield {"case": name, **_predicted(profile, None)} | _measured(case, None, own, compilation)
    # Inductor has random numbers of its own otherwise.
    seeded = structs.replace(compilation, options={"fallback_random": True})
    with really_compiled(case.model, seeded, step):
        plain = gpu.gradients(case.model, case.batch, loss_fn)
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    for words, share in SHARES.items():
        plan = sacplan.plan(profile, as_budget(budget_at(share, smallest, profile.peak_bytes)))
        row: Row = {"case": f"{name} {words}", **_predicted(profile, plan)}
        row |= _measured(case, plan, own, compilation)
        with sacplan.apply(case.model, plan), really_compiled(case.model, seeded, step):
            row["bits"] = gpu.equal(plain, gpu.gradients(case.model, case.batch, loss_fn))
        yield row


def offload(name: str) -> Iterator[Row]:
    """Yield rows of a model whose activations may wait on the host."""
    case, own = _case(name)
    profile = case.profile("cuda")
    loss_fn = case.loss_fn or default_loss
    plain = gpu.gradients(case.model, case.batch, loss_fn)
    yield {"case": name, **_predicted(profile, None)} | _measured(case, None, own)
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    for words, share in SHARES.items():
        budget = as_budget(budget_at(share, smallest, profile.peak_bytes))
        for techniques in CHOICES:
            plan = sacplan.plan(profile, budget, techniques=techniques)
            row: Row = {"case": f"{name} {words} {'+'.join(techniques)}", **_predicted(profile, plan)}
            row |= _measured(case, plan, own)
            with sacplan.apply(case.model, plan):
                row["bits"] = gpu.equal(plain, gpu.gradients(case.model, case.batch, loss_fn))
            yield row | {"predicted_host_bytes": plan.host_bytes}


def bits(name: str) -> Iterator[Row]:
    """Yield the row of a model whose gradients are compared under deterministic algorithms alone."""
    case, _ = _case(name)
    profile = case.profile("cuda")
    loss_fn = case.loss_fn or default_loss
    torch.use_deterministic_algorithms(True)
    try:
        plain, again = (gpu.gradients(case.model, case.batch, loss_fn) for _ in range(2))
        smallest = sacplan.plan(profile, "smallest").peak_bytes
        plan = sacplan.plan(profile, as_budget(budget_at(0.3, smallest, profile.peak_bytes)))
        with sacplan.apply(case.model, plan):
            planned = gpu.gradients(case.model, case.batch, loss_fn)
    finally:
        torch.use_deterministic_algorithms(False)
    yield {"case": name, "deterministic": gpu.equal(plain, again), "bits": gpu.equal(plain, planned)}


def _llama_3_8b(device: str) -> Case:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = cases.published_config("meta-llama/Meta-Llama-3-8B", rope_theta=500000.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).train()
            batch = cases.text(128256, 1, 8192)
    finally:
        torch.set_default_dtype(before)
    return Case(model, batch, None, cases.fused_adamw)


def limit(name: str) -> Iterator[Row]:
    """Yield the row of Llama-3-8B, whose plan is for all that the card has."""
    own = gpu.memory_before()
    case = _llama_3_8b("cuda")
    profile = case.profile("cuda")
    plan = sacplan.plan(profile)
    yield {"case": name, "unplanned_bytes": profile.peak_bytes, **_predicted(profile, plan)} | _measured(
        case, plan, own
    )


def predict_again() -> None:
    """Write today's time of a plan for as many bytes as the whole card's plan took into the committed row."""
    about, rows = read_results(FIGURES)
    (whole,) = (row for row in rows if row["part"] == "limit")
    profile = _llama_3_8b("meta").profile("h100")
    whole["predicted_ms"] = sacplan.plan(profile, as_budget(whole["predicted_peak_bytes"])).planned_ms
    write_results(FIGURES, rows, row_a_line=True, **about)


PARTS: dict[str, Any] = {
    "compiled": (compiled, COMPILED),
    "offload": (offload, OFFLOADED),
    "bits": (bits, BITS),
    "limit": (limit, ("llama-3-8b",)),
}


def _host_link() -> Row:
    """Return the bytes per second of copies from pinned memory and to it."""
    there = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    here = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    found = {}
    for name, copy in (
        ("to_device", lambda: there.copy_(here, non_blocking=True)),
        ("to_host", lambda: here.copy_(there, non_blocking=True)),
    ):
        times = run_seconds(copy, torch.device("cuda"))
        found[f"{name}_bytes_per_s"] = 2**30 / statistics.median(next(times) for _ in range(5))
    return found


def _predicted(profile: sacplan.Profile, plan: sacplan.Plan | None) -> Row:
    found = profile if plan is None else plan
    memory = profile.device_memory() if plan is None else plan.device_memory
    return {
        "budget_bytes": None if plan is None else plan.budget_bytes,
        "predicted_peak_bytes": found.peak_bytes,
        "predicted_allocator": msgspec.to_builtins(memory) if memory is not None else None,
        "predicted_ms": found.step_ms + (0.0 if plan is None else plan.recompute_ms),
    }


def _measured(case: Case, plan: sacplan.Plan | None, own: gpu.Memory, compilation: Any = None) -> Row:
    optimizer = case.optimizer(case.model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0  # the next measurement finds the same weights
    step = Step(case.model, case.batch, case.loss_fn or default_loss, optimizer)
    with contextlib.ExitStack() as stack:
        if plan is not None:
            stack.enter_context(sacplan.apply(case.model, plan))
        stack.enter_context(really_compiled(case.model, compilation, step))
        row = gpu.timed_steps(step, own)
    budget = None if plan is None else plan.budget_bytes
    return row | ({} if budget is None else {"within_budget": row["measured_peak_bytes"] <= budget})


def _rows(case: tuple[str, str]) -> Iterator[Row]:
    part, name = case
    head = {"part": part}
    try:
        for row in PARTS[part][0](name):
            yield head | row | {"case": f"{part} {row['case']}"}
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        yield head | {
            "case": f"{part} {name}",
            "error": f"{type(error).__name__}: {said[0]}",
            "traceback": traceback.format_exc(),
        }


def main() -> None:
    parser = Parser(__doc__)
    parser.choice("--parts", PARTS)
    parser.add_argument("--names", nargs="+", help="default: all of a part")
    parser.add_argument(
        "--predict", action="store_true", help="predict the committed step again, with no GPU"
    )
    arguments = parser.begin(silence=True)
    if arguments.predict:
        predict_again()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    about: dict[str, Any] = {
        "board": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host_link": _host_link(),
    }
    print(about)
    chosen = [
        (part, name)
        for part in arguments.parts
        for name in PARTS[part][1]
        if arguments.names is None or name in arguments.names
    ]
    device = resolve_device("cuda").name.replace(" ", "-")
    run_cases(chosen, _rows, arguments.json or RESULTS / f"gpu_plans_{device}.json", key="case", **about)


if __name__ == "__main__":
    main()
