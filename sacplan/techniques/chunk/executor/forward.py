"""The stand-in for the forward of a module that runs in slices.

``"rest"``: what the module computes stays lazy, and so does all that is computed from it until autograd asks the
module's entry node for gradients. ``"module"``: the module's own outputs are real, and its inside is not kept.
``"backward"``: the same, and these outputs are computed on whole tensors. All begin at the module's first
floating-point argument. Without gradients the module runs as if nothing had been applied.

On a call whose input cannot be sliced as planned, the module runs as without a plan, and a difference is noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils._pytree import tree_flatten, tree_unflatten

from sacplan.core.call_sites import StepDifference
from sacplan.core.decisions import Chunk
from sacplan.core.factors.axes import Axis
from sacplan.errors import ChunkError
from sacplan.techniques.chunk.executor.entry import enter, leave
from sacplan.techniques.chunk.executor.lazy import Lazy
from sacplan.techniques.chunk.executor.loop import compute, compute_whole
from sacplan.techniques.chunk.executor.values import SlicedRegion, Tally
from sacplan.techniques.runtime.alignment import Differences
from sacplan.techniques.runtime.stand_ins import StandIn
from sacplan.torch_compat.compiling import is_exporting, keep_dynamo_out, stop_compiling
from sacplan.torch_compat.private import is_plain, is_transforming

# Else a compiled loss function, which Dynamo leaves to run as it is on lazy tensors, would compile parts of the engine.
keep_dynamo_out("sacplan.techniques.chunk.executor", "entry", "lazy", "loop", "losses", "values")
keep_dynamo_out("sacplan.core.factors")
keep_dynamo_out("sacplan.torch_compat", "ops")
keep_dynamo_out("sacplan.techniques.runtime", "tensors")


class ChunkedForward(StandIn):
    """Stands in for a module's ``forward``.

    Args:
        module: the unit.
        decision: how it runs; its span is ``"module"``, ``"backward"`` or ``"rest"``.
        differences: notes where a call cannot run as planned.

    Attributes:
        tally: of the last call's region.
    """

    def __init__(
        self, module: torch.nn.Module, decision: Chunk, differences: Differences | None = None
    ) -> None:
        super().__init__(module, decision.unit)
        self.decision = decision
        self.differences = differences or Differences()
        self.tally = Tally()
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs; lazy ones if its span is the rest of the step."""
        if torch.compiler.is_compiling() and not is_exporting():
            stop_compiling(
                ChunkError,
                f"module {self.fqn!r} runs in slices, and so does the loss that is computed from it: torch.compile "
                "cannot keep that. Compile the layers, each with .compile(), and not the whole model; or leave this "
                "chunk out of the plan, and let the compiler's own chunker do it "
                "(torch._inductor.config.auto_chunker.enable) where torch has it.",
            )
        # What is exported, and evaluation: the plan is for a step of training.
        if is_exporting() or is_tracing() or not torch.is_grad_enabled():
            return self.call_original(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        self._calls += 1  # a difference in the first call alone is worth no warning
        at = next((i for i, x in enumerate(leaves) if _is_activation(x)), None)
        # No activation, or the module is inside of another region, whose slices it is part of.
        if at is None or isinstance(leaves[at], Lazy):
            return self.call_original(*args, **kwargs)
        tensor = leaves[at]
        axis = self._axis_of(tensor)
        # Everything that gets a gradient does so when the entry's node runs, so that one loop makes all of them.
        others = [*self.module.parameters(), *leaves[:at], *leaves[at + 1 :]]
        others = [x for x in others if _gets_gradient(x)]
        if axis is None or not (tensor.requires_grad or others):
            return self.call_original(*args, **kwargs)  # no such axis; or nothing to differentiate
        region = SlicedRegion(axis.size, self.decision.slices, self._note_whole)
        self.tally = region.tally
        leaves[at], token = enter(region, axis, tensor, others)
        args, kwargs = tree_unflatten(leaves, spec)
        out = self.call_original(*args, **kwargs)
        results, spec = tree_flatten(out)
        if not (lazies := [x for x in results if isinstance(x, Lazy)]):
            return out  # all that it returns is computed already
        # With span "rest" the loss is computed from the lazy outputs. Else the region ends here: one loop makes all
        # outputs. What is no lazy tensor stays as it is.
        run = {"rest": None, "module": compute, "backward": compute_whole}[self.decision.span]
        made = iter(leave(leaves[at], token, tensor, lazies, run))
        return tree_unflatten([next(made) if isinstance(x, Lazy) else x for x in results], spec)

    def _axis_of(self, tensor: torch.Tensor) -> Axis | None:
        """Return the axis of the unit's input that is sliced; None if it has one element, or (noted) is missing."""
        dim = self.decision.dim
        plain = is_plain(tensor) and not is_transforming()
        if plain and dim < tensor.dim() and tensor.shape[dim]:
            size = tensor.shape[dim]
            return Axis(dim, 1, size, 1) if size > 1 else None  # one element is one slice: the plain module
        kind = "" if plain else f" of type {type(tensor).__name__}, or inside a transform of torch.func"
        self._note(
            f"on an input of shape {tuple(tensor.shape)}{kind}",
            f"on one with elements along dimension {dim}",
        )
        return None

    def _note_whole(self, op: str, reason: str) -> None:
        self._note(f"{op} on whole tensors ({reason})", "in slices")

    def _note(self, ran: str, planned: str) -> None:
        self.differences.note(StepDifference(self.fqn, "", ran, planned), may_warn=self._calls > 1)


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _gets_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and is_plain(value)
