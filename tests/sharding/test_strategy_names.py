"""``sacplan.strategies``: names, operand mapping and costs, against ColossalAI's lists and against counts by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, cut, format_layout, local_shape
from tests.zoo.layers import FromFunction

MESH = {"dp": 2, "tp": 2}


def linear(*shape: int, bias: bool = True) -> sacplan.Strategies:
    return sacplan.strategies(nn.Linear(16, 32, bias=bias), torch.empty(shape, device="meta"), MESH)


def names_of_the_seed(dims: list[int]) -> set[str]:
    """Those of ColossalAI's LinearModuleHandler for an input whose batch dimensions are these."""
    by_rows = {
        "S0S1 = S0R x RS1", "S1S0 = S1R x RS0", "S0R = S0S1 x S1R", "S1R = S1S0 x S0R", "S01R = S01R x RR",
    }  # fmt: skip
    return {f"{name}_{d}" for name, d in itertools.product(by_rows, dims)} | {
        "RS1 = RS0 x S0S1", "RS0 = RS1 x S1S0", "RR = RS0 x S0R", "RR = RS1 x S1R", "RS0 = RR x RS0",
        "RS1 = RR x RS1", "RR = RS01 x S01R", "RS01 = RR x RS01", "RR = RR x RR",
    }  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "named", "forms"), [((4, 4, 4, 16), 24, 36), ((1, 4, 4, 16), 19, 25), ((4, 16), 14, 16)]
)
def test_the_strategies_of_a_linear(shape: tuple[int, ...], named: int, forms: int, bias: bool) -> None:
    found = linear(*shape, bias=bias)
    dims = [d for d, n in enumerate(shape[:-1]) if n > 1]
    ours = [name for name in found.names if "=" in name]
    assert set(ours) == names_of_the_seed(dims)
    assert len(ours) == named
    assert len(set(found.names)) == len(found) == forms
    one_axis = sacplan.strategies(nn.Linear(16, 32, bias=bias), torch.empty(shape), 2)
    assert len(one_axis) == math.isqrt(forms)


def test_operands_have_physical_and_logical_shapes() -> None:
    found = linear(4, 4, 4, 16)["S0S1 = S0R x RS1_1"]
    rows = [(o.name, o.role, o.physical, o.logical, format_layout(o.layout), o.local) for o in found.operands]
    assert rows == [
        ("input", "argument", (4, 4, 4, 16), (64, 16), "S1,R", (4, 2, 4, 16)),
        ("weight", "parameter", (32, 16), (16, 32), "R,S0", (16, 16)),
        ("bias", "parameter", (32,), (32,), "R,S0", (16,)),
        ("output", "output", (4, 4, 4, 32), (64, 32), "S1,S3", (4, 2, 4, 16)),
    ]
    assert found["weight"].local == local_shape((32, 16), (REPLICATED, cut(0)), (2, 2))
    with pytest.raises(KeyError):
        found["gate"]


@pytest.mark.parametrize(
    ("name", "flops", "forward", "backward"),
    [
        # Gradients of the weight (512 floats) and the bias (32) are summed over ranks that have other rows.
        ("S01R = S01R x RR_0", 4, 0, 2 * 544),
        # The one of the input (1,024) over ranks that have other columns.
        ("RS01 = RR x RS01", 4, 0, 2 * 1024),
        ("S0S1 = S0R x RS1_2", 4, 0, 272 + 512),
        # The output (2,048) over ranks that have summands.
        ("RR = RS0 x S0R", 2, 2048, 0),
        ("RR = RS01 x S01R", 4, 2 * 2048, 0),
        ("RS1 = RS0 x S0S1", 4, 1024, 512),
        ("RR = RR x RR", 1, 0, 0),
    ],
)
def test_costs(name: str, flops: int, forward: int, backward: int) -> None:
    """Two ranks that all-reduce each send as much as they have."""
    found = linear(4, 4, 4, 16)[name]
    assert found.flops == 2 * 64 * 16 * 32 // flops
    assert (found.forward.bytes, found.backward.bytes) == (4 * forward, 4 * backward)
    assert found.forward.ms is None
    assert found.memory_bytes == 4 * sum(math.prod(o.local) for o in found.operands)


