"""In-place writes of the forward pass as ops that make a new storage in the place of an old one.

``relu_(x)`` overwrites what ``x`` was. Whoever wants to make the result again needs the old ``x`` first, which is no
longer there; but if ``x`` can be made again, so can the result. For this the recording tells the two apart: the
storage is split into versions, the op reads the old one and makes the new one (``Op.replaces``), and the old one is
freed with it. Nothing is allocated, so the bytes are what they were.

Split is what a discarded op may rest on: the op may run again as far as its own traits go, an op of the forward pass
made the old version, and autograd does not hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sacplan._program.program import Event, Op, Phase


@dataclass(frozen=True, slots=True)
class Versions:
    """A step whose storages are split.

    Attributes:
        ops, events, handle_storages: with versions in the place of storages.
        version_of: the storages that were added at the end, and of which one each is a version.
    """

    ops: tuple[Op, ...]
    events: tuple[tuple[int, int], ...]
    handle_storages: tuple[int, ...]
    version_of: tuple[int, ...]


def split_versions(
    ops: Sequence[Op],
    events: Sequence[tuple[int, int]],
    handle_storages: Sequence[int],
    n_storages: int,
) -> Versions:
    """Split the storages of a step. What cannot be split stays an op that mutates."""
    now: dict[int, int] = {}  # storage to the version that it has now, if it was split
    version_of: list[int] = []
    handles, held = list(handle_storages), [0] * n_storages
    makers: dict[int, int] = {}  # storage, or version, to the op that made it
    new_ops, new_events = list(ops), []
    for code, arg in events:
        if code == Event.PACK:
            held[handle_storages[arg]] += 1
            handles[arg] = now.get(handles[arg], handles[arg])
        elif code == Event.RELEASE:
            held[handle_storages[arg]] -= 1
        elif code in (Event.FREE, Event.ALLOC):
            arg = now.pop(arg, arg)
        elif code == Event.OP:
            op = ops[arg]
            if now:
                op = _renamed(op, now)
            target = ops[arg].mutates[0] if len(ops[arg].mutates) == 1 else -1
            if op.phase is Phase.FORWARD and target >= 0 and op.recomputable and not op.writes:
                maker = makers.get(now.get(target, target), -1)
                if maker >= 0 and new_ops[maker].recomputable and not held[target]:
                    old, new = now.get(target, target), n_storages + len(version_of)
                    version_of.append(target)
                    now[target] = new
                    makers[new] = arg
                    new_ops[arg] = replace(op, writes=(new,), mutates=(), replaces=old)
                    new_events += [(code, arg), (Event.FREE, old)]
                    continue
                op = replace(op, recomputable=False)
            if op.phase is Phase.FORWARD:
                makers.update(dict.fromkeys(op.writes, arg))
            new_ops[arg] = op
        new_events.append((code, arg))
    return Versions(tuple(new_ops), tuple(new_events), tuple(handles), tuple(version_of))


def _renamed(op: Op, now: dict[int, int]) -> Op:
    reads, mutates = (tuple(now.get(s, s) for s in storages) for storages in (op.reads, op.mutates))
    return op if (reads, mutates) == (op.reads, op.mutates) else replace(op, reads=reads, mutates=mutates)
