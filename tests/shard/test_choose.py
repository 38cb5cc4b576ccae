"""What an op runs with, by where its inputs lie: the flows of Megatron, FSDP and DDP come out of one rule."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sacplan._shard.choose import choose
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import fits, format_layout, parse_asked, parse_layout
from sacplan._torch.calls import Call
from sacplan.errors import PlanError

ONE, TWO = Mesh.of({"tp": 4}), Mesh.of({"dp": 2, "tp": 2})
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chosen(
    func: Any, args: Sequence[Any], have: str, mesh: Mesh = ONE, asked: Sequence[str] = (), weights: str = ""
) -> tuple[str, str]:
    """``"S0 R"``: the layout of each input, and of each output."""
    call = Call(func, args, {}, func(*args))
    found = choose(
        call,
        [parse_layout(text) for text in have.split()],
        mesh,
        [parse_asked(text) if text else None for text in asked] or None,
        [letter == "w" for letter in weights],
    )
    for t, layout in zip((*call.inputs, *call.outputs), (*found.inputs, *found.outputs), strict=True):
        assert fits(t.shape, layout, mesh.ranks)
    return " ".join(map(format_layout, found.inputs)), " ".join(map(format_layout, found.outputs))


X, W, Y = meta(512, 64), meta(64, 64), meta(512, 64)


@pytest.mark.parametrize(
    ("func", "args", "have", "weights", "runs"),
    [
        (aten.mm.default, (X, W), "R S1", "-w", ("R S1", "S1")),
        (aten.mm.default, (X, W), "S1 S0", "-w", ("S1 S0", "P")),
        (aten.mm.default, (X, W), "S0 S1", "-w", ("S0 R", "S0")),
        (aten.mm.default, (meta(64, 512), X), "S1 S0", "--", ("S1 S0", "P")),
        (aten.add.Tensor, (X, Y), "R P", "--", ("P P", "P")),
        (aten.add.Tensor, (X, Y), "P P", "--", ("P P", "P")),
        (aten.add.Tensor, (X, Y), "S0 P", "--", ("S0 S0", "S0")),
        (aten.mul.Tensor, (X, meta(64)), "P R", "-w", ("P R", "P")),
        (aten.native_layer_norm.default, (X, [64], meta(64), meta(64), 1e-5), "P R S0", "-ww", ("R R R", "R R R")),
    ],
    ids=[
        "a column of Megatron", "a row of Megatron", "FSDP gathers the weight", "the gradient of a weight is a summand",
        "summands meet a whole value", "summands meet summands", "summands meet a cut value",
        "summands meet a whole vector", "a normalization of summands",
    ],
)  # fmt: skip
def test_flows(func: Any, args: Any, have: str, weights: str, runs: tuple[str, str]) -> None:
    assert chosen(func, args, have, weights=weights) == runs


@pytest.mark.parametrize(
    ("have", "runs"),
    [
        ("S0,R S0,S1", ("S0,R R,S1", "S0,S1")),
        ("S0,S1 R,S0", ("S0,S1 R,S0", "S0,P")),
        ("S0,R S0,R", ("S0,R R,R", "S0,R")),
    ],
)
def test_axes_are_chosen_together(have: str, runs: tuple[str, str]) -> None:
    assert chosen(aten.mm.default, (X, W), have, TWO, weights="-w") == runs


def test_a_view_follows_its_input_and_parts_of_merged_dimensions_come_back() -> None:
    x = meta(8, 64, 64)
    assert chosen(aten.view.default, (x, [512, 64]), "S0,S1", TWO) == ("S0,S1", "S0,S0/8")
    assert chosen(aten.view.default, (X, [8, 64, 64]), "S0,S0/8", TWO) == ("S0,S0/8", "S0,S1")
    assert chosen(aten.t.default, (X,), "P") == ("P", "P")


def test_what_is_written_stays() -> None:
    assert chosen(aten.add_.Tensor, (X, Y), "S0 P") == ("S0 S0", "S0")
    assert chosen(aten.mul_.Tensor, (X, Y), "P R") == ("P R", "P")
    with pytest.raises(PlanError, match=r"relu_.* as P cannot run on mesh tp 4: it writes"):
        chosen(aten.relu_.default, (X,), "P")


def test_what_is_asked_is_done_or_refused() -> None:
    ids = meta(8, 32, dtype=torch.long)
    runs = chosen(aten.embedding.default, (meta(48, 64), ids), "S0,R R,R", TWO, ("", "S0,*"), "w-")
    assert runs[0].split()[1].startswith("S0,")
    assert runs[1].startswith("S0,")
    with pytest.raises(PlanError, match="asked as S1"):
        chosen(aten.cumsum.default, (X, 1), "R", asked=("S1",))


def test_lists_of_an_optimizer_lie_by_position() -> None:
    lists = ([X, W], [Y, meta(64, 64)])
    call = Call(aten._foreach_add_.List, lists, {}, None)
    found = choose(call, [parse_layout(p) for p in ("S0", "R", "P", "S1")], ONE)
    assert [format_layout(layout) for layout in found.inputs] == ["S0", "R", "S0", "R"]


def test_an_axis_of_one_rank_moves_nothing() -> None:
    mesh = Mesh.of({"dp": 1, "tp": 4})
    for have in itertools.product(("R", "S0", "S1"), repeat=2):
        text = " ".join(f"{placement},R" for placement in have)
        assert chosen(aten.mm.default, (X, W), text, mesh)[0] == text


@pytest.mark.slow
def test_another_process_chooses_the_same() -> None:
    """Whatever its hashes are: no set's order is in it."""
    code = (
        "from tests.shard.test_choose import *\n"
        "print([chosen(aten.addmm.default, (meta(64), X, W), ' '.join(h), TWO) for h in "
        "itertools.product(('R,R', 'S0,R'), ('R,S1', 'S0,S0/2', 'P,S0'), ('S0,S1', 'R,P', 'S1,R'))])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