def test_times_are_those_of_the_device() -> None:
    args = nn.Linear(16, 32), torch.empty(4, 16), MESH
    slow, fast = (sacplan.strategies(*args, device=name)["RR = RS01 x S01R"] for name in ("t4", "h100"))
    assert slow.forward.bytes == fast.forward.bytes
    assert slow.forward.ms > fast.forward.ms > 0
    assert slow.backward.ms == 0


def test_products_are_named_whatever_they_are_called_by() -> None:
    x, w, b = torch.empty(4, 16), torch.empty(32, 16), torch.empty(32)
    by_module = set(linear(4, 16).names)
    assert set(sacplan.strategies(F.linear, (x, w, b), MESH).names) == by_module
    bias_first = sacplan.strategies(torch.ops.aten.addmm.default, (b, x, w.t()), MESH)
    products = sacplan.strategies(torch.mm, (x, torch.empty(16, 32)), MESH)
    for found in (bias_first, products):
        assert {n for n in found.names if "=" in n} == {n for n in by_module if "=" in n}
    assert products["S0S1 = S0R x RS1_0"].operands[1].layout == (REPLICATED, cut(1))


def test_what_has_no_name_is_called_by_its_layouts() -> None:
    found = sacplan.strategies(torch.bmm, (torch.empty(2, 4, 6), torch.empty(2, 6, 8)), 2)
    assert found.names == ("R x R -> R", "S0 x S0 -> S0", "S1 x R -> S1", "S2 x S1 -> P", "R x S2 -> S2")
    assert "S0,S1 x R,R x R,R -> S0,S1" in linear(4, 4, 4, 16).names


def test_the_split_of_megatron_is_among_those_of_an_mlp() -> None:
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    found = sacplan.strategies(mlp, torch.empty(8, 16), 4)
    (split,) = [s for s in found if s["output"].layout == (PARTIAL,)]
    assert [str(o) for o in split.operands] == [
        "input R", "0.weight S0", "0.bias S0", "2.weight S1", "2.bias P", "output P"
    ]  # fmt: skip
    assert split.flops == found[0].flops // 4
    assert split.forward.bytes == 1.5 * 8 * 16 * 4  # two thirds of ring all-reduces on four ranks, twice
    assert split.backward.bytes == split.forward.bytes  # of the input's gradient


def test_tables() -> None:
    found = linear(4, 16)
    table = found.to_frame()
    assert list(table.index) == list(found.names)
    assert table.loc["RS0 = RR x RS0", "weight"] == "S0,R"
    lines = repr(found).splitlines()
    assert lines[0] == "16 strategies of Linear on dp 2 x tp 2"
    assert len(lines) == 17
    assert repr(found[0]) == "<RR = RR x RR: input R,R; weight R,R; bias R,R; output R,R>"
    assert found[:2] == (found[0], found[1])
    with pytest.raises(KeyError):
        found["S2R"]


def test_the_module_is_left_as_it_is() -> None:
    norm, batch = nn.BatchNorm1d(4), torch.randn(8, 4)
    before = norm.running_mean.clone()
    assert len(sacplan.strategies(norm, batch, 2)) == 2
    assert torch.equal(norm.running_mean, before)


def test_thousands_of_ways_are_refused() -> None:
    weights = nn.ParameterList(torch.empty(4, 4) for _ in range(12))
    many = FromFunction(lambda self, x: [w * 2 for w in self.weights], weights=weights)
    with pytest.raises(sacplan.errors.PlanError, match="smaller module"):
        sacplan.strategies(many, torch.empty(4), 2)
