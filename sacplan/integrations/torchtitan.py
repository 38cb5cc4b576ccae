"""A memory policy for torchtitan's graph_trainer: a budget in bytes for the graph of a step.

    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    register_memory_policy("sacplan")(sacplan.integrations.torchtitan.memory_policy("60GiB"))

graph_trainer traces forward pass, loss and backward pass into one graph. A memory policy tags what is saved in it, and
torchtitan's passes carry that out. Of the ways that are compared, each is carried out by torchtitan on a copy, and
recorded on fake tensors. Written for torchtitan 0.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.experiments.graph_trainer.common_utils import _get_module_fqn, _is_backward_node
from torchtitan.experiments.graph_trainer.fsdp_patterns import find_fsdp_unshard_save_nodes
from torchtitan.experiments.graph_trainer.registry import MEMORY_POLICY_REGISTRY
from torchtitan.experiments.graph_trainer.selective_activation_remat import (
    must_recompute,
    selective_activation_remat_pass,
)

from sacplan.core.arguments import checked
from sacplan.core.budget import exact_bytes, format_bytes, parse_budget
from sacplan.core.liveness import footprint_of
from sacplan.device.cost import CostModel
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.partitions import Split, Splits, compared, fastest, prices_of, smallest, spec_of
from sacplan.planning.saved_values import bytes_of, needed, price_of, without_forbidden
from sacplan.record.recorder import Recorder
from sacplan.torch_compat import partitioning
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.partitioning import ForwardValue, LoweredGraphs

_LATE = ("loss", "lm_head")
"""Modules whose backward pass comes first. Nothing runs again in it."""


@dataclass(frozen=True, slots=True)
class TaggedGraph:
    """A graph that was tagged under a budget.

    Attributes:
        budget_bytes: its budget.
        needs_bytes: most that is alive while it runs.
        default_bytes: the same if nothing runs again.
        recompute_ms: predicted time that it takes more.
    """

    budget_bytes: int
    needs_bytes: int
    default_bytes: int
    recompute_ms: float


def _tags(node: Any) -> Any:
    return getattr(node.target, "tags", ())


def _storages(node: Any) -> set[int]:
    made = tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in made if isinstance(value, torch.Tensor)}


class _StepGraph:
    """The graph of a step, as ``Split`` takes the joint graphs of ``torch.compile``."""

    def __init__(self, module: Any, config: Any) -> None:
        self._module, self._config = module, config
        parallel = config.parallelism
        reshard = get_fsdp_reshard_after_forward_policy(
            parallel.fsdp_reshard_after_forward, pp_enabled=parallel.pipeline_parallel_degree > 1
        )
        for given in module.graph.find_nodes(op="placeholder"):
            for node in find_fsdp_unshard_save_nodes(given):
                node.meta["recompute"] = CheckpointPolicy[f"MUST_{'RECOMPUTE' if reshard else 'SAVE'}"]
        self._spec = spec_of(module)
        self.values = self._values()

    def _values(self) -> list[ForwardValue]:
        graph = self._module.graph
        nodes = list(graph.nodes)
        late = [_get_module_fqn(node) in _LATE for node in nodes]
        last = max((i for i, is_late in enumerate(late) if is_late), default=-1)
        backward = {node for node in nodes if _is_backward_node(node)}
        ahead = {node for node in nodes[: last + 1] if node in backward}
        stays = {
            node.name
            for node, is_late in zip(nodes, late, strict=True)
            if is_late or ahead & node.users.keys() or torch.Tag.nondeterministic_seeded in _tags(node)
        }
        for node in reversed(nodes):
            after = (0 if user in backward else 1 + user.dist_from_bw for user in node.users)
            node.dist_from_bw = min(after, default=len(nodes))
        info = SimpleNamespace(
            tangents_closure=backward,
            required_bw_nodes=backward,
            static_lifetime_input_nodes=set(graph.find_nodes(op="placeholder")),
            is_required_fw=lambda node: True,
        )
        stale = self._overwritten(nodes)
        return [
            dataclasses.replace(v, rerun_ms=math.inf)
            if v.name in stays
            else dataclasses.replace(v, is_savable=v.is_savable and v.name not in stale)
            for v in partitioning.forward_values(graph, info, 1, prices_of(self._spec))
        ]

    def _overwritten(self, nodes: list[Any]) -> set[str]:
        """Return the nodes whose memory a later op writes: what runs again must not read it from there."""
        found: set[str] = set()
        sharing: dict[Any, set[str]] = {}
        for node in nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                for storage in {s for given in node.all_input_nodes for s in _storages(given)}:
                    found |= sharing.get(storage, set())
            for storage in _storages(node):
                sharing.setdefault(storage, set()).add(node.name)
        return found

    @cached_property
    def own(self) -> Split:
        """Nothing runs again but what is sharded."""
        return Split(self, frozenset(v.name for v in self.values if v.is_read and v.is_savable))

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The ways that are compared, torchtitan's own policies among them; ``own`` is the first."""
        return compared(self, map(self._saved_by, ("default", "eager", "full")))

    def _saved_by(self, policy: str) -> frozenset[str]:
        module = partitioning.copied(self._module)
        MEMORY_POLICY_REGISTRY[policy](module, config=self._config)
        kept = {node.name for node in module.graph.nodes if not must_recompute(node)}
        saved = without_forbidden(self.values, kept)
        return saved & {value.name for value in needed(self.values, saved)}

    def lowered(self, saved: frozenset[str]) -> LoweredGraphs:
        """Return what the step takes if these are saved, as torchtitan carries it out."""
        module = partitioning.copied(self._module)
        self.tag(module, saved)
        peak = self._peak(selective_activation_remat_pass(module))
        return LoweredGraphs(peak, peak, bytes_of(self.values, saved), price_of(self.values, saved))

    def tag(self, module: Any, saved: frozenset[str]) -> None:
        """Tag what is saved in a graph of these nodes, and what runs again."""
        again = {value.name for value in needed(self.values, saved)} - saved
        for node in module.graph.nodes:
            if node.op == "call_function" and not _is_backward_node(node):
                what = "RECOMPUTE" if node.name in again else "SAVE"
                node.meta["recompute"] = CheckpointPolicy[f"MUST_{what}"]

    def _peak(self, module: Any) -> int:
        given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        with cast(FakeTensor, tensors[0]).fake_mode, torch.no_grad():
            recorder = Recorder(self._spec, CostModel(self._spec).cost, "observe")
            recorder.track_tensors(tensors)
            with recorder:
                made = torch.fx.Interpreter(module).run(*given)
        del made
        return footprint_of(recorder.program()).peak_bytes


