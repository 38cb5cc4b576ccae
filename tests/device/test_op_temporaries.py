"""What ops take beyond what a dispatch mode sees, against the allocator: inside kernels, and in backward formulas."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import sacplan
from sacplan.device import workspace
from sacplan.device.cost import is_free, op_key
from sacplan.device.op_kernels import Call
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from sacplan.torch_compat.ops import op_traits, tensors_in
from tests.zoo.layers import FromFunction

ROWS, COLUMNS = 256, 64
Tensor = torch.Tensor


def complex_of(t: Tensor) -> Tensor:
    return torch.view_as_complex(t.view(ROWS, COLUMNS // 2, 2))


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # kernels that copy, sort or convert inside
    "amax": lambda y, x: y.amax(1).sum(),
    "kthvalue": lambda y, x: y.kthvalue(3, 1).values.sum(),
    "matrix_exp": lambda y, x: torch.matrix_exp(y.view(4, 64, 64) * 0.01).sum(),
    "bilinear": lambda y, x: F.bilinear(y, x, x[:4, :, None].expand(4, 64, 64)).sum(),
    "scatter_reduce": lambda y, x: (
        torch.zeros(16, COLUMNS)
        .scatter_reduce(0, (torch.arange(ROWS) % 16)[:, None].expand_as(y), y, "amax")
        .sum()
    ),
    "svdvals": lambda y, x: torch.linalg.svdvals(y).sum(),
    "inv": lambda y, x: torch.linalg.inv(y[:64] + 99 * torch.eye(64)).sum(),
    "layer norm of a transposed tensor": lambda y, x: (
        F.layer_norm(y.view(4, 64, COLUMNS).mT, (64,)).sin().sum()
    ),
    "safe softmax": lambda y, x: torch._safe_softmax(y, -1).square().sum(),
    "half product": lambda y, x: (y.bfloat16() @ x.bfloat16().mT).sum(),
    "product with an expanded matrix": lambda y, x: (y @ x[:COLUMNS, :1].expand(COLUMNS, COLUMNS)).sum(),
    "convolution in channels last": lambda y, x: F.conv2d(
        y.view(4, 16, 16, 16).to(memory_format=torch.channels_last), x[:144].reshape(64, 16, 3, 3)
    ).sum(),
    # types that are converted
    "times bools": lambda y, x: (y * (x > 0)).sin().sum(),
    "times integers": lambda y, x: (y * (x > 0).long()).sin().sum(),
    "over integers": lambda y, x: (y / (x > 0).int().add(1)).sin().sum(),
    "complex product": lambda y, x: (complex_of(y) * complex_of(x)).abs().sum(),
    "to complex": lambda y, x: (y.cfloat() * (1 + 2j)).abs().sum(),
    "fft": lambda y, x: torch.fft.fft(y).abs().sum(),
    # formulas that are other ones under a dispatch mode
    "max of all": lambda y, x: y.max() + y.sum(),
    "prod": lambda y, x: y.prod(1).sum(),
    "cumprod": lambda y, x: y.sigmoid().cumprod(1).sum(),
    "xlogy": lambda y, x: torch.xlogy(y.abs(), x.abs() + 1).sum(),
    "clamp": lambda y, x: y.clamp(x, x + 1).sin().sum(),
    "clamp, dense gradient": lambda y, x: (y.clamp(-1, 1) * x).sin().sum(),
    "targets of cross entropy": lambda y, x: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), reduction="none"
    ).sum(),
    "weighted cross entropy": lambda y, x: F.binary_cross_entropy_with_logits(
        y, x.sigmoid(), pos_weight=torch.ones(COLUMNS), reduction="none"
    ).sum(),
}

NOTHING_TO_DISCARD = ("kthvalue", "bilinear", "product with an expanded matrix")


def loss(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(*batch) if isinstance(batch, tuple) else model(batch)
    return out


def measured(model: nn.Module, batch: Any) -> int:
    step = Step(model, batch, loss, None)
    step.run()  # the first one may fill caches
    return measured_step(step, [t for t in tree_leaves(batch) if isinstance(t, Tensor)]).peak_bytes


@pytest.mark.parametrize("name", OPS)
def test_peaks_of_an_op_are_those_of_the_allocator(name: str) -> None:
    torch.manual_seed(0)
    layer = FromFunction(lambda self, x: OPS[name](self.linear(x), x), linear=nn.Linear(COLUMNS, COLUMNS))
    model, batch = nn.Sequential(layer), torch.randn(ROWS, COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = sacplan.profile(model, batch, loss, device="cpu")
    assert profile.peak_bytes == measured(model, batch)
    if name in NOTHING_TO_DISCARD:
        return
    plan = sacplan.policy("full", profile=profile, layers="0")
    with sacplan.apply(model, plan):
        assert plan.peak_bytes == measured(model, batch)


# --- sparse tensors ---------------------------------------------------------------------------------------


def propagation(self: FromFunction, x: Tensor) -> Tensor:
    return torch.sparse.mm(self.adjacency, self.linear(x)).relu().sum()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("layout", "tolerance"), [(torch.sparse_coo, 0.06), (torch.sparse_csr, 0.002)])
def test_indices_and_values_of_sparse_tensors_count(layout: torch.layout, tolerance: float) -> None:
    torch.manual_seed(0)
    edges = torch.randint(0, 500, (2, 20_000))
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(20_000), (500, 500)).coalesce()
    sparse = adjacency.to_sparse(layout=layout)
    model = FromFunction(propagation, adjacency=sparse, linear=nn.Linear(16, 16))
    batch = torch.randn(500, 16)
    profile = sacplan.profile(model, batch, loss, device="cpu", trace="real")
    assert profile.peak_bytes == pytest.approx(measured(model, batch), rel=tolerance)
    with pytest.raises(sacplan.errors.TraceError, match='trace="real"'):
        sacplan.profile(model, batch, loss, device="cpu")


# --- PyTorch's op database --------------------------------------------------------------------------------


class NotRun(TorchDispatchMode):
    """Runs the ops that are taken to allocate nothing inside, and says which of them do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        strided = all(t.layout is torch.strided for t in tensors_in((args, kwargs)))
        if func.namespace != "aten" or is_free(func) or not strided:
            return out
        call = Call(func, args, kwargs, out)
        key = op_key(call)
        if key in self.seen or workspace._worth_a_run(call):
            return out
        self.seen.add(key)
        writes = bool(op_traits(func).written_names)
        given = tree_map_only(Tensor, lambda t: t.detach().clone() if writes else t.detach(), (args, kwargs))
        inside = workspace._peak_beyond_outputs(lambda: func(*given[0], **given[1]), given)
        if inside > 64:
            self.found[str(func)] = inside
        return out


