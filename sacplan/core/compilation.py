"""Which modules of a model are compiled, and how: a value that files can hold.

Compilation.of(["layers.*"], model)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from sacplan.core.elements import pattern_of
from sacplan.core.files import Name

Backend = Literal["inductor", "aot_eager"]


class Compilation(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The modules that ``torch.compile`` was called on, and its arguments.

    Attributes:
        modules: names of the modules that are compiled, each by itself; ``""`` is the model.
        backend, mode, dynamic, fullgraph, options: as for ``torch.compile``.
        recorded: whether the recorded step ran compiled. False for ``Profile.uncompiled``, from which proposals come,
            and which alone has the next two fields.
        broken: modules in which the compiler broke the graph: they are no units.
        untraced: names of ops for which the compiler traces other ops: plans keep their outputs.
    """

    modules: tuple[str, ...] = ("",)
    backend: Backend = "inductor"
    mode: Name | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    options: Mapping[str, bool | int | float | str] = {}
    recorded: bool = True
    broken: tuple[str, ...] = ()
    untraced: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``torch.compile``."""
        found = {"backend": self.backend, "dynamic": self.dynamic, "fullgraph": self.fullgraph}
        return {**found, "mode": self.mode, "options": dict(self.options) or None}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a dry run of the compiler leaves out, a sentence each."""
        found = []
        mode = self.mode or ""
        if mode == "reduce-overhead" or mode == "max-autotune" or self.options.get("triton.cudagraphs"):
            found.append(
                "compiled graphs run as CUDA graphs, and what their pool of memory holds besides is not counted"
            )
        if mode.startswith("max-autotune") or self.options.get("max_autotune"):
            found.append(
                "nothing is autotuned in a dry run: matrix products are those of the library, and kernels and "
                "workspaces that tuning would choose are not counted"
            )
        return tuple(found)

    def __str__(self) -> str:
        where = ", ".join(dict.fromkeys(pattern_of(fqn) for fqn in self.modules if fqn)) or "whole"
        how = [self.backend, *([] if self.mode is None else [self.mode])]
        return f"compiled {where} ({', '.join(how)})"