def _cheapest(graph: _StepGraph, limit: int) -> Split:
    """Return the cheapest way to split a graph that fits a budget.

    Raises:
        InfeasibleBudget: none that is compared fits.
    """
    default = graph.own.lowered.most_bytes
    if default <= limit:
        return graph.own

    def needs(splits: Splits) -> int:
        return splits[0].expected.most_bytes

    options = [(split,) for split in graph.splits]
    (best,) = chosen = fastest(lambda: options, needs, limit) or smallest(lambda: options, needs)
    taken = needs(chosen)
    if taken <= limit:
        return best
    raise InfeasibleBudget(
        f"a compiled graph does not fit {format_bytes(limit)}: without a budget it takes "
        f"{format_bytes(default)}, and the smallest of {len(options)} that were compared {format_bytes(taken)}. "
        f"Give at least {exact_bytes(taken)}, or make the batch smaller.",
        budget_bytes=limit,
        smallest_feasible_bytes=taken,
        binding="a compiled graph",
    )


@checked(PlanError)
def memory_policy(budget: float | str) -> Callable[..., Any]:
    """Return a memory policy that holds a budget in bytes with the least recomputation.

    Args:
        budget: for all that the graph has alive: parameters and batch, activations, gradients. A number is GiB; a share
            refers to the peak if nothing runs again. Subtract what else is on the device: optimizer state. Fusion by
            inductor is not counted: it takes less.

    Returns:
        What ``register_memory_policy`` takes. Its attribute ``graphs`` is a list of ``TaggedGraph``, one for each
        graph that it tagged. It raises ``InfeasibleBudget`` if nothing that was compared fits.

    Raises:
        BudgetError: not a budget.
    """
    parse_budget(budget, 2**40)  # what is no budget is an error now, and not in the first step

    def policy(gm: Any, *, config: Any) -> Any:
        graph = _StepGraph(gm, config)
        limit = parse_budget(budget, graph.own.lowered.most_bytes)
        chosen = _cheapest(graph, limit)
        needs, before = chosen.lowered, graph.own.lowered
        more_ms = max(0.0, needs.ms - before.ms)
        graphs.append(TaggedGraph(limit, needs.most_bytes, before.most_bytes, more_ms))
        graph.tag(gm, chosen.saved)
        return gm

    graphs: list[TaggedGraph] = []
    policy.graphs = graphs  # type: ignore[attr-defined]
    return policy
