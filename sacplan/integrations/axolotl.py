"""Plans in axolotl: a plugin that plans for the trainer which a configuration describes.

    plugins:
      - sacplan.integrations.axolotl.SacplanPlugin
    sacplan:
      budget: 22GiB

The trainer is one of ``transformers`` or TRL, so the plan is made and carried out as in ``transformers.py``. It takes
the place of ``gradient_checkpointing``. Written for axolotl 0.19.
"""

from __future__ import annotations

from typing import Any

import transformers
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from sacplan.integrations.transformers import PlanCallback, profile_trainer
from sacplan.planning.planning import plan


class Sacplan(BaseModel, extra="forbid"):
    """The options under ``sacplan:``, all optional.

    Attributes:
        budget: of the whole step, such as "22GiB"; by default what the device holds.
        device: what the step will run on, see ``sacplan.devices()``; by default the local GPU.
        techniques: what a plan may do; by default recomputation.
    """

    budget: str | float | None = None
    device: str = "cuda"
    techniques: list[str] = ["recompute"]


class SacplanArgs(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    sacplan: Sacplan = Sacplan()


class SacplanPlugin(BasePlugin):  # type: ignore[misc]  # axolotl has no annotations here
    """Plan for the trainer that axolotl has made, and train with the plan."""

    def get_input_args(self) -> str:
        """Return the name of the options."""
        return "sacplan.integrations.axolotl.SacplanArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[transformers.TrainerCallback]:
        """Return the callback that applies the plan.

        Raises:
            InfeasibleBudget: no plan holds the budget.
            TraceError: the trainer trains in a way that cannot be profiled.
        """
        asked = Sacplan(**(cfg.get("sacplan") or {}))
        chosen = plan(
            profile_trainer(trainer, device=asked.device), asked.budget, techniques=tuple(asked.techniques)
        )
        return [PlanCallback(chosen)]
