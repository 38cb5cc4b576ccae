"""Chunks on a model: the forward of each unit is replaced on the instance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sacplan.core.decisions import Chunk
from sacplan.errors import PlanError
from sacplan.techniques.chunk.executor.forward import ChunkedForward
from sacplan.techniques.chunk.executor.lazy import import_meta_kernels
from sacplan.techniques.runtime.stand_ins import InstalledStandIns


class InstalledChunks(InstalledStandIns):
    """The units of a model that run in slices in training.

    Args:
        model: the model.
        decisions: with spans ``"module"``, ``"backward"`` and ``"rest"``, one for each unit.

    Raises:
        PlanError: a unit is compiled, or has two decisions.
    """

    def __init__(self, model: torch.nn.Module, decisions: Sequence[Chunk]) -> None:
        import_meta_kernels()
        super().__init__()
        planned: dict[str, ChunkedForward] = {}
        for decision in decisions:
            if decision.unit in planned:
                raise PlanError(
                    f"the plan has two chunks for module {decision.unit!r}. Make a plan with sacplan.plan."
                )
            unit = model.get_submodule(decision.unit)
            _check_compiled(decision.unit, unit)
            planned[decision.unit] = ChunkedForward(unit, decision, self._differences)
        self._put_on(planned.values())


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
