"""The modules that ``fully_shard`` is called on, from patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sacplan.core.names import matching_modules
from sacplan.errors import TraceError

if TYPE_CHECKING:
    from torch import nn


def units_of(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that patterns name, in the order of ``named_modules()``; ``""`` is the model itself.

    Containers without a forward, such as a ``ModuleList``, are none: their modules are meant.

    Raises:
        TraceError: a pattern that matches nothing; it lists near names.
    """
    if isinstance(patterns, str) or not patterns:
        raise TraceError(
            f"the units of FSDP2 are {patterns!r}; give a list of patterns for module names, such as "
            '["layers.*", ""] ("" is the model itself).'
        )
    from torch import nn

    names = [
        fqn
        for fqn, module in model.named_modules()
        if type(module).forward is not nn.Module.forward or "forward" in vars(module)
    ]
    found = set(matching_modules(names, patterns, "units"))
    return tuple(name for name in names if name in found)
