"""Are predicted times and peaks of single ops those that were measured on GPUs?

    python -m benchmarks.published_ops
    python -m benchmarks.published_ops --ops layer_norm softmax --json FILE

A row is an op that Liger-Kernel has published a figure of: forward pass, backward pass or both, in plain PyTorch, on an
A100, H100, B200, RTX 3090 or RTX 4090 (``benchmarks/data/README.md``). Its script is run on fake tensors of that GPU
(``models/published_ops.py``).

- Times are the sums of the ops' times by the cost model, without what long steps lose (``sustained_share``). The
  summary counts rows over .1 ms, since shorter ones may wait for the CPU.
- Peaks are those of a round in which all gradients are there from the round before.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import MIB, Row, as_text, write_results
from benchmarks.models import published_ops
from benchmarks.models.published_ops import OpCase, PublishedRow
from sacplan.device.cost import CostModel
from sacplan.device.cublas import library_workspace_bytes
from sacplan.device.device_memory import device_memory
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.kernels import fake_device
from sacplan.device.op_kernels import Call

SHORTEST_MS = 0.1
"""Rows that took less are left out of the summary."""


_RECORDING_BYTES = 2 * 512
"""The batch and the parameter that a recorded step has to have, and that the script has not: a block for each."""


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
        self.ms[self._phase] += self._model.cost(Call(func, args, kwargs or {}, out))[1]
        return out


def predicted_ms(row: PublishedRow, spec: DeviceSpec | None = None) -> float:
    """Return the predicted time of a row, on its GPU or on another device."""
    spec = replace(resolve_device(row.gpu), sustained_share=1.0) if spec is None else spec
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
        case = published_ops.build(op, size, config, "speed")
        case.timed_round(lambda phase: None)  # makes the gradients that the timed round adds to
        with _Clock(CostModel(spec)) as clock:
            case.timed_round(clock.mark)
    ms = clock.ms
    draws = case.gradient == "drawn in full"
    return ms["forward"], ms["draw"], ms["backward"], draws, case.backward_is_full


class _Rounds(torch.nn.Module):
    """What a script has on the device while it runs: leaves, modules of both implementations, and inputs."""

    def __init__(self, case: OpCase, mode: str) -> None:
        super().__init__()
        self.case, self.mode = replace(case, made={}), mode
        for name, leaf in case.leaves.items():
            setattr(self, name, torch.nn.Parameter(leaf))
        for name, given in case.given.items():
            self.register_buffer(name, given)
        for name, module in (*case.modules.items(), *case.idle.items()):
            setattr(self, name, module)
        self.nothing = torch.nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss that needs nothing: the backward passes are in the rounds."""
        return self.nothing.sum()


def _rounds(model: _Rounds, batch: Any) -> torch.Tensor:
    """Run the rounds of a row: the loss function of the step that is recorded."""
    model.case.on(model).peak_rounds(model.mode)
    return model(*batch)


def predicted_peak_bytes(row: PublishedRow) -> int:
    """Return the predicted peak of a row, with what the allocator does not split off its blocks.

    ``max_memory_allocated`` counts whole blocks. Of a block that is up to 1 MiB larger than a tensor, nothing is split
    off (``sacplan/device/caching_allocator.py``).
    """
    with torch.device("meta"):
        case = published_ops.build(row.op, row.size, row.config, row.metric)
        model = _Rounds(case, row.mode)
    profile = sacplan.profile(model, (torch.empty(1, device="meta"),), _rounds, device=row.gpu)
    if case.left_bytes:
        # The allocator is not empty before the step, and where it has free blocks is not known.
        return profile.peak_bytes + case.left_bytes - _RECORDING_BYTES
    peak = device_memory(profile.program).first_step.max_memory_allocated - _RECORDING_BYTES
    if row.mode == "forward" and case.peak_by_mode:
        # The workspace of autograd's thread, from the rows before.
        peak += library_workspace_bytes(profile.spec)
    return peak


def row_of(row: PublishedRow) -> Row:
    """Return one row of the table."""
    found: Row = {
        "op": row.op, "mode": row.mode, "metric": row.metric, "size": row.size, "config": row.config,
        "gpu": row.gpu, "published": row.measured,
    }  # fmt: skip
    found["predicted"] = predicted_ms(row) if row.metric == "speed" else predicted_peak_bytes(row) / MIB
    found["error"] = found["predicted"] / row.measured - 1
    return found


def is_counted(row: Row) -> bool:
    """Whether the summary counts a row: a time over .1 ms."""
    return bool(row["metric"] == "speed" and row["published"] > SHORTEST_MS)


def times_summary(rows: Iterable[Row]) -> Row:
    """Return the errors of times over .1 ms: the median, the 90th percentile and the worst."""
    errors = sorted(abs(r["error"]) for r in rows if is_counted(r))
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(errors),
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, len(errors) * 9 // 10)],
        "worst": errors[-1],
    }


def peaks_summary(rows: Iterable[Row]) -> Row:
    """Return how far off peaks are, and how many are within 64 KiB."""
    off = [abs(r["predicted"] - r["published"]) * 1024 for r in rows if r["metric"] == "memory"]
    if not off:
        return {"rows": 0}
    return {"rows": len(off), "within_64_kib": sum(kib <= 64 for kib in off), "worst_kib": max(off)}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__, "published_ops.json")
    parser.choice("--ops", list(published_ops.CASES))
    parser.choice("--metrics", ["speed", "memory"])
    options = parser.begin(argv, silence=True)
    wanted = [r for r in published_ops.read_rows() if r.op in options.ops and r.metric in options.metrics]
    rows = run_cases(wanted, lambda row: [row_of(row)], None)
    times, peaks = times_summary(rows), peaks_summary(rows)
    print(f"times over .1 ms: {as_text(times)}; peaks: {as_text(peaks)}")
    write_results(options.json, rows, row_a_line=True, times=times, peaks=peaks)


if __name__ == "__main__":
    main()
