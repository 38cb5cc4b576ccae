"""The value that a target of the command line is loaded into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """The model, batch, loss and optimizer of a step.

    Attributes:
        name: as the user wrote it.
        model, batch, loss_fn, optimizer: as ``sacplan.profile`` takes them.
        make_batch: maps a batch size to a batch; None if the target makes batches of one size.
        facts: the options of an ``hf:`` target (batch, seq, dtype, ...), to be shown.
    """

    name: str
    model: Any
    batch: Any
    loss_fn: Any = None
    optimizer: Any = None
    make_batch: Callable[[int], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
