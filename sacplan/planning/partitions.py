"""The ways to split the graphs that ``torch.compile`` makes into forward and backward, each lowered by inductor.

Of each graph that is compiled for training, these are compared:

- what PyTorch saves by itself, and with some settings of its ``activation_memory_budget``;
- what ``saved_values`` finds cheapest for shares of the bytes that PyTorch saves.

Prices before lowering are rough: fusion decides what an op costs that runs again. After it, inductor knows what each
kernel reads and writes, and what is alive. So each is lowered, without a kernel being compiled, and judged by that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sacplan.device.cost import CostModel
from sacplan.device.devices import resolve_device
from sacplan.device.kernels import active_device
from sacplan.planning.saved_values import bytes_of, cheapest_saved, without_forbidden
from sacplan.torch_compat import partitioning
from sacplan.torch_compat.partitioning import ForwardValue, LoweredGraphs, Prices

_SETTINGS = (0.75, 0.5, 0.25)
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1)
"""Fewer bytes cost more and more time; below a tenth, what runs again is alive at once and takes what is not saved."""


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a joint graph.

    Attributes:
        saved: names of the nodes that are saved.
        lowered: what it takes.
    """

    saved: frozenset[str]
    lowered: LoweredGraphs


class JointGraph:
    """A joint graph while it is compiled.

    Args:
        module, inputs, arguments: as a partitioner gets them.
    """

    def __init__(self, module: Any, inputs: Sequence[Any], arguments: dict[str, Any]) -> None:
        self.key = partitioning.graph_key(module)
        self._module, self._inputs, self._arguments = module, inputs, arguments
        self._prices = _prices(module)
        self._values: list[ForwardValue] = []
        self._own = frozenset[str]()
        self._partitioned(partitioning.copied(module), self._note)

    def _note(self, graph: Any, info: Any, own: Callable[[float], list[Any]]) -> list[Any]:
        n_outputs = self._arguments["num_fwd_outputs"]
        self._values += partitioning.forward_values(graph, info, n_outputs, self._prices)
        chosen = own(1.0)
        self._own = frozenset(node.name for node in chosen)
        return chosen

    def _with_settings(self) -> list[frozenset[str]]:
        """Return what PyTorch saves with each of the settings."""
        found: list[frozenset[str]] = []

        def note(graph: Any, info: Any, own: Callable[[float], list[Any]]) -> list[Any]:
            found.extend(frozenset(node.name for node in own(setting)) for setting in _SETTINGS)
            return own(1.0)

        self._partitioned(partitioning.copied(self._module), note)
        return found

    def _partitioned(self, module: Any, choose: partitioning.Choose) -> tuple[Any, Any]:
        return partitioning.partitioned(module, self._inputs, self._arguments, choose)

    @cached_property
    def own(self) -> Split:
        """What PyTorch does by itself."""
        return self._lowered(self._own)

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """All ways that are compared; PyTorch's own is the first."""
        most = bytes_of(self._values, self._own)
        # PyTorch draws random numbers anew: pytorch#190758.
        found = [without_forbidden(self._values, names) for names in self._with_settings()]
        found += [cheapest_saved(self._values, share * most) for share in _SHARES]
        return self.own, *map(self._lowered, dict.fromkeys(names for names in found if names != self._own))

    def _lowered(self, saved: frozenset[str]) -> Split:
        module, n_outputs = partitioning.copied(self._module), self._arguments["num_fwd_outputs"]
        graphs = self._partitioned(module, partitioning.saving(saved))
        static = self._arguments["static_lifetime_input_indices"] or ()
        return Split(saved, partitioning.lowered(module, graphs, n_outputs, static, self._prices))

    def split(self, chosen: Split) -> tuple[Any, Any]:
        """Split the graph itself, and return its two parts."""
        return self._partitioned(self._module, partitioning.saving(chosen.saved))


def _prices(module: Any) -> Prices:
    device = next(v.device for n in module.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    model = CostModel(active_device() or resolve_device(device))
    byte_ms = 1e3 / (model.spec.bandwidth_bytes_per_s * model.spec.bandwidth_efficiency)
    return Prices(lambda *call: model.cost(*call)[1], byte_ms)


class Partitioner:
    """What inductor asks for partitions, until ``remove()`` or to the end of a ``with``.

    Args:
        choose: says how each graph is split. It is asked when the graph is compiled.
        key: tells it from others, for the compiler's caches.
    """

    def __init__(self, choose: Callable[[JointGraph], Split], key: object) -> None:
        self._choose = choose
        self._before = partitioning.swap_partitioner(partitioning.as_partitioner(self._partition, key))

    def _partition(self, module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        graph = JointGraph(module, inputs, arguments)
        return graph.split(self._choose(graph))

    def remove(self) -> None:
        """Have ``torch.compile`` partition graphs as it did before. What is compiled stays as it is."""
        partitioning.swap_partitioner(self._before)

    def __enter__(self) -> Partitioner:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()
