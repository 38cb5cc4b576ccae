"""Are predicted peaks those of the CPU's allocator, op by op, over PyTorch's op database?

    python -m benchmarks.op_memory              # all ops: some ten minutes
    python -m benchmarks.op_memory prod cumprod # some of them; their rows in the file are replaced
    python -m benchmarks.op_memory --table      # puts the table of what differs by more than 1 % on docs/op_memory.md

A row is an op of ``torch.testing._internal``'s database (float32), as one layer of a small model, on its largest
sample, scaled up where it can be (``models/op_samples.py``). A step is forward and backward, forward alone where the op
has no gradient. The peak that ``sacplan.profile`` predicts for ``device="cpu"`` is compared with the allocator's
events, without a plan and with ``sacplan.policy("full")``. Ops with sizes that depend on data are traced with
``trace="real"``. An op that is not compared says why: the plain op refuses the sample, a trace stops with an error, or
the process ended.

Needs ``expecttest``.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.processes import Limits, in_workers
from benchmarks.harness.results import Row, read_results, write_results
from benchmarks.harness.steps import on_one_thread, tensors_of
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models.op_samples import OpStep, full_name, loss_of, op_database, samples_of
from sacplan.record.step import Step, call_model
from sacplan.running.measure import measured_step

TOLERANCE = 0.01
_ERRORS = ("ended", "refused", "raised_fake", "error_fake", "raised_real", "error_real")
_LAYER = "op"
_LIMITS = Limits(seconds=float("inf"), address_space_gib=12, items=float("inf"))


@on_one_thread
def rows_of(op: Any, most: int = 1) -> list[Row]:
    """Return one row for each sample of an op: predicted and measured bytes, or the error that it raises."""
    rows = []
    for sample in samples_of(op, most):
        row: Row = {"op": full_name(op), "bytes": sample.nbytes}
        rows.append(row)
        model = OpStep(op, sample.sample)
        try:
            model(*model.batch)
        except Exception as error:  # the plain op refuses the sample
            row["refused"] = _shortened(error)
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


def _figures(model: OpStep, mode: Any, loss: Any) -> Row:
    found: Row = {}
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
    found["returns_tensors"] = bool(tensors_of(model(*model.batch)))
    if mode == "train":
        try:
            plan = sacplan.policy("full", profile=profile, layers=_LAYER)
        except sacplan.errors.PlanError:
            return found  # nothing there that may run again
        with sacplan.apply(model, plan):
            found["planned_predicted"] = plan.peak_bytes
            found["planned_measured"] = _measured(step)
    return found


def _measured(step: Step) -> int:
    """Measure the second of two steps: the first may fill caches."""
    step.run()
    return measured_step(step, step.model.batch).peak_bytes


def _shortened(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def differences(row: Row) -> tuple[float | None, float | None]:
    """Return predicted less measured as a share of measured: unplanned, and with everything discarded."""
    return tuple(
        row[f"{which}predicted"] / row[f"{which}measured"] - 1 if f"{which}measured" in row else None
        for which in ("", "planned_")
    )  # type: ignore[return-value]


def is_off(row: Row) -> bool:
    """Whether a prediction differs by more than the tolerance."""
    return any(d is not None and abs(d) > TOLERANCE for d in differences(row))


_VALUES = "its kernel chooses its way, or its sizes, by the values; a fake step has made-up ones"
_REASONS: dict[str, str] = {
    "allclose": "returns a Python value: ops without a tensor among their results are not recorded",
    "isin": _VALUES, "unique": _VALUES, "unique_consecutive": _VALUES, "nn.functional.one_hot": _VALUES,
    "nn.functional.unfold": "its backward kernel returns a storage larger than the tensor; the fake one does not",
    "linalg.matrix_rank": "made of other ops, and takes another way under a dispatch mode; in a unit with a plan, too",
    "t_copy": "copies of transposed matrices go through a block of 14 KB, which is not counted",
}  # fmt: skip
"""Why predictions differ, by op; found by comparing the allocator's events with the recorded ops."""


