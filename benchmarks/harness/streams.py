"""Streams on a machine that has none: what the executor of copies asks of ``torch.cuda``, noted while a step runs.

    with noted_streams() as noted:
        seen = fake_step(case, plan, profile.spec)
    simulated_ms(seen.program, noted, profile.spec.host_link)

The executor runs the code that it runs on a GPU, with these streams in place of CUDA's. So what is simulated is what
the executor does, when it does it: which copies it launches on which stream, which events it records, and where it has
a stream wait. Nothing comes from the planner but the decisions.

The simulation knows what CUDA says about streams, and nothing else: work on one stream runs in the order in which it
was launched, work on different streams side by side, and a stream that waits for an event goes on when all that was
launched before the event was recorded is over. Launching takes no time, and copies take no bandwidth from kernels.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

import sacplan
from benchmarks.models.cases import Case
from sacplan.core.program import Event as ProgramEvent
from sacplan.core.program import Program, StorageKind
from sacplan.device.devices import DeviceSpec
from sacplan.device.links import Link
from sacplan.profiling.tracing import StepRequest, trace_step
from sacplan.record.recorder import Recorder
from sacplan.techniques.offload.executor import transfers
from sacplan.techniques.offload.timing import PLANNED_SHARE
from sacplan.torch_compat.private import dispatch_modes

COMPUTE = "compute"


class Entry(NamedTuple):
    """Something that was asked of a stream.

    Attributes:
        at: how many ops had run in the step.
        stream: its name.
        what: the next op is a copy that runs on it; an event is recorded; or it waits for an event.
        event: which event.
    """

    at: int
    stream: str
    what: Literal["copy", "record", "wait"]
    event: int = -1


class NotedStream:
    """A stream whose calls are noted."""

    def __init__(self, notes: NotedStreams, name: str) -> None:
        self.notes = notes
        self.name = name

    def record_event(self) -> int:
        """Note an event behind all that has been launched."""
        self.notes.events += 1
        self.notes.add(self.name, "record", self.notes.events)
        return self.notes.events

    def wait_event(self, event: int) -> None:
        """Note that what is launched from here on waits for an event."""
        self.notes.add(self.name, "wait", event)

    def wait_stream(self, other: NotedStream) -> None:
        """Note that what is launched from here on waits for all that another stream has now."""
        self.wait_event(other.record_event())


@dataclass
class NotedStreams:
    """What takes the place of ``torch.cuda``.

    Attributes:
        entries: of the step that was recorded last.
        events: how many events there were.
    """

    entries: list[Entry] = field(default_factory=list)
    events: int = 0
    made: int = 0

    def __post_init__(self) -> None:
        self.computing = NotedStream(self, COMPUTE)

    def Stream(self, device: torch.device) -> NotedStream:
        """Make a stream."""
        self.made += 1
        return NotedStream(self, f"copies {self.made}")

    def current_stream(self, device: torch.device) -> NotedStream:
        """Return the stream that computes."""
        return self.computing

    @contextlib.contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        """Note that the op inside is a copy on a stream."""
        self.add(stream.name, "copy")
        yield

    def add(self, stream: str, what: Any, event: int = -1) -> None:
        """Note something; a new step begins with an empty list."""
        at = next((m.seen()[0] for m in reversed(dispatch_modes()) if isinstance(m, Recorder)), None)
        if at is None:
            return  # no step is recorded
        if self.entries and at < self.entries[-1].at:
            self.entries.clear()
        self.entries.append(Entry(at, stream, what, event))


def _one_stream_computes(memory: torch.UntypedStorage, stream: NotedStream) -> None:
    """The allocator has nothing to note, since all memory belongs to the stream that computes."""


@contextlib.contextmanager
def noted_streams() -> Iterator[NotedStreams]:
    """Give the executor of copies streams that are noted, on any device."""
    noted = NotedStreams()
    with (
        mock.patch.object(transfers, "cuda", noted),
        mock.patch.object(transfers, "WITH_STREAMS", frozenset({"cpu", "cuda", "meta"})),
        mock.patch.object(transfers, "_streams", {}),
        mock.patch.object(transfers, "note_use", _one_stream_computes),
    ):
        yield noted


class _Task(NamedTuple):
    """Work on a stream: it takes a time, records an event, or waits for one."""

    what: Literal["run", "record", "wait"]
    ms: float = 0.0
    event: int = -1


def fake_step(case: Case, plan: sacplan.Plan, spec: str | DeviceSpec) -> sacplan.Profile:
    """Run a fake step with a plan."""
    return trace_step(StepRequest(
        case.model, case.batch, case.loss_fn, case.optimizer, spec, "cost-model", "fake",
        prepare=lambda fake: sacplan.apply(fake, plan), saved="observe",
    ))  # fmt: skip


def simulated(case: Case, plan: sacplan.Plan, spec: DeviceSpec) -> tuple[sacplan.Profile, float]:
    """Return a fake step with a plan, and how long it takes on streams that have what the plan has of the link."""
    with noted_streams() as noted:
        seen = fake_step(case, plan, spec)
    return seen, simulated_ms(seen.program, noted, spec.host_link)


def planned_ms(profile: sacplan.Profile, plan: sacplan.Plan) -> float:
    """Return how long the step takes by the plan on a GPU that does not wait for the CPU."""
    return profile.program.step_ms + plan.recompute_ms + plan.added_ms


def simulated_ms(
    program: Program, noted: NotedStreams, link: Link, link_share: float = PLANNED_SHARE
) -> float:
    """Return how long a recorded step takes on a device with streams.

    Args:
        program: the step as the executor ran it.
        noted: what it asked of streams meanwhile.
        link: to the host.
        link_share: of its bandwidth.
    """
    rate = link_share * link.bandwidth_bytes_per_s / 1e3
    streams: dict[str, deque[_Task]] = {COMPUTE: deque()}
    entries = deque(noted.entries)
    copied_on: dict[int, str] = {}
    ran = [arg for code, arg in program.events if code == ProgramEvent.OP]
    # Entries count ops as they ran, so a rewrite must neither have added any nor moved them.
    assert all(i < j for i, j in itertools.pairwise(ran))
    for arg in ran:
        while entries and entries[0].at <= arg:
            entry = entries.popleft()
            if entry.what == "copy":
                copied_on[entry.at] = entry.stream
            else:
                tasks = streams.setdefault(entry.stream, deque())
                tasks.append(_Task(entry.what, event=entry.event))
        op = program.ops[arg]
        if arg in copied_on:
            (n_bytes,) = {
                program.storage_bytes[s]
                for s in (*op.reads, *op.mutates, *op.writes)
                if program.storage_kinds[s] != StorageKind.HOST
            }
            tasks = streams.setdefault(copied_on[arg], deque())
            tasks.append(_Task("run", n_bytes / rate + link.latency_s * 1e3))
        else:
            streams[COMPUTE].append(_Task("run", op.time_ms))
    return _played(streams)


def _played(streams: dict[str, deque[_Task]]) -> float:
    """Run all streams side by side, from one thing that ends to the next; return when the last one computes."""
    recorded: set[int] = set()
    ends: list[tuple[float, str]] = []  # of what runs
    ended_ms = {COMPUTE: 0.0}

    def advance(name: str, now: float) -> bool:
        """Go on with a stream until something runs or it has to wait; return whether an event was recorded."""
        tasks, news = streams[name], False
        while tasks:
            if tasks[0].what == "wait" and tasks[0].event not in recorded:
                break
            task = tasks.popleft()
            if task.what == "record":
                recorded.add(task.event)
                news = True
            elif task.what == "run" and task.ms:
                heapq.heappush(ends, (now + task.ms, name))
                break
        return news

    now = 0.0
    idle = set(streams)
    while True:
        news = True
        while news:
            news = False
            for name in sorted(idle):
                before = len(ends)
                news |= advance(name, now)
                if len(ends) > before:
                    idle.discard(name)
        if not ends:
            break
        now, name = heapq.heappop(ends)
        ended_ms[name] = now
        idle.add(name)
    assert not any(streams.values()), "a stream waits for what is never recorded"
    return ended_ms[COMPUTE]
