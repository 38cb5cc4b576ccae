"""The names of optimizers, on the command line and in Python. The help needs them, so torch is not imported here.

``optimizers.json`` next to this file has a row for each. A name is looked up by its letters and digits alone:
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
    """An optimizer that can be given by name. Called with parameters, it imports what it needs and makes it.

    Attributes:
        name: as it is written in tables.
        path: its class, ``module:Class``.
        arguments: keyword arguments of the class.
        aliases: other names, such as those of the Trainer's ``optim=``.
        sizes: the path of a class that takes as much memory, if the real one cannot run on fake tensors, or should not
            have to be installed for a comparison.
        code: the code of ``written``; if empty, ``path`` and ``arguments`` make it.
        install: the package to install for a class of another library.
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
        """Python code that makes the optimizer from ``params``."""
        more = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return self.code or f"{self.path.replace(':', '.')}(params{more})"

    @property
    def make(self) -> Any:
        """``params -> optimizer``: torch's class if there are no ``arguments``, as ``fit`` recognises it; else this."""
        return _loaded(self.path) if self.path.startswith("torch.optim:") and not self.arguments else self

    @property
    def steps_shards(self) -> bool:
        """Whether the optimizer steps sharded parameters (``DTensor``). Those of bitsandbytes do not."""
        return self.install != "bitsandbytes"

    def __call__(self, params: Any) -> Any:
        """Make the optimizer.

        On fake and meta parameters, the class of ``sizes`` takes the place of the real one, if there is one for the
        device.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        from sacplan.device.kernels import active_device

        given, spec = list(params), active_device()
        without_data = all(isinstance(p, FakeTensor) or getattr(p, "is_meta", False) for p in given)
        has_sizes = without_data and self.has_sizes_for(None if spec is None else spec.kind)
        return (_loaded(self.sizes) if has_sizes else self.imported())(given, **self.arguments)

    def has_sizes_for(self, kind: str | None) -> bool:
        """Whether ``sizes`` takes the place of the real class in a fake step on a kind of device.

        Its sizes are those of CUDA's fused update. On a CPU bitsandbytes updates in float32 copies, so there the real
        class runs if it is installed.
        """
        own_kernels = kind == "cpu" and self.install == "bitsandbytes"
        return bool(self.sizes) and not (own_kernels and importlib.util.find_spec(self.install) is not None)

    def imported(self) -> Any:
        """Return the real class.

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
"""All optimizers that have a name.

An optimizer of another library that has no ``sizes`` is traced with its own class, so the library has to be
installed. Managed memory of paged optimizers counts on the host (``host_state.py``). Adafactor of transformers works
out its own learning rate unless ``relative_step`` is off, which the Trainer sets, too. The class for Muon is our own,
so ``code`` says what a user writes instead.
"""

NONE = "none"
"""The name, on the command line, for a step without an optimizer."""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY = {_key(name): one for one in OPTIMIZERS for name in (one.name, *one.aliases)}
BY_NAME = {one.name: one for one in OPTIMIZERS}
COMPARED = ("adamw-fused", "adamw-8bit")
"""Names of those that a verdict compares with Adam and AdamW."""
COMPARED_ON_HOST = ("paged-adamw-8bit", "adamw-offload", "adamw-offload-gradients")
"""Names of those that a verdict adds if nothing else fits: their state is on the host."""


def named_optimizer(name: str) -> NamedOptimizer:
    """Return the optimizer of a name.

    Raises:
        ValueError: no optimizer has the name. The message lists similar names, or all.
    """
    found = _BY_KEY.get(_key(name))
    if found is None:
        near = did_you_mean(_key(name), _BY_KEY, lambda key: _BY_KEY[key].name)
        hint = near or f" Known are {', '.join(BY_NAME)}."
        raise ValueError(f"unknown optimizer {name!r}.{hint}")
    return found
