"""The largest batch that a data loader may yield, from its samples and not from its batches.

    make = LongestBatch(loader)
    make()          # of as many samples as a batch of the loader has
    make(16)        # of 16

A loader shuffles, so the largest batch of one epoch need not be that of the next. What bounds all of them are the
longest samples of the data set: a batch of these is at least as large as any other, whether the loader's ``collate_fn``
pads them to the longest or puts one after the other. So samples are looked at by index, one at a time, in the process
that calls; the loader is not iterated, and neither its workers nor its sampler are touched.

Padding matters, too: attention may run another kernel, with a mask, where a batch has some. If a batch of the longest
sample and the shortest ones has the same shapes, it is taken instead.

Only the sizes of samples are kept. If a few hundred of them, spread over the data set, are all of one size, the others
are taken to be of that size. Otherwise all are looked at, up to a limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from math import prod
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from sacplan.core.model_calls import shapes_of
from sacplan.errors import TraceError
from sacplan.record.state import preserved_rng, preserved_state

FEW = 256
"""So many samples of one size stand for all."""

MOST = 2**16
"""At most so many samples are looked at, spread over the data set."""


class LongestBatch:
    """Makes the largest batch of any number of samples of a data loader.

    Attributes:
        rows: samples in a batch of the loader; None if its data set makes batches itself.

    Raises:
        TraceError: the loader's data set has no length, so that samples cannot be looked at without using them up.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        data = loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not len(data):
            why = "is empty. " if isinstance(data, Sized) and not len(data) else "has no length: "
            raise TraceError(
                f"the data loader is over {type(data).__name__}, which {why}its longest samples cannot be looked at "
                "without using it up. Give a batch of the largest size as batch, for example "
                "lambda: {'input_ids': torch.zeros(8, 4096, dtype=torch.long)}."
            )
        self._data: Any = data
        self._collate: Any = loader.collate_fn
        with preserved_rng():
            self._sizes = _sizes_of(self._data)
            rows = _rows(loader)
            self.rows = max(map(len, rows)) if isinstance(rows, list) else rows
            self._batches = rows if isinstance(rows, list) else None

    def __call__(self, rows: int | None = None) -> Any:
        """Return a batch of so many samples; by default of as many as the loader's batches have."""
        with preserved_rng():
            if self.rows is None:
                return self._collated(self._longest(1))  # the data set makes batches itself
            if rows is None and self._batches is not None:
                return self._collated(max(self._batches, key=self._bytes_of))
            return self._of(self.rows if rows is None else rows)

    def _of(self, rows: int) -> Any:
        # Where samples are put one after the other, a tensor of few elements, such as the lengths of packed texts,
        # must not keep out a sample with more tokens: so the largest samples by each tensor alone are
        # tried, too, and the largest tensor of a batch decides.
        parts = range(max(map(len, self._sizes.values())))
        chosen = dict.fromkeys([tuple(self._longest(rows)), *(self._most_of(part, rows) for part in parts)])
        batches = [(indices, self._collated(indices)) for indices in chosen]
        longest, largest = max(batches, key=lambda one: sorted(_size(one[1]), reverse=True))
        if rows == 1:
            return largest
        padded = self._collated([longest[0], *self._shortest(rows - 1)])
        return padded if shapes_of((padded,), {}) == shapes_of((largest,), {}) else largest

    def _collated(self, indices: Sequence[int]) -> Any:
        samples = [self._data[i] for i in indices]
        # Without automatic batching, ``collate_fn`` gets a sample and no list.
        return self._collate(samples[0] if self.rows is None else samples)

    def _longest(self, rows: int) -> list[int]:
        """Return ``rows`` samples: that with the most elements, those with the most in each tensor, others by size."""
        sizes = self._sizes
        by_size = sorted(sizes, key=lambda i: (-sum(sizes[i]), i))
        by_tensor = [self._most_of(part, 1)[0] for part in range(max(map(len, sizes.values())))]
        # Samples repeat if there are too few to fill a batch, as in a set that is smaller than its batches.
        chosen = list(dict.fromkeys((by_size[0], *by_tensor, *by_size)))[:rows]
        return [chosen[k % len(chosen)] for k in range(rows)]

    def _most_of(self, part: int, rows: int) -> tuple[int, ...]:
        """Return ``rows`` samples, those with the most elements in tensor number ``part``."""
        size = self._sizes
        most = heapq.nsmallest(rows, size, key=lambda i: (-sum(size[i][part : part + 1]), -sum(size[i]), i))
        return tuple(most[k % len(most)] for k in range(rows))

    def _shortest(self, rows: int) -> list[int]:
        by_size = sorted(self._sizes, key=lambda i: (sum(self._sizes[i]), i))
        return [by_size[k % len(by_size)] for k in range(rows)]

    def _bytes_of(self, indices: Sequence[int]) -> tuple[int, int]:
        """Return the elements of a batch if its samples are padded, and if they are put one after the other."""
        most = max(map(sum, self._sizes.values()))  # of a sample that was not looked at
        sizes = [sum(self._sizes[i]) if i in self._sizes else most for i in indices]
        return max(sizes, default=0) * len(indices), sum(sizes)


def is_loader(batch: object) -> TypeGuard[DataLoader[Any]]:
    """Whether a batch is a data loader, of which the largest batch is meant."""
    return isinstance(batch, DataLoader)


def _rows(loader: DataLoader[Any]) -> int | list[list[int]] | None:
    """Return the number of samples in a batch; all batches of an epoch, if they differ; None if samples are batches."""
    sampler = loader.batch_sampler
    # Wrappers of Accelerate hold the sampler that they read from.
    while sampler is not None and type(sampler) is not BatchSampler:
        inner = getattr(sampler, "batch_sampler", None)
        if inner is None:
            with preserved_state(torch.nn.Module(), None, sampler):  # iterating changes it
                return [list(indices) for indices in sampler]
        sampler = inner
    return None if sampler is None else int(sampler.batch_size)


def _sizes_of(data: Any) -> dict[int, tuple[int, ...]]:
    """Return, by index, the elements of each tensor of a sample."""
    few = {i: _size(data[i]) for i in _spread(len(data), FEW)}
    if len(set(few.values())) == 1:
        return few
    return few | {i: _size(data[i]) for i in _spread(len(data), MOST) if i not in few}


def _spread(length: int, most: int) -> Iterator[int]:
    """Yield at most so many indices, evenly spread, the first and the last among them."""
    count = min(length, most)
    yield from dict.fromkeys(k * (length - 1) // max(1, count - 1) for k in range(count))


def _size(sample: Any) -> tuple[int, ...]:
    return tuple(_elements(sample))


def _elements(value: Any) -> Iterable[int]:
    """Yield the elements of the tensors, arrays, lists of numbers and texts in a sample."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _elements(one)
    elif hasattr(value, "shape"):
        yield prod(value.shape)
    elif isinstance(value, str):
        yield len(value)
    elif isinstance(value, (list, tuple)):
        if value and not isinstance(value[0], (int, float, bool)):
            for one in value:
                yield from _elements(one)
        else:
            yield len(value)
