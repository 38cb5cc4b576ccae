"""Name what lies on a GPU outside of torch's allocator: figures, each with its source.

A step fits a device if what the allocator reserves (``device_memory.py``) and these figures together are at most the
device's memory. Torch counts none of them: ``nvidia-smi`` shows them as the difference to
``torch.cuda.memory_reserved()``.

Not here, since no figure can be named for them: workspaces of cuDNN and other processes on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sacplan.core.budget import format_bytes
from sacplan.device.devices import DeviceSpec

_MIB = 2**20


class Outside(NamedTuple):
    """Memory that torch's allocator cannot have: a library takes it from the device itself, or it is left free.

    Attributes:
        name: What it is for.
        n_bytes: How much.
        source: Where the figure is from.
    """

    name: str
    n_bytes: int
    source: str


CUDA_CONTEXT = Outside(
    "CUDA context",
    512 * _MIB,
    "the context and its kernels, loaded when they are first used: 0.3 to 0.5 GiB (pytorch issues #86509, #107667 and "
    "#109888); on ROCm an assumption",
)


MARGIN = 0.012
"""Share of a GPU's memory that is left free. Peaks of published steps whose settings are known are above the predicted
ones by up to 0.6 % (``benchmarks/results/published.json``), and on an H100 the context took 0.3 % of the memory more
than is counted (``gpu_plans_h100.json``). Published figures of what is reserved, where the setting is known,
are within the margin."""


def nccl_buffers(communicators: int) -> Outside:
    """Return the buffers of NCCL, which grow with the number of communicators and their channels."""
    many = "" if communicators == 1 else f" ({communicators} communicators)"
    return Outside(
        f"NCCL buffers{many}",
        communicators * 1024 * _MIB,
        "an assumption: 1 GiB for each communicator. By NCCL's source it is 576 MiB with the 24 channels of an A100's "
        "NVLink (issue #964 has 544 to 688 MB), less over PCIe; #864 has 1.6 GB with a CUDA context. All-to-all on 8 "
        "H100s connects all pairs: 2.6 GiB by the source, and #1685 has 3.3 GB, 2 GiB more than is counted",
    )


def outside_allocator(spec: DeviceSpec, communicators: int = 0) -> tuple[Outside, ...]:
    """Return what a process takes on a device outside of torch's allocator, and a margin; nothing on a CPU.

    Args:
        spec: The device.
        communicators: How many NCCL communicators the step uses; 0 on a single device.
    """
    if spec.kind != "cuda":
        return ()
    source = "published steps take up to 0.6% more than predicted (docs/measured.md), contexts up to 0.3% (docs/gpu.md)"
    return *outside_on_gpu(communicators), Outside(
        "margin for errors", int(MARGIN * spec.memory_bytes), source
    )


def outside_on_gpu(communicators: int = 0) -> tuple[Outside, ...]:
    """Return what a process takes on a GPU outside of torch's allocator; the figures are the same for every GPU."""
    return (CUDA_CONTEXT, *([nccl_buffers(communicators)] if communicators else []))


def outside_text(found: Sequence[Outside]) -> str:
    """Return the figures in words: ``CUDA context 0.50 GiB and NCCL buffers 1.00 GiB``."""
    *most, last = (f"{figure.name} {format_bytes(figure.n_bytes)}" for figure in found)
    return f"{', '.join(most)} and {last}" if most else last
