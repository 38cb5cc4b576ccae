"""The module tree: names by path component, orders that are checked, rows of memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from sacplan.classic.graph import (
    ExactTradeoff,
    MemorySegment,
    ModuleInfo,
    ModuleStats,
    parse_module_info,
)
from sacplan.errors import PlanError

PRE = ("", "layers.1", "layers.1.attn", "layers.10", "layers.10.attn", "net.layers.1")
POST = ("layers.1.attn", "layers.1", "layers.10.attn", "layers.10", "net.layers.1", "")


def info(pre: tuple[str, ...] = PRE, post: tuple[str, ...] = POST, **kwargs: tuple[str, ...]) -> ModuleInfo:
    return ModuleInfo(tuple(ModuleStats(fqn) for fqn in reversed(pre)), pre, post, **kwargs)


def test_nodes_are_in_execution_order() -> None:
    graph = parse_module_info(info())
    assert tuple(node.fqn for node in graph.nodes) == PRE
    assert graph.root == ""
    assert graph.index("layers.10") == 3
    assert graph.position("layers.10") == 3
    assert len(graph) == 6
    assert "layers.10" in graph
    assert "layers" not in graph
    assert graph["layers.10"].fqn == "layers.10"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (info(post=POST[1:]), r"fw_post_order lacks modules .*'layers.1.attn'"),
        (info(post=(*POST, "x")), r"fw_post_order has modules .*'x'"),
        (info(post=(*POST, "")), r"fw_post_order names modules more than once: ''"),
        (info(bw_pre_order=("", "x")), r"bw_pre_order names modules without statistics: 'x'"),
        (info(bw_post_order=("", "")), r"bw_post_order names modules more than once"),
        (ModuleInfo((), (), ()), "no module statistics"),
        (ModuleInfo((ModuleStats("a"), ModuleStats("a")), ("a",), ("a",)), "statistics names modules more"),
        (ModuleInfo((ModuleStats("a"),), ("a", "b"), ("a",)), "fw_pre_order has modules .*'b'"),
    ],
)
def test_inconsistent_info(broken: ModuleInfo, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_module_info(broken)


def test_backward_orders_may_lack_modules() -> None:
    parse_module_info(info(bw_pre_order=("", "layers.1"), bw_post_order=("layers.1", "")))


def test_unknown_root() -> None:
    with pytest.raises(PlanError, match="root 'model'"):
        parse_module_info(info(), root="model")


def test_points_and_fits_are_checked() -> None:
    with pytest.raises(PlanError, match="discard ratio"):
        ExactTradeoff(1.5, 0.0)
    with pytest.raises(PlanError, match="recompute time"):
        ExactTradeoff(0.5, float("nan"))
    with pytest.raises(PlanError, match="n_segments is 2"):
        ModuleStats("a", n_segments=2, slopes=(1.0,), intercepts=(0.0,))


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True])
def test_world_size(world_size: int) -> None:
    with pytest.raises(PlanError, match="world_size"):
        parse_module_info(info()).memory_rows(world_size)


def test_graph_is_a_value() -> None:
    graph = parse_module_info(info())
    assert copy.deepcopy(graph) == graph
    assert pickle.loads(pickle.dumps(graph)).parent("layers.1.attn") == "layers.1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.root = "a"  # type: ignore[misc]
    replaced = dataclasses.replace(graph, segments=(MemorySegment(0, 1, 1),))
    assert replaced != graph
    assert replaced.parent("layers.1.attn") == "layers.1"
