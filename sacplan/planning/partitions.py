"""Ways to split the graphs that ``torch.compile`` makes into forward and backward, measured by inductor's lowering.

For each graph that is compiled for training, these are compared:

- what PyTorch saves by itself, and with some settings of its ``activation_memory_budget``;
- what ``saved_values`` finds cheapest for shares of the bytes that PyTorch saves.

Prices before lowering are rough: what it costs to run an op again depends on fusion. After lowering, inductor knows
what each kernel reads and writes, and what is alive. So a split is lowered before it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec
from sacplan.device.op_kernels import Call
from sacplan.planning.saved_values import bytes_of, cheapest_saved, price_of, with_unrepeatable_saved
from sacplan.torch_compat import partitioning
from sacplan.torch_compat.partitioning import ForwardValue, LoweredGraphs, Prices

# Memory budgets of PyTorch's own partitioner, whose splits are compared with ours.
_SETTINGS = (0.75, 0.5, 0.25)
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1)
"""Shares of the bytes that PyTorch saves. Below a tenth, what runs again is alive at once: nothing is gained."""


class Split:
    """A way to split a joint graph. Lowering takes seconds, so it is put off until the figures are needed.

    Args:
        graph: the joint graph.
        saved: names of the nodes whose values are saved.
    """

    def __init__(self, graph: JointGraph, saved: frozenset[str]) -> None:
        self.saved = saved
        self.nbytes = bytes_of(graph.values, saved)
        self.price_ms = price_of(graph.values, saved)
        self._graph = graph

    @cached_property
    def lowered(self) -> LoweredGraphs:
        """Memory and time of the split as inductor lowers it."""
        return self._graph.lowered(self.saved)

    @property
    def is_lowered(self) -> bool:
        """Whether ``lowered`` is known."""
        return "lowered" in vars(self)

    @property
    def expected(self) -> LoweredGraphs:
        """Memory and time of the split; if it is not lowered yet, an estimate from splits that are.

        That is the next larger one, moved by the difference in bytes and price; at least the bytes of smaller ones.
        """
        if self.is_lowered:
            return self.lowered
        known = [split for split in self._graph.splits if split.is_lowered]
        above = min((s for s in known if s.nbytes >= self.nbytes), key=lambda s: s.nbytes, default=known[0])
        least = max((s.lowered.most_bytes for s in known if s.nbytes <= self.nbytes), default=0)
        return above.lowered.moved(self.nbytes - above.nbytes, self.price_ms - above.price_ms, least)


class JointGraph:
    """A joint graph, while it is compiled and afterwards.

    Args:
        given: a copy of the graph.
        outputs_stay: whether outputs of the forward pass stay alive to the end of the backward pass, saved or not.
        spec: the device.

    Attributes:
        values: those of the forward part, from which a split chooses.
        world: makes the context to lower a split in. While the graph is compiled, it makes an empty one.
    """

    def __init__(self, given: partitioning.GivenGraph, outputs_stay: bool, spec: DeviceSpec) -> None:
        self.key = partitioning.graph_key(given.module)
        self.values: list[ForwardValue] = []
        self.world: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._given = given
        self._n_held = given.arguments["num_fwd_outputs"] if outputs_stay else 0
        self._prices = prices_of(spec)

    def _saved_by_pytorch(self, *settings: float) -> list[frozenset[str]]:
        """Return the names that PyTorch saves with each of its memory budgets. The first call fills ``values``."""
        found: list[frozenset[str]] = []

        def note(graph: Any, info: Any, own: Callable[[float], list[Any]]) -> list[Any]:
            self.values = self.values or partitioning.forward_values(graph, info, self._n_held, self._prices)
            found.extend(frozenset(node.name for node in own(setting)) for setting in settings)
            return own(1.0)

        with self.world():
            self._partitioned(partitioning.copied(self._given.module), note)
        return found

    def _partitioned(self, module: Any, choose: partitioning.Choose) -> tuple[Any, Any]:
        return partitioning.partitioned(module, self._given.inputs, self._given.arguments, choose)

    @property
    def is_dynamic(self) -> bool:
        """Whether the graph has symbolic sizes, which may be fixed once it is compiled."""
        return any(isinstance(node.meta.get("val"), torch.SymInt) for node in self._given.module.graph.nodes)

    @cached_property
    def own(self) -> Split:
        """The split that PyTorch chooses by itself, lowered."""
        (saved,) = self._saved_by_pytorch(1.0)
        split = Split(self, saved)
        lower([split])
        return split

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The splits that are compared; PyTorch's own is the first."""
        # PyTorch may draw random numbers again, and others (pytorch#190758): save them.
        others = [with_unrepeatable_saved(self.values, names) for names in self._saved_by_pytorch(*_SETTINGS)]
        others += (cheapest_saved(self.values, share * self.own.nbytes) for share in _SHARES)
        return self.own, *(Split(self, saved) for saved in dict.fromkeys(others) if saved != self.own.saved)

    def lowered(self, saved: frozenset[str]) -> LoweredGraphs:
        """Lower the split that saves these nodes, and return its memory and time."""
        module = partitioning.copied(self._given.module)
        with self.world(), self._given.settings:
            graphs = self._partitioned(module, partitioning.saving(saved))
            return partitioning.lowered(module, graphs, self._given.arguments, self._n_held, self._prices)


Splits = tuple[Split, ...]
"""One split for each graph of a step, in order."""


def ms_of(splits: Splits) -> float:
    """Return the expected time in ms of the graphs with these splits."""
    return sum(split.expected.ms for split in splits)


def order_of(splits: Splits) -> float:
    """Return the sort key of options: time to a nanosecond. Of equals the first wins, which is PyTorch's own."""
    return round(ms_of(splits), 6)


def fastest(
    options: Callable[[], Sequence[Splits]], n_bytes: Callable[[Splits], int], budget: int
) -> Splits | None:
    """Return the fastest option that fits a budget once lowered; None if none is expected to fit.

    As in a binary search, the middle one of the options that may be faster is lowered next.

    Args:
        options: makes the options. It is called again after each lowering.
        n_bytes: bytes that an option is expected to take.
        budget: in bytes.
    """
    while True:
        fitting = sorted((one for one in options() if n_bytes(one) <= budget), key=order_of)
        if not fitting:
            return None
        are_lowered = [all(split.is_lowered for split in one) for one in fitting]
        n_faster = are_lowered.index(True) if any(are_lowered) else len(fitting)  # not lowered yet
        if not n_faster:
            return fitting[0]
        lower(fitting[(n_faster - 1) // 2])


def smallest(options: Callable[[], Sequence[Splits]], n_bytes: Callable[[Splits], int]) -> Splits:
    """Return the option that takes least, once all are lowered; arguments as for ``fastest``."""
    while unknown := [split for one in options() for split in one if not split.is_lowered]:
        lower(unknown)
    return min(options(), key=lambda one: (n_bytes(one), order_of(one)))


def lower(splits: Iterable[Split]) -> None:
    """Have inductor lower those splits that are not lowered yet."""
    for split in splits:
        _ = split.lowered


def prices_of(spec: DeviceSpec) -> Prices:
    """Return the prices of ops and of bytes on a device, in ms."""
    model = CostModel(spec)
    byte_ms = 1e3 / (model.spec.bandwidth_bytes_per_s * model.spec.bandwidth_efficiency)
    return Prices(lambda *call: model.cost(Call(*call))[1], byte_ms)
