"""The time of a step in eager mode on a GPU, where the CPU issues one op after the other.

    eager_ms(profile.program)    # at least the sum of the ops' times

The CPU issues ops ahead of the GPU, as long as it is faster. Where ops are small, the GPU runs out of work and waits.
Times of ops are those of the GPU alone. The time of a step is what a stopwatch beside the training loop shows: both are
played, op by op, and the CPU waits where the step asks for a value. The loop itself is taken to wait for nothing, so
that the CPU is in the next step while the GPU is in this one.
"""

from __future__ import annotations

from sacplan.core.elements import Event, Phase
from sacplan.core.program import Program
from sacplan.torch_compat.ops import aten_names

OP_US = 20.0
"""Microseconds that the CPU needs for an op in training, autograd included. Published are 99.6 ms for the 4,800 ops of
a step of t5-base on a desktop."""
_CUDNN_US = {"aten.convolution_backward.default": 170.0, "aten.convolution.default": 100.0}
_CUDNN_US |= dict.fromkeys(
    (
        f"aten.{name}.default"
        for name in ("cudnn_batch_norm", "native_batch_norm", "cudnn_batch_norm_backward",
                     "native_batch_norm_backward", "_native_batch_norm_legit")
    ),
    90.0,
)  # fmt: skip
"""The same for ops that look for a plan of cuDNN and make descriptors: fitted to torchvision's models at batch 12 on an
A100 (``benchmarks/data/steps.jsonl``)."""
WITHOUT_AUTOGRAD = 0.5
"""Share of these times where nothing is recorded for a backward pass. Assumed."""
_ASKS = {name.replace("::", ".") for name in aten_names("_local_scalar_dense nonzero masked_select _unique2")}
"""Ops that hand a value or a size to the CPU, which waits until the GPU has it."""


def eager_ms(program: Program, op_us: float | None = None, *, without: Phase | None = None) -> float:
    """Return the time of a step in ms, of many in a row, if the CPU needs ``op_us`` for each op of the GPU.

    ``without``: a phase that is left out, as the optimizer's is in all micro-steps but one.
    """
    ops = (program.ops[arg] for code, arg in program.events if code == Event.OP)
    ran = [op for op in ops if op.phase != without]
    share = 1e-3 if any(op.phase == Phase.BACKWARD for op in ran) else 1e-3 * WITHOUT_AUTOGRAD
    issued = done = before = 0.0
    for _ in range(2):  # the second step begins as the CPU does while the GPU is in the first
        before = done
        for op in ran:
            if op.name.rpartition(".")[0] in _ASKS:
                issued = done = max(issued, done)
            if op.time_ms:
                issued += op.runs * share * (_CUDNN_US.get(op.name, OP_US) if op_us is None else op_us)
                done = max(done + op.time_ms, issued + op.time_ms / op.runs)
    return done - before


def waits_ms(program: Program) -> float:
    """Return the part of ``eager_ms`` in which the GPU waits for the CPU; 0.0 if that is no more than rounding."""
    found = eager_ms(program) - program.step_ms
    return found if found > 1e-9 * program.step_ms else 0.0