def reason_of(row: Row) -> str:
    """Say why the prediction for an op differs from what was measured; "" where that is not known."""
    return _REASONS.get(row["op"], "")


def markdown(rows: Sequence[Row]) -> str:
    """Write a line of totals, the table of what differs, and that of what cannot be traced."""
    by_op = operator.itemgetter("op")
    compared = [row for row in rows if "measured" in row]
    off = [row for row in compared if is_off(row)]
    real = sum(row["trace"] == "real" for row in compared)
    failed = [row for row in rows if "error_real" in row or "raised_real" in row or "ended" in row]
    parts = [
        f"{len(compared)} ops compared, {len(compared) - len(off)} within {TOLERANCE:.0%} without a plan and with "
        f'everything discarded; {real} of them with `trace="real"`.'
    ]
    shown = (
        (row, ["-" if d is None else f"{d:+.1%}" for d in differences(row)]) for row in sorted(off, key=by_op)
    )
    why = ((f"`{row['op']}`", *by, reason_of(row) or "not known yet") for row, by in shown)
    parts.append(markdown_table("op | unplanned | everything discarded | why", why))
    if failed:
        said = (
            (row["op"], next(row[k] for k in ("ended", "error_real", "raised_real") if k in row))
            for row in sorted(failed, key=by_op)
        )
        cells = ((f"`{op}`", text[:160].replace("|", "/")) for op, text in said)
        parts.append(markdown_table("cannot be traced | what is said", cells))
    raw = sorted({f"`{row['op']}`" for row in rows if "raised_fake" in row})
    if raw:
        parts.append(f"A fake trace stops with an error of PyTorch's, not of sacplan's, at {', '.join(raw)}.")
    return "\n\n".join(parts)


# --- all of them ------------------------------------------------------------------------------------------


@functools.cache
def _ops() -> dict[str, Any]:
    return {full_name(op): op for op in op_database()}


def _rows(name: str) -> list[Row]:
    try:
        return rows_of(_ops()[name])
    except Exception as error:  # the sample's own: said in a row
        return [{"op": name, "refused": _shortened(error)}]


def _lost(name: str, reason: str, seconds: float) -> list[Row]:
    return [{"op": name, "ended": reason}]


def _replaced(before: list[Row], rows: list[Row], names: Sequence[str]) -> list[Row]:
    """Put the rows of some ops where their rows were; those of new ops come last."""
    new: dict[str, list[Row]] = {row["op"]: [] for row in rows}
    for row in rows:
        new[row["op"]].append(row)
    kept = [each for row in before for each in new.pop(row["op"], [] if row["op"] in names else [row])]
    return kept + [row for left in new.values() for row in left]


TABLE = PageTable("op_memory", "op_memory.md", markdown)


def main() -> None:
    parser = Parser(__doc__, "op_memory.json", TABLE)
    parser.add_argument("ops", nargs="*", help="names in the database; all of them by default")
    torch.set_num_threads(1)
    arguments = parser.begin()
    asked = frozenset(arguments.ops)
    names = [name for name, op in _ops().items() if not asked or not asked.isdisjoint((op.name, name))]
    began = time.perf_counter()
    rows: list[Row] = []
    # One process does all of them: a new one only follows where an op ends it, which costs that op alone.
    for found in in_workers(names, _rows, _lost, jobs=1, limits=_LIMITS):
        for row in found:
            rows.append(row)
            errors = [row[k] for k in _ERRORS if k in row]
            if arguments.ops or is_off(row) or errors:
                shown = " ".join("" if d is None else f"{d:+.2%}" for d in differences(row))
                print(f"{row['op']:48s} {row.get('trace', ''):5s} {shown} {'; '.join(errors)}", flush=True)
    if arguments.ops and arguments.json.exists():
        rows = _replaced(read_results(arguments.json)[1], rows, names)
    write_results(arguments.json, rows, seconds=round(time.perf_counter() - began))


if __name__ == "__main__":
    main()
