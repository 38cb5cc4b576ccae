"""Models of DTensors, and of subclasses of it, are recorded as what one rank runs on its local tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

import sacplan
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.program import Program
from sacplan.device.devices import resolve_device
from sacplan.device.op_kernels import Call
from sacplan.distributed.sharding.costs import Costs
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.recorded import with_collectives
from sacplan.errors import TraceError
from sacplan.record.fake_data import data_rules
from sacplan.techniques.chunk.entries import loss_chunks, module_chunks
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.ops import is_computation
from sacplan.torch_compat.private import ranks_of_group
from tests.support.steps import assert_predicted, bit_equal
from tests.support.steps import mean_square as loss_fn
from tests.zoo.layers import FeedForward, FromFunction
from tests.zoo.parallel import Sequences, mean_square, parallel_sequences

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of four ranks, of which this process is the first and the others are not there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _subclass() -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    class Labelled(DTensor):  # type: ignore[misc]
        """Runs everything on local tensors; what it makes carries the label of its last argument."""

        label: str

        @classmethod
        def of(cls, local: torch.Tensor, like: Any, label: str) -> Any:
            meta = TensorMeta(local.shape, local.stride(), local.dtype)
            made = cls(local, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)
            made.label = label
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given: list[Any] = []

            def local(t: Any) -> torch.Tensor:
                given.append(t)
                return t._local_tensor

            args, kwargs = tree_map_only(cls, local, (args, kwargs or {}))
            assert given[-1].label
            return tree_map_only(
                torch.Tensor, lambda t: cls.of(t, given[-1], given[-1].label), func(*args, **kwargs)
            )

    return Labelled


def distributed(model: nn.Module, mesh: Any, subclass: Any = None) -> nn.Module:
    """Each parameter is a replicated DTensor, or one of a subclass."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(p.detach(), mesh)
            placed = whole if subclass is None else subclass.of(p.detach(), whole, name)
            module.register_parameter(name, nn.Parameter(placed))
    return model


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 32), nn.Tanh()
    )


def _ops(program: Program) -> Counter[str]:
    return Counter(op.name for op in program.ops if is_computation(op.name))


