"""Where a chunk of all that follows may begin in a step of training, and in how many slices it may run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sacplan._chunk.rest import CannotChunk, Entry, Rewrite, chunk_rest
from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Chunk
from sacplan._program.program import Phase, Program

_TRIED = 12  # modules, from the last one backwards
_MOST_OPS = 400  # forward ops from the entry on
_PROBE = 16  # slices with which entries are compared
_MOST_SLICES = 128
_SAME = 1.02  # times the bytes of another entry: no better


@dataclass(frozen=True, slots=True)
class LossChunks:
    """One entry with the numbers of slices that are offered.

    Attributes:
        unit: fqn of the module at which it begins.
        forward_ops: what no longer runs where it ran.
        options: the decision and its rewrite, by rising number of slices.
    """

    unit: str
    forward_ops: frozenset[int]
    options: tuple[tuple[Chunk, Rewrite], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no entry at a module."""

    unit: str
    why: str


def loss_chunks(program: Program, device: DeviceSpec) -> LossChunks | tuple[Refusal, ...]:
    """The entry from which on slices save most; or why none of the last modules is one.

    Worked out once for a program.
    """
    return program.derived(("loss chunks", device), lambda: _loss_chunks(program, device))


def _loss_chunks(program: Program, device: DeviceSpec) -> LossChunks | tuple[Refusal, ...]:
    best: tuple[int, Chunk] | None = None
    refused: list[Refusal] = []
    for unit in _last_modules(program):
        try:
            chunk, rewrite = _first_axis(program, unit, device)
        except CannotChunk as error:
            if best is not None:
                break  # what begins before it reads the same and more
            refused.append(Refusal(unit, str(error)))
            continue
        most = most_bytes(program, rewrite)
        if best is None or most * _SAME < best[0]:
            best = most, chunk
    if best is None:
        return tuple(refused)
    return _offered(program, best[1], device)


def _last_modules(program: Program) -> Iterator[str]:
    """Modules that are called once, the one that begins last first; of those that begin at one op, the innermost."""
    ops = program.ops
    last = max((i for i, op in enumerate(ops) if op.phase is Phase.FORWARD), default=-1)
    found = [
        (program.scopes[calls[0]].first_op, calls[0], fqn)
        for fqn, calls in program.calls.items()
        if len(calls) == 1 and fqn and last - program.scopes[calls[0]].first_op <= _MOST_OPS
    ]
    for _, _, fqn in sorted(found, reverse=True)[:_TRIED]:
        yield fqn


def _first_axis(program: Program, unit: str, device: DeviceSpec) -> tuple[Chunk, Rewrite]:
    """A chunk along the longest dimension that can be sliced; the last one is that of features."""
    shape = program.tensors[Entry.of(program, unit).tensor].shape
    why = CannotChunk(f"what enters {unit!r} has shape {shape}")
    for size, dim in sorted(((n, d) for d, n in enumerate(shape[:-1])), reverse=True):
        if size < 2:
            continue
        chunk = Chunk(unit, "rest", min(_PROBE, size), dim)
        try:
            return chunk, chunk_rest(program, chunk, device)
        except CannotChunk as error:
            why = error
    raise why


def entry_size(program: Program, chunk: Chunk) -> int:
    """How long the axis is of which slices are taken."""
    shape = program.tensors[Entry.of(program, chunk.unit).tensor].shape
    return shape[chunk.dim] // (chunk.outer * chunk.inner)


def _offered(program: Program, found: Chunk, device: DeviceSpec) -> LossChunks:
    size = entry_size(program, found)
    options = []
    slices = 2
    while slices <= min(size, _MOST_SLICES):
        chunk = Chunk(found.unit, "rest", slices, found.dim)
        options.append((chunk, chunk_rest(program, chunk, device)))
        slices *= 2
    deferred = options[0][1].deferred
    forward = frozenset(i for i in deferred if program.ops[i].phase is Phase.FORWARD)
    return LossChunks(found.unit, forward, tuple(options))


def most_bytes(program: Program, rewrite: Rewrite) -> int:
    """The most that is alive from the entry until its loop is over, over what is alive at the entry."""
    from sacplan._program.liveness import Fold

    patch = rewrite.patch
    first, last = min(patch.events), max(int(program.liveness.op_events[i]) for i in rewrite.deferred)
    fold = Fold(program, patch)
    begins = most = 0
    for position, event in enumerate(program.events[: last + 1]):
        if position == first:
            begins = most = fold.live
        for code, arg in patch.events.get(position, (event,)):
            fold.step(code, arg)
            if position >= first and code == 2:
                most = max(most, fold.noted)
    return most - begins
