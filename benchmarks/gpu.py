"""Are predictions right on a CUDA device: peaks, step times, attention kernels, cuBLAS workspaces?

    python -m benchmarks.gpu [--names gpt2 llama ...] [--kinds bf16 autocast] [--seconds 420] [--json FILE]
    python -m benchmarks.gpu --table          # the table of docs/gpu.md, from the committed figures
    python -m benchmarks.gpu --predict        # the same with today's predictions beside what was measured

Needs torch and sacplan alone; with transformers installed the models of ``hf_models.py`` are measured, too. A row is a
model in bfloat16 or under autocast, with AdamW:

- the predicted peak of the step, which is a sum of tensors, beside ``requested_bytes.all.peak`` of
  ``torch.cuda.memory_stats``, and what the allocator played through reports beside what the real one does
  (``max_memory_allocated``, ``max_memory_reserved``), in the first step and in eight more;
- the step's time by the wall clock, beside predictions by the cost model of the table, and by timing each op
  (``runtime="benchmark"``);
- two plans, applied and measured, with loss and gradients compared bit by bit. Where they vary from run to run,
  ``gpu_plans.py`` compares them under deterministic algorithms.

A row that fails says so in the table and makes the exit status 1; the others go on. Results go to
``benchmarks/results/gpu_<device>.json``.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

import sacplan
from benchmarks.gpu_times import CHANGED, profiled
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import as_budget, budget_at, timed
from benchmarks.harness.results import MIB, RESULTS, ROOT, Row, as_text, read_results, write_results
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import gpu_models
from sacplan.device.attention import AttentionCall, attention_backend
from sacplan.device.cublas import library_workspace_bytes
from sacplan.device.device_memory import device_memory
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.record.step import Step, default_loss

ZOO = ("gpt2", "llama", "t5", "bert", "vit", "mixtral", "resnet", "mamba")
KINDS = ("bf16", "autocast")
TIMED_STEPS = 5
FIGURES = RESULTS / "gpu_h100.json"
MORE_STEPS = 8
"""After the first, as ``device_memory`` plays."""
SHARES = (0.3, 0.7)
"""Budgets of the two plans, between the smallest feasible peak (0) and the unplanned one (1)."""

Build = Callable[[], tuple[torch.nn.Module, Any, Any]]


# --- cases ------------------------------------------------------------------------------------------


def cases(names: list[str] | None, kinds: list[str], device: str) -> Iterator[tuple[Row, Build | str]]:
    """Yield what is to be measured: (model and kind, how to build it or why it is left out)."""
    for kind in kinds:
        for name in gpu_models.MODELS:
            if names is None or name in names:
                build = functools.partial(gpu_models.build, name, device, torch.bfloat16, kind == "autocast")
                yield {"model": name, "kind": kind}, build
    wanted = [f"transformers/{n}" for n in ZOO if names is None or f"transformers/{n}" in names]
    if not wanted:
        return
    try:
        from benchmarks.models import hf_models
    except ImportError as error:
        for name in wanted:
            yield {"model": name, "kind": "bf16"}, f"not installed: {error.name or error}"
        return
    for name in wanted:
        build = functools.partial(_from_hf_models, hf_models, name.split("/")[1], device)
        yield {"model": name, "kind": "bf16"}, build


def _from_hf_models(hf_models: Any, name: str, device: str) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, batch, loss_fn = hf_models.build(name, device=device, dtype=torch.bfloat16)
    return model, {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}, loss_fn


# --- one row ----------------------------------------------------------------------------------------


def measure_row(build: Build, device: str, spec: DeviceSpec) -> Row:
    """Measure everything about one model."""
    own = memory_before()
    model, batch, loss_fn = build()
    loss_fn = loss_fn or default_loss
    profiles: dict[str, sacplan.Profile] = {}
    profile_s = {}
    for name, runtime in (("datasheet", "cost-model"), ("benchmark", "benchmark")):
        profile = functools.partial(sacplan.profile, model, batch, loss_fn, torch.optim.AdamW)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            profiles[name], profile_s[name] = timed(functools.partial(profile, device=spec, runtime=runtime))
    seen = profiles["datasheet"]
    row: Row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "predicted_peak_bytes": seen.peak_bytes,
        "predicted_allocator": msgspec.to_builtins(device_memory(seen.program)),
        "predicted_ms": {name: p.step_ms for name, p in profiles.items()},
        "profile_s": profile_s,
        "not_timed": sorted(
            {str(w.message).split(":", 1)[1] for w in caught if "could not be run" in str(w.message)}
        ),
        "assumptions": list(seen.assumptions),
    }
    plain = gradients(model, batch, loss_fn)
    again = gradients(model, batch, loss_fn)
    row["deterministic"] = equal(plain, again)
    del again
    row |= _measured(model, batch, loss_fn, own)
    row["plans"] = []
    smallest = sacplan.plan(seen, "smallest").peak_bytes
    for share in SHARES:
        budget = budget_at(share, smallest, seen.peak_bytes)
        plan = sacplan.plan(seen, as_budget(budget))
        with sacplan.apply(model, plan):
            planned: Row = {"budget_bytes": budget, "predicted_peak_bytes": plan.peak_bytes}
            planned["predicted_ms"] = plan.planned_ms
            planned["bit_equal"] = equal(plain, gradients(model, batch, loss_fn))
            planned |= _measured(model, batch, loss_fn, own)
        planned["predicted_allocator"] = msgspec.to_builtins(plan.device_memory)
        planned["within_budget"] = planned["measured_peak_bytes"] <= budget
        row["plans"].append(planned)
    return row


def gradients(model: torch.nn.Module, batch: Any, loss_fn: Any) -> list[torch.Tensor]:
    """Run a step from a fixed seed; return loss and gradients, on the host. Buffers are put back."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    torch.manual_seed(1)
    loss = loss_fn(model, batch)
    loss.backward()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _measured(model: torch.nn.Module, batch: Any, loss_fn: Any, own: Memory) -> Row:
    """Measure the peak, as the sum of tensors, and the time of real steps with AdamW, and what the allocator says.

    The learning rate is 0, so that the next measurement finds the same weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    step = Step(model, batch, loss_fn, optimizer)
    return timed_steps(step, own)


def timed_steps(step: Step, own: Memory) -> Row:
    """Run steps on CUDA as a process does that trains: the first makes the optimizer's state.

    Args:
        own: What is on the device that is no part of the step.
    """

    def run() -> None:
        step.model.zero_grad(set_to_none=True)
        step.run()

    def peaks() -> Row:
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {
            "max_memory_allocated": allocated - own.allocated,
            "max_memory_reserved": reserved - own.reserved,
        }

    step.model.zero_grad(set_to_none=True)
    _forget_memory()
    run()
    allocator = {"first_step": peaks()}
    for _ in range(MORE_STEPS):
        run()
    allocator["steps"] = peaks()
    times = []
    for _ in range(TIMED_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    step.model.zero_grad(set_to_none=True)
    _forget_memory()
    run()
    torch.cuda.synchronize()
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"] - own.requested
    step.model.zero_grad(set_to_none=True)
    return {"measured_peak_bytes": requested, "allocator": allocator, "measured_ms": statistics.median(times)}


def _forget_memory() -> None:
    """Empty the allocator, so that a step makes its own cuBLAS workspaces and finds no segments of earlier ones."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device: of blocks, of the tensors in them, and of segments."""

    allocated: int = 0
    requested: int = 0
    reserved: int = 0


