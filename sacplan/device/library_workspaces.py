"""Add the workspaces that cuBLAS keeps, which the caching allocator counts as allocated.

torch gives every cuBLAS handle a workspace of its own, and every thread has its own handle. So a training
step has two: one from the first matrix product of the forward pass on, one from the first of the backward
pass, which runs on another thread. They stay until the process ends. One stream is assumed; a step that
multiplies on several has a pair for each. cuBLASLt shares the same memory.

From torch 2.15 nothing stays: each product allocates its workspace and frees it
(``kernel_workspace_bytes`` counts it there). Sizes: ``device/cublas.py``.
"""

from __future__ import annotations

from sacplan.core.program import Event, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.cublas import PRODUCTS, library_workspace_bytes, workspaces_stay
from sacplan.device.devices import DeviceSpec


def library_workspaces(program: Program, spec: DeviceSpec, version: tuple[int, int] | None = None) -> Patch:
    """Return the rewrite that adds the workspaces that stay.

    They are storages of ``StorageKind.OTHER``, alive from the first product of their thread on (forward and optimizer
    on one, backward on the other). An empty patch where there are none.
    """
    # On a CPU there are none. From torch 2.15 each product counts its own while it runs.
    nbytes = spec.round_up(library_workspace_bytes(spec, version))
    if not nbytes or not workspaces_stay(version):
        return Patch()
    products = {name.replace("::", ".") for name in PRODUCTS}
    draft = PatchBuilder(program)
    threads: set[bool] = set()
    for position, (code, arg) in enumerate(program.events):
        if code == Event.OP:
            op = program.ops[arg]
            thread = op.phase == Phase.BACKWARD
            if thread not in threads and op.name.rpartition(".")[0] in products:
                workspace = draft.new_storage(nbytes, StorageKind.OTHER)
                # Never freed. Before the product, which is the first to run with it.
                draft.events[position] = ((int(Event.ALLOC), workspace), (code, arg))
                threads.add(thread)
                if len(threads) == 2:
                    break
    return draft.patch()
