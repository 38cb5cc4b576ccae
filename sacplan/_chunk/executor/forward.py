"""The stand-in for the forward of a module that runs in slices.

``"rest"``: what the module computes stays lazy, and so does all that is computed from it until autograd asks the
module's entry node for gradients. ``"module"``: the module's own outputs are real, and its inside is not kept.
``"backward"``: the same, and these outputs are computed on whole tensors. All begin at the module's first
floating-point argument. Without gradients the module runs as if nothing had been applied.

On a call whose input cannot be sliced as planned, the module runs plainly, and a difference is noted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from sacplan._chunk.executor import entry, lazy, loop, losses, values
from sacplan._chunk.executor.entry import enter, leave
from sacplan._chunk.executor.lazy import Lazy
from sacplan._chunk.executor.values import SlicedRegion, Tally
from sacplan._executor import tensors
from sacplan._executor.alignment import Differences
from sacplan._executor.stand_ins import StandIn
from sacplan._factors import (
    attention,
    axes,
    convolutions,
    gathers,
    norms,
    pointwise,
    products,
    reductions,
    rule,
    views,
)
from sacplan._factors import losses as factor_losses
from sacplan._factors.axes import Axis
from sacplan._program.decisions import Chunk
from sacplan._program.places import StepDifference
from sacplan._torch import ops
from sacplan._torch.compiling import keep_dynamo_out, stop_compiling
from sacplan._torch.private import is_plain
from sacplan.errors import ChunkError

_FORMULAS = (attention, convolutions, gathers, factor_losses, norms, pointwise, products, reductions, views)
# Else a compiled loss function, which Dynamo leaves to run as it is on lazy tensors, would compile parts of the engine.
keep_dynamo_out(entry, lazy, loop, losses, values, axes, rule, *_FORMULAS, ops, tensors)


class ChunkedForward(StandIn):
    """Stands in for a module's ``forward``.

    Args:
        module: the unit.
        decision: how it runs; its span is ``"module"``, ``"backward"`` or ``"rest"``.
        differences: notes where a call cannot run as planned.

    Attributes:
        tally: counts of the last call's region.
    """

    def __init__(
        self, module: torch.nn.Module, decision: Chunk, differences: Differences | None = None
    ) -> None:
        super().__init__(module, decision.unit)
        self.decision = decision
        self.differences = differences or Differences()
        self.tally = Tally()
        self._calls = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock, which belongs to this module's calls."""
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Make a lock: a copy has calls of its own."""
        self.__dict__.update(state, _lock=threading.RLock())

    def for_replica(self, replica: torch.nn.Module) -> StandIn:
        """Return the same for a replica of the module."""
        other = super().for_replica(replica)
        other.__dict__.update(_lock=threading.RLock())
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs; lazy ones if its span is the rest of the step."""
        if torch.compiler.is_compiling():
            stop_compiling(
                ChunkError,
                f"module {self.fqn!r} runs in slices, and so does the loss that is computed from it: torch.compile "
                "cannot keep that. Compile the layers, each with .compile(), and not the whole model; or leave this "
                "chunk out of the plan, and let the compiler's own chunker do it "
                "(torch._inductor.config.auto_chunker.enable) where torch has it.",
            )
        if not torch.is_grad_enabled():
            return self.call_original(*args, **kwargs)  # evaluation: the plan is for a step of training
        leaves, spec = tree_flatten((args, kwargs))
        self._calls += 1  # a difference in the first call alone is worth no warning
        at = next((i for i, x in enumerate(leaves) if _is_activation(x)), None)
        # No activation, or the module is inside of another region, whose slices it is part of.
        if at is None or isinstance(leaves[at], Lazy):
            return self.call_original(*args, **kwargs)
        axis = self._axis_of(leaves[at])
        with self._lock:
            places = _parameters(self.module)
            known = {id(p): p for p in (where[name] for where, name in places)}
            # Everything that gets a gradient goes through the entry's node, so that one loop makes all of them.
            known.update((id(x), x) for i, x in enumerate(leaves) if i != at and _gets_gradient(x))
            if axis is None or not (leaves[at].requires_grad or known):
                return self.call_original(*args, **kwargs)  # no such axis; or nothing to differentiate
            region = self._new_region(axis.size)
            self.tally = region.tally
            start, aliases = enter(region, axis, leaves[at], list(known.values()))
            given = dict(zip(known, aliases, strict=True))
            inputs = [start if i == at else given.get(id(x), x) for i, x in enumerate(leaves)]
            args, kwargs = tree_unflatten(inputs, spec)
            with _replaced(places, given):
                out = self.call_original(*args, **kwargs)
        # The loss follows, which is computed of lazy outputs.
        if self.decision.span == "rest":
            return out
        results, spec = tree_flatten(out)
        lazies = [x for x in results if isinstance(x, Lazy)]
        whole = self.decision.span == "backward"
        # The region ends here: one loop makes all outputs, and what is no lazy tensor stays as it is.
        made = iter(leave(start, leaves[at], lazies, whole=whole) if lazies else ())
        return tree_unflatten([next(made) if isinstance(x, Lazy) else x for x in results], spec)

    def _axis_of(self, tensor: torch.Tensor) -> Axis | None:
        """Return the axis of the unit's input that is sliced; None, with a note, if the input has no such axis."""
        dim, outer, inner = self.decision.dim, self.decision.outer, self.decision.inner
        if is_plain(tensor) and dim < tensor.dim():
            size, rest = divmod(tensor.shape[dim], outer * inner)
            if size == 1 and not rest:
                return None  # one slice
            if size and not rest:
                return Axis(dim, outer, size, inner)
        kind = "" if is_plain(tensor) else f" of type {type(tensor).__name__}"
        self._note(
            f"on an input of shape {tuple(tensor.shape)}{kind}",
            f"on one whose dimension {dim} is a multiple of {outer * inner}",
        )
        return None

    def _new_region(self, size: int) -> SlicedRegion:
        accumulate = torch.float32 if self.decision.accumulate == "float32" else None
        return SlicedRegion(size, self.decision.slices, accumulate, self._note_whole)

    def _note_whole(self, op: str, reason: str) -> None:
        self._note(f"{op} on whole tensors ({reason})", "in slices")

    def _note(self, ran: str, planned: str) -> None:
        self.differences.note(StepDifference(self.fqn, "", ran, planned), may_warn=self._calls > 1)


_ParameterSlots = list[tuple[dict[str, Any], str]]


def _parameters(module: torch.nn.Module) -> _ParameterSlots:
    """Return where modules keep the parameters that get gradients; replicas of DataParallel have them as attributes."""
    places = [(m._parameters, name) for m in module.modules() for name in m._parameters]
    places += [
        (m.__dict__, name) for m in module.modules() for name in m.__dict__.get("_former_parameters", ())
    ]
    return [(where, name) for where, name in places if _gets_gradient(where.get(name))]


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _gets_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and is_plain(value)


@contextlib.contextmanager
def _replaced(places: _ParameterSlots, given: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Give the modules these aliases instead of their parameters, inside the context."""
    before = [(where, name, where[name]) for where, name in places]
    try:
        for where, name, parameter in before:
            where[name] = given[id(parameter)]
        yield
    finally:
        for where, name, parameter in before:
            where[name] = parameter