def database() -> list[Any]:
    pytest.importorskip("expecttest")
    from benchmarks.models.op_samples import op_database

    return op_database()


def transposed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() < 2:
        return leaf
    return leaf.detach().mT.contiguous().mT.requires_grad_(leaf.requires_grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of torch's own samples
def test_what_is_not_run_allocates_nothing_inside() -> None:
    mode = NotRun()
    for op in (op for op in database()[::30] if torch.float32 in op.supported_dtypes("cpu")):
        samples = op.sample_inputs_func(op, "cpu", torch.float32, op.supports_autograd)
        for sample in itertools.islice(samples, 3):
            for given in (sample, sample.transform(transposed)):
                try:
                    with mode:
                        out = op.op(given.input, *given.args, **given.kwargs)
                        ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
                        if ends:
                            torch.autograd.backward([t.sum().abs() for t in ends])
                except (RuntimeError, TypeError, ValueError, AssertionError):
                    continue  # the op takes no such sample; what it ran before that, counts
    assert len(mode.seen) > 50
    assert not mode.found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_the_database_is_predicted_to_one_percent() -> None:
    from benchmarks.op_memory import differences, is_off, reason_of, rows_of

    compared = 0
    for op in database()[::50]:
        for row in rows_of(op):
            compared += "measured" in row
            assert not is_off(row) or reason_of(row), (row, differences(row))
    assert compared >= 8
