"""Make optimizers by their names, from the classes of the libraries that have them.

Classes of other libraries are traced unchanged: bitsandbytes registers fake kernels of its updates. A few classes are
our own. ``AdamW8bitSizes`` and ``PagedAdamW8bitSizes`` have the sizes of bitsandbytes' classes, so that other
optimizers can be compared with these where bitsandbytes is not installed (``tests/profiling/test_optimizer_table.py``
checks the sizes). ``MuonAndAdamW`` steps two optimizers, as people do with Muon.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sacplan.device.devices import DeviceSpec
from sacplan.errors import TraceError
from sacplan.profiling.optimizer_names import NamedOptimizer, named_optimizer

BLOCK = 256
"""Elements that share a scale in the 8-bit state of bitsandbytes."""
SMALLEST = 4096
"""Least elements of a parameter whose state bitsandbytes keeps in 8 bits."""
_LONG = 16
"""Least ratio of the longer to the shorter side of a matrix that counts as an embedding, a head or an adapter."""

Factory = Callable[[Any], torch.optim.Optimizer]


class AdamW8bitSizes(torch.optim.Optimizer):
    """The memory of ``bitsandbytes.optim.AdamW8bit``, for fake steps; it computes nothing.

    A parameter of at least 4096 elements has two states of one byte an element, with a float32 scale per block of 256.
    A smaller one has two float32 states. All parameters share two tables of 256 float32 values. The kernels are fused,
    without temporaries.
    """

    stands_for = "AdamW8bit"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make state that is missing, and run one op that reads and writes all of it."""
        # As in the real class, frozen parameters and those that got no gradient have no state.
        with_gradient = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in with_gradient:
            if not self.state[p]:
                self._make(self.state[p], p)
        # One op that reads and writes the state and allocates nothing, as the fused kernel does.
        states = [t for p in with_gradient for t in self.state[p].values()]
        torch.ops.sacplan.fused_update_(with_gradient, [p.grad for p in with_gradient], states)

    def _make(self, state: dict[str, Any], p: torch.Tensor) -> None:
        new = functools.partial(torch.empty, device=p.device)
        if p.numel() < SMALLEST:
            state |= {name: new(p.shape, dtype=torch.float32) for name in ("state1", "state2")}
            return
        # bitsandbytes makes its two tables once, and all parameters share them.
        tables = next((s for s in self.state.values() if "qmap1" in s), None)
        # Rounded up, since the last block may be shorter.
        blocks = -(-p.numel() // BLOCK)
        for i in "12":
            # A one-byte float instead of an integer, since ``data_rules`` would follow the values of integers, and
            # compute them.
            state[f"state{i}"] = new(p.shape, dtype=torch.float8_e4m3fn)
            state[f"absmax{i}"] = new((blocks,), dtype=torch.float32)
            table = f"qmap{i}"
            state[table] = new((256,), dtype=torch.float32) if tables is None else tables[table]


class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the matrices of hidden layers, and ``torch.optim.AdamW`` for all other parameters.

    An optimizer gets no names of parameters, so shapes decide: a matrix with one side at least 16 times the other is
    taken for an embedding, a head or an adapter, which Muon is not for.
    """

    stands_for = "Muon + AdamW"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        given = [p for group in self.param_groups for p in group["params"]]
        # Muon takes matrices only. Long and wide ones (embeddings, heads, adapters) are left to AdamW.
        hidden = [p for p in given if p.dim() == 2 and max(p.shape) < _LONG * min(p.shape)]
        chosen = {id(p) for p in hidden}
        others = [p for p in given if id(p) not in chosen]
        # torch refuses an optimizer without parameters, so each is made only if it has some.
        self._parts: list[torch.optim.Optimizer] = []
        self._parts += [torch.optim.Muon(hidden)] if hidden else []
        self._parts += [torch.optim.AdamW(others)] if others else []
        for part in self._parts:
            part.state = self.state  # shared, so that the recorder finds it in one place

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both optimizers."""
        for part in self._parts:
            part.step()


class PagedAdamW8bitSizes(AdamW8bitSizes):
    """The memory of ``bitsandbytes.optim.PagedAdamW8bit``; ``host_state.py`` says which state is paged."""

    stands_for = "PagedAdamW8bit"
    is_paged = True


def factory_of(optimizer: Any, spec: DeviceSpec) -> Any:
    """Return the factory of an optimizer that is given by name; anything else is returned unchanged.

    The library is imported if the step that is traced next needs it.

    Raises:
        TraceError: no optimizer has this name, or its library is not installed.
    """
    # A name first: it may stand for a ``NamedOptimizer``, which is prepared below as if the caller had given it.
    if isinstance(optimizer, str):
        try:
            optimizer = named_optimizer(optimizer).make
        except ValueError as error:
            raise TraceError(f"{error} Or give an optimizer, or a callable `params -> optimizer`.") from error
    # Imported here and not in the step: bitsandbytes makes tables while it is imported, and would keep fake ones.
    if isinstance(optimizer, NamedOptimizer) and not optimizer.has_sizes_for(spec.kind):
        optimizer.imported()
    return optimizer
