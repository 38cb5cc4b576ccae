"""Partitions in force: ``torch.compile`` splits the joint graphs that a plan knows as the plan says."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sacplan.core.decisions import Partition
from sacplan.errors import SacplanWarning
from sacplan.techniques.recompute.executor.recipes import InstalledRecipes
from sacplan.torch_compat.partitioning import (
    as_partitioner,
    as_pytorch,
    graph_key,
    partitioned,
    saving,
    swap_partitioner,
)


class InstalledPartitions(InstalledRecipes):
    """The partitioner that inductor asks about each joint graph, and recipes of units that run eagerly.

    Installing and removing it makes PyTorch compile everything again. A graph that the plan does not know is
    partitioned as PyTorch does it, with a warning.
    """

    def __init__(self, decisions: Sequence[Partition], *recipes: Any) -> None:
        super().__init__(*recipes)
        self._split = dict.fromkeys(decision.unit for decision in decisions)
        # A graph whose sizes were not planned for is looked up by its ops alone.
        self._saved = {decision.graph.partition("-")[0]: decision.saved for decision in decisions}
        self._saved |= {decision.graph: decision.saved for decision in decisions}
        # A new key each time: for a graph out of the compiler's cache, nothing would warn if the plan does not know it.
        self._partitioner = as_partitioner(self._partition, uuid.uuid4().hex)
        torch.compiler.reset()
        self._before = swap_partitioner(self._partitioner)

    def _partition(self, module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        key = graph_key(module)
        saved = self._saved.get(key, self._saved.get(key.partition("-")[0]))
        if saved is not None:
            return partitioned(module, inputs, arguments, saving(saved))
        if self._saved:
            warnings.warn(
                f"torch.compile made a graph of {len(module.graph.nodes)} nodes that the applied plan does not know, "
                "and PyTorch chooses what it saves. If it is of the planned model, the step may take more memory than "
                "planned: another torch, other arguments of torch.compile, or a batch with which the model runs other "
                "ops. Make the plan here, with the same compile=.",
                SacplanWarning,
                stacklevel=2,
            )
        if self._before is not None:
            return self._before(module, inputs, **arguments)
        return partitioned(module, inputs, arguments, as_pytorch)

    @property
    def units(self) -> tuple[str, ...]:
        """The modules that are compiled, and those with recipes."""
        return (*self._split, *super().units)

    def remove(self) -> None:
        """Have PyTorch choose again, and remove the recipes."""
        super().remove()
        torch.compiler.reset()
        self._saved = {}
        now = swap_partitioner(self._before)
        if now is not self._partitioner:  # set by others since, and it may ask this one: put it back
            swap_partitioner(now)
