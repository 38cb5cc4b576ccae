"""draft"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from sacplan._recipes import PlannedForward

OTHER = CheckpointPolicy.PREFER_SAVE
LOG: list = []


class Tags:
    def __init__(self, sites):
        self.sites = frozenset(sites)


@functools.lru_cache(maxsize=None)
def tags_of(sites):
    return Tags(sites)


def checkpointed_for_compile(planned: PlannedForward, args: Any, kwargs: Any) -> Any:
    def call() -> Any:
        return planned.original(*args, **kwargs)

    return checkpoint(call, use_reentrant=False, context_fn=functools.partial(contexts, planned.tags))


def contexts(tags) -> Any:
        seen: dict[str, int] = {}
        log = []
        LOG.append(log)

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            name = str(func)
            occurrence = seen.get(name, 0)
            seen[name] = occurrence + 1
            log.append((name, occurrence))
            return CheckpointPolicy.PREFER_RECOMPUTE if (name, occurrence) in tags.sites else OTHER

        return create_selective_checkpoint_contexts(policy)
