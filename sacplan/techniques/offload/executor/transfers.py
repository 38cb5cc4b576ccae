"""A transfer: one copy between a device and the host, on a stream of its own.

Each GPU has two streams for this, one out and one back. What orders them against the streams that compute are events
and nothing else:

- A copy out begins when the stream that computes has made the value, and runs in parallel with later work. Memory that
  the copy reads may go to others only when it is over, so whoever lets go of a tensor waits for its transfer first.
- A copy back goes into memory that the computing stream has taken. Whoever used that memory before did so on that
  stream, and the copy waits for it; it also waits for its own way out. Whoever needs the value waits for the copy.

So memory is taken and freed on the computing stream, in an order that does not depend on how fast the link is, and the
peak of a step does not either. With ``Tensor.record_stream`` for the copying streams it would: the allocator then keeps
a block until it next happens to look at an event.

Several computing streams work as well. Each transfer remembers its ``home``, the stream on which it began, since a
saved tensor may be let go of, asked for or dropped on another stream or thread (autograd runs a node on the stream of
its forward op). Each stream that uses a transfer waits for it itself. Where it is not the one to which the memory
belongs, ``record_stream`` tells the allocator of it. For the stream to which it belongs that does nothing
(``recordStream`` in ``c10/cuda/CUDACachingAllocator.cpp``), so a step on one stream stays as predicted.

A transfer that is given up, as after an error, or because part of a graph is dropped, is waited for by its home: a
copy back must not write to memory that others have by then. So is a copy out whose source is freed before anybody has
waited, since nobody saves it: with expandable segments the allocator may give memory that is free back to the driver,
and waits for the stream that the memory belongs to, but for no other (``unmapHandles`` in the file above). A copy that
still reads there would be an illegal access. Pinned memory needs no such care: torch's allocator keeps a block until
the copies that use it are over (``record_event`` in ``aten/src/ATen/native/cuda/Copy.cu``).

Writes in place to a tensor that is on its way out can garble the copy, but not a value that is used: the memory is let
go of only if the tensor's version, and the writes that the unit saw, are those of the moment at which the copy began
(``marks.LetGo``). After that the copy is over.

Without a GPU a copy is made where it would begin. Order, values, and what is held when are the same.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import cuda

WITH_STREAMS = frozenset({"cuda"})
"""Types of devices whose copies run on streams."""


class _Streams:
    """The streams of a device that copy out and back."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = cuda.Stream(device), cuda.Stream(device)


_streams: dict[torch.device, _Streams] = {}
_making = threading.Lock()


def _streams_of(device: torch.device) -> _Streams:
    with _making:
        if device not in _streams:
            _streams[device] = _Streams(device)
        return _streams[device]


class _CopyEnd:
    """The end of a copy, for which its home still has to wait.

    Attributes:
        event: the end.
        home: the stream on which the copy began; None once it waits.
    """

    __slots__ = ("event", "home")

    def __init__(self, event: Any, home: Any) -> None:
        self.event, self.home = event, home

    def give_up(self, _: object = None) -> None:
        """Have the home wait now, unless it waits already."""
        home, self.home = self.home, None
        if home is not None:
            home.wait_event(self.event)


class Transfer:
    """A copy that may still run.

    Attributes:
        target: the memory that is written. The transfer keeps it, so that it is not freed before the end is awaited.
    """

    __slots__ = ("_device", "_end", "_source", "target")

    def __init__(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        self.target = target
        self._device = device
        self._end: _CopyEnd | None = None
        self._source: weakref.ref[Any] | None = None
        # Without streams the copy is made now. With streams, ``out`` and ``back`` begin it, each on its own stream.
        if device.type not in WITH_STREAMS:
            target.copy_(source)

    @classmethod
    def out(cls, source: torch.Tensor, host: torch.Tensor) -> Transfer:
        """Copy from the device, after all that has been launched so far."""
        made = cls(host, source, source.device)
        if source.device.type in WITH_STREAMS:
            end = made._begin(_streams_of(source.device).out, source)
            # The memory may belong to another stream than the home, which is the one that waits if it is freed.
            memory = source.untyped_storage()
            note_use(memory, end.home)
            made._source = weakref.ref(memory, end.give_up)
        return made

    @classmethod
    def back(cls, host: torch.Tensor, target: torch.Tensor, copy_out: Transfer | None) -> Transfer:
        """Copy what is on the host, or is once ``copy_out`` is over, to ``target``, just allocated on the device."""
        made = cls(target, host, target.device)
        if target.device.type in WITH_STREAMS:
            stream = _streams_of(target.device).back
            # ``_begin`` has it wait for the stream that asks, which need not have waited for the copy out.
            if copy_out is not None and copy_out._end is not None:
                stream.wait_event(copy_out._end.event)
            made._begin(stream, host)
        return made

    def _begin(self, stream: Any, source: torch.Tensor) -> _CopyEnd:
        home = cuda.current_stream(self._device)
        stream.wait_stream(home)
        with cuda.stream(stream):
            self.target.copy_(source, non_blocking=True)
        self._end = _CopyEnd(stream.record_event(), home)
        return self._end

    def wait(self, memory: torch.UntypedStorage) -> None:
        """Have the stream that computes now wait for the end, before it uses or frees this memory on the device."""
        if self._end is None:
            return
        current = cuda.current_stream(self._device)
        current.wait_event(self._end.event)
        note_use(memory, current)
        if current == self._end.home:
            self._end.home = None

    def __del__(self) -> None:
        if (end := getattr(self, "_end", None)) is not None:
            end.give_up()


def note_use(memory: torch.UntypedStorage, stream: Any) -> None:
    """Tell the allocator that a stream uses memory, which may belong to another one."""
    torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory).record_stream(stream)
