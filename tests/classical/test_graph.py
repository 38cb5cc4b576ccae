"""The module tree: names by path component, orders that are checked, rows of memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sacplan._classical.graph import (
    ExactTradeoff,
    Graph,
    MemorySegment,
    ModuleInfo,
    ModuleStats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from sacplan._program.program import is_inside
from sacplan.errors import PlanError

PRE = ("", "layers.1", "layers.1.attn", "layers.10", "layers.10.attn", "net.layers.1")
POST = ("layers.1.attn", "layers.1", "layers.10.attn", "layers.10", "net.layers.1", "")


def info(pre: tuple[str, ...] = PRE, post: tuple[str, ...] = POST, **kwargs: tuple[str, ...]) -> ModuleInfo:
    return ModuleInfo(tuple(ModuleStats(fqn) for fqn in reversed(pre)), pre, post, **kwargs)


def prefixed(name: str) -> str:
    return f"Net.{name}" if name else "Net"


def test_is_inside_goes_by_component() -> None:
    assert is_inside("layers.1.attn", "layers.1")
    assert not is_inside("layers.10", "layers.1")
    assert not is_inside("net.layers.1.attn", "layers.1")
    assert not is_inside("layers.1", "layers.1")
    assert is_inside("layers.1", "")
    assert not is_inside("", "")


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


def test_parents_skip_modules_that_did_not_run() -> None:
    graph = parse_module_info(info())
    assert graph.parent("") is None
    assert graph.parent("layers.1") == ""
    assert graph.parent("layers.10.attn") == "layers.10"
    assert graph.parent("net.layers.1") == ""
    assert graph.ancestors("layers.1.attn") == ("layers.1", "")
    assert graph.ancestors("") == ()


def test_root_named_by_its_class() -> None:
    graph = parse_module_info(info(tuple(map(prefixed, PRE)), tuple(map(prefixed, POST))))
    assert graph.root == "Net"
    assert graph.ancestors("Net.layers.1.attn") == ("Net.layers.1", "Net")
    assert graph.match(["layers.1", "Net.layers.10"], "ac_units") == {"Net.layers.1", "Net.layers.10"}


def test_root_whose_name_is_no_prefix() -> None:
    graph = parse_module_info(info(("Net", *PRE[1:]), (*POST[:-1], "Net")))
    assert graph.parent("layers.1") == "Net"
    assert graph.match(["Net.layers.1"], "ac_units") == {"layers.1"}


def test_match_is_whole() -> None:
    graph = parse_module_info(info())
    assert graph.match(["layers.1"], "ac_units") == {"layers.1"}
    assert graph.match([], "ac_units") == frozenset()
    with pytest.raises(PlanError, match=r"fsdp_units: unknown module 'layers.11'.*'layers.1'"):
        graph.match(["layers.11"], "fsdp_units")
    with pytest.raises(PlanError, match=r"unknown module 'attn'.*'layers.1.attn'"):
        graph.match(["attn"], "ac_units")
    with pytest.raises(PlanError, match=r"is the string 'layers.1'"):
        graph.match("layers.1", "ac_units")
    with pytest.raises(PlanError, match=r"unknown module 'layer.1'; did you mean"):
        graph.index("layer.1")


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


def two_modules(segments: tuple[MemorySegment, ...] = ()) -> Graph:
    return Graph(
        (
            ModuleStats(
                "net",
                param_per_module=100,
                grad_total=11,
                act_total=70,
                act_grad_per_module=5,
                fw_runtime_per_module=1.5,
                bw_runtime_per_module=3.0,
            ),
            ModuleStats("a", grad_total=50, act_total=40, act_grad_per_module=3),
        ),
        ("a", "net"),
        "net",
        segments,
    )


def test_classical_rows() -> None:
    graph = two_modules()
    assert graph.memory_rows() == [(0, 100 + 50 + 40 + 3), (1, 100 + 11 + 70 + 5)]
    assert graph.memory_rows(world_size=4) == [(0, 38 + 43), (1, 28 + 75)]  # 37.5 and 27.75, rounded up
    assert get_peak_memory_runtime_baseline(graph) == (193, 4.5)


def test_segment_rows() -> None:
    graph = two_modules(
        (
            MemorySegment(1, 10, 5),
            MemorySegment(0, 9, 9),
            MemorySegment(1, 10, 6),
            MemorySegment(2, 101, 0, "optimizer step"),
        )
    )
    assert graph.memory_rows() == [(0, 18), (1, 16), (2, 101)]
    assert [row.name for row in graph.named_memory_rows()] == ["a", "net", "optimizer step"]
    assert graph.memory_rows(world_size=2) == [(0, 14), (1, 11), (2, 51)]
    assert get_peak_memory_runtime_baseline(graph) == (101, 4.5)
    with pytest.raises(PlanError, match="not within a step of 2 modules"):
        two_modules((MemorySegment(3, 0, 0),))


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True])
def test_world_size(world_size: int) -> None:
    with pytest.raises(PlanError, match="world_size"):
        two_modules().memory_rows(world_size)


def test_graph_is_a_value() -> None:
    graph = two_modules()
    assert copy.deepcopy(graph) == graph
    assert pickle.loads(pickle.dumps(graph)).parent("a") == "net"
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.root = "a"  # type: ignore[misc]
    replaced = dataclasses.replace(graph, segments=(MemorySegment(0, 1, 1),))
    assert replaced != graph
    assert replaced.parent("a") == "net"


def test_to_frame() -> None:
    frame = two_modules().to_frame()
    assert list(frame.index) == ["net", "a"]
    assert frame.loc["net", "param_per_module"] == 100
    assert frame.loc["a", "parent"] == "net"


@given(st.lists(st.lists(st.sampled_from(["a", "aa", "b", "1", "10"]), max_size=4), min_size=1, max_size=12))
def test_ancestors_agree_with_components(paths: list[list[str]]) -> None:
    names = list(dict.fromkeys(["", *(".".join(path) for path in paths)]))
    shuffled = names[1:]
    random.Random(0).shuffle(shuffled)
    graph = parse_module_info(
        ModuleInfo(tuple(ModuleStats(fqn) for fqn in [*shuffled, ""]), tuple(names), tuple(names))
    )
    for fqn in names:
        parts = fqn.split(".") if fqn else []
        expected = {
            other
            for other in names
            if other != fqn
            and (other.split(".") if other else []) == parts[: len(other.split(".") if other else [])]
        }
        assert set(graph.ancestors(fqn)) == expected
        assert {other for other in names if is_inside(fqn, other)} == expected
