"""The value that a command line's target is loaded into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a step is made of.

    Attributes:
        name: as it was written.
        model, batch, loss_fn, optimizer: as ``sacplan.profile`` takes them.
        make_batch: batch size to batch, where the target has it.
        facts: what was chosen for an ``hf:`` target (batch, seq, dtype, ...), to be shown.
    """

    name: str
    model: Any
    batch: Any
    loss_fn: Any = None
    optimizer: Any = None
    make_batch: Callable[[int], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
