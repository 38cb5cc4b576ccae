"""The search for placements: what it finds on models whose best placements are known."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import sacplan
from sacplan._placing.answer import sharding_of
from sacplan._placing.axis_program import AxisProgram
from sacplan._placing.roles import ROLES
from sacplan._placing.search import ShardingSearch, ShardingSolution
from sacplan._placing.shardings import searched, tensor_parallel
from sacplan._profile.profile import Profile
from sacplan._ranks.ranks import Ranks
from sacplan._shard.mesh import Mesh
from sacplan._shard.places import matches
from sacplan._shard.sharding import Sharding
from sacplan._solve.milp import Milp
from tests.zoo.layers import MLP, FromFunction, Residual, Stack

OPTIONS = Milp(gap=2e-3, work_limit=100_000_000)


@cache
def mlp(tokens: int = 512) -> Profile:
    with torch.device("meta"):
        model, batch = MLP(1024, bias=False).bfloat16(), torch.empty(tokens, 1024, dtype=torch.bfloat16)
    return sacplan.profile(model, batch, loss_fn=lambda m, x: m(x).float().square().mean(), device="h100")


@cache
def stack(layers: int, rows: int = 8) -> Profile:
    with torch.device("meta"):
        mlps = (Residual(MLP(256, bias=False)) for _ in range(layers))
        model = Stack([nn.Embedding(512, 256), *mlps], nn.LayerNorm(256)).bfloat16()
        ids = torch.zeros(rows, 512, dtype=torch.long)
    return sacplan.profile(
        model,
        ids,
        loss_fn=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.AdamW,
        device="h100",
    )


def search(profile: Profile, mesh: dict[str, int], **allowed: str) -> ShardingSearch:
    roles = {axis: ROLES[role] for axis, role in allowed.items()}
    return ShardingSearch(profile.recorded, profile.parameters, Mesh.of(mesh), profile.spec, roles, OPTIONS)


def fastest(profile: Profile, mesh: dict[str, int], **allowed: str) -> tuple[Sharding, ShardingSolution]:
    found = search(profile, mesh, **allowed)
    best = found.cheapest()
    assert best is not None
    return sharding_of(found.evaluation, best.choice), best


def test_whole_copies_on_all_ranks_are_the_recorded_step() -> None:
    for profile in (mlp(), stack(2)):
        found = search(profile, {"a": 2, "b": 2})
        evaluation = found.evaluation
        figures = evaluation.figures(evaluation.replicated())
        assert evaluation.is_possible(evaluation.replicated())
        assert figures.peak_bytes == profile.recorded.footprint.peak_bytes
        assert figures.ms == pytest.approx(profile.recorded.step_ms)
        live = [moment.live_bytes for moment in profile.recorded.liveness.moments[1:]]
        assert evaluation.live(evaluation.replicated()).tolist() == live


def test_an_mlp_is_split_as_megatron_does() -> None:
    sharding, best = fastest(mlp(), {"tp": 4})
    assert best.status == "optimal"
    assert sharding.homes == {"up.weight": "S0", "down.weight": "S1"}
    assert sharding.places == ()
    assert best.bound_ms is not None
    assert best.bound_ms <= best.figures.ms < mlp().recorded.step_ms
    rank = Ranks.spread(sharding).program(mlp().recorded, mlp().fingerprint.parameters, mlp().spec)
    assert rank.footprint.peak_bytes == pytest.approx(best.figures.peak_bytes, rel=0.02)


def test_limits_are_kept_and_cost_time() -> None:
    found = search(mlp(), {"tp": 4})
    free = found.cheapest()
    assert free is not None
    smallest = found.smallest
    assert smallest.figures.peak_bytes < free.figures.peak_bytes
    before = free.figures.ms
    for share in (0.75, 0.5, 0.25, 0.0):
        spare = free.figures.peak_bytes - smallest.figures.peak_bytes
        limit = smallest.figures.peak_bytes + share * spare
        one = found.cheapest(limit)
        assert one is not None
        assert one.figures.peak_bytes <= limit
        assert one.figures.ms >= before * (1 - OPTIONS.gap)
        assert found.evaluation.is_possible(one.choice)
        before = one.figures.ms
    assert found.cheapest(smallest.figures.peak_bytes * 0.98) is None


def test_the_smallest_is_what_can_be_had() -> None:
    profile = stack(2)
    found = search(profile, {"ranks": 4})
    peak_bytes = found.smallest.figures.peak_bytes
    assert profile.recorded.footprint.peak_bytes / 4 <= peak_bytes
    assert peak_bytes < profile.recorded.footprint.peak_bytes / 2
    homes = sharding_of(found.evaluation, found.smallest.choice).homes
    assert set(homes.values()) <= {"S0", "S1"}


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_many_layers_have_the_variables_of_few(mesh: dict[str, int]) -> None:
    sizes = set()
    for layers in (3, 8):
        found = search(stack(layers), mesh)
        program = AxisProgram(found.evaluation, found.evaluation.replicated(), len(mesh) - 1, OPTIONS)
        sizes.add(program.variables)
    assert len(sizes) == 1


def test_equal_layers_lie_alike_and_homes_have_patterns() -> None:
    best, _ = fastest(stack(3), {"tp": 4})
    layers = [name for name in best.homes if name.startswith("layers.")]
    assert all(name.startswith("layers.*.") for name in layers)


def test_the_same_is_found_again() -> None:
    assert fastest(mlp(), {"dp": 2, "tp": 2}) == fastest(mlp(), {"dp": 2, "tp": 2})


def test_data_parallelism_is_found_under_its_restrictions() -> None:
    profile = stack(2, rows=256)
    replicas, whole = fastest(profile, {"dp": 4}, dp="ddp")
    sharded, parts = fastest(profile, {"dp": 4}, dp="fsdp")
    assert not replicas.homes
    assert [place.op for place in replicas.places] == ["aten.embedding.default"]
    assert replicas.places[0].inputs == ("R", "S0")
    assert set(sharded.homes.values()) == {"S0"}
    assert len(sharded.homes) == 5
    assert parts.figures.peak_bytes < whole.figures.peak_bytes


def test_tensor_parallelism_keeps_the_batch_whole() -> None:
    profile = mlp(4096)
    best, _ = fastest(profile, {"tp": 4}, tp="tensor")
    assert best.homes == {"up.weight": "S0", "down.weight": "S1"}
    rank = Ranks.spread(best).program(profile.recorded, profile.fingerprint.parameters, profile.spec)
    products = [op for op in rank.ops if op.phase == 0 and op.name == "aten.mm.default"]
    assert [rank.tensors[op.outputs[0]].shape for op in products] == [(4096, 1024), (4096, 1024)]


def test_tensor_parallelism_leaves_other_axes_open() -> None:
    profile = stack(2)
    found = tensor_parallel(profile, Mesh.of({"dp": 2, "tp": 4})).sharding
    assert all(home.startswith("R,S") for home in found.homes.values())
    assert {name for name, shape, _ in profile.fingerprint.parameters if len(shape) > 1} == {
        p.name
        for p in profile.parameters
        if any(matches(pattern, p.name) for pattern in found.homes) and len(p.shape) > 1
    }
    assert all(text.startswith("*,") for place in found.places for text in place.inputs)
    Ranks.spread(found).program(profile.recorded, profile.fingerprint.parameters, profile.spec)


def test_a_limit_that_nothing_keeps_gives_the_smallest() -> None:
    profile = stack(2)
    found = ShardingSearch(profile.recorded, profile.parameters, Mesh.of(4), profile.spec)
    smallest = sharding_of(found.evaluation, found.smallest.choice)
    assert searched(profile, Mesh.of(4), 1).sharding == smallest
    assert searched(profile, Mesh.of(4)).sharding == fastest(profile, {"ranks": 4})[0]


def test_nothing_is_worse_than_what_people_name() -> None:
    profile, mesh = stack(2), {"dp": 2, "tp": 2}
    found = search(profile, mesh)
    free = found.cheapest()
    assert free is not None
    for roles in (("data", "data"), ("data", "tensor"), ("tensor", "data"), ("tensor", "tensor")):
        named = found.in_roles(roles)
        assert named is not None
        assert found.evaluation.is_possible(named.choice)
        assert free.figures.ms <= named.figures.ms * (1 + 1e-9)
    assert free.bound_ms is not None
    assert free.bound_ms <= free.figures.ms
    assert not math.isinf(free.bound_ms)


def test_axes_that_cut_one_dimension_cut_inside_each_other() -> None:
    found = search(mlp(), {"a": 2, "b": 2})
    best = found.cheapest(20 * 2**20)  # whole weights take more
    assert best is not None
    assert sharding_of(found.evaluation, best.choice).homes == {
        "up.weight": "S0,S0/2",
        "down.weight": "S1,S1/2",
    }


def test_three_axes_and_their_order() -> None:
    sharding, best = fastest(mlp(4096), {"node": 2, "dp": 2, "tp": 2})
    named = search(mlp(4096), {"node": 2, "dp": 2, "tp": 2}).in_roles(("data", "data", "tensor"))
    assert named is not None
    assert best.figures.ms <= named.figures.ms * (1 + 1e-9)
    rank = Ranks.spread(sharding).program(
        mlp(4096).recorded, mlp(4096).fingerprint.parameters, mlp(4096).spec
    )
    assert rank.footprint.peak_bytes < mlp(4096).recorded.footprint.peak_bytes / 2


def test_an_op_that_returns_none_for_some_outputs() -> None:
    """Of images there is no gradient, and ``convolution_backward`` returns None for it."""
    with torch.device("meta"):
        model = FromFunction(
            lambda self, images: self.mlp(self.patch(images).flatten(2).transpose(1, 2)),
            patch=nn.Conv2d(3, 64, 8, 8),
            mlp=MLP(64, bias=False),
        )
        images = torch.empty(8192, 3, 64, 64)
    profile = sacplan.profile(model, images, loss_fn=lambda m, x: m(x).sum(), device="h100")
    sharding, best = fastest(profile, {"dp": 4})
    assert best.figures.ms < profile.recorded.step_ms / 2
    rank = Ranks.spread(sharding).program(profile.recorded, profile.fingerprint.parameters, profile.spec)
    assert rank.step_ms < profile.recorded.step_ms / 2
