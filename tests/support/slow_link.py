"""A link that is as slow, and streams that are as unordered, as CUDA allows: on a CPU, for the executor of copies.

    with slow_link() as link:
        step(model, batch)
    assert not link.broken

The executor runs the code that it runs on a GPU, with these streams in place of CUDA's. Ops run at once, as the stream
that computes has run them by the time at which anybody may look. A copy runs as late as it may: when a stream that
computes waits for it, and behind the copies that it waits for itself. So a value is wrong, or ``broken`` says so, where
a wait is missing:

- Until a copy runs, every byte of its target is 255: nan, or an index far outside.
- A copy out whose source was written in the meantime has what was written; if it was freed, it copies nothing.
- A copy that does not wait for the stream that computes may run before its source is there, or before others have read
  what was in its target: it copies nothing. Nor does a copy back that does not wait for its own way out.
- ``broken`` has the copies to or from memory of the device that was freed before a stream that computes had waited for
  them.

Which work comes before which is followed as CUDA says it: by sets of copies, and of moments of streams that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan.techniques.offload.executor import transfers
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.private import storage_key

Order = frozenset[Any]
"""What comes before: copies by number, and moments, which are a stream that computes and a count."""


class SlowStream:
    """A stream. What is launched on it comes behind all that is in ``order``."""

    def __init__(self, link: SlowLink, computes: bool = False) -> None:
        self.link = link
        self.computes = computes
        self.moments = 0
        self.order: Order = frozenset()

    def record_event(self) -> Order:
        """Return what has been launched, and all that comes before."""
        return self.order | {(self, self.moments)} if self.computes else self.order

    def wait_event(self, event: Order) -> None:
        """Put what comes before the event before all that is launched from here on."""
        if self.link.without and self.link.without == _asking():
            return
        self.order |= event
        if self.computes:
            self.link.finish(event)

    def wait_stream(self, other: SlowStream) -> None:
        """Wait for all that another stream has now."""
        self.wait_event(other.record_event())


def _asking() -> tuple[str, ...]:
    """Return the functions of the executor that have a stream wait: two, or the only one."""
    names = []
    frame: Any = sys._getframe()
    while frame is not None and len(names) < 2:
        if frame.f_globals.get("__name__", "").startswith("sacplan.techniques.offload.executor"):
            names.append(frame.f_code.co_name)
        elif names:
            break
        frame = frame.f_back
    return tuple(names)


@dataclass
class _Copy:
    """A copy that has not run yet."""

    target: weakref.ref[torch.UntypedStorage]
    source: weakref.ref[torch.UntypedStorage]
    n_bytes: int
    order: Order
    is_early: bool  # it may run before something that it needs


@dataclass
class SlowLink:
    """What takes the place of ``torch.cuda``.

    Attributes:
        without: the functions of the executor whose wait is left out.
        broken: what may go wrong on a GPU beyond values.
        copies: how many have been launched.
        told: the streams of which the allocator was told, with the memory that they use.
    """

    without: tuple[str, ...] = ()
    broken: list[str] = field(default_factory=list)
    copies: int = 0
    told: list[tuple[weakref.ref[torch.UntypedStorage], SlowStream]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pending: dict[int, _Copy] = {}
        self._arrived_in: dict[
            int, tuple[int, weakref.ref[torch.UntypedStorage]]
        ] = {}  # targets of all copies
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._here = threading.local()  # each thread computes on a stream of its own

    # --- torch.cuda -----------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> SlowStream:
        """Make a stream for copies."""
        return SlowStream(self)

    def current_stream(self, device: torch.device) -> SlowStream:
        """Return the stream of this thread. Something may have been launched on it since the last time."""
        stream: SlowStream = getattr(self._here, "stream", None) or SlowStream(self, computes=True)
        self._here.stream = stream
        stream.moments += 1
        return stream

    @contextlib.contextmanager
    def stream(self, stream: SlowStream) -> Iterator[None]:
        """Launch what is inside on a stream: copies, unless it computes."""
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        try:
            with contextlib.nullcontext() if stream.computes else _Launching(self, stream, before):
                yield
        finally:
            self._here.stream = before

    # --- copies ---------------------------------------------------------------------------------

    def launch(self, stream: SlowStream, home: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy of whole storages, which runs later."""
        to, of = target.untyped_storage(), source.untyped_storage()
        assert target.nbytes == source.nbytes == to.nbytes() == of.nbytes()
        with self._lock:
            number = next(self._numbers)
            self.copies += 1
            sent, host = self._arrived_in.get(storage_key(of), (-1, None))
            is_back = host is not None and host() is of
            is_early = (home, home.moments) not in stream.order or (is_back and sent not in stream.order)

            def freed(_: Any) -> None:
                # Pinned memory waits for its copies by itself.
                if number in self._pending:
                    way = "to" if is_back else "from"
                    self.broken.append(f"memory was freed while a copy {way} it may still run")

            on_device = to if is_back else of
            on_host = weakref.ref(of if is_back else to)
            there = weakref.ref(on_device, freed)
            target, source = (there, on_host) if is_back else (on_host, there)
            self._pending[number] = _Copy(target, source, to.nbytes(), stream.order, is_early)
            self._arrived_in[storage_key(to)] = number, weakref.ref(to)
            stream.order |= {number}
            ctypes.memset(to.data_ptr(), 255, to.nbytes())

    def finish(self, event: Order) -> None:
        """Run the copies that come before an event, for which a stream that computes waits."""
        with self._lock:
            for number in sorted(n for n in event if isinstance(n, int)):
                copy = self._pending.get(number)
                if copy is not None:
                    self.finish(copy.order)
                    self._run(copy)
                    del self._pending[number]

    def _run(self, copy: _Copy) -> None:
        target, source = copy.target(), copy.source()
        if target is not None and source is not None and not copy.is_early:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), copy.n_bytes)

    def note_use(self, memory: torch.UntypedStorage, stream: SlowStream) -> None:
        """Take the place of ``record_stream``."""
        self.told.append((weakref.ref(memory), stream))


class _Launching(TorchDispatchMode):
    """Takes the copies inside, and runs none but fake ones."""

    def __init__(self, link: SlowLink, stream: SlowStream, home: Any) -> None:
        super().__init__()
        self.link, self.on, self.home = link, stream, home

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        self.link.launch(self.on, self.home, args[0], args[1])
        return args[0]


@contextlib.contextmanager
def slow_link(without: tuple[str, ...] = ()) -> Iterator[SlowLink]:
    """Give the executor of copies such streams on a CPU."""
    link = SlowLink(without)
    with (
        mock.patch.object(transfers, "cuda", link),
        mock.patch.object(transfers, "WITH_STREAMS", frozenset({"cpu"})),
        mock.patch.object(transfers, "_streams", {}),
        mock.patch.object(transfers, "note_use", link.note_use),
    ):
        yield link
