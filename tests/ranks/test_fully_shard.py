"""The step of one rank as ``fully_shard`` runs it: against rank 0 of torch's fake process group, to the byte.

The fake process group lets one process be rank 0 of eight: all buffers are allocated, nothing is sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from sacplan.core.program import Phase, StorageKind
from sacplan.distributed.ranks.ranks import units_of
from sacplan.errors import TraceError
from tests.support.ranks import (
    OPTIMIZER,
    RANKS,
    RankMemory,
    cross_entropy_in_two,
    fully_sharded,
    levels,
    optimizer_of,
)  # fmt: skip
from tests.support.slow import slow_after
from tests.support.steps import mean_square
from tests.zoo import language_models as models
from tests.zoo.layers import MLP, Adapted, FromFunction, HeavyLayers, Shared, Stack, Unlike

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # a linear layer's output is a view
    pytest.mark.filterwarnings("ignore::sacplan.SacplanWarning"),
]

UNITS = ["layers.*", ""]


def policy(**arguments: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**arguments)


def usual() -> Any:
    """As people train: float32 parameters, bfloat16 computation, float32 reductions."""
    return policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offloading() -> Any:
    """Without a GPU nothing can be pinned."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


def lm(layers: int = 3) -> nn.Module:
    return models.LM(layers=layers, dim=32, heads=4, vocab=64)


def odd_lm() -> nn.Module:
    """No dimension is a multiple of the ranks, and one bias is shorter than there are ranks."""
    return nn.Sequential(models.LM(layers=2, dim=36, heads=4, vocab=67), nn.Linear(67, 5))


def tokens() -> torch.Tensor:
    return models.tokens(4, 32, 64)


def tied() -> nn.Module:
    """The head's weight is the embedding's."""
    model = Stack([nn.Embedding(64, 16), nn.ReLU()], nn.Linear(16, 64, bias=False))
    model.head.weight = model.layers[0].weight
    return model


