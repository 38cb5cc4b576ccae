"""The ways to split the graphs that ``torch.compile`` makes into forward and backward, as inductor lowers them.

Of each graph that is compiled for training, these are compared:

- what PyTorch saves by itself, and with some settings of its ``activation_memory_budget``;
- what ``saved_values`` finds cheapest for shares of the bytes that PyTorch saves.

Prices before lowering are rough: fusion decides what an op costs that runs again. After it, inductor knows what each
kernel reads and writes, and what is alive. So a split is lowered, without a kernel being compiled, before it is chosen.
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
"""Fewer bytes cost more and more time; below a tenth, what runs again is alive at once and takes what is not saved."""


class Split:
    """A way to split a joint graph. Lowering takes seconds, so each is lowered when its figures are needed.

    Args:
        graph: the joint graph.
        saved: names of the nodes that are saved.
    """

    def __init__(self, graph: JointGraph, saved: frozenset[str]) -> None:
        self.saved = saved
        self.nbytes = bytes_of(graph.values, saved)
        self.price_ms = price_of(graph.values, saved)
        self._graph = graph

    @cached_property
    def lowered(self) -> LoweredGraphs:
        """What it takes, by inductor."""
        return self._graph.lowered(self.saved)

    @property
    def is_lowered(self) -> bool:
        """Whether it was lowered before."""
        return "lowered" in vars(self)

    @property
    def expected(self) -> LoweredGraphs:
        """What it takes, or should take by those that were lowered before.

        It is expected to take fewer bytes and more time than one that saves more, and at least the bytes of one that
        saves less.
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
        given: a copy of it.
        outputs_stay: what the forward pass returns is alive to the end of the backward pass, saved or not.
        spec: the device.

    Attributes:
        values: those of its forward part, among which a split chooses.
        world: makes what is entered to lower a split. While the graph is compiled, there is nothing to enter.
    """

    def __init__(self, given: partitioning.GivenGraph, outputs_stay: bool, spec: DeviceSpec) -> None:
        self.key = partitioning.graph_key(given.module)
        self.values: list[ForwardValue] = []
        self.world: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._given = given
        self._n_held = given.arguments["num_fwd_outputs"] if outputs_stay else 0
        self._prices = prices_of(spec)

    def _saved_by_pytorch(self, *settings: float) -> list[frozenset[str]]:
        """Return what PyTorch saves with each of these. The first call notes the values."""
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
        """Whether sizes in it are symbols, which may be fixed once it is compiled."""
        return any(isinstance(node.meta.get("val"), torch.SymInt) for node in self._given.module.graph.nodes)

    @cached_property
    def own(self) -> Split:
        """What PyTorch does by itself. It is lowered."""
        (saved,) = self._saved_by_pytorch(1.0)
        split = Split(self, saved)
        lower([split])
        return split

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The ways that are compared; PyTorch's own is the first."""
        # PyTorch draws random numbers anew: pytorch#190758.
        others = [with_unrepeatable_saved(self.values, names) for names in self._saved_by_pytorch(*_SETTINGS)]
        others += (cheapest_saved(self.values, share * self.own.nbytes) for share in _SHARES)
        return self.own, *(Split(self, saved) for saved in dict.fromkeys(others) if saved != self.own.saved)

    def lowered(self, saved: frozenset[str]) -> LoweredGraphs:
        """Return what it takes to save these nodes."""
        module = partitioning.copied(self._given.module)
        with self.world(), self._given.settings:
            graphs = self._partitioned(module, partitioning.saving(saved))
            return partitioning.lowered(module, graphs, self._given.arguments, self._n_held, self._prices)


Splits = tuple[Split, ...]
"""A split of each graph of a step."""


def ms_of(splits: Splits) -> float:
    """Return the time that is expected of graphs that are split so."""
    return sum(split.expected.ms for split in splits)


def order_of(splits: Splits) -> float:
    """The faster first, to a nanosecond: of those that are as fast, PyTorch's own stand first."""
    return round(ms_of(splits), 6)


def fastest(
    options: Callable[[], Sequence[Splits]], n_bytes: Callable[[Splits], int], budget: int
) -> Splits | None:
    """Return the fastest options that fit a budget, by their figures once lowered; None if none should fit.

    As in a binary search, what is lowered next halves what is left: what saves more is expected to take more.

    Args:
        options: makes those to choose from. They are asked for again after each lowering.
        n_bytes: what one takes, by what is expected of its splits.
        budget: in bytes.
    """
    while True:
        fitting = sorted((one for one in options() if n_bytes(one) <= budget), key=order_of)
        if not fitting:
            return None
        is_known = [all(split.is_lowered for split in one) for one in fitting]
        unknown = is_known.index(True) if any(is_known) else len(fitting)
        if not unknown:
            return fitting[0]
        lower(fitting[(unknown - 1) // 2])


def smallest(options: Callable[[], Sequence[Splits]], n_bytes: Callable[[Splits], int]) -> Splits:
    """Return the options that take least; arguments as for ``fastest``. All are lowered: no budget decides which."""
    while unknown := [split for one in options() for split in one if not split.is_lowered]:
        lower(unknown)
    return min(options(), key=lambda one: (n_bytes(one), order_of(one)))


def lower(splits: Iterable[Split]) -> None:
    """Have inductor lower splits that were not lowered before."""
    for split in splits:
        _ = split.lowered


def prices_of(spec: DeviceSpec) -> Prices:
    """Return what ops cost on a device."""
    model = CostModel(spec)
    byte_ms = 1e3 / (model.spec.bandwidth_bytes_per_s * model.spec.bandwidth_efficiency)
    return Prices(lambda *call: model.cost(Call(*call))[1], byte_ms)
