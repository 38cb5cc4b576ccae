"""The batches of a run: how many samples each one has, and to how many tokens they are padded or packed.

A run is described by the lengths of its samples and by the rules of the loader that makes batches of them. Or it is
read off a ``DataLoader``, of whose batches only the shapes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from sacplan.core.model_calls import shapes_of
from sacplan.errors import PlanError
from sacplan.record.longest import is_loader
from sacplan.record.state import preserved_state

_MOST = 2**24
"""No more samples are drawn: their steps would be played for hours."""


class Shape(NamedTuple):
    """A batch: its samples, and the tokens of each."""

    batch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a loader makes batches of samples.

    Attributes:
        lengths: Tokens in each sample.
        batch: Samples in a batch; None if ``tokens`` is given.
        tokens: Instead, the most that a batch may have, padding included.
        pad_to_multiple_of: A batch is padded to its longest sample, rounded up to a multiple of this.
        pack: Instead, all samples are put one behind the other and cut into rows of so many tokens.
        seed: Of the generator that shuffles; None: samples come in order.
        epochs: How often all samples come.
        drop_last: Whether an incomplete batch at the end of an epoch is left out.
    """

    lengths: tuple[int, ...]
    batch: int | None
    tokens: int | None = None
    pad_to_multiple_of: int = 1
    pack: int | None = None
    seed: int | None = 0
    epochs: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if (self.batch is None) == (self.tokens is None):
            raise PlanError(
                f"batch={self.batch!r} and tokens={self.tokens!r}: give one of them, the samples in a batch or "
                "the most tokens in one."
            )
        for what in ("batch", "tokens", "pad_to_multiple_of", "pack", "epochs"):
            value = getattr(self, what)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise PlanError(f"{what}={value!r} must be 1 or more.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise PlanError(f"seed={self.seed} must be from 0 to 2**63 - 1, or None for no shuffle.")
        if len(self.lengths) * self.epochs > _MOST:
            raise PlanError(
                f"epochs={self.epochs} of {len(self.lengths)} samples are more than {_MOST:,}: nobody waits for them. "
                "Give fewer epochs, or a part of the samples."
            )
        if self.pack is not None and (self.tokens is not None or self.pad_to_multiple_of > 1):
            raise PlanError(
                f"pack={self.pack}: packed rows have that many tokens, without padding. Give batch=, the rows in a "
                "batch, and neither tokens= nor pad_to_multiple_of=."
            )
        if self.tokens is not None and self.longest > self.tokens:
            raise PlanError(
                f"tokens={self.tokens}: the longest sample has {self.longest} with its padding. Raise tokens, or cut "
                "samples."
            )

    @property
    def longest(self) -> int:
        """Tokens in a row of the longest batch."""
        return self._padded(max(self.lengths)) if self.pack is None else self.pack

    @property
    def size(self) -> int:
        """The number that limits a batch: its samples, or its tokens."""
        found = self.batch or self.tokens
        assert found is not None
        return found

    def of_size(self, n: int) -> Drawing:
        """Return the same samples in batches of another size."""
        return replace(self, batch=n) if self.tokens is None else replace(self, tokens=n)

    def shapes(self) -> list[Shape]:
        """Return the batches of the run, in order."""
        lengths = self.lengths
        if self.pack is not None:  # rows are alike, whatever the order of the samples
            lengths = (self.pack,) * -(-sum(lengths) // self.pack)
        # The samples come in the order in which a ``DataLoader`` with this generator yields them.
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        samples: Any = lengths  # a sequence is enough of a data set
        loader: DataLoader[int] = DataLoader(
            samples, min(self.batch or 256, len(lengths) + 1), shuffle=self.seed is not None, generator=generator,
            collate_fn=list, drop_last=self.drop_last and self.batch is not None,
        )  # fmt: skip
        found: list[Shape] = []
        for _ in range(self.epochs):
            batches = loader if self.batch else self._by_tokens(length for some in loader for length in some)
            found += (Shape(len(batch), self._padded(max(batch))) for batch in batches)
        if not found:
            raise PlanError(f"drop_last=True: {len(lengths)} samples make no batch of {self.batch}.")
        return found

    def _padded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _by_tokens(self, order: Iterable[int]) -> Iterator[list[int]]:
        """Yield batches, each filled until the next sample would make it larger than the budget of tokens."""
        assert self.tokens is not None
        batch: list[int] = []
        for length in order:
            if batch and (len(batch) + 1) * self._padded(max(*batch, length)) > self.tokens:
                yield batch
                batch = []
            batch.append(length)
        if not self.drop_last:
            yield batch


def read_lengths(lengths: Any, longest: int | None) -> tuple[int, ...]:
    """Return the tokens in each sample, from a sequence, an array, a tensor, or a mapping of lengths to counts.

    Raises:
        PlanError: There are none, or one is not a length: no integer, below 1, or above ``longest``.
    """
    try:
        if not isinstance(lengths, Mapping):
            found = np.asarray(lengths)
        elif sum(lengths.values()) <= _MOST:
            found = np.repeat(list(lengths), list(lengths.values()))
        else:
            raise ValueError(f"they count more than {_MOST:,} samples")
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"lengths cannot be read as integers: {error}.") from error
    if not found.size:
        raise PlanError("lengths is empty. Give the tokens in each sample, for example [312, 87, 1024].")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise PlanError(
            f"lengths must be integers in one dimension, one for each sample; these are {found.dtype} of shape "
            f"{list(found.shape)}."
        )
    wrong = np.flatnonzero((found < 1) | (found > (found.max() if longest is None else longest)))
    if wrong.size:
        i, rule = int(wrong[0]), "a sample has 1 token or more"
        if found[i] >= 1:
            rule = f"the model has {longest} positions (longest=). Cut samples as the tokenizer does"
        raise PlanError(
            f"lengths[{i}] is {int(found[i])}, and {rule}. {wrong.size} of {found.size} are such."
        )
    return tuple(found.tolist())


def shapes_of_loader(loader: DataLoader[Any], epochs: int) -> list[Shape]:
    """Return the batches that a loader yields. No tensor is kept, and random generators are as they were.

    Raises:
        PlanError: A batch has no tensor of two dimensions, or there is none.
    """
    found: list[Shape] = []
    with preserved_state(torch.nn.Module(), None, loader.sampler, loader.batch_sampler, loader.generator):
        for _ in range(epochs):
            for batch in loader:
                shapes = [shape for _, shape in shapes_of((batch,), {}) if len(shape) > 1]
                if not shapes:
                    raise PlanError(
                        f"batch {len(found)} of the data loader has no tensor of samples x tokens. Give the lengths of "
                        "the samples in place of the loader."
                    )
                found.append(Shape(*max(shapes, key=lambda shape: shape[0] * shape[1])[:2]))
    if not found:
        raise PlanError("the data loader is empty.")
    return found


def read_shapes(
    lengths: Any, longest: int | None, epochs: int, **rules: Any
) -> tuple[list[Shape], Drawing | None]:
    """Return the batches of a run, and how they were drawn; None if a ``DataLoader`` does that.

    Raises:
        PlanError: As for ``read_lengths`` and ``Drawing``; or rules are given with a loader, which has its own.
    """
    if not is_loader(lengths):
        drawing = Drawing(read_lengths(lengths, longest), epochs=epochs, **rules)
        shapes = drawing.shapes()
    else:
        usual = Drawing((1,), 1)
        given = [name for name, value in rules.items() if value not in (None, getattr(usual, name))]
        if given:
            raise PlanError(f"{given[0]}= with a data loader, which makes the batches itself: leave it out.")
        drawing, shapes = None, shapes_of_loader(lengths, epochs)
    most = max(shape.seq for shape in shapes)
    if longest is not None and most > longest:
        raise PlanError(
            f"a batch has {most} tokens in a row, and the model has {longest} positions (longest=)."
        )
    return shapes, drawing
