"""PyTorch's partitioner for joint graphs, and the peaks of the graphs that it makes.

Private PyTorch API, tried on 2.13: ``private_names.json`` lists it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from sacplan.torch_compat.inductor import MEASURES, POOLS
from sacplan.torch_compat.ops import draws_numbers, is_heavy, op_traits
from sacplan.torch_compat.private import replaced
from sacplan.torch_compat.versions import torch_names

Graph = Any
"""A ``torch.fx.GraphModule``, whose nodes have no precise types."""


@dataclass(frozen=True, slots=True)
class LoweredGraphs:
    """What inductor's lowering says of the two graphs of a compiled region.

    Attributes:
        forward_bytes, backward_bytes: most that is alive while either runs, inputs and outputs included.
        saved_bytes: what the forward pass leaves for the backward pass, without parameters.
        ms: predicted time of both: of heavy ops, and of fused kernels by what they read and write.
    """

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    ms: float

    @property
    def most_bytes(self) -> int:
        """Most that is alive while one of the two runs."""
        return max(self.forward_bytes, self.backward_bytes)

    def needs_bytes(self, calls: int) -> int:
        """Return the most that is alive if ``calls`` forward passes come before the first backward pass."""
        return self.most_bytes + (calls - 1) * self.saved_bytes

    def moved(self, nbytes: int, ms: float, least: int) -> LoweredGraphs:
        """Return these with ``nbytes`` more saved, ``ms`` more time, and ``least`` bytes or more alive in each."""
        first, second = (max(most + nbytes, least) for most in (self.forward_bytes, self.backward_bytes))
        return LoweredGraphs(first, second, self.saved_bytes + nbytes, self.ms + ms)


@dataclass(frozen=True, slots=True)
class Prices:
    """What ops cost on a device.

    Attributes:
        op_ms: the time of an op by itself: ``(op, args, kwargs, result)``.
        byte_ms: the time to read or write a byte.
    """

    op_ms: Callable[..., float]
    byte_ms: float


_FUSED = 0.1
"""Time of a pointwise op that runs again, as a share of the time to write its output: its reader's kernel computes it.
With 1, plans for BERT (``benchmarks.compiled_budgets``) run products again instead, and steps take longer."""

_FURTHER = 1.1
"""The cost of saving a value grows by this for each op between the value and the backward pass: from far away it is
made again by a longer chain, which inductor splits into more kernels. From PyTorch's partitioner."""


class _Lowered(BaseException):
    """Ends lowering before code is generated. No ``Exception``, since inductor wraps those."""

    def __init__(self, peak_bytes: int, moved_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self.moved_bytes = moved_bytes


@dataclass(frozen=True, slots=True)
class GivenGraph:
    """A copy of a joint graph, as a partitioner gets it, with inductor's settings at that time."""

    module: Graph
    inputs: Sequence[Any]
    arguments: dict[str, Any]
    settings: AbstractContextManager[Any]

    @classmethod
    def of(cls, module: Graph, inputs: Sequence[Any], arguments: dict[str, Any]) -> GivenGraph:
        """Copy a graph: partitioning changes it, and the graph itself is compiled next."""
        return cls(copied(module), inputs, arguments, inductor_settings())


Choose = Callable[[Any, Any, Callable[[float], list[Any]]], list[Any]]
"""From a joint graph, what PyTorch's partitioner knows of its nodes, and what PyTorch saves with an
``activation_memory_budget``, to the nodes to save."""


def partitioned(
    module: Graph, inputs: Sequence[Any], arguments: dict[str, Any], choose: Choose
) -> tuple[Graph, Graph]:
    """Return the forward and the backward graph that PyTorch makes of a joint graph, which is changed.

    Args:
        module, inputs, arguments: as a partitioner gets them.
        choose: what is saved. All else that the backward pass reads is made again.
    """
    with torch_names():
        from torch._functorch import partitioners
        from torch._functorch.partitioners import choose_saved_values_set as own
        from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    def chosen(graph: Any, info: Any, memory_budget: float = 1.0) -> list[Any]:
        return choose(graph, info, functools.partial(own, graph, info))

    with replaced(partitioners, choose_saved_values_set=chosen):
        found: tuple[Graph, Graph] = partition(module, inputs, **arguments)
    return found


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """The value that a node of the forward part of a joint graph makes.

    Attributes:
        name: of the node.
        inputs: numbers of the values that it is made of.
        nbytes: its size; 0 for what is there anyway: parameters, and outputs that the caller holds.
        is_read: the backward pass reads it.
        is_savable: it may be saved.
        save_ms: what it costs to save it.
        rerun_ms: what it costs to make it again in the backward pass; infinity: it must not be.
    """

    name: str
    inputs: tuple[int, ...]
    nbytes: int
    is_read: bool
    is_savable: bool
    save_ms: float
    rerun_ms: float


def forward_values(graph: Any, info: Any, n_held: int, prices: Prices) -> list[ForwardValue]:
    """Return the values among which a partition chooses, in the order of the graph.

    Args:
        graph, info: as ``Choose`` gets them.
        n_held: how many outputs of the forward pass the caller holds: the first ones.
        prices: of the device.
    """
    nodes = [n for n in graph.nodes if n.op != "output" and n not in info.tangents_closure]
    number = {node: i for i, node in enumerate(nodes)}
    held = {*info.static_lifetime_input_nodes, *graph.output_node().args[0][:n_held]}
    values = []
    for node in nodes:
        nbytes = 0 if node in held else _size(node)
        is_read = node in info.required_bw_nodes or not info.tangents_closure.isdisjoint(node.users)
        is_value = isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt))
        is_savable = node.op == "placeholder" or (is_value and not _must(node, "RECOMPUTE"))
        # What the forward pass does not need runs once in any case.
        rerun_ms = _rerun_ms(node, prices) if info.is_required_fw(node) else 0.0
        inputs = tuple(number[i] for i in node.all_input_nodes)
        # The backward pass reads what is saved; the forward pass writes it, unless it is in memory anyway.
        passes = 1 if _is_written(node, info) else 2
        save_ms = passes * nbytes * prices.byte_ms * _FURTHER ** min(max(node.dist_from_bw, 1), 100)
        values.append(ForwardValue(node.name, inputs, nbytes, is_read, is_savable, save_ms, rerun_ms))
    return values


