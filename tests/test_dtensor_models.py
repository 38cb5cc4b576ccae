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
from sacplan._program.program import Program
from sacplan._torch.ops import is_computation

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
    assert found.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)
    again = sacplan.profile(  # what DTensor plans once and remembers is no part of a step
        distributed(mlp(), mesh), x, _replicated_loss(mesh), torch.optim.SGD, device
    )
    assert again.recorded == found.recorded


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_a_subclass_with_a_dispatch_of_its_own(mesh: Any, trace: Any) -> None:
    """Also mixed with plain tensors; what autograd unpacks is of the same class, with its attributes."""
    x = torch.zeros(256, 32)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    plain = sacplan.profile(mlp(), x, loss_fn, torch.optim.SGD, "cpu", trace=trace)
    found = sacplan.profile(
        distributed(mlp(), mesh, _subclass()), x, loss_fn,
        torch.optim.SGD, "cpu", trace=trace,
    )  # fmt: skip
    assert _ops(found.recorded) == _ops(plain.recorded)
    assert found.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)
