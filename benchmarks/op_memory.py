"""Predicted against measured peaks, op by op: PyTorch's op database on a CPU, unplanned and with everything discarded.

    python -m benchmarks.op_memory              # all ops: some ten minutes
    python -m benchmarks.op_memory prod cumprod # some of them; their rows in the file are replaced

Each op of ``torch.testing._internal``'s database (float32) is one layer of a small model, on its largest sample,
scaled up where it can be (``op_samples.py``). A step is forward and backward, forward alone where the op has no
gradient. Its peak, as ``sacplan.profile`` predicts it for ``device="cpu"``, is compared with the allocator's events;
then with ``sacplan.policy("full")``. Ops with sizes that depend on data are traced with ``trace="real"``.

The table of what differs by more than one percent is for ``docs/op_memory.md``. Needs ``expecttest``.
"""

from __future__ import annotations

import collections
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import sacplan
from benchmarks.common import describe, machine, on_one_thread, parser, write_results
from benchmarks.op_samples import OpStep, full_name, loss_of, op_database, samples_of
from sacplan._record.step import Step, call_model
from sacplan._verify.measure import measured_step

TOLERANCE = 0.01
_ERRORS = ("ended", "refused", "raised_fake", "error_fake", "raised_real", "error_real")
_ADDRESS_SPACE = 12 * 2**30
_LAYER = "op"


@on_one_thread
def rows_of(op: Any, most: int = 1) -> list[dict[str, Any]]:
    """One row for each sample of an op: predicted and measured bytes, or the error that it raises."""
    rows = []
    for sample in samples_of(op, most):
        row: dict[str, Any] = {"op": full_name(op), "bytes": sample.nbytes}
        rows.append(row)
        model = OpStep(op, sample.sample)
        try:
            model(*model.batch)
        except Exception as error:  # the plain op refuses the sample
            rows[-1] |= {"refused": _shortened(error)}
            continue
        mode = "train" if op.supports_autograd and _has_gradient(model) else "inference"
        row["mode"] = mode
        loss = loss_of if mode == "train" else call_model
        row |= _figures(model, mode, loss)
    return rows


def _has_gradient(model: OpStep) -> bool:
    try:
        return bool(loss_of(model, model.batch).requires_grad)
    except (AssertionError, RuntimeError):  # no output has one, or the op raises: the forward pass says which
        return False