def adapted(base: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: stacked(lambda: nn.Sequential(Adapted(nn.Linear(48, 48, dtype=base), 48, 48), nn.ReLU()))


def in_4_bits(storage: torch.dtype) -> Callable[[], nn.Module]:
    """As QLoRA: the frozen layers are packed, two values in a byte, and stored as elements of this type."""

    def layer() -> nn.Module:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        base = bitsandbytes.nn.Linear4bit(
            48, 48, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
        )
        return nn.Sequential(Adapted(base.to("cpu"), 48, 48), nn.ReLU())  # packs the weight

    return lambda: stacked(layer)


def scales_bytes(model: nn.Module) -> int:
    """Return the bytes of scales and tables beside 4-bit weights, which are neither parameters nor buffers."""
    states = [layer.weight.quant_state for layer in model.modules() if type(layer).__name__ == "Linear4bit"]
    scales = [(s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code) for s in states]
    return sum(t.nbytes for tensors in scales for t in tensors)


def rarely_used() -> nn.Module:
    """Has parameters that no step uses, more than those that it uses."""
    return FromFunction(
        lambda self, x: self.last(torch.relu(self.first(x))) + x,
        first=nn.Linear(48, 48),
        never=nn.Linear(48, 200),
        last=nn.Linear(48, 48),
    )


def two_towers() -> nn.Module:
    """Two stacks side by side: the first layer of each needs no gradient for its input."""
    towers = {name: nn.Sequential(MLP(32), MLP(32)) for name in ("left", "right")}
    return FromFunction(lambda self, x, y: (self.left(x) * self.right(y)).mean(-1), **towers)


def stacked(make: Callable[[], nn.Module]) -> nn.Module:
    return Stack((make() for _ in range(3)), nn.Linear(48, 5))


def trained_norms() -> nn.Module:
    """Only the norms of the layers are trained."""
    model = lm()
    for name, p in model.named_parameters():
        p.requires_grad_(".norm" in name)
    return model


def in_bfloat16(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Autocast keeps a copy of each gathered weight until its context ends, and autograd keeps it longer."""
    with torch.autocast("cpu", torch.bfloat16):
        return models.cross_entropy(model, batch)


def images() -> torch.Tensor:
    return torch.randn(32, 48)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step with ``fully_shard``, and what is said to it."""

    make: Callable[[], nn.Module] = lm
    batch: Callable[[], Any] = tokens
    loss: Callable[..., torch.Tensor] = models.cross_entropy
    units: tuple[str, ...] = ("layers.*", "")
    policy: Callable[[], Any] | None = usual
    reshard: bool | int | None = None
    mesh: tuple[int, int] | None = None
    offload: bool = False
    ignored: Callable[[nn.Module], set[nn.Parameter]] = lambda model: set()

    def ranks(self, model: nn.Module, **changes: Any) -> sacplan.FSDP2:
        found = sacplan.FSDP2(
            {"replicate": self.mesh[0], "shard": self.mesh[1]} if self.mesh else RANKS,
            self.units,
            self.policy and self.policy(),
            self.reshard,
            offloading() if self.offload else None,
            self.ignored(model),
        )
        return dataclasses.replace(found, **changes)

    def sharded(self, model: nn.Module, mesh: Any) -> nn.Module:
        """The model of the first rank."""
        if self.mesh is not None:
            mesh = dist.device_mesh.init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard"))
        offload = offloading() if self.offload else None
        ignored = self.ignored(model)
        return fully_sharded(
            model, mesh, self.units, self.reshard, self.policy and self.policy(), offload, ignored
        )


def integers(model: nn.Module) -> set[nn.Parameter]:
    return {p for p in model.parameters() if not p.is_floating_point()}


HEAVY: dict[str, Any] = {"make": HeavyLayers, "batch": lambda: torch.randn(16, 64), "loss": mean_square}
ODD: dict[str, Any] = {"make": odd_lm, "loss": mean_square, "units": ("0.layers.*", "")}
LORA: dict[str, Any] = {"make": adapted(torch.float32), "batch": images, "loss": mean_square}
QLORA: dict[str, Any] = {**LORA, "make": adapted(torch.bfloat16)}
IN_4_BITS: dict[str, Any] = {**LORA, "policy": None}
UNUSED: dict[str, Any] = {"make": lambda: stacked(rarely_used), "batch": images, "loss": mean_square}
SHARED: dict[str, Any] = {
    "make": Shared, "batch": lambda: torch.randn(2, 16, 16), "loss": mean_square, "units": ("layer", "other", "")
}  # fmt: skip
TOWERS: dict[str, Any] = {
    "make": two_towers,
    "batch": lambda: (torch.randn(64, 32), torch.randn(64, 32)),
    "loss": mean_square,
    "units": ("left.*", "right.*", ""),
}
LEAVES = ("embed", "layers.*", "norm", "head")

CASES = {
    "mixed": Case(),
    "kept": Case(reshard=False),
    "padded": Case(policy=None, **ODD),
    "two backward passes": Case(policy=None, loss=cross_entropy_in_two),
    "frozen": Case(make=trained_norms, policy=None),
    "autocast": Case(loss=in_bfloat16, policy=None),
    "some modules only": Case(units=("layers.*",), policy=None),
    "nested": Case(units=("layers.*", "layers.*.mlp", ""), policy=None),
    "called three times": Case(policy=None, **SHARED),
    "unused parameters": Case(policy=None, **UNUSED),
    "mixed, outputs in float32, of the root too": Case(
        policy=lambda: policy(param_dtype=torch.bfloat16, output_dtype=torch.float32), units=(*LEAVES, "")
    ),
    "mixed, low-rank adapters on a bfloat16 base": Case(**QLORA),
    "shards of two": Case(reshard=2, policy=None),
    "replicas, mixed": Case(mesh=(2, 4)),
    "replicas, only reduced": Case(mesh=(4, 2), policy=lambda: policy(reduce_dtype=torch.bfloat16), **HEAVY),
    "offloaded, mixed, replicas": Case(offload=True, mesh=(2, 4), **HEAVY),
}  # what ``make test`` runs: each setting, each kind of model
MORE = {
    "root not kept": Case(reshard=True),
    "two towers": Case(policy=None, **TOWERS),
    "a trained parameter that is whole": Case(
        ignored=lambda model: {model.layers[1][0].base.weight},
        policy=None,
        **{**LORA, "make": lambda: adapted(torch.float32)().requires_grad_()},
    ),
    "4-bit weights as bytes": Case(**{**IN_4_BITS, "make": in_4_bits(torch.uint8)}),
    "4-bit weights as bfloat16": Case(**{**IN_4_BITS, "make": in_4_bits(torch.bfloat16)}),
    "4-bit weights as bytes, whole as with Accelerate": Case(
        ignored=integers, **{**IN_4_BITS, "make": in_4_bits(torch.uint8)}
    ),
    "mixed, inputs as they are": Case(
        policy=lambda: policy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    ),
    "mixed, tied weights": Case(make=tied, units=("",)),
}
ALL = CASES | MORE


@pytest.mark.parametrize("name", slow_after(len(CASES), ALL))
def test_peak_of_a_rank_is_the_allocators(name: str, mesh: Any) -> None:
    case = ALL[name]
    model, batch = case.make(), case.batch()
    profile = sacplan.profile(model, batch, case.loss, optimizer_of, "cpu", ranks=case.ranks(model))
    held = scales_bytes(model)
    measured = RankMemory(case.sharded(model, mesh), batch, case.loss).peak_bytes(held)
    assert profile.peak_bytes == measured


@pytest.mark.parametrize(
    "name",
    slow_after(3, ["replicas, mixed", "padded", "two backward passes", "frozen", "mixed", "shards of two"]),
)
def test_a_planned_step_has_the_planned_peak(name: str, mesh: Any, tmp_path: Path) -> None:
    """Traced with the plan, and measured with the plan applied before ``fully_shard`` and behind it."""
    case = ALL[name]
    model, batch = case.make(), case.batch()
    profile = sacplan.profile(model, batch, case.loss, optimizer_of, "cpu", ranks=case.ranks(model))
    plan = sacplan.plan(profile, "smallest", solver="greedy")
    assert plan.peak_bytes < profile.peak_bytes
    assert sacplan.verify(model, batch, plan, case.loss, optimizer_of).peak_bytes == plan.peak_bytes
    for first in (True, False):
        model = case.make()
        if first:
            sacplan.apply(model, plan, check=False)
        case.sharded(model, mesh)
        if not first:
            sacplan.apply(model, plan, check=False)
        assert RankMemory(model, batch, case.loss).peak_bytes() == plan.peak_bytes
    profile.save(tmp_path / "file.json")
    assert sacplan.Profile.load(tmp_path / "file.json") == profile


@pytest.mark.parametrize("name", slow_after(2, ["SGD", "Adadelta", "Adamax", "ASGD", "NAdam", "RMSprop"]))
def test_state_of_other_optimizers_is_in_shards(
    name: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On parameters that eight ranks do not divide."""
    settings = {"SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}}
    optimizer = functools.partial(getattr(torch.optim, name), **settings.get(name, {}))
    monkeypatch.setattr("tests.support.ranks.OPTIMIZER", optimizer)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(61, 61), nn.GELU())))
    batch, units = torch.randn(16, 61), ["?", ""]
    rank = sacplan.profile(model, batch, mean_square, optimizer_of, "cpu", ranks=sacplan.FSDP2(RANKS, units))
    assert any(kind == StorageKind.OPTIMIZER_STATE for kind in rank.program.storage_kinds)
    assert rank.peak_bytes == RankMemory(fully_sharded(model, mesh, units), batch, mean_square).peak_bytes()


# --- clipping of gradients ------------------------------------------------------------------------------------------


def clips(norm_type: float, foreach: bool | None) -> Callable[..., torch.optim.Optimizer]:
    """Plain SGD that clips gradients before its step. It has no temporaries that would hide those of clipping."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad])

        def clip(*_: Any) -> None:
            clipped = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(clipped, 1.0, norm_type, foreach=foreach)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("norm_type", "foreach", "shape"),  # each pair of settings is there
    slow_after(2, [
        (2.0, None, None), (float("inf"), False, (2, 4)), (1.0, False, None),
        (float("inf"), None, None), (2.0, False, (2, 4)), (1.0, None, (2, 4)),
    ]),
)  # fmt: skip
def test_clipping_takes_what_dtensors_take(
    norm_type: float,
    foreach: bool | None,
    shape: tuple[int, int] | None,
    mesh: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms of shards are reduced over the ranks before the norm of them is taken."""
    optimizer = clips(norm_type, foreach)
    monkeypatch.setattr("tests.support.ranks.optimizer_of", optimizer)
    case = Case(mesh=shape, **{**HEAVY, "policy": None, "batch": lambda: torch.randn(2, 64)})
    model, batch = case.make(), case.batch()
    program = sacplan.profile(model, batch, case.loss, optimizer, "cpu", ranks=case.ranks(model)).program
    predicted = max(
        moment.live_bytes
        for moment in program.liveness.moments
        if moment.op >= 0 and program.ops[moment.op].phase == Phase.OPTIMIZER
    )
    memory = RankMemory(case.sharded(model, mesh), batch, case.loss)
    memory.step()
    memory.optimizer.zero_grad(set_to_none=True)
    loss = case.loss(memory.model, batch)
    loss.backward()
    shards = (p.grad._local_tensor.untyped_storage() for p in model.parameters())  # type: ignore[union-attr]
    gradients = sum({s._cdata: s.nbytes() for s in shards}.values())
    assert predicted == memory._alive_bytes() + loss.nbytes + gradients + max(levels(memory.optimizer.step))


# --- what is recorded -----------------------------------------------------------------------------------------------


def profiled(
    model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], **how: Any
) -> sacplan.Profile:
    return sacplan.profile(model, batch, loss_fn, optimizer_of, "cpu", **how)


def test_the_parts_of_rank_0_are_there() -> None:
    """As many ranks as there may be: nothing is made of the parts of the others."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    program = profiled(model, torch.randn(2, 5), mean_square, ranks=sacplan.FSDP2(2**20, [""])).program
    assert program.parameter_bytes[""] == 4 * (5 + 1 + 6 + 1)


@pytest.mark.parametrize("optimizer", [optimizer_of, None])
def test_the_model_is_as_before(optimizer: Any) -> None:
    model = lm()
    before = {name: (p, p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}
    sacplan.profile(model, tokens(), models.cross_entropy, optimizer, "cpu", ranks=Case().ranks(lm()))
    for name, p in model.named_parameters():
        same, value, address = before[name]
        assert p is same
        assert p.grad is None
        assert p.data_ptr() == address
        assert torch.equal(p, value)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_plan_may_ask_for_other_ranks_than_the_profile() -> None:
    ranks = sacplan.FSDP2(8, UNITS, usual())
    profile = sacplan.profile(lm(2), tokens(), models.cross_entropy, optimizer_of, "cpu", ranks=ranks)

    def peak(mesh: Any, **arguments: Any) -> int:
        ranks = sacplan.FSDP2(mesh, UNITS, usual(), **arguments)
        return sacplan.plan(profile, "100%", ranks=ranks).baseline_peak_bytes

    assert sacplan.plan(profile, "100%").baseline_peak_bytes == peak(8) == profile.peak_bytes
    assert peak(2) > peak(8)
    assert peak(8, reshard_after_forward=False) > peak(8)
    assert peak({"replicate": 4, "shard": 2}) > peak(8)


def test_a_plan_may_ask_for_the_host() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    def spread(offload: Any = None) -> sacplan.FSDP2:
        return sacplan.FSDP2(RANKS, UNITS, offload_policy=offload)

    step: Any = (HeavyLayers(), torch.randn(16, 64), mean_square, optimizer_of, "h100")
    device, host = (sacplan.profile(*step, ranks=spread(policy)) for policy in (None, CPUOffloadPolicy()))
    plan = sacplan.plan(device, "100%", ranks=spread(CPUOffloadPolicy()))
    assert plan.ranks == host.ranks
    assert host.host_bytes > 0 == device.host_bytes
    assert host.peak_bytes < device.peak_bytes
    assert plan.baseline_peak_bytes == host.peak_bytes
    assert "offload_policy=CPUOffloadPolicy()" in str(plan)
    assert sacplan.plan(host, "100%", ranks=spread(OffloadPolicy())).peak_bytes == device.peak_bytes


@pytest.mark.parametrize("reshard", [None, False, 2])
def test_inference(reshard: bool | int | None) -> None:
    step: Any = (HeavyLayers(), torch.randn(4, 64))
    case = Case(**{**HEAVY, "reshard": reshard})
    mixed, plain = (
        sacplan.profile(*step, device="cpu", mode="inference", ranks=case.ranks(step[0], mp_policy=policy))
        for policy in (usual(), None)
    )
    assert mixed.peak_bytes < plain.peak_bytes


def test_what_leaves_a_unit_is_kept() -> None:
    program = profiled(
        lm(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, ("layers.*", ""))
    ).program
    assert program.gathering == {"", "layers.0", "layers.1", "layers.2"}
    scopes = set(program.calls["layers.1"])
    layer = [op for op in program.ops if op.phase == Phase.FORWARD and op.scope in scopes]
    added = [op.recomputable for op in layer if op.name == "aten.add.Tensor"]
    assert added[-2:] == [True, False]  # the residual stream within the layer, and the layer's output


def test_replicas_hold_gradients_twice() -> None:
    whole, rank = (
        profiled(lm(), tokens(), models.cross_entropy, ranks=ranks) for ranks in (None, sacplan.DDP(2))
    )
    trained = sum(p.numel() * p.element_size() for p in lm().parameters())
    assert rank.peak_bytes == whole.peak_bytes + trained


@pytest.mark.parametrize("units", [["a", "b", ""], None])
def test_the_road_from_profile_to_a_verified_plan(units: list[str] | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Unlike(), torch.randn(256, 32)
    ranks = sacplan.DDP(4) if units is None else sacplan.FSDP2(4, units)
    profile = sacplan.profile(model, batch, device="cpu", optimizer=OPTIMIZER, ranks=ranks)
    assert profile.assumptions
    for solver in ("best", "rotor"):
        plan = sacplan.plan(profile, "smallest", solver=solver)
        assert plan.peak_bytes < profile.peak_bytes
        if units is not None:
            assert set(plan.units) <= {"a", "b"}  # no unit around both
        plan.save(tmp_path / "plan.json")
        loaded = sacplan.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert sacplan.verify(model, batch, loaded, optimizer=OPTIMIZER).peak_bytes == plan.peak_bytes
    with pytest.raises(sacplan.errors.PlanError, match="one of 4 ranks"):
        sacplan.verify(model, batch, plan, optimizer=OPTIMIZER, run="real")


# --- patterns and errors ------------------------------------------------------------------------------------------


def test_patterns() -> None:
    model = lm()
    layers = ("layers.0", "layers.1", "layers.2")
    assert units_of(model, ["layers.*", ""]) == ("", *layers)
    assert units_of(model, ["layers*"]) == layers  # the list itself is never called
    assert units_of(model, ["layers.*", "*.mlp"]) == (
        "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.2", "layers.2.mlp",
    )  # fmt: skip
    assert units_of(model, ["*"]) == ("",)
    assert units_of(model, ["head", "layers.[02]"]) == ("layers.0", "layers.2", "head")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layer.*"], r"no module matches 'layer\.\*'\. Did you mean .*'layers\.0'"),
        (["mlp"], r"no module matches 'mlp'\. Did you mean .*'layers\.0\.mlp'"),
        (["layers"], r"no module matches 'layers'\. Did you mean"),
        ([], "the units of FSDP2 are .*; give a list of patterns"),
    ],
)
def test_units_that_there_are_not(units: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        profiled(lm(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, units))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"reshard_after_forward": 3},
            r"reshard_after_forward is 3, which does not divide the 8 ranks.*divisors: 2, 4",
        ),
        ({"reshard_after_forward": 0}, "reshard_after_forward is 0"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward is 'yes'; give True, False"),
        (
            {"mp_policy": "bfloat16"},
            "mp_policy is 'bfloat16'; give torch.distributed.fsdp.MixedPrecisionPolicy",
        ),
        ({"mp_policy": policy(param_dtype=torch.int8)}, "param_dtype is 'int8'; give a floating-point type"),
        ({"mesh": 0}, "0 ranks: give an int"),
        ({"mesh": True}, "True"),
        ({"mesh": 1}, "FSDP2 of 1 rank: nothing is sharded"),
        ({"units": "layers.*"}, r"the units of FSDP2 are the string 'layers\.\*'; give a list"),
        ({"offload_policy": True}, r"offload_policy is True; give torch.distributed.fsdp.CPUOffloadPolicy"),
        ({"mesh": {"a": 2, "b": 2, "c": 2}}, "a DeviceMesh of one axis or of two"),
        ({"mesh": {"replicate": 8, "shard": 1}}, "8 replicas of one shard each"),
        ({"mesh": 8.0}, "FSDP2 of 8.0"),
        ({"ignored_params": {nn.Parameter(torch.ones(1))}}, "no parameter of the model"),
    ],
)
def test_what_fully_shard_does_not_take(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        sacplan.profile(
            lm(), tokens(), device="cpu", ranks=sacplan.FSDP2(**{"mesh": 8, "units": UNITS, **arguments})
        )


@pytest.mark.parametrize("asked", [8, "FSDP2", sacplan.FSDP2, {"mesh": 8}])
def test_what_is_no_ranks(asked: Any) -> None:
    with pytest.raises(
        TraceError, match=r"give sacplan.FSDP2\(8\), sacplan.DDP\(8\), or the ranks of a plan"
    ):
        sacplan.profile(lm(), tokens(), device="cpu", ranks=asked)


def test_hooks_of_parameters_are_not_modelled() -> None:
    model = HeavyLayers()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(TraceError, match=r"a parameter has a hook.*sacplan\.ranks"):
        sacplan.profile(model, torch.randn(4, 64), mean_square, device="cpu", ranks=sacplan.FSDP2(8))


def test_a_unit_that_is_not_called() -> None:
    model = Stack([])
    model.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # which nothing calls, but its layers
    with pytest.raises(TraceError, match=r"does not run on .* as PyTorch spreads it"):
        sacplan.profile(
            model, torch.randn(2, 8), mean_square, device="cpu", ranks=sacplan.FSDP2(2, ["layers*"])
        )


def test_a_real_step_is_not_that_of_a_rank() -> None:
    with pytest.raises(sacplan.errors.PlanError, match='trace="fake"'):
        sacplan.profile(lm(), tokens(), device="cpu", trace="real", ranks=sacplan.FSDP2(8))


def scaled() -> nn.Module:
    """Has a scalar parameter, and parameters of two types."""
    return FromFunction(
        lambda self, x: x * self.scale + self.low.float(),
        scale=nn.Parameter(torch.tensor(1.0)),
        low=nn.Parameter(torch.ones(8, dtype=torch.bfloat16)),
    )


def test_a_parameter_used_outside_of_its_unit() -> None:
    with pytest.raises(TraceError, match=r"does not run on dp 8 as PyTorch spreads it"):
        profiled(tied(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, ["layers.0", ""]))
    assert profiled(tied(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, [""])).peak_bytes > 0


def test_parameters_that_cannot_be_sharded() -> None:
    step: Any = (torch.randn(4, 8), mean_square)
    with pytest.raises(TraceError, match=r"scalar"):
        profiled(scaled(), *step, ranks=sacplan.FSDP2(RANKS, [""]))
    model = scaled()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(TraceError, match=r"uniform original parameter dtype"):
        profiled(model, *step, ranks=sacplan.FSDP2(RANKS, [""]))
