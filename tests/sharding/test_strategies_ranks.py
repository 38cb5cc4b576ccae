"""Strategies on four real ranks, as DTensors: all forms of a Linear, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.placements import PARTIAL, REPLICATED, Placement, Placements
from tests.support.ops import Ops
from tests.support.placed import assert_equal, every_rank, scattered

if not torch.distributed.is_available():
    pytest.skip("a build without torch.distributed", allow_module_level=True)

import torch.distributed as dist

from tests.support.processes import run_ranks

MESH = Mesh.of({"dp": 2, "tp": 2})


class Rank:
    """This process, and what it has of tensors."""

    def __init__(self, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", MESH.ranks, mesh_dim_names=MESH.names)
        self.at = every_rank(MESH)[rank]

    def part(self, t: torch.Tensor, layout: Placements) -> torch.Tensor:
        """The same summands are drawn on all ranks."""
        torch.manual_seed(1)
        return scattered(t, layout, MESH)[self.at].clone(memory_format=torch.preserve_format)

    def whole(self, part: torch.Tensor, shape: Sequence[int], layout: Placements) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        kinds = {"R": lambda p: Replicate(), "P": lambda p: Partial(), "S": lambda p: Shard(p.dim)}
        # A second cut of a dimension lies inside of the first one, as those of a DTensor do.
        assert [p.outer for p in layout if p.is_cut] in ([], [1], [1, 1]) or layout[0].dim == layout[1].dim
        placements = [kinds[p.kind](p) for p in layout]
        stride = torch.empty(shape, device="meta").stride()
        placed = DTensor.from_local(
            part.contiguous(), self.mesh, placements, shape=torch.Size(shape), stride=stride
        )
        return placed.full_tensor()


def of_gradient(layout: Placements, spread: Sequence[bool]) -> Placements:
    """A gradient lies as its tensor does, if that is cut; that of a summand is whole.

    That of what is whole is a summand on each rank, where ranks have other parts of the rest (``spread``).
    """

    def placed(p: Placement, is_spread: bool) -> Placement:
        if p.is_cut:
            return p
        return PARTIAL if is_spread and not p.is_partial else REPLICATED

    return tuple(map(placed, layout, spread))


def check_linear(here: Rank, shape: tuple[int, ...], bias: bool) -> int:
    """Every form of it; how many."""
    torch.manual_seed(0)
    tensors = [torch.randn(s) for s in (shape, (32, 16), (32,))][: 3 if bias else 2]
    truth = [t.clone().requires_grad_() for t in tensors]
    y = F.linear(*truth)
    g = torch.randn_like(y)
    y.backward(g)
    forms = sacplan.strategies(nn.Linear(16, 32, bias=bias), tensors[0], MESH)
    for form in forms:
        *given, out = form.operands
        parts = [here.part(t, o.layout).requires_grad_() for t, o in zip(tensors, given, strict=True)]
        assert [tuple(p.shape) for p in parts] == [o.local for o in given], form
        with Ops(lambda call: call.func.namespace) as seen:
            mine = F.linear(*parts)
        assert set(seen.noted) == {"aten"}, form
        assert tuple(mine.shape) == out.local, form
        assert_equal(here.whole(mine.detach(), y.shape, out.layout), y.detach(), form.name)
        # Every form but the one where an axis does nothing has another part of the work on each rank.
        spread = [any(o.layout[axis] != REPLICATED for o in form.operands) for axis in range(2)]
        mine.backward(here.part(g, of_gradient(out.layout, [False, False])))
        reduced = 0
        for part, t, o in zip(parts, truth, given, strict=True):
            layout = of_gradient(o.layout, spread)
            assert_equal(here.whole(part.grad, t.shape, layout), t.grad, f"{form.name}: gradient of {o.name}")
            reduced += sum(p.is_partial for p in layout) * part.grad.nbytes
        assert reduced == form.backward.bytes, form  # ranks of two send as much as they have
    return len(forms)


def forms_of_linear(here: Rank) -> None:
    shapes = ((4, 4, 4, 16), (1, 4, 4, 16), (4, 16))
    counts = [check_linear(here, s, bias) for s, bias in itertools.product(shapes, (True, False))]
    assert counts == [36, 36, 25, 25, 16, 16]


def on_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4)
    try:
        forms_of_linear(Rank(rank))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    run_ranks(on_rank, (str(tmp_path),), 4)
