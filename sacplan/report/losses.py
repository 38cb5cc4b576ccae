"""The loss of a plan that runs in slices, beside the same loss by other means."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from sacplan.core.liveness import Fold
from sacplan.core.program import Event, Phase, Program, StorageKind
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.techniques.chunk.alternatives import Alternative, LossRegion, liger, linear_cross_entropy
from sacplan.techniques.chunk.entries import ChunkOptions, Refusal, entry_size, loss_chunks, most_bytes
from sacplan.techniques.chunk.rest import training_chunk

_CROSS_ENTROPY = ("aten.nll_loss_forward.", "aten.nll_loss2d_forward.", "aten.cross_entropy_loss.")


def loss_rows(profile: Profile, plan: Plan | None) -> list[Alternative]:
    """Return the plain loss, that in slices, and the fused losses of other libraries; nothing without a chunk of it."""
    chunk = next((one for one in (() if plan is None else plan.chunks) if one.span == "rest"), None)
    # Only a chunk to the end of the step (``rest``) has the loss in it.
    if chunk is None:
        return []
    program, spec = profile.program, profile.spec
    rewrite = training_chunk(program, chunk, spec)
    head = _head(program, rewrite.deferred)
    # Another loss, for which there are no rules of other libraries.
    if head is None:
        return []
    region, operand_bytes = head
    plain_ms = sum(program.ops[i].time_ms for i in rewrite.deferred)
    plain_bytes = operand_bytes + _plain_bytes(program, rewrite.deferred)
    sliced_bytes = operand_bytes + most_bytes(program, rewrite)
    note = f"slices of {-(-entry_size(program, chunk) // chunk.slices)} rows"
    others = [linear_cross_entropy(region, spec), liger(region, spec)]
    return [
        Alternative("as it is", plain_bytes, plain_ms, True, "whole logits"),
        Alternative(f"in {chunk.slices} slices", sliced_bytes, plain_ms + rewrite.added_ms, True, note),
        *others,
    ]


def _head(program: Program, deferred: Iterable[int]) -> tuple[LossRegion, int] | None:
    """Return the linear layer before a cross entropy, and the bytes that it and the loss read. None without them.

    The layer is taken to be the matrix product with the largest output.
    """
    forward = [(i, program.ops[i]) for i in sorted(deferred) if program.ops[i].phase is Phase.FORWARD]
    if not any(op.name.startswith(_CROSS_ENTROPY) for _, op in forward):
        return None
    products = [(op, program.tensors[op.outputs[0]].shape) for _, op in forward if op.flops and op.outputs]
    products = [(op, shape) for op, shape in products if len(shape) >= 2]
    # A cross entropy on what no matrix product has made.
    if not products:
        return None
    # The logits are by far the largest product before a cross entropy.
    head, shape = max(products, key=lambda each: math.prod(each[1]))
    made = {s for _, op in forward for s in op.writes}
    read = {s for _, op in forward for s in op.reads} - made
    vocabulary = shape[-1]
    biases = (
        program.tensors[t]
        for _, op in forward
        for t in op.inputs
        if program.storage_kinds[program.tensors[t].storage] is StorageKind.PARAMETER
    )
    region = LossRegion(
        tokens=math.prod(shape[:-1]),
        width=head.flops // (2 * math.prod(shape)),
        vocabulary=vocabulary,
        dtype=getattr(torch, program.tensors[head.outputs[0]].dtype),
        bias=any(t.shape == (vocabulary,) for t in biases),
    )
    return region, sum(program.storage_bytes[s] for s in read)


def _plain_bytes(program: Program, deferred: Iterable[int]) -> int:
    """Return by how many bytes the peak of these ops exceeds what is alive before them."""
    wanted = frozenset(deferred)
    fold = Fold(program)
    begins = most = -1
    for code, arg in program.events:
        # Before ``fold.step``: what is alive when the first of them begins.
        if code == Event.OP and arg in wanted and begins < 0:
            begins = fold.live
        fold.step(code, arg)
        if code == Event.OP and arg in wanted:
            most = max(most, fold.noted)
    return most - begins


def loss_refusals(profile: Profile) -> tuple[Refusal, ...]:
    """Return why the loss cannot run in slices, for each module where a chunk could begin. Empty if it can."""
    # There is no loss.
    if profile.mode == "inference":
        return ()
    found = loss_chunks(profile.program, profile.spec)
    return () if isinstance(found, ChunkOptions) else found
