"""The time of a step in eager mode on a GPU, where the CPU issues one op after the other.

    eager_ms(profile.program)    # at least the sum of the ops' times

The CPU issues ops ahead of the GPU, as long as it is faster. Where ops are small, the GPU runs out of work and waits.
Times of ops are those of the GPU alone. The time of a step is what a stopwatch around the training loop shows: CPU and
GPU are played, op by op, and the CPU waits where the step asks for a value. The loop itself is taken to wait for
nothing, so that the CPU is in the next step while the GPU is in this one. Benchmarks often wait before and after each
step (``waited``): the GPU is idle then until the first op is issued.

Microseconds of the CPU are fitted to 33 steps that wait for it: our own of 11 models on an H100, in bfloat16 and under
autocast (``benchmarks/data/h100_steps.csv``, medians of up to four runs), torchvision's at batch 12 on an A100 (taken
for steps of a loop that does not wait, which it did), and one of t5-base on a desktop (``steps.jsonl`` next to it).

- An op of the forward pass is called from Python, by a module that does more than that, and autograd makes a node for
  it; in the backward pass a thread in C++ calls it. Views cost nothing of their own. Convolutions look for a plan of
  cuDNN, too, and make descriptors.
- AdamW in ``foreach`` kernels takes some 80 us for a parameter, most of it in Python. On the H100, 28 to 39 us of them
  were between the first kernel and the last.
- An op that a plan runs again costs what its node, its slots and its own call take in Python, in both passes; and a
  dispatch mode watches the ops of a forward pass that has such ops. Both are fitted to 36 planned steps on the H100
  (``python -m benchmarks.gpu_times``). Many ops that run again at once cost less: steps of Mamba that run 800 again are
  predicted two thirds too slow. The executor has become faster since, by less than a tenth.
- What the CPU needs for copies of offloading and for waiting on them is not counted.
- Without autograd, tinynet_e's 225 ops take 4.5 ms on an RTX 4090, which is a bound.

The same step on another day's H100 took up to a half longer, so the figures are no better than that for any one host.
"""

from __future__ import annotations

from sacplan.core.elements import Event, Op, Phase
from sacplan.core.program import Program
from sacplan.torch_compat.ops import aten_names

FORWARD_US, BACKWARD_US = 55.0, 10.0
_CONVOLUTION_US = {"aten.convolution.default": 30.0, "aten.convolution_backward.default": 60.0}
FOREACH_US = 6.0
"""For each tensor in the lists of an optimizer's op, with the optimizer's Python for that tensor."""
RECOMPUTED_US, WATCHED_US = 250.0, 35.0
"""For an op that a plan runs again, all told; and, in addition, for each op of a forward pass that has such ops."""
WITHOUT_AUTOGRAD = 0.3
"""Share of these times where nothing is recorded for a backward pass."""
_ASKS = {name.replace("::", ".") for name in aten_names("_local_scalar_dense nonzero masked_select _unique2")}
"""Ops that hand a value or a size to the CPU, which waits until the GPU has it."""


def eager_ms(
    program: Program, *, without: Phase | None = None, waited: bool = False, checkpointed: bool = False
) -> float:
    """Return the time in ms of one step of many in a row.

    Args:
        program: the step.
        without: a phase that is left out, as the optimizer's is in all micro-steps but one.
        waited: whether the loop waits for the GPU between steps.
        checkpointed: whether ``torch.utils.checkpoint``, and no plan, runs ops again, as a forward pass does.
    """
    ops = (program.ops[arg] for code, arg in program.events if code == Event.OP)
    ran = [op for op in ops if op.phase != without]
    is_planned = not checkpointed and any(op.recomputes >= 0 for op in ran)
    watched_us, again_us = (WATCHED_US, RECOMPUTED_US) if is_planned else (0.0, FORWARD_US)
    share = 1e-3 if any(op.phase == Phase.BACKWARD for op in ran) else 1e-3 * WITHOUT_AUTOGRAD
    issued = done = before = 0.0
    for _ in range(2):  # the first step only brings the CPU to where the second begins
        before = done
        for op in ran:
            if op.name.rpartition(".")[0] in _ASKS or (waited and op is ran[0]):
                issued = done = max(issued, done)
            issued += op.runs * share * _issue_us(op, watched_us, again_us)
            # The GPU does all of the op's work, and the last run only after it is issued.
            if op.time_ms:
                done = max(done + op.time_ms, issued + op.time_ms / op.runs)
    return done - before


def _issue_us(op: Op, watched_us: float, again_us: float) -> float:
    """Return the CPU's microseconds for an op; 0.0 if the GPU has nothing to do for it, or waits for another stream.

    ``time_ms`` of a collective is only what the GPU waits for it, and may be 0.
    """
    if op.name.startswith("sacplan.") or not (op.time_ms or op.name.startswith("c10d.")):
        return 0.0
    if op.recomputes >= 0:
        return again_us
    if op.name.startswith("aten._foreach"):
        return FOREACH_US * len(op.inputs)
    of_phase = FORWARD_US + watched_us if op.phase == Phase.FORWARD else BACKWARD_US
    return of_phase + _CONVOLUTION_US.get(op.name, 0.0)


def waits_ms(program: Program) -> float:
    """Return the part of ``eager_ms`` in which the GPU waits for the CPU; 0.0 if that is no more than rounding."""
    waited_ms = eager_ms(program) - program.step_ms
    return waited_ms if waited_ms > 1e-9 * program.step_ms else 0.0