def memory_before() -> Memory:
    """Return what is on the device before a row begins.

    A cuBLAS workspace of the backward thread cannot be dropped. It counts as the row's, for the step uses it.
    """
    _forget_memory()
    left, workspace = torch.cuda.memory_allocated(), library_workspace_bytes(resolve_device("cuda"))
    if workspace and left in (workspace, 2 * workspace):
        return Memory()
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return Memory(left, requested, torch.cuda.memory_reserved())


def predict_again(rows: list[Row]) -> None:
    """Predict measured steps with today's code, on a fake H100: peak and time without a plan, and times with one.

    Another plan for the same bytes may come out today, so the peaks of plans stay those of the plans that ran.
    """
    for row in rows:
        if "plans" not in row or row["model"] in CHANGED:
            continue
        profile = profiled(row["model"], row["kind"])
        row["predicted_peak_bytes"] = profile.peak_bytes
        row["predicted_allocator"] = msgspec.to_builtins(device_memory(profile.program))
        row["predicted_ms"]["datasheet"] = profile.step_ms
        for plan in row["plans"]:
            plan["predicted_ms"] = sacplan.plan(profile, as_budget(plan["budget_bytes"])).planned_ms


# --- attention and cuBLAS ---------------------------------------------------------------------------

BACKENDS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
ATTENTION: list[tuple[str, Row]] = json.loads(
    (ROOT / "benchmarks/data/attention_calls.json").read_text("utf-8")
)


def attention_rows(spec: DeviceSpec, device: str) -> list[Row]:
    """Return torch's choice of an attention kernel beside ours."""
    rows = []
    for name, o in ATTENTION:
        dtype, dim, heads = getattr(torch, o.get("dtype", "bfloat16")), o.get("dim", 64), o.get("kv_heads", 4)
        grad, three = o.get("grad", True), o.get("three", False)
        shapes = [(2, 4, 128, dim), *[(2, heads, o.get("keys", 128), dim)] * 2]
        q, k, v = (
            torch.randn(s[1:] if three else s, dtype=dtype, device=device, requires_grad=grad) for s in shapes
        )
        mask, options = None, {"dropout_p": o.get("dropout_p", 0.0), "is_causal": o.get("is_causal", False)}
        if "mask" in o:
            mask = torch.zeros(o["mask"], dtype=dtype, device=device, requires_grad=o.get("mask_grad", False))
        gqa = o.get("enable_gqa", False)
        row: Row = {"case": name}
        try:
            row["torch"] = BACKENDS[torch._fused_sdp_choice(q, k, v, mask, **options, enable_gqa=gqa)]
        except RuntimeError as error:
            row["torch"] = f"error: {str(error).splitlines()[0]}"
        call = AttentionCall(
            tuple(q.shape), tuple(k.shape), tuple(v.shape), dtype, mask_dim=None if mask is None else mask.dim(),
            mask_requires_grad=mask is not None and mask.requires_grad, enable_gqa=gqa, needs_grad=grad, **options,
        )  # fmt: skip
        row["ours"] = attention_backend(spec, call)
        row["agree"] = row["torch"] == row["ours"]
        rows.append(row)
    return rows


