"""A model with what a step needs, and the language models that several benchmarks plan for.

Models whose step is only planned are built on the meta device: they take no memory, and no time to initialize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sacplan
from benchmarks.harness.steps import LossFn, RealStep, real_step
from sacplan.integrations.hf import architectures

_SEED = 7


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what a step of it takes.

    Attributes:
        batch: a tensor, a tuple (positional) or a dictionary (by keyword), as for ``sacplan.profile``.
        loss_fn: None where the model returns its loss.
        optimizer: parameters -> optimizer, or None.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None = None
    optimizer: Any = None

    def profile(self, device: str = "h100", **options: Any) -> sacplan.Profile:
        """Profile the step."""
        return sacplan.profile(self.model, self.batch, self.loss_fn, self.optimizer, device=device, **options)

    def verify(self, plan: sacplan.Plan, **options: Any) -> Any:
        """Run the step with a plan, by default a fake one."""
        return sacplan.verify(self.model, self.batch, plan, self.loss_fn, self.optimizer, **options)

    def step(
        self, batch: Any = None, *, plan: sacplan.Plan | None = None, before: Sequence[Any] = ()
    ) -> RealStep:
        """Run and measure a real step on the batch or on another one."""
        batch = self.batch if batch is None else batch
        return real_step(
            self.model, batch, self.loss_fn, optimizer=self.optimizer, plan=plan, before=before, seed=_SEED
        )


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make an AdamW that needs no temporaries."""
    return torch.optim.AdamW(parameters, fused=True)


def text(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
    """Draw token ids, which are the labels, too."""
    ids = torch.randint(0, vocabulary, shape)
    return {"input_ids": ids, "labels": ids}


def empty_text(*shape: int) -> dict[str, torch.Tensor]:
    """Return the same without data: token ids on the meta device."""
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def on_meta(model_class: Any, config: Any) -> nn.Module:
    """Build a model of transformers on the meta device, in bfloat16."""
    with torch.device("meta"):
        return model_class(config).bfloat16()


def gpt2(rows: int = 16, **config: Any) -> Case:
    """Build GPT-2, 124 M parameters, with sequences of 1024 tokens; ``config`` changes its shape."""
    import transformers

    made = transformers.GPT2Config(**config)
    model = on_meta(transformers.GPT2LMHeadModel, made)
    return Case(model, text(made.vocab_size, rows, 1024), optimizer=torch.optim.AdamW)


def published_config(name: str, **config: Any) -> Any:
    """Return the configuration of a model that sacplan knows by name, without a cache; ``config`` changes it."""
    import transformers

    row = architectures.find(name)
    values = {**row.values, "use_cache": False, **config}
    return transformers.AutoConfig.for_model(row.model_type, **values)


def published(name: str, **config: Any) -> nn.Module:
    """Build such a model on the meta device, in bfloat16."""
    import transformers

    made = published_config(name, **config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made).bfloat16().train()


def example(layers: int = 12) -> Case:
    """Return the example's transformer, float32, on 8 x 1024 tokens; the loss is the sum of its outputs."""
    from examples.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(n_layers=layers)
    return Case(model, torch.randint(0, 8192, (8, 1024)))
