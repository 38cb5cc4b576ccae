"""The modules that ``fully_shard`` is called on, from patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sacplan.core.elements import names_module
from sacplan.core.program import is_inside
from sacplan.errors import TraceError

if TYPE_CHECKING:
    from torch import nn


def matching(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match (``*`` also matches dots), in their order; of nested matches the outermost.

    Raises:
        TraceError: a pattern that matches nothing; it lists near names.
    """
    if isinstance(patterns, str) or not patterns:
        raise TraceError(
            f"the units of FSDP2 are {patterns!r}; give a list of patterns for module names, such as "
            '["layers.*", ""] ("" is the model itself).'
        )
    chosen: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if names_module(pattern, name)}
        if not matches:
            raise TraceError(_unknown(pattern, names))
        # ``layers.*`` matches what is inside of a layer as well; only the layer is meant.
        chosen |= {name for name in matches if not any(is_inside(name, other) for other in matches)}
    return tuple(name for name in names if name in chosen)


def units_of(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that patterns name, in the order of ``named_modules()``; ``""`` is the model itself.

    Containers without a forward, such as a ``ModuleList``, are none: their modules are meant.

    Raises:
        TraceError: as for ``matching``.
    """
    from torch import nn

    names = [
        fqn
        for fqn, module in model.named_modules()
        if type(module).forward is not nn.Module.forward or "forward" in vars(module)
    ]
    return matching(names, patterns)


def _unknown(pattern: str, names: Sequence[str]) -> str:
    known = [name for name in names if name]
    near = difflib.get_close_matches(pattern, known, n=4, cutoff=0.4)
    near += [name for name in known if name.endswith(f".{pattern}") and name not in near][:3]
    listed = ", ".join(map(repr, near or known[:6]))
    return (
        f"units: no module matches {pattern!r}; {'near names are' if near else 'modules are'} {listed}. Patterns are "
        'matched whole, "*" also matches dots, and "" is the model itself.'
    )
