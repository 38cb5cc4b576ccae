"""Add the workspaces that cuBLAS keeps, which the caching allocator counts as allocated.

torch gives every cuBLAS handle a workspace of its own, and every thread has its own handle. So a training
step has two: one from the first matrix product of the forward pass on, one from the first of the backward
pass, which runs on another thread. They stay until the process ends. One stream is assumed; a step that
multiplies on several has a pair for each. cuBLASLt, which adds a bias to a product, has workspaces of its own.

A plan can change which products come first: ops that run again, and a loss in slices, multiply in the backward pass
before the recorded step does, and a forward pass may be left without products. So each rewrite places the workspaces.

From torch 2.15 nothing stays: each product allocates its workspace and frees it
(``kernel_workspace_bytes`` counts it there). Sizes: ``device/cublas.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from sacplan.core.derived import derived
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

_ALLOC, _OP = int(Event.ALLOC), int(Event.OP)


def library_workspaces(program: Program, spec: DeviceSpec, version: tuple[int, int] | None = None) -> Patch:
    """Return the rewrite that adds the workspaces that stay.

    They are storages of ``StorageKind.OTHER``, alive from the first product of their thread on (forward and optimizer
    on one, backward on the other). An empty patch if no workspace stays.
    """
    draft, sizes = PatchBuilder(program), _sizes(spec, version)
    for position, uses in _first_products(program, *sizes).items():
        new = [(_ALLOC, draft.new_storage(sizes[use], StorageKind.OTHER)) for use in uses]
        # Never freed. Before the product, which is the first to run with it.
        draft.events[position] = (*new, program.events[position])
    return draft.patch()


def with_workspaces_moved(program: Program, before: Program, spec: DeviceSpec) -> Program:
    """Return a rewritten step with the workspaces where its own first products need them.

    Args:
        program: the rewritten step.
        before: the step that it was made from, with or without workspaces.
        spec: the device.
    """
    sizes = _sizes(spec, None)
    at_products = _events_before(before, *sizes)
    bytes_of, kinds = before.storage_bytes, before.storage_kinds
    # The first products are where they were, or there are no workspaces to move.
    if at_products == _events_before(program, *sizes) or not all(
        code == _ALLOC and kinds[s] == StorageKind.OTHER and bytes_of[s] in sizes.values()
        for code, s in at_products
    ):
        return program
    bare = program.with_(Patch(events={program.events.index(event): () for event in at_products}))
    return bare.with_(library_workspaces(bare, spec))


def _sizes(spec: DeviceSpec, version: tuple[int, int] | None) -> dict[str, int]:
    """Return the bytes of each workspace that stays, by its use."""
    sizes = {use: library_workspace_bytes(spec, version) for use in ("forward", "backward")}
    sizes["bias"] = bias_workspace_bytes(spec, version)
    # On a CPU there are none. From torch 2.15 each product counts its own while it runs.
    stay = sizes["forward"] and workspaces_stay(version)
    return {use: spec.round_up(n_bytes) for use, n_bytes in sizes.items() if stay and n_bytes}


@derived
def _first_products(program: Program, *uses: str) -> Mapping[int, Sequence[str]]:
    """Return, by position of the event of a product, the uses of workspaces that it is the first of."""
    first_at: dict[str, int] = {}
    for position, (code, arg) in enumerate(program.events):
        if len(first_at) == len(uses):
            break
        if code != _OP or not (name := _product(program.ops[arg].name)):
            continue
        op = program.ops[arg]
        # Ops run again where autograd asks for a value, which may be before the first gradient is computed.
        in_backward = op.phase == Phase.BACKWARD or op.recomputes >= 0
        first_at.setdefault("backward" if in_backward else "forward", position)
        # No workspace was seen for biased products that run again in the backward pass. An op in slices has unknown
        # inputs, and is taken to have one.
        may_add = "bias" in uses and name in WITH_BIAS and not in_backward
        if may_add and not (op.inputs and len(program.tensors[op.inputs[0]].shape) > 1):
            first_at.setdefault("bias", position)
    return {at: [use for use, first in first_at.items() if first == at] for at in first_at.values()}


@cache  # there are few names, and a search for plans asks about many programs
def _product(op_name: str) -> str:
    """Return the name of an op without its overload if it is a product; else nothing."""
    name = op_name.rpartition(".")[0].replace(".", "::")
    return name if name in PRODUCTS else ""


def _events_before(program: Program, *uses: str) -> list[tuple[int, int]]:
    """Return the events right before the first products, one for each use: those that allocate, if any do."""
    first = _first_products(program, *uses)
    return [event for at, its_uses in first.items() for event in program.events[at - len(its_uses) : at]]
