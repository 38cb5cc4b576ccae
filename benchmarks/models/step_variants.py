"""Steps that differ from the one that was recorded: caches filled in the first forward, and a smaller last batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.harness.steps import LossFn, seed_everything
from sacplan._record.state import preserved_state
from sacplan._record.step import default_loss

Batch = dict[str, Any]


# --- a lazily filled cache -------------------------------------------------------------------------------------------


class _Rotated:
    """Rotates what a module returns by angles whose cosines and sines the first call computes and keeps.

    Code of rotary position embeddings does this. The ops that fill the table are in the first step only.
    """

    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        rows, width = y.shape[-2:]
        if self.cos is None or self.cos.shape[0] < rows or self.cos.shape[1] != width:
            inverse = 10000.0 ** -(torch.arange(0, width, 2, device=y.device) / width)
            angles = torch.arange(rows, device=y.device).float()[:, None] * inverse
            angles = torch.cat([angles, angles], dim=-1)[:, :width]
            self.cos, self.sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
        assert self.sin is not None
        return y * self.cos[:rows] + y.roll(width // 2, dims=-1) * self.sin[:rows]


def rotate_lazily(model: torch.nn.Module, batch: Any, loss_fn: LossFn | None = None) -> Callable[[], None]:
    """Give each layer a table of cosines and sines that its first forward fills.

    The first module without children that a layer calls (of the model's first ``ModuleList``) becomes one that
    rotates its output.

    Returns:
        A function that empties the tables.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    layers = list(lists[0]) if lists else [model]
    with _first_calls(layers) as first, preserved_state(model, None):
        seed_everything(0)
        (loss_fn or default_loss)(model, batch)
    rotated = list(dict.fromkeys(first.values()))
    if not rotated:
        raise ValueError(f"no layer of {type(model).__name__} calls a module that returns a tensor")
    for module in rotated:
        kind = type(module)
        module.__class__ = type(f"Rotated{kind.__name__}", (_Rotated, kind), {})

    def empty() -> None:
        for module in rotated:
            module.cos = module.sin = None  # type: ignore[assignment]

    empty()
    return empty


@contextmanager
def _first_calls(layers: list[torch.nn.Module]) -> Iterator[dict[torch.nn.Module, torch.nn.Module]]:
    """Map each layer to the first module without children that it calls while the body runs."""
    first: dict[torch.nn.Module, torch.nn.Module] = {}

    def note(layer: torch.nn.Module) -> Callable[..., None]:
        def hook(module: torch.nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point() and output.ndim > 1:
                first.setdefault(layer, module)

        return hook

    handles = [
        module.register_forward_hook(note(layer))
        for layer in layers
        for module in layer.modules()
        if not any(True for _ in module.children())
    ]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()


# --- a smaller last batch --------------------------------------------------------------------------------------------


def fewer_rows(batch: Batch, rows: int, of: int) -> Batch:
    """Return the first ``rows`` of ``of`` rows; inputs with several entries for each row keep them together."""

    def cut(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, list)) and len(value) % of == 0:
            return value[: len(value) * rows // of]
        return value

    return {k: cut(v) for k, v in batch.items()}


_ALONG_TEXT = (
    "input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids", "decoder_input_ids",
)  # fmt: skip


def shorter(batch: Batch, length: int, of: int) -> Batch:
    """Cut text to ``length`` tokens of ``of``, and with it the inputs that go along with the tokens."""

    def cut(name: str, value: Any) -> Any:
        text = name in _ALONG_TEXT and isinstance(value, torch.Tensor) and value.ndim == 2
        return value[:, :length].contiguous() if text and value.shape[1] == of else value

    return {k: cut(k, v) for k, v in batch.items()}


def smaller_batch(model: torch.nn.Module, batch: Batch, loss_fn: LossFn | None = None) -> tuple[Batch, str]:
    """Make a last batch: three quarters of the rows, and text of an odd length where the model takes it.

    Returns:
        The batch, and what it is in words.
    """
    leader = batch.get("input_ids", batch.get("labels"))
    text = batch.get("input_ids")
    of = min(len(v) for v in batch.values() if isinstance(v, torch.Tensor)) if leader is None else len(leader)
    rows = max(2, of * 3 // 4 // 2 * 2)  # even, for micro-batches
    found = fewer_rows(batch, rows, of)
    words = f"{rows} of {of} rows"
    if text is not None:
        of = text.shape[1]
        length = min(of - 1, (of - of // 8) | 1)
        cut = shorter(found, length, of)
        if _runs(model, cut, loss_fn):
            return cut, f"{words}, {length} of {of} tokens"
    return found, words


def _runs(model: torch.nn.Module, batch: Batch, loss_fn: LossFn | None) -> bool:
    """Whether the model takes a batch. It says no by an exception, of any kind."""
    seed_everything(0)
    with preserved_state(model, None):
        try:
            (loss_fn or default_loss)(model, batch)
        except Exception:  # whatever the model raises for a length that it does not take
            return False
    return True
