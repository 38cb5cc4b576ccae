"""A parcel: the contents of one storage, on their way to the host and back (``transfers.py`` says on which streams)."""

from __future__ import annotations

import torch

from sacplan.errors import OffloadError
from sacplan.techniques.offload.executor.transfers import Transfer
from sacplan.techniques.runtime.tensors import View
from sacplan.techniques.runtime.writes import last_write_to
from sacplan.torch_compat.host_memory import empty_on_host


class Parcel:
    """A copy of a storage.

    Args:
        tensor: a tensor on the storage; all of it is copied.

    Attributes:
        version: of the tensor when the copy began.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        vector = whole(tensor)
        self.version = tensor._version
        self._last_write = last_write_to(tensor.untyped_storage())  # versions miss writes to ``tensor.data``
        self._device = vector.device
        self._host: torch.Tensor | None = empty_on_host(vector)
        self._out: Transfer | None = Transfer.out(vector, self._host)
        self._back: Transfer | None = None
        self._version_back = 0

    def has_all_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether nobody has written to a storage since the copy began in a way that versions do not show."""
        return last_write_to(storage) == self._last_write

    def await_out(self, storage: torch.UntypedStorage) -> None:
        """Have computation wait until the contents of the storage are on the host."""
        assert self._out is not None
        self._out.wait(storage)

    def fetch(self) -> None:
        """Begin to copy back, unless that has begun."""
        if self._back is not None:
            return
        host = self._host
        assert host is not None
        copy = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._back = Transfer.back(host, copy, self._out)
        self._version_back = self._back.target._version

    def take(self, view: View) -> torch.Tensor:
        """Return a view of the contents on the device; computation waits for them.

        Raises:
            OffloadError: somebody has written to the copy since it came back.
        """
        self.fetch()
        assert self._back is not None
        copy = self._back.target
        self._back.wait(copy.untyped_storage())
        # The host's memory is free once the copy is there; pinned blocks wait for the streams that use them.
        self._out = self._host = None
        if copy._version != self._version_back:
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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as one vector."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor.detach(), (elements,), (1,), 0)
