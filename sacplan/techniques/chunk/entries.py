"""Chunks that are offered to a plan for training: where they begin, along which axis, and in how many slices.

- The loss (``loss_chunks``): the last modules are tried one by one backwards, each along the longest axis that works.
  The one whose chunk has the least at its peak is taken. Only this one is offered, in 2, 4, 8 ... slices.
- Modules (``module_chunks``): around the op at the peak of a plan, the largest module that works, and all modules that
  are alike.
- The backward pass of a module without children (``backward_chunks``), such as a norm: the one at the peak of a plan,
  and all that are alike. Its forward pass stays as it is, so that what it makes may be recomputed. Slices cost next to
  nothing there, so one decision is taken for all of them.

Whether a chunk works is found by rehearsing it (``rest.py``). Only one number of slices is tried for that. The choice
of the entry is greedy: a longer chunk with other recomputation around it could be better.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from sacplan.core.decisions import Chunk, Decision
from sacplan.core.derived import derived
from sacplan.core.elements import is_inside, pattern_of
from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import ROOT_SCOPE, Phase, Program
from sacplan.device.devices import DeviceSpec
from sacplan.device.kernels import registered
from sacplan.techniques.base.offers import Offer
from sacplan.techniques.base.regions import Option
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.chunk.chunk_entry import CannotChunk, ChunkSpan, entry_of
from sacplan.techniques.chunk.families import Rewrite
from sacplan.techniques.chunk.rest import training_chunk

_TRIED = 12  # modules, from the last one backwards
_MOST_OPS = 400  # forward ops from the entry on
_PROBE = 16  # slices with which entries are compared
_MOST_SLICES = 128  # of the rest of a step, which is offered in powers of two
_MODULE_SLICES = (2, 4, 8, 16, 32, 64)  # of a module
_FEWEST_SLICES = 4  # of a backward pass; twice as many as long as it stays at the peak
_CLEARLY = 1.02  # a longer chunk is worth its slices if its peak is lower by this factor


_TrainingSpan: TypeAlias = Literal["module", "backward", "rest"]


Slices = tuple[Chunk, ...]
"""One place where a chunk may begin, in each number of slices that is offered, by rising number."""


class LossChunks(NamedTuple):
    """Where slices up to the loss may begin.

    Attributes:
        chunks: the entry with which they save most; () if there is none.
        refused: by the fqn of a module, why no chunk begins there.
    """

    chunks: Slices
    refused: Mapping[str, str]


def offer_of(step: PlanStep, chunks: Slices) -> Offer:
    """Return the offer to run a chunk in one of several numbers of slices.

    Each number of slices is rehearsed when its option is asked for. A chunk of the loss ends with the forward pass, so
    neither its module nor one around it may be a unit.
    """
    program, device = step.program, step.device
    assert device is not None

    def option_of(chunk: Decision) -> Option:
        assert isinstance(chunk, Chunk)
        rewrite = training_chunk(program, chunk, device)
        return Option(step.added_cost(rewrite.added_ms), 0, (), "chunk", chunk, rewrite.patch)

    # Other techniques cannot free what a loop holds, which is the same with any number of slices.
    first = training_chunk(program, chunks[0], device)
    kept = first.deferred.union(program.writer[s] for s in first.held if s in program.writer)
    alone = (chunks[0].unit,) if chunks[0].span == "rest" else ()
    return Offer(chunks[0].unit, chunks, option_of, first.deferred, kept, alone)


# --- the loss


@derived
def loss_chunks(program: Program, device: DeviceSpec, after: int = -1) -> LossChunks:
    """Choose the module from which the step runs in slices up to the loss: the one that saves most memory.

    If none of the last modules can begin such a chunk, return the reason for each. Cached for each program.

    Args:
        program, device: the step, and what it runs on.
        after: the chunk begins after this op: what is compiled cannot run in slices.
    """
    best: tuple[int, Chunk] | None = None
    refused: dict[str, str] = {}
    with registered(device):  # once for all rehearsals
        for unit in _last_modules(program, after):
            try:
                chunk = _first_axis(program, unit, "rest", device)
            except CannotChunk as error:
                if best is not None:
                    break  # chunks that begin earlier run the same ops and more
                refused[unit] = str(error)
                continue
            peak_bytes = _most_bytes(program, training_chunk(program, chunk, device))
            # Each chunk is longer than those tried before, so it has to be clearly better.
            if best is None or _CLEARLY * peak_bytes < best[0]:
                best = peak_bytes, chunk
    if best is None:
        return LossChunks((), refused)
    powers = [2**i for i in range(1, _MOST_SLICES.bit_length())]
    return LossChunks(_offered(program, best[1], powers), {})


def _last_modules(program: Program, after: int) -> Iterator[str]:
    """Yield the last modules that are called once, then others, such as one called by micro-batches: to be refused.

    In both groups the last modules come first; of those that begin at one op, the innermost.
    """
    ops = program.ops
    last = max((i for i, op in enumerate(ops) if op.phase is Phase.FORWARD), default=-1)
    first = max(after + 1, last - _MOST_OPS)
    found = [
        (len(calls) == 1, program.scopes[calls[-1]].first_op, calls[-1], fqn)
        for fqn, calls in program.calls.items()
        if fqn and program.scopes[calls[-1]].first_op >= first
    ]
    for *_, fqn in sorted(found, reverse=True)[:_TRIED]:
        yield fqn


# --- modules


@derived
def module_chunks(
    program: Program, scope: int, device: DeviceSpec, pins: Pins = NO_PINS
) -> tuple[Slices, ...]:
    """Return chunks of the largest module around a call that can run in slices, and of its like; () if none can.

    ``pins``: modules that must not be units are left out. Worked out once for a program.
    """
    with registered(device):  # once for all rehearsals
        found = _largest(program, scope, device, pins)
        if found is None:
            return ()
        n_ops = len(program.ops_in(program.calls[found.unit][0]))
        name = _name_in_layer(found.unit)
        units = (
            unit
            for unit, calls in program.calls.items()
            if len(calls) == 1
            and _name_in_layer(unit) == name
            and len(program.ops_in(calls[0])) == n_ops
            and pins.may_be_a_unit(program, unit)
        )
        # In all numbers of slices: the rewrites of the first module serve for all that are alike.
        return tuple(_offered_where_alike(program, found, units, _MODULE_SLICES, device))


def _largest(program: Program, scope: int, device: DeviceSpec, pins: Pins) -> Chunk | None:
    """Return a chunk of the largest module around a module call that can run in slices; None if none can."""

    def may_be_rehearsed(around: int) -> bool:
        # Not the model itself, nor a module that is called several times or has too many ops.
        unit = program.scopes[around].fqn
        if not unit or len(program.calls[unit]) != 1 or not pins.may_be_a_unit(program, unit):
            return False
        return len(program.ops_in(around)) <= _MOST_OPS

    outwards = (scope, *program.ancestors(scope)) if scope != ROOT_SCOPE else ()
    # The largest first: if it works, one rehearsal is enough.
    for around in reversed(tuple(itertools.takewhile(may_be_rehearsed, outwards))):
        with contextlib.suppress(CannotChunk):  # a smaller module may work
            return _first_axis(program, program.scopes[around].fqn, "module", device)
    return None


def _name_in_layer(unit: str) -> str:
    """Return the last part of a module's name; for a layer in a list, the list's and ``.*``."""
    *_, before, last = ("", *unit.split("."))
    return f"{before}.*" if last.isdigit() else last


# --- backward passes


def backward_chunks(
    program: Program,
    scope: int,
    device: DeviceSpec,
    pins: Pins,
    known: Sequence[Chunk],
) -> tuple[Chunk, ...]:
    """Return chunks of the backward pass of a module call and of all that are alike; () if it cannot run so.

    Args:
        program: the recorded step.
        scope: the module call.
        device: what it runs on.
        pins: modules with ops that they name are left out.
        known: the chunks so far. If the module's backward pass is among them, the answer has twice as many slices.
    """
    if scope == ROOT_SCOPE:
        return ()  # no module runs at the peak
    unit = program.scopes[scope].fqn
    same = [chunk for chunk in known if chunk.span == "backward" and _alike(chunk.unit, unit)]
    if any(chunk.unit == unit for chunk in same):
        slices = 2 * same[0].slices
        # Not more slices than a module may have, and no empty ones.
        if slices > min(_MODULE_SLICES[-1], *(entry_size(program, chunk) for chunk in same)):
            return ()
        return tuple(msgspec.structs.replace(chunk, slices=slices) for chunk in same)
    # The module, or one around it, runs in slices in another way.
    taken = any(unit == chunk.unit or is_inside(unit, chunk.unit) for chunk in known)
    is_called_once = len(program.calls[unit]) == 1
    if taken or not is_called_once or not pins.may_be_a_unit(program, unit):
        return ()
    try:
        found = _first_axis(program, unit, "backward", device)
    except CannotChunk:
        return ()  # no axis of its input can be sliced
    units = (
        other
        for other, calls in program.calls.items()
        if _alike(other, unit) and pins.named_ops.isdisjoint(program.ops_in(calls[0]))
    )
    alike = _offered_where_alike(program, found, units, (found.slices,), device)
    chunks = tuple(chunk for offered in alike for chunk in offered)
    return chunks if any(chunk.unit == unit for chunk in chunks) else ()


def _alike(unit: str, other: str) -> bool:
    return pattern_of(unit) == pattern_of(other)


# --- both


def _first_axis(program: Program, unit: str, span: _TrainingSpan, device: DeviceSpec) -> Chunk:
    """Return a chunk along the longest dimension that works. The last dimension, that of features, is never tried."""
    shape = program.tensors[entry_of(program, unit)[1]].shape
    why = CannotChunk(f"what enters {unit!r} has shape {shape}")
    for size, dim in sorted(((n, d) for d, n in enumerate(shape[:-1])), reverse=True):
        # An axis of one element has no slices.
        if size < 2:
            continue
        slices = min(_FEWEST_SLICES if span == "backward" else _PROBE, size)
        chunk = Chunk(unit, span, slices, dim)
        try:
            training_chunk(program, chunk, device)
        except CannotChunk as error:
            why = error
        else:
            return chunk
    raise why


def entry_size(program: Program, chunk: Chunk) -> int:
    """Return the length of the axis that a chunk slices."""
    return ChunkSpan.of(program, chunk).axis.size


def _offered(program: Program, found: Chunk, numbers: Sequence[int]) -> Slices:
    """Return a chunk in each of some numbers of slices that its axis has elements for, and in the first in any case."""
    most = max(numbers[0], entry_size(program, found))
    return tuple(msgspec.structs.replace(found, slices=slices) for slices in numbers if slices <= most)


def _offered_where_alike(
    program: Program, found: Chunk, units: Iterable[str], numbers: Sequence[int], device: DeviceSpec
) -> Iterator[Slices]:
    """Yield, for each unit, the chunks that are ``found`` moved to it, one per number of slices.

    Units where any of these chunks cannot run are skipped.
    """
    for unit in units:
        # The caller matches units by name; their ops may still differ from those of ``found.unit``.
        with contextlib.suppress(CannotChunk):
            offered = _offered(program, msgspec.structs.replace(found, unit=unit), numbers)
            for chunk in offered:
                training_chunk(program, chunk, device)
            yield offered


def _most_bytes(program: Program, rewrite: Rewrite) -> int:
    """Return the most that is alive from the entry until the loop is over, beyond what is alive at the entry."""
    events, liveness = rewrite.patch.events, program.with_(rewrite.patch).liveness
    first, last = min(events), max(int(program.liveness.op_events[i]) for i in rewrite.deferred)
    # In the rewritten program, which has more or fewer events up to there.
    end = last + sum(len(new) - 1 for at, new in events.items() if at <= last)
    inside = (first <= liveness.op_events) & (liveness.op_events <= end)
    return int(liveness.at_op[inside].max() - liveness.before_event[first])