def _must(node: Any, what: str) -> bool:
    return bool(node.meta.get("recompute") == CheckpointPolicy[f"MUST_{what}"])


def _is_written(node: Any, info: Any) -> bool:
    """Whether the forward pass has what a node makes in memory, because it is not fused with all that read it."""
    users = [user for user in node.users if info.is_required_fw(user)]
    return node.op == "placeholder" or _has_own_kernel(node) or any(map(_has_own_kernel, users))


def _has_own_kernel(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_heavy(node.target)


def _is_view(node: Any) -> bool:
    func = node.target
    return isinstance(func, torch._ops.OpOverload) and any(
        r.alias_info is not None for r in func._schema.returns
    )


def _rerun_ms(node: Any, prices: Prices) -> float:
    func = node.target
    if node.op == "placeholder" or _must(node, "SAVE"):
        return math.inf
    if not isinstance(
        func, torch._ops.OpOverload
    ):  # parts of tuples, arithmetic with sizes; else a graph of its own
        return math.inf if isinstance(func, torch._ops.HigherOrderOperator) else 0.0
    is_view = _is_view(node)
    if not _must(node, "RECOMPUTE") and (
        func._schema.is_mutable
        or draws_numbers(func, node.args, node.kwargs)  # PyTorch's own budget draws others: pytorch#190758
        or not (op_traits(func).rerunnable or is_view or not node.all_input_nodes)
    ):
        return math.inf
    if is_heavy(func):
        return _op_ms(node, prices)
    if is_view:
        return 0.0
    reads = max(node.all_input_nodes, key=_elements, default=node)
    if _elements(reads) > _elements(node):  # a reduction, which no other kernel takes in
        return prices.byte_ms * _size(reads)
    # A random number takes some twenty instructions: about the time to write it.
    return (1.0 if "random" in func._opname else _FUSED) * prices.byte_ms * _size(node)


def _op_ms(node: Any, prices: Prices) -> float:
    return prices.op_ms(node.target, *torch.fx.map_arg((node.args, node.kwargs), _known), _known(node))


def _elements(node: Any) -> int:
    value = _known(node) if "val" in node.meta else None
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _known(node: Any) -> Any:
    """Return what a node makes, with numbers for sizes that are symbols."""
    with torch_names():
        from torch._functorch.partitioners import _remove_symbols_without_guarding as without_symbols
    return tree_map_only(torch.Tensor, functools.partial(without_symbols, fallback=4096), node.meta["val"])


def graph_key(module: Graph) -> str:
    """Return a hash of the names, ops and inputs of a joint graph's nodes, "-", and one of their sizes."""
    nodes = list(module.graph.nodes)
    ops = [(n.name, n.op, str(n.target), *(i.name for i in n.all_input_nodes)) for n in nodes]
    sizes = [str(v.shape) for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return "-".join(hashlib.sha256(repr(found).encode()).hexdigest()[:12] for found in (ops, sizes))


def saving(names: Collection[str]) -> Choose:
    """Return the choice of the nodes with these names."""
    return lambda graph, *_: [node for node in graph.nodes if node.name in names]


def as_pytorch(graph: Any, info: Any, own: Callable[[float], list[Any]]) -> list[Any]:
    """Choose what PyTorch chooses."""
    return own(1.0)


def copied(module: Graph) -> Graph:
    """Return a graph module with a graph of its own and the same attributes."""
    return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


def _size(node: Any) -> int:
    """Return the bytes of what a node makes: of all of its results; 0 of what is no tensor."""
    with torch_names():
        from torch._functorch.partitioners import _size_of
    return int(_size_of(node)) if "val" in node.meta else 0


def lowered(
    module: Graph, graphs: tuple[Graph, Graph], arguments: dict[str, Any], n_held: int, prices: Prices
) -> LoweredGraphs:
    """Have inductor lower two graphs, without generating code, and return what they take.

    Args:
        module: the joint graph.
        graphs: the forward and the backward graph, which are changed.
        arguments: as a partitioner gets them.
        n_held: how many outputs of the forward graph the caller holds: the first ones.
        prices: of the device.
    """
    forward, backward = graphs
    inputs = [node for node in module.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    static, n_outputs = arguments["static_lifetime_input_indices"] or (), arguments["num_fwd_outputs"]
    parameters = {node.name for i, node in enumerate(inputs) if i in static}  # alive from step to step
    results = [node for node in forward.graph.output_node().args[0] if isinstance(node, torch.fx.Node)]
    saved = {node for node in results[n_outputs:] if node.name not in parameters}
    held = {node for node in results[:n_held] if node.op != "placeholder"} - saved
    forward.graph.output_node().meta["user_visible_output_idxs"] = list(range(n_outputs))
    backward.graph.output_node().meta["user_visible_output_idxs"] = []
    given, kept = sum(map(_size, inputs)), sum(map(_size, held))
    heavy = [node for graph in graphs for node in graph.graph.nodes if _has_own_kernel(node)]
    heavy_ms = math.fsum(_op_ms(node, prices) for node in heavy)
    first, second = _lowered(forward, False), _lowered(backward, True)
    return LoweredGraphs(
        given + first.peak_bytes,
        given + kept + second.peak_bytes,
        sum(map(_size, saved)),
        heavy_ms + prices.byte_ms * (first.moved_bytes + second.moved_bytes),
    )


def _lowered(graph: Graph, is_backward: bool) -> _Lowered:
    """Return the most that a graph has alive of what it may free and what it makes, and what fused kernels move."""
    with torch_names():
        from torch._inductor import compile_fx
        from torch._inductor import config as inductor_config
        from torch._inductor.graph import GraphLowering
        from torch._inductor.memory import estimate_peak_memory_allocfree, prepare_planning_info
        from torch.utils._ordered_set import OrderedSet

    def stop(self: Any) -> None:
        self.init_wrapper_code()
        self._update_scheduler()
        plan = self.scheduler
        given, made = OrderedSet(self.graph_inputs.keys()), OrderedSet(self.get_output_names())
        freed = prepare_planning_info(plan.nodes, plan.name_to_buf, plan.name_to_fused_node, given, made)[1]
        # The peak in ``[0]`` leaves out outputs in torch 2.11.
        peak = estimate_peak_memory_allocfree(plan.nodes, freed, made)[0]
        raise _Lowered(
            peak, sum(node.get_read_write_buffers_sizes() for node in plan.nodes if not node.is_extern())
        )

    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = next((v.node.shape_env for v in values if isinstance(v, torch.SymInt)), None)
    try:
        with (
            # Other users of these symbols must not find them fixed to the sizes of this batch.
            contextlib.nullcontext() if sizes is None else sizes.suppress_guards(),
            replaced(GraphLowering, codegen=stop, codegen_with_cpp_wrapper=stop),
            inductor_config.patch(force_disable_caches=True, **dict.fromkeys((*MEASURES, *POOLS), False)),
        ):
            compile_fx.compile_fx_inner(graph, values, is_backward=is_backward)
    except _Lowered as found:
        return found
    raise AssertionError("inductor compiled a graph without lowering it")


def inductor_settings() -> AbstractContextManager[Any]:
    """Return a context with inductor's settings of now, which ``torch.compile`` was given for its graphs."""
    with torch_names():
        from torch._inductor import config

        return cast(AbstractContextManager[Any], config.patch(config.get_config_copy()))


def as_partitioner(partition: Callable[..., Any], key: Any) -> Any:
    """Return a function in the form in which inductor takes a partitioner of joint graphs.

    Args:
        partition: ``(joint graph, inputs, **arguments) -> (forward graph, backward graph)``.
        key: tells the function from others, for the compiler's caches.
    """
    with torch_names():
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        class Custom(CustomPartitionerFn):  # type: ignore[misc]
            def __call__(self, graph: Any, inputs: Any, **arguments: Any) -> Any:
                return partition(graph, inputs, **arguments)

            def uuid(self) -> Any:
                return repr(key)

            def __reduce__(self) -> Any:  # for the keys of the compiler's caches
                return str, (repr(key),)

    return Custom()


@contextlib.contextmanager
def joint_graphs_noted(note: Callable[[GivenGraph], object]) -> Iterator[None]:
    """Inside, hand a copy of each joint graph to ``note``, before inductor splits the graph as usual."""
    with torch_names():
        from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(module: Any, inputs: Sequence[Any], **arguments: Any) -> Any:
        note(GivenGraph.of(module, inputs, arguments))
        return (before or min_cut_rematerialization_partition)(module, inputs, **arguments)

    before = swap_partitioner(as_partitioner(partition, "sacplan"))
    try:
        yield
    finally:
        swap_partitioner(before)


def swap_partitioner(partitioner: Any) -> Any:
    """Set inductor's partitioner, None for PyTorch's own, and return the one before."""
    with torch_names():
        from torch._inductor import config

        before, config.custom_partitioner_fn = config.custom_partitioner_fn, partitioner
    return before
