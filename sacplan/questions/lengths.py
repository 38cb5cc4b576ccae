"""The batches of a run: how many samples each batch has, and to which sizes they are padded or packed.

A run is described by the sizes of its samples and by the rules of the loader that makes batches of them. A sample has
one size, its tokens, or several: the height and width of an image, or tokens, height and width. Or the shapes of the
batches are read from a ``DataLoader``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from sacplan.core.model_calls import shapes_of
from sacplan.errors import PlanError
from sacplan.record.longest import is_loader
from sacplan.record.state import preserved_state

_MOST = 2**24
"""The most samples of a run: the steps of more would be played for hours."""

Shape: TypeAlias = tuple[int, ...]
"""A batch: how many samples it has, and the sizes to which all of them are padded."""


def fits_in(shape: Shape, other: Shape) -> bool:
    """Whether no entry of a shape is larger than that of another one."""
    return all(map(operator.le, shape, other))


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a loader makes batches of samples.

    Attributes:
        lengths: The sizes of each sample.
        batch: Samples in a batch; None if ``tokens`` is given.
        tokens: Instead of ``batch``, the most tokens in a batch, padding included; pixels for images.
        pad_to_multiple_of: A batch is padded to the largest of each size, rounded up to a multiple of this.
        pack: Instead of padding, all samples are concatenated and cut into rows of so many tokens.
        seed: Seed of the generator that shuffles; None: samples come in order.
        epochs: How often all samples come.
        drop_last: Whether an incomplete batch at the end of an epoch is left out.
    """

    lengths: tuple[Shape, ...]
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
        if self.pack is not None and (self.tokens or self.pad_to_multiple_of > 1 or len(self.lengths[0]) > 1):
            raise PlanError(
                f"pack={self.pack}: packed rows have that many tokens, without padding. Give batch=, the rows in a "
                "batch, one length for each sample, and neither tokens= nor pad_to_multiple_of=."
            )
        if self.tokens is not None and self.largest > self.tokens:
            raise PlanError(
                f"tokens={self.tokens}: the longest sample has {self.largest} with its padding. Raise tokens, or cut "
                "samples."
            )

    @property
    def largest(self) -> int:
        """Tokens, or pixels, of the largest sample with its padding."""
        return max(math.prod(self._padded(sizes)) for sizes in set(self.lengths))

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
        if self.pack is not None:  # rows have one length, whatever the order of the samples
            lengths = ((self.pack,),) * -(-sum(length for (length,) in lengths) // self.pack)
        # The samples come in the order in which a ``DataLoader`` with this generator yields them.
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        samples: Any = lengths  # a sequence is enough of a data set
        loader: DataLoader[Shape] = DataLoader(
            samples, min(self.batch or 256, len(lengths) + 1), shuffle=self.seed is not None, generator=generator,
            collate_fn=list, drop_last=self.drop_last and self.batch is not None,
        )  # fmt: skip
        found: list[Shape] = []
        for _ in range(self.epochs):
            if self.batch is None:
                found += self._by_tokens(sizes for some in loader for sizes in some)
            else:
                found += ((len(batch), *self._padded(map(max, zip(*batch, strict=True)))) for batch in loader)
        if not found:
            raise PlanError(f"drop_last=True: {len(lengths)} samples make no batch of {self.batch}.")
        return found

    def _padded(self, sizes: Iterable[int]) -> Shape:
        return tuple(-(-size // self.pad_to_multiple_of) * self.pad_to_multiple_of for size in sizes)

    def _by_tokens(self, order: Iterable[Shape]) -> Iterator[Shape]:
        """Yield batches, each filled until the next sample would make it larger than the budget of tokens."""
        assert self.tokens is not None
        n, largest = 0, next(iter(self.lengths))
        for sizes in order:
            wider = tuple(map(max, largest, sizes)) if n else sizes
            if n and (n + 1) * math.prod(self._padded(wider)) > self.tokens:
                yield n, *self._padded(largest)
                n, wider = 0, sizes
            n, largest = n + 1, wider
        if not self.drop_last:
            yield n, *self._padded(largest)


def read_lengths(lengths: Any, longest: int | None) -> tuple[Shape, ...]:
    """Return the sizes of each sample, from a sequence, an array, a tensor, or a mapping of sizes to counts.

    Raises:
        PlanError: There are none, or one is not a size: no integer, below 1, or more tokens than ``longest``.
    """
    try:
        if not isinstance(lengths, Mapping):
            found = np.asarray(lengths)
        elif sum(lengths.values()) <= _MOST:
            found = np.repeat(list(lengths), list(lengths.values()), axis=0)
        else:
            raise ValueError(f"they count more than {_MOST:,} samples")
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"lengths cannot be read as integers: {error}.") from error
    if not found.size:
        raise PlanError("lengths is empty. Give the tokens in each sample, for example [312, 87, 1024].")
    if found.ndim not in (1, 2) or found.dtype.kind not in "iu":
        raise PlanError(
            "lengths must be integers in one dimension, one for each sample, or in two, such as height and width of "
            f"each; these are {found.dtype} of shape {list(found.shape)}."
        )
    found = found.reshape(len(found), -1)
    # Tokens are the first of several sizes.
    wrong = np.flatnonzero((found < 1).any(axis=1) | (found[:, 0] > (longest or found.max())))
    if wrong.size:
        i, rule = int(wrong[0]), "a sample has 1 token or more"
        if found[i].min() >= 1:
            rule = f"the model has {longest} positions (longest=). Cut samples as the tokenizer does"
        said = " x ".join(map(str, found[i].tolist()))
        raise PlanError(f"lengths[{i}] is {said}, and {rule}. {wrong.size} of {len(found)} are such.")
    return tuple(map(tuple, found.tolist()))


def shape_of_batch(batch: Any) -> Shape:
    """Return samples and sizes of a batch: tokens, height and width of images, or all three.

    Images are the largest tensor of samples x channels x height x width, tokens the largest of samples x tokens; if
    there are no images, features may follow. () if there is neither, or tensors differ in their number of samples.
    """
    shapes = [shape for _, shape in shapes_of((batch,), {})]
    images = max((shape for shape in shapes if len(shape) == 4), key=math.prod, default=())
    if images:
        tokens = max((s[1:] for s in shapes if len(s) == 2 and s[0] == images[0]), default=())
        return (images[0], *tokens, *images[2:])
    texts = [shape[:2] for shape in shapes if len(shape) > 1]
    return max(texts) if len({n for n, _ in texts}) == 1 else ()


def shapes_of_loader(
    loader: DataLoader[Any], epochs: int, shape_of: Callable[[Any], Sequence[int]]
) -> list[Shape]:
    """Return the shapes of the batches that a loader yields. Random generators are restored afterwards.

    Raises:
        PlanError: A batch has no sizes, or another number of sizes than the first one; or there is no batch.
    """
    found: list[Shape] = []
    with preserved_state(torch.nn.Module(), None, loader.sampler, loader.batch_sampler, loader.generator):
        for _ in range(epochs):
            for batch in loader:
                found.append(tuple(shape_of(batch)))
                if len(found[-1]) < 2 or len(found[-1]) != len(found[0]):
                    raise PlanError(
                        f"batch {len(found) - 1} of the data loader has the sizes {list(found[-1])}, and the first "
                        f"{list(found[0])}: samples and what make_batch makes them of. Give shape_of=, which "
                        "returns them of a batch, or the lengths of the samples in place of the loader."
                    )
    if not found:
        raise PlanError("the data loader is empty.")
    return found


def read_shapes(
    lengths: Any, longest: int | None, epochs: int, shape_of: Callable[[Any], Sequence[int]], **rules: Any
) -> tuple[list[Shape], Drawing | None]:
    """Return the batches of a run and their ``Drawing``, which is None for a ``DataLoader``.

    Raises:
        PlanError: As for ``read_lengths`` and ``Drawing``; or rules are given with a loader, which has its own rules.
    """
    if not is_loader(lengths):
        drawing = Drawing(read_lengths(lengths, longest), epochs=epochs, **rules)
        shapes = drawing.shapes()
    else:
        usual = Drawing(((1,),), 1)
        given = [name for name, value in rules.items() if value not in (None, getattr(usual, name))]
        if given:
            raise PlanError(f"{given[0]}= with a data loader, which makes the batches itself: leave it out.")
        drawing, shapes = None, shapes_of_loader(lengths, epochs, shape_of)
    most = max(shape[1] for shape in shapes)
    if longest is not None and most > longest:
        raise PlanError(
            f"a batch has {most} tokens in a row, and the model has {longest} positions (longest=)."
        )
    return shapes, drawing
