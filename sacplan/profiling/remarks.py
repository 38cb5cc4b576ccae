"""Caveats of a recorded step that bear on its peak or its time, a sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.metadata import version

import torch

from sacplan.core.budget import format_bytes
from sacplan.core.fingerprint import FingerprintEntry
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
    # By default ``torch.optim`` makes ``step`` on the CPU, whatever device the parameters are on.
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


def loss_of_library(model: torch.nn.Module, setup: Setup) -> tuple[str, ...]:
    """Name the version and the loss of transformers, if the step trains the loss of such a model."""
    if setup.loss != OWN_LOSS or not type(model).__module__.startswith("transformers."):
        return ()
    made = getattr(model.loss_function, "__name__", "a loss of its own")
    how = ": logits in float32, labels shifted and not the logits" if made == "ForCausalLMLoss" else ""
    return (
        f"the loss is {made} of transformers {version('transformers')}{how}; other versions hold a tensor as large as "
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
        "They want tensors of 4 dimensions, contiguous in the last one, a head size that is a multiple of 8, and a "
        "half type or as many heads in key and value as in the query"
    )


_LOW = ("torch.bfloat16", "torch.float16")


def runs_in_4_bits(program: Program) -> bool:
    """Whether a step multiplies with 4-bit weights of bitsandbytes."""
    return any("bitsandbytes" in op.name and "4bit" in op.name for op in program.ops)


def types_of_shards(
    parameters: Iterable[FingerprintEntry], world_size: int, *, in_4_bits: bool
) -> tuple[str, ...]:
    """Say what becomes of the types of a model with adapters that ``fully_shard`` shards, a sentence each.

    ``fully_shard`` asks for one type among the trained parameters of a unit (``_init_mp_dtypes`` in PyTorch's
    ``_fsdp_param_group.py``). Frozen ones keep theirs. Those that upcast are the trainers: Accelerate called
    ``model.to(torch.float32)`` in mixed precision up to 1.12, and from 1.13 on converts trained parameters alone
    (``fsdp2_prepare_model``), but none of a model with 4-bit weights. Those that are stored as integers it leaves out
    of the shards, although bitsandbytes runs with such shards (``tests/ranks/test_4bit_shards.py``).

    Args:
        parameters: of the whole model, name, shape and type (``Fingerprint.parameters``).
        world_size: ranks that the shards are on.
        in_4_bits: whether the model has 4-bit weights, of which some types are those of storage alone.
    """
    found = list(parameters)
    # Types are written as ``"frozen torch.bfloat16"`` for parameters that are not trained.
    frozen = [(shape, dtype.split()[-1]) for _, shape, dtype in found if dtype.startswith("frozen ")]
    trained = {dtype for _, _, dtype in found if not dtype.startswith("frozen ")}
    # Low-precision floats may be upcast by a trainer. What is no float is a packed weight, which cannot be.
    low, packed = (
        [(shape, dtype) for shape, dtype in frozen if test(dtype)]
        for test in (_LOW.__contains__, lambda dtype: not _is_float(dtype))
    )
    said = []
    if low and trained == {"torch.float32"} and not in_4_bits:
        # Two bytes more for each element: from 16 bits to 32.
        more = 2 * sum(math.prod(shape) for shape, _ in low)
        said.append(
            f"frozen parameters in {low[0][1].removeprefix('torch.')} stay so beside trained ones in float32: "
            "fully_shard asks for one type of the trained ones of a unit alone. Accelerate up to 1.12 makes the whole "
            f"model float32 in mixed precision, which takes {format_bytes(more)} more, "
            f"{format_bytes(more // world_size)} on each of {world_size} ranks"
        )
    if packed:
        # Without ``"torch."``, the six letters in front, it is the name of the type in that module.
        whole = sum(math.prod(shape) * getattr(torch, dtype[6:]).itemsize for shape, dtype in packed)
        said.append(
            f"frozen weights in {packed[0][1].removeprefix('torch.')} count as shards, as fully_shard makes them. "
            f"Accelerate leaves them out, and each rank then holds all {format_bytes(whole)}: with "
            "bnb_4bit_quant_storage=torch.bfloat16 it shards them too"
        )
    return tuple(said)


def _is_float(dtype: str) -> bool:
    kind: torch.dtype = getattr(torch, dtype[6:])
    return kind.is_floating_point


def without_bfloat16(program: Program, spec: DeviceSpec) -> str:
    """Say that the step is in bfloat16 and the device has no arithmetic for it; empty if that is not so."""
    # Either the device has the arithmetic, or the step does not use the type.
    if spec.has_bfloat16 or all(tensor.dtype != "bfloat16" for tensor in program.tensors):
        return ""
    why = f" (compute capability {'.'.join(map(str, spec.capability))}, not 8.0)" if spec.capability else ""
    return (
        f"{spec.name} has no bfloat16 arithmetic{why}: this step would run there in emulation, slowly, and some "
        "kernels refuse. Use float16 with a gradient scaler"
    )
