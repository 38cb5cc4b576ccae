"""Changes of a model's configuration that are worth another recording, and how they are taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._profile.profile import Profile, trace_step
from sacplan._record.step import LossFn


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a configuration.

    Attributes:
        name, says: for people.
        code: what makes it.
        attribute, value: what it sets.
        config: of whom.
    """

    name: str
    says: str
    code: str
    attribute: str
    value: Any
    config: Any

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Inside, the configuration is changed."""
        before = getattr(self.config, self.attribute)
        setattr(self.config, self.attribute, self.value)
        try:
            yield
        finally:
            setattr(self.config, self.attribute, before)

    def recorded(
        self, like: Profile, model: torch.nn.Module, batch: Any, loss_fn: LossFn | None, optimizer: Any
    ) -> Profile:
        """The step with the change, recorded as the profile was."""
        with self.made():
            again = trace_step(
                model, batch, loss_fn, optimizer, like.spec, like.runtime, like.trace, mode=like.mode
            )
        return again.on_ranks(like.ranks)


def changes(model: torch.nn.Module) -> Iterator[Change]:
    """Those that a model of transformers could do with."""
    config = getattr(model, "config", None)
    if model.training and getattr(config, "use_cache", False) is True:
        yield Change(
            "use_cache",
            "use_cache=False (the output otherwise keeps keys and values that training does not read)",
            "model.config.use_cache = False",
            "use_cache",
            False,
            config,
        )
    if getattr(config, "_attn_implementation", None) == "eager" and getattr(model, "_supports_sdpa", False):
        yield Change(
            "sdpa",
            'Attention with scaled_dot_product_attention instead of "eager", which keeps the attention scores,',
            'model.set_attn_implementation("sdpa")',
            "_attn_implementation",
            "sdpa",
            config,
        )
