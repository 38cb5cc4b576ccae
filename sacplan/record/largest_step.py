"""Bring an optimizer to the largest of its steps.

Some optimizers do not do the same in each step: SOAP refreshes its bases every tenth time, SPlus every hundredth,
Lookahead every fifth, AdaShift collects ten gradients first, RAdam begins without a variance. A plan has to hold for
all steps, so the one that is recorded should be the largest. It is looked for in three parts:

1. The optimizer steps until what it keeps no longer grows.
2. Numbers in its dictionaries (state, groups, attributes) that go up by one are its counts of steps.
3. They are set to a count that the usual periods divide, and a few steps are tried around it: periodic work coincides
   there.

In the end the counts are those before the largest of these steps. What is missed: work at a single count or at random,
periods that do not divide ``FAR``, counts in other places, and the very first step.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._mode_utils import no_dispatch

from sacplan.errors import SacplanWarning, TraceError
from sacplan.record.alive import AliveStorages
from sacplan.record.state import reachable

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
        TraceError: the step needs a closure. Most of these optimizers, as SAM, fail only when called without one.
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
        numbers = list(_numbers(optimizer, value_of))
        peak, grown = _step(optimizer)
        if grown <= 0:
            break
    else:
        _warn(optimizer, f"still keeps more after each of {_MOST_GROWTH} steps: later ones take more")
    # What the last step raised by one counts steps.
    counts = [at for at in numbers if _number(dict.get(at.holder, at.key), value_of) == at.number + 1]
    # Peak of a step to the count before it; None: the counts that the optimizer has by itself.
    tried: dict[int, int | None] = {peak: None}
    try:
        for count in range(FAR - 2, FAR + 2) if counts else ():
            _set(counts, count)
            tried.setdefault(_step(optimizer)[0], count)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _warn(
            optimizer, f"cannot take step {FAR:,} ({why}): the profile is of no step that is larger at times"
        )
    _set(counts, tried[max(tried)])


def _warn(optimizer: torch.optim.Optimizer, what: str) -> None:
    warnings.warn(f"{type(optimizer).__name__} {what}.", SacplanWarning, stacklevel=3)


class _Number(NamedTuple):
    """A number in a dictionary."""

    holder: dict[Any, Any]
    key: Any
    number: float


def _numbers(optimizer: torch.optim.Optimizer, value_of: ValueOf) -> Iterator[_Number]:
    """Yield the numbers in the dictionaries of an optimizer."""
    for holder in reachable(optimizer, but=(torch.nn.Module,)):
        for key, value in list(dict.items(holder)) if isinstance(holder, dict) else ():
            if (number := _number(value, value_of)) is not None:
                yield _Number(holder, key, number)


def _number(value: Any, value_of: ValueOf) -> float | None:
    if isinstance(value, torch.Tensor):
        known = value_of(value) if value.numel() == 1 else None
        with no_dispatch():
            return None if known is None else known.item()
    return value if type(value) in (int, float) else None


@torch.no_grad()
def _set(counts: Iterable[_Number], count: int | None) -> None:
    for holder, key, number in counts:
        value, new = holder[key], number if count is None else count
        if isinstance(value, torch.Tensor):
            value.fill_(new)
        else:
            holder[key] = type(value)(new)


def _step(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Step once; return the peak of the bytes that the optimizer uses, and how many more it keeps."""
    own = [v for v in reachable(optimizer, but=(torch.nn.Module,)) if isinstance(v, torch.Tensor)]
    with AliveStorages() as alive:
        alive.note(own + [t.grad for t in own if t.grad is not None])
        del own
        before = alive.bytes
        optimizer.step()
    return alive.peak_bytes, alive.bytes - before
