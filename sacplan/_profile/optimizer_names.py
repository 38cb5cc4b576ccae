"""The names of optimizers, on the command line and in Python. torch is not imported: the help needs this module.

A name is looked up by its letters and digits alone: ``adamw_8bit``, ``AdamW8bit`` and ``adamw-8bit`` are the same.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer that has a name.

    Attributes:
        name: as it is written in tables.
        says: in a sentence.
        path: its class, ``module:Class``.
        arguments: of the class, beside the parameters.
        aliases: other names, such as those of the Trainer's ``optim=``.
        sizes: of a class that cannot run on fake tensors, or should not have to be installed for a comparison: the
            name, in ``optimizer_table.py``, of one that takes as much memory.
        code: what makes it; by default written from ``path`` and ``arguments``.
        install: what to install, where it is of another library.
    """

    name: str
    says: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    code: str = ""
    install: str = ""
    sizes: str = ""

    @property
    def written(self) -> str:
        """The code that makes it from ``params``."""
        more = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return self.code or f"{self.path.replace(':', '.')}(params{more})"


# An optimizer of another library without ``sizes`` is traced with its own class, so the library has to be installed.
_BNB: dict[str, Any] = {"install": "bitsandbytes"}
_AO: dict[str, Any] = {"install": "torchao"}

OPTIMIZERS = (
    NamedOptimizer("adamw", "AdamW", "torch.optim:AdamW", aliases=("adamw-torch",)),
    NamedOptimizer(
        "adamw-fused",
        "AdamW with fused=True",
        "torch.optim:AdamW",
        {"fused": True},
        ("adamw-torch-fused", "fused-adamw"),
    ),
    NamedOptimizer(
        "adamw-8bit",
        "AdamW with 8-bit state (bitsandbytes)",
        "bitsandbytes.optim:AdamW8bit",
        aliases=("adamw-bnb-8bit", "bnb-adamw-8bit"),
        sizes="AdamW8bit",
        **_BNB,
    ),
    NamedOptimizer("sgd", "SGD without momentum", "torch.optim:SGD"),
    NamedOptimizer("sgd-momentum", "SGD with momentum", "torch.optim:SGD", {"momentum": 0.9}, ("sgdm",)),
    NamedOptimizer("adam", "Adam", "torch.optim:Adam"),
    # Managed memory may be on the host when the device is full, so that is where this state counts (``host_state.py``).
    NamedOptimizer(
        "paged-adamw",
        "AdamW with float32 state in managed memory (bitsandbytes)",
        "bitsandbytes.optim:PagedAdamW",
        aliases=("paged-adamw-32bit",),
        **_BNB,
    ),
    NamedOptimizer(
        "paged-adamw-8bit",
        "AdamW with 8-bit state in managed memory (bitsandbytes)",
        "bitsandbytes.optim:PagedAdamW8bit",
        sizes="PagedAdamW8bit",
        **_BNB,
    ),
    NamedOptimizer("lion", "Lion (bitsandbytes)", "bitsandbytes.optim:Lion", aliases=("lion-32bit",), **_BNB),
    NamedOptimizer(
        "lion-8bit", "Lion with 8-bit state (bitsandbytes)", "bitsandbytes.optim:Lion8bit", **_BNB
    ),
    NamedOptimizer(
        "paged-lion",
        "Lion with float32 state in managed memory (bitsandbytes)",
        "bitsandbytes.optim:PagedLion",
        aliases=("paged-lion-32bit",),
        **_BNB,
    ),
    NamedOptimizer(
        "paged-lion-8bit",
        "Lion with 8-bit state in managed memory (bitsandbytes)",
        "bitsandbytes.optim:PagedLion8bit",
        **_BNB,
    ),
    NamedOptimizer(
        "adafactor",
        "Adafactor of transformers, as the Trainer makes it",
        "transformers.optimization:Adafactor",
        # By default the class works out its own learning rate (``relative_step``). The Trainer switches that off.
        {"lr": 1e-3, "scale_parameter": False, "relative_step": False},
        ("adafactor-transformers",),
        install="transformers",
    ),
    NamedOptimizer("adafactor-torch", "Adafactor of torch", "torch.optim:Adafactor"),
    # The class is our own, so ``code`` says what a user would write instead of its path.
    NamedOptimizer(
        "muon",
        "Muon for matrices, AdamW for embeddings, heads and vectors",
        "sacplan._profile.optimizer_table:MuonAndAdamW",
        code="[torch.optim.Muon(hidden_matrices), torch.optim.AdamW(all_others)]",
    ),
    NamedOptimizer(
        "adamw-8bit-torchao",
        "AdamW with 8-bit state (torchao)",
        "torchao.optim:AdamW8bit",
        aliases=("adamw-torch-8bit",),
        **_AO,
    ),
    NamedOptimizer(
        "adamw-4bit",
        "AdamW with 4-bit state (torchao)",
        "torchao.optim:AdamW4bit",
        aliases=("adamw-torch-4bit", "adamw-4bit-torchao"),
        **_AO,
    ),
    NamedOptimizer(
        "adamw-fp8",
        "AdamW with float8 state (torchao)",
        "torchao.optim:AdamWFp8",
        aliases=("adamw-fp8-torchao",),
        **_AO,
    ),
    NamedOptimizer(
        "adamw-offload",
        "AdamW on the CPU (torchao)",
        "torchao.optim:CPUOffloadOptimizer",
        aliases=("adamw-cpu-offload", "cpu-offload"),
        sizes="CPUOffloadOptimizer",
        **_AO,
    ),
    NamedOptimizer(
        "adamw-offload-gradients",
        "AdamW on the CPU, gradients too (torchao)",
        "torchao.optim:CPUOffloadOptimizer",
        {"offload_gradients": True},
        sizes="CPUOffloadOptimizer",
        **_AO,
    ),
    NamedOptimizer("rmsprop", "RMSprop", "torch.optim:RMSprop"),
    NamedOptimizer("adagrad", "Adagrad", "torch.optim:Adagrad"),
)
NONE = "none"
"""The name, on the command line, for a step without an optimizer."""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Aliases lead to the same entry. Names are compared without case and punctuation.
_BY_KEY = {_key(name): one for one in OPTIMIZERS for name in (one.name, *one.aliases)}
NAMES = tuple(one.name for one in OPTIMIZERS)


def named_optimizer(name: str) -> NamedOptimizer:
    """Return the optimizer of a name.

    Raises:
        ValueError: there is none. The message lists the names that are like it, or all.
    """
    found = _BY_KEY.get(_key(name))
    if found is None:
        near = difflib.get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.8)
        # Two similar keys may be aliases of one optimizer, which is suggested once.
        like = [_BY_KEY[key].name for key in near]
        known = (
            f"Did you mean {' or '.join(dict.fromkeys(like))}?" if like else f"Known are {', '.join(NAMES)}."
        )
        raise ValueError(f"unknown optimizer {name!r}. {known}")
    return found
