"""Chunks on a model: the forward of each unit is replaced on the instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Chunk
from sacplan.errors import PlanError
from sacplan.techniques.chunk.executor.forward import ChunkedForward
from sacplan.techniques.chunk.executor.lazy import import_meta_kernels
from sacplan.techniques.chunk.executor.stretch import SlicedForward
from sacplan.techniques.runtime.alignment import RecordedUnit
from sacplan.techniques.runtime.stand_ins import InstalledStandIns, StandIn


class InstalledChunks(InstalledStandIns):
    """The units of a model that run in slices.

    Args:
        model: the model.
        decisions: stretches; or with other spans, one for each unit.
        recorded: for stretches, unit to the ops of its calls in the recorded step.

    Raises:
        PlanError: a unit is compiled, or has two decisions.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decisions: Sequence[Chunk],
        recorded: Mapping[str, Sequence[OpSequence]] | None = None,
    ) -> None:
        import_meta_kernels()
        super().__init__()
        names = {id(module): fqn for fqn, module in model.named_modules()}
        by_unit: dict[str, list[Chunk]] = defaultdict(list)
        for decision in decisions:
            by_unit[decision.unit].append(decision)
        planned: list[StandIn] = []
        for fqn, own in by_unit.items():
            unit = model.get_submodule(fqn)
            if own[0].span == "stretch":
                elsewhere = self._elsewhere(names, unit, fqn)
                calls = RecordedUnit(fqn, (recorded or {}).get(fqn, ()), {})
                planned.append(SlicedForward(unit, calls, own, elsewhere, self._differences))
                continue
            if len(own) > 1:
                raise PlanError(f"the plan has two chunks for module {fqn!r}. Make a plan with sacplan.plan.")
            _check_compiled(fqn, unit)
            planned.append(ChunkedForward(unit, own[0], self._differences))
        self._put_on(planned)


def _check_compiled(fqn: str, unit: torch.nn.Module) -> None:
    """Refuse a compiled unit: compiled code cannot run on lazy tensors."""
    for name, module in unit.named_modules():
        if module._compiled_call_impl is not None or hasattr(
            module.__dict__.get("forward"), "_torchdynamo_orig_callable"
        ):
            path = ".".join(part for part in (fqn, name) if part)
            raise PlanError(
                f"module {path!r} is compiled, but module {fqn!r} is to run in slices, which torch.compile cannot "
                "keep. Leave that module uncompiled, and compile the others each with .compile()."
            )
