"""Bring an optimizer to the largest of its steps.

Some optimizers do not do the same in each step: SOAP refreshes its bases every tenth time, SPlus every hundredth,
Lookahead every fifth, AdaShift collects ten gradients first, RAdam begins without a variance. A plan has to hold for
all steps, so the one that is recorded should be the largest. It is looked for in three parts:

1. The optimizer steps until what it keeps no longer grows.
2. Numbers in its dictionaries (state, groups, attributes) that go up by one are its counts of steps.
3. They are set to a count that the usual periods divide, and a few steps are tried around it: what is periodic falls
   together there.

Then the counts are those before the largest of these steps. What is missed: work at a single count or at random,
periods that do not divide ``FAR``, counts in other places, and the very first step.
"""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from sacplan._record.state import kept_by, reachable
from sacplan._torch.local_tensors import Watching, is_deferred
from sacplan._torch.ops import tensors_in
from sacplan._torch.private import storage_key, strided_parts
from sacplan.errors import SacplanWarning, TraceError

FAR = 1_008_000
"""All numbers up to 10 divide it, and 12, 16, 20, 25, 32, 50, 64, 100, 128, 200, 250, 500 and 1,000."""

_MOST_GROWTH = 64
"""Most steps in which an optimizer may collect its state."""

_ALIKE = ("torch.optim.", "bitsandbytes.", "torchao.", "sacplan.")
"""Packages whose optimizers do the same in each step but the first, apart from torch's RAdam."""

ValueOf = Callable[[torch.Tensor], torch.Tensor | None]
"""The value of a tensor of one number; None if it is not known."""


def update(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer.

    Raises:
        TraceError: It needs a closure. Most of those that do, as SAM, only say so when they are called without.
    """
    try:
        optimizer.step()
    except Exception as error:
        if not re.search(r"[Cc]losure|'NoneType' object is not callable", str(error)):
            raise
        raise TraceError(
            f"{type(optimizer).__name__}.step needs a closure that runs the step again, as often as it likes: "
            "that is not one step whose memory could be planned. Use another optimizer, or leave optimizer= out."
        ) from error


def before_largest_step(optimizer: torch.optim.Optimizer, value_of: ValueOf) -> None:
    """Step an optimizer, so that it makes its state, and leave it before the largest of its later steps.

    Its parameters have gradients, which stay.
    """
    update(optimizer)
    if type(optimizer).__module__.startswith(_ALIKE) and not isinstance(optimizer, torch.optim.RAdam):
        return
    for _ in range(_MOST_GROWTH):
        found = list(_numbers(optimizer, value_of))
        peak, grown = _step(optimizer)
        if grown <= 0:
            break
    else:
        _warn(
            optimizer,
            f"still keeps more after each of {_MOST_GROWTH} steps, so later ones have a higher peak",
        )
    counts = [
        (holder, key, n) for holder, key, n in found if _number(dict.get(holder, key), value_of) == n + 1
    ]
    # By the peak of a step, the count before it; None for the one that it had.
    tried: dict[int, int | None] = {peak: None}
    try:
        for count in range(FAR - 2, FAR + 2) if counts else ():
            _set(counts, count)
            tried.setdefault(_step(optimizer)[0], count)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _warn(
            optimizer,
            f"cannot take step {FAR:,} ({why}), so the profile is not of one that is larger at times",
        )
    _set(counts, tried[max(tried)])


def _warn(optimizer: torch.optim.Optimizer, what: str) -> None:
    warnings.warn(f"{type(optimizer).__name__} {what}.", SacplanWarning, stacklevel=3)


def _numbers(
    optimizer: torch.optim.Optimizer, value_of: ValueOf
) -> Iterable[tuple[dict[Any, Any], Any, float]]:
    """Yield the dictionaries of an optimizer with numbers in them: the dictionary, the key and the number."""
    for holder in reachable(optimizer, but=(torch.nn.Module,)):
        for key, value in list(dict.items(holder)) if isinstance(holder, dict) else ():
            number = _number(value, value_of)
            if number is not None:
                yield holder, key, number


def _number(value: Any, value_of: ValueOf) -> float | None:
    if isinstance(value, torch.Tensor):
        known = value_of(value) if value.numel() == 1 else None
        with no_dispatch():
            return None if known is None else known.item()
    return value if type(value) in (int, float) else None


@torch.no_grad()
def _set(counts: Iterable[tuple[dict[Any, Any], Any, float]], count: int | None) -> None:
    for holder, key, number in counts:
        value, new = holder[key], number if count is None else count
        if isinstance(value, torch.Tensor):
            value.fill_(new)
        else:
            holder[key] = type(value)(new)


def _step(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Step once; return the peak of the bytes that the optimizer uses, and how many more it keeps."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    with _Alive([*parameters, *gradients, *kept_by(optimizer)]) as alive:
        before = alive.bytes
        optimizer.step()
    return alive.peak_bytes, alive.bytes - before


class _Alive(Watching):
    """Counts the bytes of some tensors, and of those that ops make, as long as they live."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._add(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self._add(tensors_in(out))
        return out

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (part.untyped_storage() for t in tensors for part in strided_parts(t)):
            key, nbytes = storage_key(storage), storage.nbytes()
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage, functools.partial(self._freed, key, nbytes))
                self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._storages[key]
        self.bytes -= nbytes
