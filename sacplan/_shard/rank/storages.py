"""Which storage stands for a recorded one on a rank, and when the storages that the rank adds are freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator


class RankStorages:
    """Storages that were replaced, and those that are freed with a recorded one or after an op.

    A storage that the rank adds has no ``FREE`` of its own in the recording. It is freed where the recorded step lets
    go of what it belongs to.
    """

    def __init__(self) -> None:
        self._now: dict[int, int] = {}  # recorded storages to those that have taken their place
        self._recorded: dict[int, int] = {}  # the inverse
        self._freed_with: dict[int, list[int]] = defaultdict(list)  # by recorded storage
        self._freed_after: dict[int, list[int]] = defaultdict(list)  # by op
        self._viewed: set[int] = set()  # added storages that have views

    def now(self, recorded: int) -> int:
        """Return the storage that stands for a recorded one."""
        return self._now.get(recorded, recorded)

    def replace(self, old: int, new: int) -> None:
        """Have one storage take the place of another, which may itself have taken that of a recorded one."""
        recorded = self._recorded.pop(old, old)
        self._recorded[new], self._now[recorded] = recorded, new

    def add_view(self, storage: int, recorded: int) -> None:
        """Note a view of a copy: the copy lives as long as the recorded storage that the view was on."""
        # Once, however many views it has: it is freed once.
        if storage not in self._viewed:
            self._viewed.add(storage)
            self._freed_with[recorded].append(storage)

    def has_views(self, storage: int) -> bool:
        """Whether a storage is a copy that has views."""
        return storage in self._viewed

    def free_with(self, recorded: int, storage: int) -> None:
        """Have a storage freed with a recorded one."""
        self._freed_with[recorded].append(storage)

    def free_after(self, op: int, storage: int) -> None:
        """Have a storage freed when an op has run."""
        self._freed_after[op].append(storage)

    def freed(self, recorded: int) -> Iterator[int]:
        """Yield the storages to free where the recorded step frees one: what stands for it, and what goes with it."""
        # ``pop``: a storage of the recording may be made again later, and is then itself again.
        yield self._now.pop(recorded, recorded)
        yield from self._freed_with.pop(recorded, ())

    def freed_after(self, op: int) -> list[int]:
        """Return the storages to free now that an op has run."""
        return self._freed_after.pop(op, [])
