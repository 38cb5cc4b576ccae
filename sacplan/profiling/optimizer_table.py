"""Make optimizers by their names, from the classes of the libraries that have them.

A class of another library is traced as it is: bitsandbytes registers fake kernels of its updates. A few
classes of ours stand in this table. ``AdamW8bitSizes`` has the sizes of bitsandbytes' AdamW8bit, so that other
optimizers can be compared with it where that library is not installed (``tests/profiling/test_optimizer_table.py``
checks the sizes), and so has its paged one. ``MuonAndAdamW`` steps two optimizers, as people do with Muon.
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
"""Elements of a parameter from which on bitsandbytes keeps its state in 8 bits."""
_LONG = 16
"""Rows to columns, or columns to rows, from which on a matrix counts as an embedding, a head or an adapter."""

Factory = Callable[[Any], torch.optim.Optimizer]


class AdamW8bitSizes(torch.optim.Optimizer):
    """The memory of ``bitsandbytes.optim.AdamW8bit``, for fake steps; it computes nothing.

    Two states of one byte an element with a float32 scale per block of 256, of parameters with at least 4096 elements;
    two of float32 of smaller ones. Two tables of 256 float32 values serve all parameters. Fused kernels, without
    temporaries.
    """

    stands_for = "AdamW8bit"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state at the first call; touch it."""
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
            # A float of one byte in the place of an integer: ``data_rules`` follows the values of integers, and would
            # compute them.
            state[f"state{i}"] = new(p.shape, dtype=torch.float8_e4m3fn)
            state[f"absmax{i}"] = new((blocks,), dtype=torch.float32)
            table = f"qmap{i}"
            state[table] = new((256,), dtype=torch.float32) if tables is None else tables[table]


class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the matrices of hidden layers, and ``torch.optim.AdamW`` for all other parameters.

    Names are not known here, so shapes decide: a matrix that is 16 times as long as wide or more is taken for an
    embedding, a head or an adapter, which Muon is not for.
    """

    stands_for = "Muon + AdamW"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        given = [p for group in self.param_groups for p in group["params"]]
        # Muon takes matrices alone. Those that are long or wide are left to AdamW: embeddings, heads and adapters.
        hidden = [p for p in given if p.dim() == 2 and max(p.shape) < _LONG * min(p.shape)]
        chosen = {id(p) for p in hidden}
        others = [p for p in given if id(p) not in chosen]
        # torch refuses an optimizer without parameters, so either of the two may be missing.
        self._parts: list[torch.optim.Optimizer] = []
        self._parts += [torch.optim.Muon(hidden)] if hidden else []
        self._parts += [torch.optim.AdamW(others)] if others else []
        for part in self._parts:
            part.state = self.state  # one state, which the recorder finds

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self._parts:
            part.step()


class PagedAdamW8bitSizes(AdamW8bitSizes):
    """The memory of ``bitsandbytes.optim.PagedAdamW8bit``; ``host_state.py`` says which state is paged."""

    stands_for = "PagedAdamW8bit"
    is_paged = True


def factory_of(optimizer: Any, spec: DeviceSpec) -> Any:
    """Return what makes the optimizer of a step that is about to be traced, if it is given by its name.

    An optimizer and any other callable are returned as they are.

    Raises:
        TraceError: no optimizer has this name, or its library is not installed.
    """
    # A name first: it may stand for a factory of this table, which is prepared below like one that the user gave.
    if isinstance(optimizer, str):
        try:
            optimizer = named_optimizer(optimizer).make
        except ValueError as error:
            raise TraceError(f"{error} Or give an optimizer, or a callable `params -> optimizer`.") from error
    # Imported here and not in the step: bitsandbytes makes tables while it is imported, and would keep fake ones.
    if isinstance(optimizer, NamedOptimizer) and not optimizer.has_sizes_for(spec.kind):
        optimizer.imported()
    return optimizer