def _figures(model: OpStep, mode: Any, loss: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trace in ("fake", "real"):
            found["trace"] = trace
            try:
                profile = sacplan.profile(model, model.batch, loss, device="cpu", mode=mode, trace=trace)
                break
            except sacplan.SacplanError as error:
                found[f"error_{trace}"] = _shortened(error)
            except Exception as error:  # not of the family: the row says so
                found[f"raised_{trace}"] = _shortened(error)
        else:
            return found
    said = {str(w.message) for w in caught if "workspace" in str(w.message)}
    if said:
        found["warnings"] = sorted(said)
    step = Step(model, model.batch, loss, None, mode)
    found["predicted"] = profile.peak_bytes
    found["measured"] = _measured(step)
    found["returns_tensors"] = any(isinstance(t, torch.Tensor) for t in tree_leaves(model(*model.batch)))
    if mode == "train":
        try:
            plan = sacplan.policy("full", profile=profile, layers=_LAYER)
        except sacplan.PlanError:
            return found  # nothing there that may run again
        with sacplan.apply(model, plan):
            found["planned_predicted"] = plan.peak_bytes
            found["planned_measured"] = _measured(step)
    return found


def _measured(step: Step) -> int:
    """The second of two steps: the first may fill caches."""
    assert isinstance(step.model, OpStep)
    step.run()
    return measured_step(step, step.model.batch).peak_bytes


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def differences(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Predicted less measured as a share of measured, unplanned and with everything discarded."""
    return tuple(
        row[f"{which}predicted"] / row[f"{which}measured"] - 1 if f"{which}measured" in row else None
        for which in ("", "planned_")
    )  # type: ignore[return-value]


def is_off(row: dict[str, Any]) -> bool:
    """Whether a prediction differs by more than the tolerance."""
    return any(d is not None and abs(d) > TOLERANCE for d in differences(row))


_VALUES = "its kernel chooses its way, or its sizes, by the values; a fake step has made-up ones"
_REASONS: dict[str, str] = {
    "allclose": "returns a Python value: ops without a tensor among their results are not recorded",
    "isin": _VALUES,
    "unique": _VALUES,
    "unique_consecutive": _VALUES,
    "nn.functional.one_hot": _VALUES,
    "nn.functional.unfold": "its backward kernel returns a storage larger than the tensor; the fake one does not",
    "linalg.matrix_rank": "made of other ops, and takes another way under a dispatch mode; in a unit with a plan, too",
    "sgn": "autograd's zero tensors have no memory in a real step",
    "t_copy": "copies of transposed matrices go through a block of 14 KB, which is not counted",
}
"""Why predictions differ, by op; found by comparing the allocator's events with the recorded ops."""


def reason_of(row: dict[str, Any]) -> str:
    """Why the prediction for an op differs from what was measured; "" where that is not known."""
    return _REASONS.get(row["op"], "")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line of totals, the table of what differs, and that of what cannot be traced."""
    compared = [row for row in rows if "measured" in row]
    off = [row for row in compared if is_off(row)]
    real = sum(row["trace"] == "real" for row in compared)
    failed = [row for row in rows if "error_real" in row or "raised_real" in row or "ended" in row]
    lines = [
        f"{len(compared)} ops compared, {len(compared) - len(off)} within {TOLERANCE:.0%} without a plan and with "
        f'everything discarded; {real} of them with `trace="real"`.',
        "",
        "| op | unplanned | everything discarded | why |",
        "| --- | --- | --- | --- |",
    ]
    for row in sorted(off, key=lambda row: row["op"]):
        shown = ["-" if d is None else f"{d:+.1%}" for d in differences(row)]
        lines.append(f"| `{row['op']}` | {shown[0]} | {shown[1]} | {reason_of(row) or 'not known yet'} |")
    if failed:
        lines += ["", "| cannot be traced | what is said |", "| --- | --- |"]
        for row in sorted(failed, key=lambda row: row["op"]):
            said = next(row[k] for k in ("ended", "error_real", "raised_real") if k in row)
            lines.append(f"| `{row['op']}` | {said[:160].replace('|', '/')} |")
    raw = sorted({f"`{row['op']}`" for row in rows if "raised_fake" in row})
    if raw:
        lines += [
            "",
            f"A fake trace stops with an error of PyTorch's, not of sacplan's, at {', '.join(raw)}.",
        ]
    return "\n".join(lines)


# --- all of them ------------------------------------------------------------------------------------------


def _in_workers(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of ops, in processes of their own: an op that ends its process costs itself only."""
    left = collections.deque(names)
    while left:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.op_memory", "--worker", *left]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                if "done" in row:
                    left.popleft()
                else:
                    yield row
        if left:
            yield {"op": left.popleft(), "ended": f"the process ended with {worker.returncode}"}


def _work(names: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    ops = {full_name(op): op for op in op_database()}
    for name in names:
        try:
            rows = rows_of(ops[name])
        except Exception as error:  # the sample's own: said in a row
            rows = [{"op": name, "refused": _shortened(error)}]
        for row in rows:
            print(json.dumps(row), flush=True)
        print(json.dumps({"done": name}), flush=True)


def main() -> None:
    arguments_parser = parser(__doc__, "op_memory.json")
    arguments_parser.add_argument("ops", nargs="*", help="names in the database; all of them by default")
    arguments_parser.add_argument("--worker", action="store_true", help="print rows as JSON")
    arguments = arguments_parser.parse_args()
    if arguments.worker:
        _work(arguments.ops)
        return
    torch.set_num_threads(1)
    print(describe(machine()))
    asked = frozenset(arguments.ops)
    names = [
        full_name(op) for op in op_database() if not asked or not asked.isdisjoint((op.name, full_name(op)))
    ]
    began = time.perf_counter()
    rows = []
    for row in _in_workers(names):
        rows.append(row)
        errors = [row[k] for k in _ERRORS if k in row]
        if arguments.ops or is_off(row) or errors:
            shown = " ".join("" if d is None else f"{d:+.2%}" for d in differences(row))
            print(f"{row['op']:48s} {row.get('trace', ''):5s} {shown} {'; '.join(errors)}", flush=True)
    if arguments.ops and arguments.json.exists():
        replaced = {row["op"]: [] for row in rows}
        for row in rows:
            replaced[row["op"]].append(row)
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
        rows = [new for row in kept for new in replaced.pop(row["op"], [] if row["op"] in names else [row])]
        rows += [row for new in replaced.values() for row in new]
    write_results(arguments.json, rows, seconds=round(time.perf_counter() - began))
    print("\n" + markdown(rows))


if __name__ == "__main__":
    main()
