"""Caveats of a recorded step that bear on its peak or its time, a sentence each."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import torch

from sacplan.core.budget import format_bytes
from sacplan.core.program import Program
from sacplan.core.setup import OWN_LOSS, SUM_OF_OUTPUTS, Setup
from sacplan.device.devices import DeviceSpec
from sacplan.torch_compat.triton_kernels import TRITON_KERNEL_NAME

_STEPS_BYTES = 4  # a float32


def no_optimizer(program: Program, spec: DeviceSpec) -> str:
    """Say that no optimizer ran, and how much state AdamW would add."""
    trained = [program.storage_bytes[parameter] for parameter in program.gradients]
    return without_optimizer(adamw_state_bytes(trained, spec))


def without_optimizer(state_bytes: int) -> str:
    """Say that no optimizer ran, and that AdamW would add so many bytes of state."""
    return (
        "no optimizer, so the peak has nothing of one in it: AdamW would add "
        f"{format_bytes(state_bytes)} of state, and the temporaries of its step"
    )


def adamw_state_bytes(trained: Iterable[int], spec: DeviceSpec) -> int:
    """Return the bytes that ``torch.optim.AdamW`` keeps for parameters of these sizes.

    Two moments of each parameter's size, and a float32 count of steps, each rounded as the allocator does. On a GPU the
    counts are on the host.
    """
    # ``torch.optim`` makes ``step`` on the CPU by default, so on a GPU it takes no memory of the device.
    counter = 0 if spec.kind == "cuda" else spec.round_up(_STEPS_BYTES)
    return sum(2 * spec.round_up(n_bytes) + counter for n_bytes in trained)


def on_the_host(setup: Setup) -> str:
    """Say how many bytes the optimizer takes of the host's memory; empty if none."""
    if not setup.optimizer_host_bytes:
        return ""
    return (
        f"{format_bytes(setup.optimizer_host_bytes)} of {setup.optimizer} are in the host's memory, pinned or paged, "
        "and in no peak of the device"
    )


def summed_outputs(setup: Setup) -> str:
    """Say that the step trains the sum of its outputs, and what to give instead; empty if the step has a loss."""
    if setup.loss != SUM_OF_OUTPUTS:
        return ""
    return (
        "no loss_fn, and among the outputs of the model neither a loss nor exactly one scalar that could be it: the "
        "step trains the sum of its float outputs, and its peak is not that of the loss that you train. Give "
        "loss_fn=lambda model, batch: ... that returns the loss"
    )


def loss_of_library(model: torch.nn.Module, setup: Setup) -> tuple[str, ...]:
    """Return, in a tuple, a sentence on the loss of a transformers model; () if the step trains another loss."""
    if setup.loss != OWN_LOSS or not type(model).__module__.startswith("transformers."):
        return ()
    loss = getattr(model.loss_function, "__name__", "a loss of its own")
    how = ": logits in float32, labels shifted and not the logits" if loss == "ForCausalLMLoss" else ""
    return (
        f"the loss is {loss} of transformers {version('transformers')}{how}; other versions hold a tensor as large as "
        "the logits more or less",
    )


def without_cudnn_workspaces(program: Program, spec: DeviceSpec) -> str:
    """Say which of cuDNN's workspaces are not in the peak; empty for a step without convolutions, or on a CPU."""
    convolved = [program.tensors[op.inputs[0]].dtype for op in program.ops if "convolution" in op.name]
    if spec.kind != "cuda" or not convolved:
        return ""
    if all(dtype in ("bfloat16", "float16") for dtype in convolved):
        return "workspaces of cuDNN's convolutions are as measured on an H100; other GPUs and releases may take others"
    return "workspaces of cuDNN's convolutions in float32 count as 0: it does not publish their sizes"


def triton_kernels(program: Program) -> str:
    """Say what a plan does about the Triton kernels of a step; empty if there are none."""
    count = sum(op.name == TRITON_KERNEL_NAME for op in program.ops)
    said = "launches of Triton kernels are left alone: a plan keeps what they read or write, and recomputes around them"
    return f"{count} {said}; they take the time of reading and writing their tensors" if count else ""


def unfused_attention(program: Program, spec: DeviceSpec) -> str:
    """Say that attention keeps its scores; empty if a fused kernel of the device runs it, or on a CPU."""
    # Only the unfused path of ``scaled_dot_product_attention`` runs this op.
    if spec.kind != "cuda" or all(op.name != "aten._safe_softmax.default" for op in program.ops):
        return ""
    return (
        "scaled_dot_product_attention runs as separate ops, which keep the scores: no fused kernel takes its inputs. "
        "They want tensors of 4 dimensions, contiguous in the last one, and a head size that is a multiple of 8. If "
        "key and value have fewer heads than the query, they also want float16 or bfloat16"
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
