"""The size of a cuBLAS workspace, and whether it stays allocated.

PyTorch gives cuBLAS a workspace out of its caching allocator, so it counts as allocated, and no dispatch mode sees it.
Without workspaces, every peak on a GPU would be too low by 8.1 to 128 MiB for each thread that multiplies.

Source of the sizes: ``aten/src/ATen/cuda/CublasHandlePool.cpp``; 32 MiB on Blackwell since pull request
#175344 (2.12). There is one for each handle and stream: ``ATen/cuda/CUDAContextLight.h`` of 2.13 and 2.14. On an
H100 with torch 2.11 the sizes are those; ``benchmarks/gpu.py`` prints those of the local GPU. cuBLASLt, which adds a
bias to a product, has workspaces of its own, of 1 MiB (``CUDABlas.cpp``), until it shares those of cuBLAS (torch 2.14).
"""

from __future__ import annotations

import os
import re

from sacplan.device.devices import DeviceSpec, torch_version
from sacplan.torch_compat.ops import aten_names

KIB, MIB = 2**10, 2**20
SMALL_BYTES = (4096 * 2 + 16 * 8) * KIB  # cuBLAS's own configuration ":4096:2:16:8"
LARGE_BYTES = 32 * MIB

PRODUCTS = aten_names("mm addmm _addmm_activation bmm baddbmm addbmm mv addmv dot vdot _scaled_mm") | {
    "bitsandbytes::gemm_4bit"
}
"""Ops that call cuBLAS."""

WITH_BIAS = aten_names("addmm _addmm_activation")
"""Ops that call cuBLASLt if their first operand is a bias of one dimension."""

_CONFIG = ("CUBLAS_WORKSPACE_CONFIG",)
_ROCM_CONFIG = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
_ROCM_LARGE = ("mi300x", "mi350x")  # gfx94x and gfx95x


def library_workspace_bytes(spec: DeviceSpec, version: tuple[int, int] | None = None) -> int:
    """Return the bytes of one cuBLAS workspace on ``spec``; 0 on a CPU.

    ``spec.matmul_workspace_bytes`` where it is given, else ``CUBLAS_WORKSPACE_CONFIG`` of this process, else
    torch's default.

    Args:
        spec: the device.
        version: of torch, (major, minor); default: the one that runs.
    """
    if spec.kind != "cuda":
        return 0
    # From the most specific to the most general: the device as given, this process's environment, torch's default.
    if spec.matmul_workspace_bytes is not None:
        return spec.matmul_workspace_bytes
    version = torch_version() if version is None else version
    rocm = spec.capability is None
    # ":SIZE:COUNT" in KiB, several of them; a value in another form sets nothing.
    for name in _ROCM_CONFIG if rocm else _CONFIG:
        pairs = re.findall(r":(\d+):(\d+)", os.environ.get(name, ""))
        if pairs:
            return sum(int(size) * KIB * int(count) for size, count in pairs)
    if spec.capability is None:
        return 4 * LARGE_BYTES if spec.name in _ROCM_LARGE else LARGE_BYTES
    major = spec.capability[0]
    if major == 9 or (major in (10, 12) and version >= (2, 12)):
        return LARGE_BYTES
    return SMALL_BYTES


def bias_workspace_bytes(spec: DeviceSpec, version: tuple[int, int] | None = None) -> int:
    """Return the bytes of one workspace of cuBLASLt, where it has its own; 0 on a CPU and on ROCm.

    0, too, where ``spec.matmul_workspace_bytes`` is given, which then stands for all workspaces.
    """
    own = spec.kind == "cuda" and spec.capability is not None and spec.matmul_workspace_bytes is None
    return MIB if own and (torch_version() if version is None else version) < (2, 14) else 0


def workspaces_stay(version: tuple[int, int] | None = None) -> bool:
    """Whether a workspace, once made, stays allocated. From torch 2.15 on each product allocates and frees its own."""
    return (torch_version() if version is None else version) < (2, 15)
