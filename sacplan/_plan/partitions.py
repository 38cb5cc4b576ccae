"""What there is to save of the graphs that ``torch.compile`` makes, and a partitioner that asks what is.

Of each graph that is compiled for training, it is noted what PyTorch would save, and what else there is to choose from;
``saved_values`` has the cheapest choice for a limit of saved bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._device.cost import CostModel
from sacplan._device.devices import resolve_device
from sacplan._device.kernels import active_device
from sacplan._plan.saved_values import SavedValues, bytes_of
from sacplan._torch import partitioning
from sacplan._torch.partitioning import ForwardValue, GraphPeaks


@dataclass(frozen=True, slots=True)
class JointGraph:
    """What there is to choose from in a graph.

    Attributes:
        values: those that may be saved, in the order of the graph.
        own: names of those that PyTorch saves.
    """

    values: Sequence[ForwardValue]
    own: frozenset[str]

    @property
    def own_bytes(self) -> int:
        """The bytes that PyTorch saves."""
        return bytes_of(self.values, self.own)


Peaks = Callable[[SavedValues | None], GraphPeaks]
"""Has inductor lower the two graphs that save these values, without compiling a kernel, and returns what is alive at
most. None: what PyTorch saves."""

Choose = Callable[[str, JointGraph, Peaks], SavedValues | None]
"""Says what a graph, which has a key, saves; None: what PyTorch saves."""


class Partitioner:
    """What inductor asks for partitions, until ``remove()`` or to the end of a ``with``.

    Args:
        choose: says what each graph saves. It is asked when the graph is compiled.
        key: tells it from others, for the compiler's caches.
    """

    def __init__(self, choose: Choose, key: object) -> None:
        self._choose = choose
        self._before = partitioning.swap_partitioner(partitioning.as_partitioner(self._partition, key))

    def _partition(self, module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        partitioned = functools.partial(partitioning.partitioned, inputs=inputs, arguments=arguments)
        n_outputs, static = arguments["num_fwd_outputs"], arguments["static_lifetime_input_indices"] or ()
        values: list[ForwardValue] = []
        own: set[str] = set()
        noting = functools.partial(_note, values, own, n_outputs)
        partitioned(partitioning.copied(module), choose=noting)
        graph = JointGraph(values, frozenset(own))

        def choice(saved: SavedValues | None) -> partitioning.Choose:
            return partitioning.saving(graph.own if saved is None else saved.names)

        def peaks(saved: SavedValues | None) -> GraphPeaks:
            copy = partitioning.copied(module)
            return partitioning.lowered_peaks(
                copy, partitioned(copy, choose=choice(saved)), n_outputs, static
            )

        return partitioned(module, choose=choice(self._choose(partitioning.graph_key(module), graph, peaks)))

    def remove(self) -> None:
        """Have ``torch.compile`` partition graphs as it did before. What is compiled stays as it is."""
        partitioning.swap_partitioner(self._before)

    def __enter__(self) -> Partitioner:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()


def _note(
    values: list[ForwardValue],
    own: set[str],
    n_outputs: int,
    graph: Any,
    info: Any,
    choose: Callable[[], list[Any]],
) -> list[Any]:
    """Choose what PyTorch chooses, and note it, and what else there is to choose from."""
    device = next(v.device for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    model = CostModel(active_device() or resolve_device(device))
    ms_per_byte = 1e3 / (model.spec.bandwidth_bytes_per_s * model.spec.bandwidth_efficiency)
    values += partitioning.forward_values(
        graph, info, n_outputs, lambda *call: model.cost(*call)[1], ms_per_byte
    )
    chosen = choose()
    own.update(node.name for node in chosen)
    return chosen
