"""Caveats of a recorded step that bear on its peak or its time, a sentence each."""

from __future__ import annotations

from collections.abc import Iterable

from sacplan._device.devices import DeviceSpec
from sacplan._program.budget import format_bytes
from sacplan._program.program import Program
from sacplan._program.setup import SUM_OF_OUTPUTS, Setup

_STEPS_BYTES = 4  # a float32


def no_optimizer(program: Program, spec: DeviceSpec) -> str:
    """Say that no optimizer ran, and how much state AdamW would add."""
    trained = [program.storage_bytes[parameter] for parameter in program.gradients]
    return without_optimizer(adamw_state_bytes(trained, spec))


def without_optimizer(state_bytes: int) -> str:
    """Say the same for a known size of the state."""
    return (
        "no optimizer, so the peak has nothing of one in it: AdamW would add "
        f"{format_bytes(state_bytes)} of state, and the temporaries of its step"
    )


def adamw_state_bytes(trained: Iterable[int], spec: DeviceSpec) -> int:
    """Return the bytes that ``torch.optim.AdamW`` keeps for parameters of these sizes.

    Two moments of each parameter's size, and a float32 count of steps, each rounded as the allocator does. On a GPU the
    counts are on the host.
    """
    counter = 0 if spec.kind == "cuda" else spec.round_up(_STEPS_BYTES)
    return sum(2 * spec.round_up(n_bytes) + counter for n_bytes in trained)


def on_the_host(setup: Setup) -> str:
    """Say how much of the optimizer is in the host's memory; empty if nothing is."""
    if not setup.optimizer_host_bytes:
        return ""
    return (
        f"{format_bytes(setup.optimizer_host_bytes)} of {setup.optimizer} are in the host's memory, pinned or paged, "
        "and in no peak of the device"
    )


def summed_outputs(setup: Setup) -> str:
    """Say that the step trains the sum of its outputs, and what to give instead; empty if it has a loss."""
    if setup.loss != SUM_OF_OUTPUTS:
        return ""
    return (
        "no loss_fn, and among the outputs of the model neither a loss nor exactly one scalar that could be it: the "
        "step trains the sum of its float outputs, and its peak is not that of the loss that you train. Give "
        "loss_fn=lambda model, batch: ... that returns the loss"
    )


def without_bfloat16(program: Program, spec: DeviceSpec) -> str:
    """Say that the step is in bfloat16 and the device has no arithmetic for it; empty if that is not so."""
    if spec.has_bfloat16 or all(tensor.dtype != "bfloat16" for tensor in program.tensors):
        return ""
    why = f" (compute capability {'.'.join(map(str, spec.capability))}, not 8.0)" if spec.capability else ""
    return (
        f"{spec.name} has no bfloat16 arithmetic{why}: this step would run there in emulation, slowly, and some "
        "kernels refuse. Use float16 with a gradient scaler"
    )
