"""The calls of a model in a step that is recorded: what tensors it got, and whether there were gradients.

with recorded_inputs(model) as calls:
...                     # a step
calls                       # [ModelCall(tensors=(("['input_ids']", (8, 512)), ...))]
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sacplan.core.model_calls import ModelCall, shapes_of


@contextlib.contextmanager
def recorded_inputs(model: torch.nn.Module) -> Iterator[Collection[ModelCall]]:
    """Collect the calls of a model inside: each different one once."""
    calls: dict[ModelCall, None] = {}

    def note(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        has = any(p.grad is not None for p in model.parameters())
        calls[ModelCall(shapes_of(args, kwargs), has)] = None

    # TorchScript compiles hooks, and cannot compile this one.
    if isinstance(model, torch.jit.ScriptModule):
        yield calls
        return
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