def _replicated_loss(mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return lambda model, x: model(DTensor.from_local(x, mesh)).square().mean().to_local()


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_replicated_dtensors_are_recorded_as_plain_ones(mesh: Any, device: str) -> None:
    x = torch.zeros(256, 32)
    plain = sacplan.profile(mlp(), x, lambda m, x: m(x).square().mean(), torch.optim.SGD, device)
    found = sacplan.profile(distributed(mlp(), mesh), x, _replicated_loss(mesh), torch.optim.SGD, device)
    assert _ops(found.recorded) == _ops(plain.recorded)
    assert found.recorded.parameter_bytes == plain.recorded.parameter_bytes
    assert found.peak_bytes == plain.peak_bytes
    again = sacplan.profile(  # what DTensor plans once and remembers is no part of a step
        distributed(mlp(), mesh), x, _replicated_loss(mesh), torch.optim.SGD, device
    )
    assert again.recorded == found.recorded


def test_numbers_that_autograd_keeps_count_beside_dtensors(mesh: Any) -> None:
    def forward(self: FromFunction, x: Any) -> torch.Tensor:
        hidden = self.layer(x)
        for _ in range(8):
            hidden = hidden.sin() * 2.0 + hidden
        return hidden.to_local().sum()  # type: ignore[no-any-return]

    from torch.distributed.tensor import DTensor

    model = distributed(FromFunction(forward, layer=nn.Linear(4, 4)), mesh)
    x = DTensor.from_local(torch.zeros(2, 4), mesh)
    profile = sacplan.profile(model, x, device="cpu")
    for plan in sacplan.plan(profile), sacplan.plan(profile, "smallest"):
        assert_predicted(model, x, plan)
    assert plan.units


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_a_subclass_with_a_dispatch_of_its_own(mesh: Any, trace: Any) -> None:
    """Also mixed with plain tensors; what autograd unpacks is of the same class, with its attributes."""
    x = torch.zeros(256, 32)
    try:
        model = distributed(mlp(), mesh, _subclass())
    except RuntimeError as error:
        pytest.skip(f"this torch dispatches a subclass as a DTensor: {error}")

    plain = sacplan.profile(mlp(), x, loss_fn, torch.optim.SGD, "cpu", trace=trace)
    found = sacplan.profile(model, x, loss_fn, torch.optim.SGD, "cpu", trace=trace)
    assert _ops(found.recorded) == _ops(plain.recorded)
    assert found.peak_bytes == plain.peak_bytes


# --- tensor parallelism -------------------------------------------------------------------------------------


def _filled(model: nn.Module) -> nn.Module:
    """With numbers in all parameters: ranks that are not there send none."""
    with torch.no_grad():
        for p in model.parameters():
            local_part(p).normal_(std=0.1)
    return model


def _sequences(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Sequences(layers=2)
    parallel_sequences(model, mesh)
    return _filled(model)


def _batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 128, 64)


def test_a_collective_takes_the_time_of_its_link(mesh: Any) -> None:
    times = []
    for device in ("h100", "a100-80gb"):
        recorded = sacplan.profile(_sequences(mesh), _batch(), mean_square, device=device).recorded
        op = next(op for op in recorded.ops if "all_gather" in op.name)
        costs = Costs(Mesh.of(4), resolve_device(device))
        assert op.time_ms == costs.collective_ms("all_gather", recorded.storage_bytes[op.writes[0]], 0)
        times.append(op.time_ms)
    assert times[0] < times[1]


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_a_real_step_is_recorded_with_the_same_peak(mesh: Any, optimizer: Any) -> None:
    """And leaves the parameters as they were."""
    model, batch = _sequences(mesh), _batch()
    before = [p.to_local().clone() for p in model.parameters()]
    fake, real = (
        sacplan.profile(model, batch, mean_square, optimizer, "cpu", trace=trace)
        for trace in ("fake", "real")
    )
    assert real.peak_bytes == fake.peak_bytes
    assert bit_equal([p.to_local() for p in model.parameters()], before)
    assert all(p.grad is None for p in model.parameters())


def test_a_fingerprint_has_global_shapes(mesh: Any) -> None:
    """So that all ranks have the same one, whatever they hold."""
    whole, parallel = (Fingerprint.of(m, _batch()) for m in (Sequences(layers=2), _sequences(mesh)))
    assert parallel.parameters == whole.parameters
    assert whole.local_shapes is None
    shapes = parallel.local_shapes
    assert shapes is not None
    assert shapes["layers.0.up.weight"] == (64, 64)
    assert shapes["layers.0.down.weight"] == (64, 64)
    assert shapes["layers.0.norm.weight"] == (64,)


def test_values_do_not_go_through_a_collective(mesh: Any) -> None:
    """The other ranks would have to take part."""
    with sacplan.fake_device("cpu"), data_rules() as rules:
        known = torch.arange(4)
        assert rules.value(known) is not None
        assert rules.value(known + 1) is not None
        sent = torch.ops._c10d_functional.all_reduce(known, "sum", mesh.get_group().group_name)
        assert rules.value(sent) is None


def test_modules_on_dtensors_are_not_chunked_and_are_named(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 512))

    x = torch.randn(8, 64, 32)
    whole = sacplan.profile(model, x, loss_fn, device="cpu")
    assert loss_chunks(whole.program, whole.spec).chunks
    parallelize_module(model, mesh, {"2": ColwiseParallel()})
    parallel = sacplan.profile(model, x, loss_fn, device="cpu")
    found = loss_chunks(parallel.program, parallel.spec)
    assert not found.chunks
    assert next(iter(found.refused.values())).count("module '2' runs ops on DTensors") == 1
    assert module_chunks(
        parallel.program, parallel.program.calls["0"][0], parallel.spec
    )  # a plain one may be


def test_slices_of_local_tensors_in_inference(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, x = FeedForward(32, 1024, dropout=0.0), torch.randn(8, 64, 32)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _filled(model)
    profile = sacplan.profile(model, x, device="cpu", mode="inference")
    plan = sacplan.plan(profile, "50%", techniques=("chunk",))
    assert plan.decisions
    assert sacplan.verify(model, x, plan).peak_bytes == plan.peak_bytes
    with torch.no_grad():
        expected = model(x)
        with sacplan.apply(model, plan) as handle:
            torch.testing.assert_close(model(x) + 0, expected + 0)
            assert not handle.differences


def test_a_mesh_that_was_shut_down_is_named(mesh: Any) -> None:
    assert ranks_of_group(mesh.get_group().group_name) == [0, 1, 2, 3]
    assert ranks_of_group("of nobody") is None
    cost = with_collectives(lambda *_: (0, 0.0), resolve_device("cpu"))
    x = torch.zeros(4)
    with pytest.raises(TraceError, match="process group 'of nobody', which is not there"):
        cost(Call(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "of nobody"), {}, x))
