"""Changes of a model that are worth another recording. Each is undone when the recording ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from sacplan.core.program import Phase
from sacplan.device.attention_repairs import repaired
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import trace_step
from sacplan.record.step import LossFn

_UNFUSED = "aten._safe_softmax.default"  # only the unfused path of scaled_dot_product_attention runs this op


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """An assignment: ``config.attribute = value``."""

    name: str
    says: str
    code: str
    attribute: str
    value: Any
    config: Any

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Have the model changed inside of the ``with`` block."""
        before = getattr(self.config, self.attribute)
        setattr(self.config, self.attribute, self.value)
        try:
            yield
        finally:
            setattr(self.config, self.attribute, before)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Calls of attention that a fused kernel can run, in place of those that none can.

    ``found`` is filled during the recording: the reason why no fused kernel could run a call, to the code that helps.
    """

    found: dict[str, str] = field(default_factory=dict)
    name: str = "fused-attention"

    @property
    def says(self) -> str:
        """What was found in the recording."""
        return f"Attention runs as separate ops because {', and '.join(self.found)}: a fused kernel"

    @property
    def code(self) -> str:
        """The lines that help."""
        return "\n".join(self.found.values())

    def made(self) -> AbstractContextManager[None]:
        """Have the model changed inside of the ``with`` block."""
        return repaired(self.found)


Change: TypeAlias = ConfigChange | FusedAttention
"""A change of a model. Read ``says`` and ``code`` after the recording: they may depend on what happened in it."""


def recorded(
    change: Change, like: Profile, model: torch.nn.Module, batch: Any, loss_fn: LossFn | None, optimizer: Any
) -> Profile:
    """Record the step with a change, in the same way as the profile ``like``."""
    with change.made():
        return trace_step(
            model,
            batch,
            loss_fn,
            optimizer,
            like.spec,
            like.runtime,
            like.trace,
            mode=like.mode,
            ranks=like.ranks,
            accumulation_steps=like.fingerprint.setup.accumulation_steps,
            routing=like.fingerprint.setup.routing,
            compiled=like.fingerprint.setup.compiled,
        )


def changes(profile: Profile, model: torch.nn.Module) -> Iterator[Change]:
    """Yield the changes from which a step may profit."""
    config = getattr(model, "config", None)
    # Only generation reads a cache. In training nobody does, but the output keeps it alive.
    if model.training and getattr(config, "use_cache", False) is True:
        yield ConfigChange(
            "use_cache",
            "use_cache=False (the output otherwise keeps keys and values that training does not read)",
            "model.config.use_cache = False",
            "use_cache",
            False,
            config,
        )
    # Both names are private to transformers: what it runs now, and whether it could run the other one.
    if getattr(config, "_attn_implementation", None) == "eager" and getattr(model, "_supports_sdpa", False):
        yield ConfigChange(
            "sdpa",
            'Attention with scaled_dot_product_attention instead of "eager", which keeps the attention scores,',
            'model.set_attn_implementation("sdpa")',
            "_attn_implementation",
            "sdpa",
            config,
        )
    # Only a fake step of a GPU goes through our choice of kernels, which the repair changes. A real step has
    # run what the hardware offers.
    if profile.trace == "fake" and profile.spec.kind == "cuda" and _is_unfused(profile):
        yield FusedAttention()


def _is_unfused(profile: Profile) -> bool:
    return any(op.phase == Phase.FORWARD and op.name == _UNFUSED for op in profile.recorded.ops)
