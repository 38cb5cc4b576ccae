"""Are predicted times and peaks of single ops those that were measured on GPUs?

    python -m benchmarks.published_ops
    python -m benchmarks.published_ops --ops layer_norm softmax --json FILE

A row is an op that Liger-Kernel has published a figure of: forward pass, backward pass or both, in plain PyTorch, on an
A100, H100, B200, RTX 3090 or RTX 4090 (``benchmarks/data/README.md``). Its script is run on fake tensors of that GPU
(``models/published_ops.py``).

- Times are the sums of the ops' times by the cost model. The summary counts rows over .1 ms, since shorter ones may
  wait for the CPU.
- Peaks are those of a round in which all gradients are there from the round before.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import Row
from benchmarks.harness.table import Table
from benchmarks.models import published_ops
from benchmarks.models.published_ops import PublishedRow
from sacplan._device.cost import CostModel
from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._device.kernels import fake_device

SHORTEST_MS = 0.1
"""Rows that took less are left out of the summary."""


class _Clock(TorchDispatchMode):
    """Adds up the predicted times of the ops that run, by what is being timed."""

    def __init__(self, model: CostModel) -> None:
        super().__init__()
        self._model = model
        self._phase = ""
        self.ms: dict[str, float] = defaultdict(float)

    def mark(self, phase: str) -> None:
        self._phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ms[self._phase] += self._model.cost(func, args, kwargs or {}, out)[1]
        return out


def predicted_ms(row: PublishedRow, spec: DeviceSpec | None = None) -> float:
    """Return the predicted time of a row, on its GPU or on another device."""
    spec = resolve_device(row.gpu) if spec is None else spec
    forward, drawn, backward, full_draws, backward_is_full = _phases(
        row.op, row.size, row.config, row.gpu, spec
    )
    full = forward + backward + (drawn if full_draws else 0.0)
    return {"forward": forward, "backward": full if backward_is_full else backward, "full": full}[row.mode]


@functools.cache
def _phases(
    op: str, size: int, config: str, gpu: str, spec: DeviceSpec
) -> tuple[float, float, float, bool, bool]:
    """Return the times of forward pass, drawing the gradient and backward pass; and what a row counts of them."""
    with fake_device(spec):
        case = published_ops.build(op, size, config, gpu)
        case.round(lambda phase: None)  # makes the gradients that the timed round adds to
        with _Clock(CostModel(spec)) as clock:
            case.round(clock.mark)
    ms = clock.ms
    draws = case.gradient == "drawn in full"
    return ms["forward"], ms["draw"], ms["backward"], draws, case.backward_is_full


def row_of(row: PublishedRow) -> Row:
    """Return one row of the table."""
    found: Row = {
        "op": row.op, "mode": row.mode, "metric": row.metric, "size": row.size, "config": row.config,
        "gpu": row.gpu, "published": row.measured,
    }  # fmt: skip
    found["predicted"] = predicted_ms(row)
    found["error"] = found["predicted"] / row.measured - 1
    return found


def summary(rows: Iterable[Row]) -> Row:
    """Return the errors of times over .1 ms: the median, the 90th percentile and the worst."""
    errors = sorted(abs(r["error"]) for r in rows if r["metric"] == "speed" and r["published"] > SHORTEST_MS)
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(errors),
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, len(errors) * 9 // 10)],
        "worst": errors[-1],
    }


TABLE = Table(
    ("op", "<26"), ("mode", "<8"), ("device", "<9"), ("size", "7d"), ("published", ">10.3f"),
    ("predicted", ">10.3f"), ("", "<3"), ("error", "+8.1%"),
)  # fmt: skip


def line(row: Row) -> str:
    unit = "ms" if row["metric"] == "speed" else "MiB"
    return TABLE.row(
        row["op"],
        row["mode"],
        row["gpu"],
        row["size"],
        row["published"],
        row["predicted"],
        unit,
        row["error"],
    )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__, "published_ops.json")
    parser.choice("--ops", list(published_ops.CASES))
    options = parser.begin(argv)
    wanted = [row for row in published_ops.read_rows("speed") if row.op in options.ops]
    print(TABLE.head)
    rows = run_cases(wanted, lambda row: [row_of(row)], line, None)
    times = summary(rows)
    print(times)


if __name__ == "__main__":
    sys.exit(main())
