"""The step of one rank that DDP runs (``DistributedDataParallel``), from the recorded step of the model.

    rank = program.with_(replicated(program, fingerprint.local_parameters, spec, world_size=8)).renumbered()

DDP copies each gradient into a bucket when it is there, reduces the bucket over all ranks, and copies it back.
The buckets stay allocated from step to step, so with its default ``gradient_as_bucket_view=False`` gradients are
held twice. Nothing else is on a rank's device that is not there without DDP.

Source: ``torch/csrc/distributed/c10d/reducer.cpp`` of 2.13 (``initialize_buckets``, ``rebuild_buckets``,
``compute_bucket_assignment_by_size``). Buckets are taken to be filled in the reverse order of parameters, where DDP
takes the order in which gradients came in its first step: that moves where one bucket ends and the next begins,
not what they take together.

A bucket is reduced when its last gradient is there, behind the rest of the backward pass, and one after the other
(``overlap.py``); at the end of the backward pass DDP waits for all of them. An op for each bucket takes the copies
into it and out of it, and its exposed time.

Not counted: what NCCL or gloo allocate for themselves, and the copies with which DDP synchronizes buffers when a
forward begins. Not modelled: ``gradient_as_bucket_view=True``, communication hooks, ``static_graph``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from sacplan._device.devices import DeviceSpec
from sacplan._program.fingerprint import FingerprintEntry
from sacplan._program.program import ROOT_SCOPE, Event, Op, Patch, Phase, Program, StorageKind
from sacplan._program.rewriting import PatchBuilder
from sacplan._ranks.backward_hooks import backward_passes
from sacplan._ranks.shards import Parameter, parameters_of
from sacplan._shard.overlap import Overlap
from sacplan.errors import TraceError

FIRST_BUCKET_BYTES = 2**20
"""``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: the first bucket is small, so that reducing begins early."""

BUCKET_CAP_MB = 25.0
"""Default of DDP's ``bucket_cap_mb``, in MiB."""


_REDUCE = "c10d.allreduce_.default"


def replicated(
    program: Program,
    parameters: Sequence[FingerprintEntry],
    spec: DeviceSpec,
    world_size: int,
    *,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> Patch:
    """Return the rewrite for one rank of ``DistributedDataParallel``: the buckets stay allocated throughout.

    Args:
        program: of the whole model on one device.
        parameters: name, shape and dtype of each (``Fingerprint.local_parameters``).
        spec: the device; its allocator's rounding counts, and its links.
        world_size: ranks.
        bucket_cap_mb: as for DDP, in MiB.

    Raises:
        TraceError: a bucket size that is not positive.
    """
    if not bucket_cap_mb > 0:
        raise TraceError(f"bucket_cap_mb is {bucket_cap_mb!r}; it must be positive (MiB).")
    buckets = buckets_of(parameters_of(program, parameters), int(bucket_cap_mb * 2**20))
    draft = PatchBuilder(program)
    there = [draft.new_storage(spec.round_up(_bytes_of(bucket)), StorageKind.GRADIENT) for bucket in buckets]
    # DDP's constructor allocates the buckets, so they are alive before the step begins, and nothing frees
    # them.
    draft.initial += there
    for position, bucket, time_ms in _reduces(program, buckets, Overlap.of(world_size, spec)):
        # Several buckets may be complete after the same op: append to what an earlier one put there.
        before = draft.events.get(position, (program.events[position],))
        reduce = draft.ops.add(_reduce(there[bucket], time_ms))
        draft.events[position] = (*before, (int(Event.OP), reduce))
    return draft.patch()


def _reduce(storage: int, time_ms: float) -> Op:
    # It writes to the bucket in place and allocates nothing. It counts as backward so that its time is in that phase.
    return Op(
        name=_REDUCE,
        phase=Phase.BACKWARD,
        scope=ROOT_SCOPE,
        time_ms=time_ms,
        flops=0,
        workspace_bytes=0,
        reads=(storage,),
        writes=(),
        mutates=(storage,),
        recomputable=False,
    )


def _reduces(
    program: Program, buckets: Sequence[Sequence[Parameter]], overlap: Overlap
) -> Iterator[tuple[int, int, float]]:
    """Yield the event after which each bucket is reduced, the bucket, and the time of its copies and the wait."""
    for run in backward_passes(program):
        after: dict[int, list[int]] = defaultdict(list)
        for bucket, number in enumerate(_ready(program, buckets, [op for _, op in run])):
            after[number].append(bucket)
        # Two passes over the buckets: all reductions are started at the ops that complete them, while
        # computation goes on. Only then does DDP wait for each, in the same order (``finalize_backward`` in
        # reducer.cpp). So a bucket pays for the part of its reduction that the rest of the backward pass did
        # not hide.
        running: list[tuple[int, int, float, float]] = []
        for number, (_, index) in enumerate(run):
            overlap.compute(program.ops[index].time_ms)
            for bucket in after[number]:
                n_bytes = _bytes_of(buckets[bucket])
                copy_ms = overlap.copy(n_bytes)
                running.append((index, bucket, copy_ms, overlap.start("all_reduce", n_bytes)))
        for index, bucket, copy_ms, end_ms in running:
            time_ms = copy_ms + overlap.wait(end_ms) + overlap.copy(_bytes_of(buckets[bucket]))
            yield int(program.liveness.op_events[index]), bucket, time_ms


def _ready(program: Program, buckets: Iterable[Sequence[Parameter]], run: Sequence[int]) -> Iterator[int]:
    """Yield, for each bucket, the number of the op in the backward pass after which it is reduced, in order."""
    last: dict[int, int] = {}  # storage to the number of the op that writes to it last
    for number, op in enumerate(map(program.ops.__getitem__, run)):
        last.update(dict.fromkeys((*op.writes, *op.mutates), number))
    # Invariant: ``at`` never decreases. The reducer reduces buckets strictly in order (``mark_bucket_ready``
    # in reducer.cpp ignores one whose turn has not come), so a complete bucket waits for those before it.
    at = 0
    for bucket in buckets:
        for p in bucket:
            gradient = program.gradients.get(p.storage, -1)
            storage = program.tensors[gradient].storage if gradient >= 0 else -1
            # A parameter without a gradient in this pass, such as an unused one, holds its bucket back until
            # the end.
            at = max(at, last.get(storage, len(run) - 1))
        yield at


def buckets_of(parameters: Iterable[Parameter], cap_bytes: int) -> tuple[tuple[Parameter, ...], ...]:
    """Return the parameters of each bucket. A bucket has one dtype, and is closed once it has reached its limit."""
    open_buckets: dict[str, list[Parameter]] = {}
    limits: dict[str, int] = {}
    found = []
    for p in reversed([p for p in parameters if p.trainable]):
        # As ``compute_bucket_assignment_by_size`` in reducer.cpp does: one open bucket for each dtype, which
        # is closed when it has reached (not before it would exceed) its limit. The first bucket of each dtype
        # has the small limit.
        bucket = open_buckets.setdefault(p.dtype, [])
        bucket.append(p)
        if _bytes_of(bucket) >= limits.get(p.dtype, FIRST_BUCKET_BYTES):
            found.append(tuple(open_buckets.pop(p.dtype)))
            limits[p.dtype] = cap_bytes
    # What is left below the limits, of each dtype.
    return (*found, *map(tuple, open_buckets.values()))


def _bytes_of(bucket: Iterable[Parameter]) -> int:
    return sum(p.n_bytes for p in bucket)
