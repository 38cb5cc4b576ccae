"""A small model in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning
import torch

from tests.support.trainers import llama


class Llama(lightning.LightningModule):  # type: ignore[name-defined,misc]
    """Trains on batches by keyword, and notes how long each was."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["input_ids"].shape[1])
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def quiet_trainer(*callbacks: Any, **options: Any) -> Any:
    """A Trainer on the CPU that writes and shows nothing, unless ``options`` say so."""
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(
        accelerator="cpu", callbacks=list(callbacks), **dict.fromkeys(shown, False) | options
    )
