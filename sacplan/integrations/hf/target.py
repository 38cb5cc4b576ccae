"""What may be asked of a target, such as a model of Hugging Face, and what comes of it. torch is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from sacplan.errors import SacplanError

_Error = TypeVar("_Error", bound=Exception)

NAMED = ("hf:", "diffusers:")
"""How targets begin whose models the command line makes, and so takes options for."""

LORA = "Write r=16, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"


class TargetError(SacplanError):
    """A target that cannot be loaded, or whose own code failed."""


def hinted(error: _Error, *hints: str) -> _Error:
    """Attach hints on what to try to an error, and return it. Each hint becomes a line below the message."""
    error.__notes__ = hints  # type: ignore[attr-defined]  # PEP 678, without add_note in Python 3.10
    return error


def given(group: Any, *without: str) -> dict[str, Any]:
    """Return the options of a group that are given, by field. None means "not given"."""
    found = {f.name: getattr(group, f.name) for f in fields(group) if f.name not in without}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to make a model. A field is None if it is not asked for; ``fetch`` is whether its configuration may be."""

    batch: int | None = None
    seq: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    optimizer: str | None = None
    attn: Literal["sdpa", "eager"] | None = None
    lora: str | None = None
    load_in_4bit: bool | None = None
    bnb_4bit_quant_storage: str | None = None
    fetch: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name, but for ``fetch``: it does not change what is made."""
        # Defaults are in ``DEFAULTS`` and not in the fields: a default must not override what a plan's file says.
        return given(self, "fetch")


# Only what a model cannot be made without. All other options do nothing unless they are given.
DEFAULTS = ModelOptions(batch=1, seq=1024, dtype="bfloat16", optimizer="adamw")


@dataclass(frozen=True)
class Target:
    """The model, batch, loss and optimizer of a step.

    Attributes:
        name: as the user wrote it.
        model, batch, loss_fn, optimizer: as ``sacplan.profile`` takes them.
        make_batch: maps a batch size to a batch; None if the target makes batches of one size.
        facts: the options of a model of Hugging Face (batch, seq, dtype, ...), to be shown.
    """

    name: str
    model: Any
    batch: Any
    loss_fn: Any = None
    optimizer: Any = None
    make_batch: Callable[[int], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
