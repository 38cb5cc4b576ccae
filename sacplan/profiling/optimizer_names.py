"""The names of optimizers, on the command line and in Python. torch is not imported: the help needs this module.

``optimizers.json`` beside this file has a row for each. A name is looked up by its letters and digits alone:
``adamw_8bit``, ``AdamW8bit`` and ``adamw-8bit`` are the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sacplan.core.near import did_you_mean
from sacplan.errors import TraceError


@dataclass(frozen=True, slots=True, eq=False)
class NamedOptimizer:
    """An optimizer that has a name. Called with parameters, it makes one; its library is imported when it first does.

    Attributes:
        name: as it is written in tables.
        path: its class, ``module:Class``.
        arguments: of the class, beside the parameters.
        aliases: other names, such as those of the Trainer's ``optim=``.
        sizes: of a class that cannot run on fake tensors, or should not have to be installed for a comparison: the
            path of one that takes as much memory.
        code: what makes it; by default written from ``path`` and ``arguments``.
        install: what to install, where it is of another library.
    """

    name: str
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

    @property
    def make(self) -> Any:
        """``params -> optimizer``: of torch's own without arguments the class itself, which ``fit`` recognises."""
        return _loaded(self.path) if self.path.startswith("torch.optim:") and not self.arguments else self

    @property
    def steps_shards(self) -> bool:
        """Whether it steps parameters that are sharded (``DTensor``). Those of bitsandbytes do not."""
        return self.install != "bitsandbytes"

    def __call__(self, params: Any) -> Any:
        """Make the optimizer.

        The sizes stand in only where nothing is computed. A real step runs the real class, and so does a fake one for
        which there are no sizes.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        from sacplan.device.kernels import active_device

        given, spec = list(params), active_device()
        without_data = all(isinstance(p, FakeTensor) or getattr(p, "is_meta", False) for p in given)
        has_sizes = without_data and self.has_sizes_for(None if spec is None else spec.kind)
        return (_loaded(self.sizes) if has_sizes else self.imported())(given, **self.arguments)

    def has_sizes_for(self, kind: str | None) -> bool:
        """Whether sizes take the place of the class in a fake step on a kind of device.

        They are those of CUDA's fused update. On a CPU bitsandbytes updates in float32 copies, which its class shows
        where it is installed.
        """
        own_kernels = kind == "cpu" and self.install == "bitsandbytes"
        return bool(self.sizes) and not (own_kernels and importlib.util.find_spec(self.install) is not None)

    def imported(self) -> Any:
        """Return the class.

        Raises:
            TraceError: its library is not installed.
        """
        try:
            return _loaded(self.path)
        except ModuleNotFoundError as error:
            raise TraceError(
                f"optimizer {self.name!r} is {self.path.replace(':', '.')}, and {error.name} is not installed; run: "
                f"pip install {self.install or self.path.partition(':')[0]}"
            ) from error


def _loaded(path: str) -> Any:
    library, _, kind = path.partition(":")
    return getattr(importlib.import_module(library), kind)


def _read() -> tuple[NamedOptimizer, ...]:
    rows = json.loads(Path(__file__).with_name("optimizers.json").read_text(encoding="utf-8"))
    return tuple(NamedOptimizer(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows)


OPTIMIZERS = _read()
"""All that have a name.

One of another library without ``sizes`` is traced with its own class, so the library has to be installed. Managed
memory of the paged ones counts on the host (``host_state.py``). Adafactor of transformers works out its own learning
rate unless ``relative_step`` is off, as the Trainer has it. The class for Muon is our own, so ``code`` says what a
user writes instead.
"""

NONE = "none"
"""The name, on the command line, for a step without an optimizer."""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Aliases lead to the same entry. Names are compared without case and punctuation.
_BY_KEY = {_key(name): one for one in OPTIMIZERS for name in (one.name, *one.aliases)}
BY_NAME = {one.name: one for one in OPTIMIZERS}
COMPARED = ("adamw-fused", "adamw-8bit")
"""Those that a verdict compares with Adam and AdamW."""
COMPARED_ON_HOST = ("paged-adamw-8bit", "adamw-offload", "adamw-offload-gradients")
"""Those that it adds where these do not fit: their state is on the host."""


def named_optimizer(name: str) -> NamedOptimizer:
    """Return the optimizer of a name.

    Raises:
        ValueError: there is none. The message lists the names that are like it, or all.
    """
    found = _BY_KEY.get(_key(name))
    if found is None:
        near = did_you_mean(_key(name), _BY_KEY, lambda key: _BY_KEY[key].name)
        hint = near or f" Known are {', '.join(BY_NAME)}."
        raise ValueError(f"unknown optimizer {name!r}.{hint}")
    return found
