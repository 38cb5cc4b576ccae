"""Add the workspaces that cuBLAS keeps, which the caching allocator counts as allocated.

torch gives every cuBLAS handle a workspace of its own, and every thread has its own handle. So a training
step has two: one from the first matrix product of the forward pass on, one from the first of the backward
pass, which runs on another thread. They stay until the process ends. One stream is assumed; a step that
multiplies on several has a pair for each. cuBLASLt, which adds a bias to a product, has workspaces of its own.

From torch 2.15 nothing stays: each product allocates its workspace and frees it
(``kernel_workspace_bytes`` counts it there). Sizes: ``device/cublas.py``.
"""

from __future__ import annotations

from sacplan.core.program import Event, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.cublas import (
    PRODUCTS,
    WITH_BIAS,
    bias_workspace_bytes,
    library_workspace_bytes,
    workspaces_stay,
)
from sacplan.device.devices import DeviceSpec


def library_workspaces(program: Program, spec: DeviceSpec, version: tuple[int, int] | None = None) -> Patch:
    """Return the rewrite that adds the workspaces that stay.

    They are storages of ``StorageKind.OTHER``, alive from the first product of their thread on (forward and optimizer
    on one, backward on the other). An empty patch where there are none.
    """
    # On a CPU there are none. From torch 2.15 each product counts its own while it runs.
    product_bytes, bias_bytes = library_workspace_bytes(spec, version), bias_workspace_bytes(spec, version)
    if not product_bytes or not workspaces_stay(version):
        return Patch()
    draft = PatchBuilder(program)
    sizes = {"forward": product_bytes, "backward": product_bytes, "bias": bias_bytes}
    for position, (code, arg) in enumerate(program.events):
        op = program.ops[arg] if code == Event.OP else None
        name = op.name.rpartition(".")[0].replace(".", "::") if op is not None else ""
        if op is None or name not in PRODUCTS:
            continue
        used = ["backward" if op.phase == Phase.BACKWARD else "forward"]
        # None was seen for biased products that run again in the backward pass.
        if name in WITH_BIAS and used == ["forward"] and len(program.tensors[op.inputs[0]].shape) == 1:
            used.append("bias")
        new = [
            (int(Event.ALLOC), draft.new_storage(spec.round_up(nbytes), StorageKind.OTHER))
            for use in used
            if (nbytes := sizes.pop(use, 0))
        ]
        if new:
            # Never freed. Before the product, which is the first to run with it.
            draft.events[position] = (*new, (code, arg))
    return draft.patch()