def cublas_report(spec: DeviceSpec, device: str) -> Row:
    """Return the size of a workspace, and how many a forward and a backward product leave behind."""
    report: Row = {"predicted_bytes": library_workspace_bytes(spec), "predicted_count": 2}
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    report["torch_says_bytes"] = ask() if ask is not None else None
    a = torch.randn(64, 64, device=device, requires_grad=True)
    marks = []
    _forget_memory()
    for run in (lambda: a.detach() @ a.detach(), lambda: (a @ a).sum().backward()):
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        a.grad = None
        marks.append(torch.cuda.memory_allocated() - before)
    return report | {"forward_leaves_bytes": marks[0], "backward_leaves_bytes": marks[1]}


# --- all of it --------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; the exit status is 1 if a row failed."""
    parser = Parser(__doc__)
    parser.add_argument("--names", nargs="+", help="of gpu_models.py, or transformers/NAME; default: all")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds", type=float, default=420.0, help="start no further row after this long")
    parser.add_argument("--table", action="store_true", help="only put the committed figures on the page")
    parser.add_argument(
        "--predict", action="store_true", help="predict the committed steps again, with no GPU"
    )
    options = parser.parse_args(arguments)
    if options.predict:
        about, rows = read_results(FIGURES)
        predict_again(rows)
        write_results(FIGURES, rows, **about)
    if options.table or options.predict:
        TABLE.put(read_results(FIGURES)[1])
        return 0
    known = [*gpu_models.MODELS, *(f"transformers/{n}" for n in ZOO)]
    unknown = sorted(set(options.names or ()) - set(known))
    if unknown:
        parser.error(f"unknown names {unknown}; known: {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    began = time.perf_counter()
    device = "cuda"
    spec = resolve_device(device)
    board = torch.cuda.get_device_name()
    print(f"{board} ({spec.name}), torch {torch.__version__}, CUDA {torch.version.cuda}")
    data: Row = {
        "device": spec.name,
        "board": board,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas": cublas_report(spec, device),
        "attention": attention_rows(spec, device),
    }
    print(*map(as_text, (data["cublas"], *data["attention"])), sep="\n")
    rows: list[Row] = []
    lost = ""
    for row, build in cases(options.names, options.kinds, device):
        rows.append(row)
        if isinstance(build, str):
            row["skipped"] = build
        elif lost:
            row["error"] = f"not run: {lost}"
        elif time.perf_counter() - began > options.seconds:
            row["skipped"] = f"no time left (--seconds {options.seconds:g})"
        else:
            try:
                row |= measure_row(build, device, spec)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                row["traceback"] = traceback.format_exc()
            lost = _context_lost()
        for each in (row, *row.get("plans", ())):
            print(as_text({"model": row["model"]} | each), flush=True)
    data["seconds"] = round(time.perf_counter() - began, 1)
    path = options.json or RESULTS / f"gpu_{spec.name.replace(' ', '-')}.json"
    write_results(path, rows, **data)
    failed = [row for row in rows if "error" in row]
    print(f"{len(rows)} rows, {len(failed)} failed, {data['seconds']} s; written to {path}")
    return 1 if failed else 0


def _context_lost() -> str:
    """Return why the CUDA context can no longer be used after a row; "" if it can."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the CUDA context is lost ({str(error).splitlines()[0]})"
    return ""


def _cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each step of a model, without a plan and with one."""
    steps = [("none", row, row["predicted_ms"]["datasheet"])]
    steps += [(f"{p['budget_bytes'] / MIB:,.0f} MiB", p, p["predicted_ms"]) for p in row["plans"]]
    for budget, r, ms in steps:
        measured = r["measured_peak_bytes"]
        ours, theirs = (
            r[who]["steps"]["max_memory_allocated"] for who in ("predicted_allocator", "allocator")
        )
        yield (
            f"`{row['model']}`", budget, f"{measured / MIB:,.2f}",
            f"{r['predicted_peak_bytes'] / measured - 1:+.3%}", f"{ours / theirs - 1:+.2%}",
            f"{ms:.1f}", f"{r['measured_ms']:.1f}",
        )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Write the table of the page."""
    heads = "model | plan | measured MiB | error | allocated | predicted ms | measured ms"
    return markdown_table(heads, (cells for row in rows if "plans" in row for cells in _cells(row)))


TABLE = PageTable("gpu", "gpu.md", table)


if __name__ == "__main__":
    sys.exit(main())
