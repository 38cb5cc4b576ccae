"""PyTorch's partitioner for joint graphs, and the peaks of the graphs that it makes.

Private PyTorch API, tried on 2.13: ``LATE`` of ``versions.py`` lists it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from sacplan._torch.inductor import MEASURES, POOLS
from sacplan._torch.ops import is_heavy
from sacplan._torch.private import replaced
from sacplan._torch.versions import torch_names

Graph = Any
"""A ``torch.fx.GraphModule``, whose nodes have no precise types."""


@dataclass(frozen=True, slots=True)
class GraphPeaks:
    """Memory of the two graphs of a compiled region.

    Attributes:
        forward_bytes, backward_bytes: most that is alive while either runs, inputs and outputs included.
        saved_bytes: what the forward pass leaves for the backward pass, without parameters.
    """

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


class _Lowered(BaseException):
    """Ends lowering before code is generated. No ``Exception``, since inductor wraps those."""

    def __init__(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes


def partitioned(
    module: Graph, inputs: Sequence[Any], arguments: dict[str, Any], share: float | None
) -> tuple[Graph, Graph]:
    """Return the forward and the backward graph that PyTorch makes of a joint graph, which is changed.

    Args:
        module, inputs, arguments: as a partitioner gets them.
        share: the ``activation_memory_budget``. None: run again all that is cheap, and nothing else.
    """
    with torch_names():
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    patches: dict[str, Any] = {"activation_memory_budget": 1.0 if share is None else share}
    if share is None:
        _keep_costly(module.graph)
        patches |= dict.fromkeys(_BANS, False)
    with config.patch(patches):
        found: tuple[Graph, Graph] = partition(module, inputs, **arguments)
    return found


_BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
    "ban_recompute_not_in_allowlist",
)
"""Reasons for PyTorch to keep what is cheap."""


def _keep_costly(graph: Any) -> None:
    # PyTorch takes some attention for cheap. What was said of a node by its user stays.
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and is_heavy(node.target):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def copied(module: Graph) -> Graph:
    """Return a graph module with a graph of its own and the same attributes."""
    return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


def _size(node: Any) -> int:
    """Return the bytes of what a node makes: of all of its results; 0 of what is no tensor."""
    with torch_names():
        from torch._functorch.partitioners import _size_of
    return int(_size_of(node)) if "val" in node.meta else 0


def results_of(graph: Graph) -> tuple[str, ...]:
    """Return the names of the nodes that a graph returns."""
    return tuple(node.name for node in graph.graph.output_node().all_input_nodes)


def lowered_peaks(
    module: Graph, graphs: tuple[Graph, Graph], n_outputs: int, static: Collection[int]
) -> GraphPeaks:
    """Have inductor lower two graphs, without generating code, and return what is alive at most.

    Args:
        module: the joint graph.
        graphs: the forward and the backward graph, which are changed.
        n_outputs: outputs of the forward graph that are not there for the backward graph.
        static: numbers of the inputs that stay alive from step to step: parameters.
    """
    forward, backward = graphs
    inputs = [node for node in module.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    parameters = {node.name for i, node in enumerate(inputs) if i in static}
    results = [node for node in forward.graph.output_node().args[0] if isinstance(node, torch.fx.Node)]
    saved = {node for node in results[n_outputs:] if node.name not in parameters}
    held = {node for node in results[:n_outputs] if node.op != "placeholder"} - saved
    forward.graph.output_node().meta["user_visible_output_idxs"] = list(range(n_outputs))
    backward.graph.output_node().meta["user_visible_output_idxs"] = []
    given = sum(map(_size, inputs))
    return GraphPeaks(
        given + _lowered(forward, False),
        given + sum(map(_size, held)) + _lowered(backward, True),
        sum(map(_size, saved)),
    )


def _lowered(graph: Graph, is_backward: bool) -> int:
    """Return the most that a graph has alive of what it may free and what it makes, in bytes."""
    with torch_names():
        from torch._inductor import compile_fx
        from torch._inductor import config as inductor_config
        from torch._inductor.graph import GraphLowering
        from torch._inductor.memory import prepare_planning_info
        from torch.utils._ordered_set import OrderedSet

    def stop(self: Any) -> None:
        self.init_wrapper_code()
        self._update_scheduler()
        plan = self.scheduler
        names = OrderedSet(self.graph_inputs.keys()), OrderedSet(self.get_output_names())
        raise _Lowered(
            prepare_planning_info(plan.nodes, plan.name_to_buf, plan.name_to_fused_node, *names)[0]
        )

    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    off = dict.fromkeys((*MEASURES, *POOLS), False)
    try:
        with (
            replaced(GraphLowering, codegen=stop, codegen_with_cpp_wrapper=stop),
            inductor_config.patch(force_disable_caches=True, **off),
        ):
            compile_fx.compile_fx_inner(graph, values, is_backward=is_backward)
    except _Lowered as found:
        return found.peak_bytes
    raise AssertionError("inductor compiled a graph without lowering it")


def as_partitioner(partition: Callable[..., Any], key: Any) -> Any:
    """Return a function as what inductor takes for a partitioner of joint graphs.

    Args:
        partition: ``(joint graph, inputs, **arguments) -> (forward graph, backward graph)``.
        key: tells it from others, for the compiler's caches.
    """
    with torch_names():
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        class Custom(CustomPartitionerFn):  # type: ignore[misc]
            def __call__(self, graph: Any, inputs: Any, **arguments: Any) -> Any:
                return partition(graph, inputs, **arguments)

            def uuid(self) -> Any:
                return key

    return Custom()


def swap_partitioner(partitioner: Any) -> Any:
    """Set inductor's partitioner, None for PyTorch's own, and return the one before."""
    with torch_names():
        from torch._inductor import config

        before, config.custom_partitioner_fn = config.custom_partitioner_fn, partitioner
    return before
