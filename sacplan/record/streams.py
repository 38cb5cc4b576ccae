"""Streams of a step on a GPU: what runs side by side, and how long computation waits for collectives.

A stream has a clock, which is where its last op ends. An op moves the clock of the stream that it runs on; an event is
the time of a clock, and waiting for one moves a clock forward to that time. What the clock of the default stream is
moved by waiting is exposed time: it counts as time of the op that was waited for, and all other ops on other streams
take none. So the time of a step is the sum over its ops.

The host is taken to run ahead. A collective runs on a stream of its group's own, after what was issued before on the
stream that it is called on. Any other stream than the default one waits for it. On the default stream the first op that
uses its tensors waits. The host waits for a copy of memory that is not pinned: nothing is issued before the copy ends.

PyTorch says where it changes streams and waits through ``torch.cpu``'s streams, which do nothing by themselves.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.host_memory import TO_DEVICE, TO_HOST
from sacplan.torch_compat.ops import is_between_ranks
from sacplan.torch_compat.private import group_of, replaced


class Streams(ExitStack):
    """The clocks of the streams of one recorder. Inside, calls of ``torch.cpu``'s streams are followed.

    Args:
        extend: adds a time in ms to that of an op.

    Attributes:
        default: the stream of computation.
        side: storages that were made on other streams than the default one, to the stream's number.
    """

    def __init__(self, extend: Callable[[int, float], None]) -> None:
        super().__init__()
        self._extend = extend
        self.default: Any = torch.cpu.current_stream()
        self._now: dict[Any, float] = defaultdict(float)  # by stream, or by the ranks of a group
        self._last: dict[Any, int] = {}  # by stream, the last collective, or before any the first op
        self.side: dict[int, int] = {}
        self._numbers: dict[Any, int] = {self.default: 0}
        self._pending: dict[int, tuple[float, int]] = {}  # storage to its collective's end and op

    def __enter__(self) -> Streams:
        super().__enter__()
        event = functools.partial(_Event, self)
        waits = {
            "record_event": lambda stream: event(stream),
            "wait_event": lambda stream, moment: moment.wait(stream),
            "wait_stream": lambda stream, other: event(other).wait(stream),
        }
        self.enter_context(replaced(torch.cpu.Stream, **waits))
        self.enter_context(replaced(torch.cpu, Event=event))
        return self

    def at(self, stream: Any) -> tuple[float, int]:
        """Return the clock of a stream, and the op that a wait for it counts for; -1 if it ran nothing."""
        return self._now[stream], self._last.get(stream, -1)

    def wait(self, stream: Any, until: float, op: int) -> None:
        """Let a stream wait until a time, at which an op ends."""
        exposed = until - self._now[stream]
        if exposed <= 0:
            return
        self._now[stream] = until
        if stream is self.default and op >= 0:
            self._extend(op, exposed)

    def ran(self, index: int, call: Call, ms: float, used: Sequence[int], made: Iterable[int]) -> float:
        """Note that an op ran on the current stream, and return what counts as its own time.

        ``used`` are the storages of its arguments, ``made`` those that it made.
        """
        stream, func = torch.cpu.current_stream(), call.func
        if number := self._numbers.setdefault(stream, len(self._numbers)):
            self.side.update(dict.fromkeys(made, number))
        for storage in used:
            if storage in self._pending:
                self.wait(stream, *self._pending.pop(storage))
        before = self._now[stream]
        group = group_of(func, call.args, call.kwargs) if is_between_ranks(func) and ms else None
        if group is not None or stream not in self._last:
            self._last[stream] = index
        end = max(before, self._now[group] if group is not None else 0.0) + ms
        if group is not None:
            self._now[group] = end
            if stream is self.default:  # counts only as far as an op waits for it
                self._pending.update(dict.fromkeys((*used, *made), (end, index)))
                return 0.0
        self._now[stream] = end
        if func in (TO_DEVICE, TO_HOST) and call.args[1]:  # the host waits for the copy
            exposed = max(0.0, end - self._now[self.default])
            self._now[self.default] += exposed
            return exposed
        return ms if stream is self.default else 0.0


class _Event(torch.cpu.Event):
    """A moment of a stream; before one is recorded, a moment that is over."""

    def __init__(self, streams: Streams, stream: Any = None) -> None:
        self._streams = streams
        self._at = streams.at(stream)

    def record(self, stream: Any = None) -> None:
        self._at = self._streams.at(stream or torch.cpu.current_stream())

    def wait(self, stream: Any = None) -> None:
        self._streams.wait(stream or torch.cpu.current_stream(), *self._at)

    def synchronize(self) -> None:
        self._streams.wait(self._streams.default, *self._at)
