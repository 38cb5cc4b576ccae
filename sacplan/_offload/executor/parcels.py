"""A parcel: the contents of one storage, on their way to the host and back.

On a GPU, copies run on two streams for each device, one out and one back. What orders them are events and nothing else:

- A copy out begins when the stream that computes has made the value. A tensor's memory may be given to others only when
  its copy is done, so the computing stream waits for it before the memory is let go of.
- A copy back goes into memory that the computing stream has taken. Whoever used that memory before did so on the
  computing stream, and the copy waits for that. Whoever needs the value waits for the copy.

So all memory is taken and freed on the computing stream, in an order that does not depend on how fast the link is.
``Tensor.record_stream`` would give that up: the allocator then frees a block when it next happens to ask the event, and
the peak of a step depends on the clock.

Without a GPU a copy is made where it would begin. Order, values, and what is held when are the same.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from sacplan._executor.tensors import View
from sacplan._executor.writes import last_write_to, last_write_to_storage
from sacplan._torch.host_memory import empty_on_host
from sacplan.errors import OffloadError


class _Streams:
    """The streams of a device that copy out and back."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)


_streams: dict[torch.device, _Streams] = {}
_making = threading.Lock()


def _streams_of(device: torch.device) -> _Streams:
    with _making:
        if device not in _streams:
            _streams[device] = _Streams(device)
        return _streams[device]


class Parcel:
    """A copy of a storage.

    Args:
        tensor: a tensor on the storage; all of it is copied.

    Attributes:
        version: of the tensor when the copy began.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        whole = _whole(tensor)
        self.version = tensor._version
        self._last_write = last_write_to(tensor)  # ``tensor.data`` has a version of its own
        self.device = whole.device
        self._pending: Any = None  # the event of a copy that may still run
        self._host: torch.Tensor | None = empty_on_host(whole)
        self._copy: torch.Tensor | None = None
        self._copy_version = 0
        if not whole.is_cuda:
            self._host.copy_(whole)
            return
        streams = _streams_of(self.device)
        # Only what has been launched so far: the copy runs beside everything that comes later.
        streams.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(streams.out):
            self._host.copy_(whole, non_blocking=True)
            self._pending = streams.out.record_event()

    def has_all_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether nobody has written to a storage since the copy began, as far as versions do not show it."""
        return last_write_to_storage(storage) == self._last_write

    def await_out(self) -> None:
        """Have computation wait until the contents are on the host."""
        self._settle()

    def fetch(self) -> None:
        """Begin to copy back, unless that has begun."""
        if self._copy is not None:
            return
        host = self._host
        assert host is not None
        copy = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self._copy, self._copy_version = copy, copy._version
        if not copy.is_cuda:
            copy.copy_(host)
            self._copy_version = copy._version
            return
        streams = _streams_of(self.device)
        # After what has used this memory before, which is all on the computing stream; and after the copy out, which
        # that stream has waited for.
        streams.back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(streams.back):
            copy.copy_(host, non_blocking=True)
            self._pending = streams.back.record_event()
        self._copy_version = copy._version

    def take(self, view: View) -> torch.Tensor:
        """Return a view of the contents on the device; computation waits for them.

        Raises:
            OffloadError: somebody has written to the copy since it is back.
        """
        self.fetch()
        self._settle()
        # The host's memory is free once the copy is there; pinned blocks wait for the streams that use them.
        self._host = None
        copy = self._copy
        assert copy is not None
        if copy._version != self._copy_version:
            raise OffloadError(
                f"a tensor of shape {tuple(view[0])} that had been copied to the host was written in place by the "
                "backward pass that asked for it, and is needed again. Write to a copy, tensor.clone(); or plan with "
                "other techniques than offload."
            )
        # All views that autograd and recipes held lie on one copy, as they lay on one storage.
        size, stride, offset, dtype = view
        if copy.dtype != dtype:
            copy = copy.view(dtype)
        return torch.as_strided(copy, size, stride, offset)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            torch.cuda.current_stream(self.device).wait_event(pending)

    def __del__(self) -> None:
        # Given up halfway, as after an error: the memory on the device must not go to others before the copy is over.
        if getattr(self, "_pending", None) is not None:
            self._settle()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as one vector."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor.detach(), (elements,), (1,), 0)
