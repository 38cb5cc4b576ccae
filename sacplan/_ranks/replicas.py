"""The step of one rank under ``DistributedDataParallel``, from the recorded step of the model.

    rank = replicated(program, fingerprint.parameters, spec)

DDP copies each gradient into a bucket when it is there, reduces the bucket over all ranks, and copies it back.
The buckets stay allocated from step to step, so with its default ``gradient_as_bucket_view=False`` gradients are
held twice. Nothing else is on a rank's device that is not there without DDP.

Source: ``torch/csrc/distributed/c10d/reducer.cpp`` of 2.13 (``initialize_buckets``, ``rebuild_buckets``,
``compute_bucket_assignment_by_size``). Buckets are taken to be filled in the reverse order of parameters, where DDP
takes the order in which gradients came in its first step: that moves where one bucket ends and the next begins,
not what they take together.

Not counted: what NCCL or gloo allocate for themselves, the copies with which DDP synchronizes buffers when a forward
begins, and time. Not modelled: ``gradient_as_bucket_view=True``, communication hooks, ``static_graph``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sacplan._device.devices import DeviceSpec
from sacplan._program.fingerprint import Entry
from sacplan._program.program import Patch, Program, StorageKind
from sacplan._ranks.shards import Parameter, parameters_of
from sacplan.errors import TraceError

FIRST_BUCKET_BYTES = 2**20
"""``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: the first bucket is small, so that reducing begins early."""

BUCKET_CAP_MB = 25.0
"""Default of DDP's ``bucket_cap_mb``, in MiB."""


def replicated(
    program: Program,
    parameters: Sequence[Entry],
    spec: DeviceSpec,
    *,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> Patch:
    """The rewrite for one rank of ``DistributedDataParallel``: the buckets are there all the time.

    Args:
        program: of the whole model on one device.
        parameters: name, shape and dtype of each (``Fingerprint.parameters``).
        spec: the device; its allocator's rounding counts.
        bucket_cap_mb: as for DDP, in MiB.

    Raises:
        TraceError: a bucket size that is not positive.
    """
    if not bucket_cap_mb > 0:
        raise TraceError(f"bucket_cap_mb is {bucket_cap_mb!r}; it must be positive (MiB).")
    buckets = bucket_bytes(parameters_of(program, parameters), int(bucket_cap_mb * 2**20))
    first = len(program.storage_bytes)
    return Patch(
        storage_bytes=tuple(map(spec.round_up, buckets)),
        storage_kinds=(StorageKind.GRADIENT,) * len(buckets),
        initial=tuple(range(first, first + len(buckets))),
    )


def bucket_bytes(parameters: Iterable[Parameter], cap_bytes: int) -> tuple[int, ...]:
    """Sizes of the buckets, each of one type; one is closed when it has reached its limit."""
    open_buckets: dict[str, int] = {}
    limits: dict[str, int] = {}
    found = []
    for p in reversed([p for p in parameters if p.trainable]):
        size = open_buckets[p.dtype] = open_buckets.get(p.dtype, 0) + p.n_bytes
        if size >= limits.get(p.dtype, FIRST_BUCKET_BYTES):
            found.append(open_buckets.pop(p.dtype))
            limits[p.dtype] = cap_bytes
    return (*found, *open_buckets.values())
