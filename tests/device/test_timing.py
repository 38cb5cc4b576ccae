"""Measured op times: operands that ops accept, whatever mode is on, and nothing left behind."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

import sacplan
from sacplan.device.cost import is_free
from sacplan.device.devices import resolve_device
from sacplan.device.op_kernels import Call
from sacplan.device.real_ops import RealOp, outside_of_the_trace
from sacplan.device.timing import MeasuredTimes
from sacplan.errors import DeviceError
from sacplan.torch_compat.ops import tensors_in
from tests.support.ops import Ops
from tests.zoo.language_models import TokenModel, cross_entropy

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture
def times():
    return MeasuredTimes(resolve_device("cpu"))


def fakes(make):
    """(func, args, kwargs) of one call on fake tensors."""
    with FakeTensorMode():
        return make()


def test_a_large_product_costs_more_than_a_small_one(times):
    def cost(n):
        a = torch.randn(n, n)
        return times.cost(Call(aten.mm.default, (a, a), {}, a))

    large, small = cost(1024), cost(64)
    assert large[0] == 2 * 1024**3
    assert large[1] > 10 * small[1] > 0


def test_views_and_allocations_are_free(times):
    x = torch.randn(4, 4)
    assert times.cost(Call(aten.t.default, (x,), {}, x.t())) == (0, 0.0)
    assert times.cost(Call(aten.empty.memory_format, ([4, 4],), {}, x)) == (0, 0.0)


OPS = {
    "index_put": lambda: (
        aten.index_put_.default,
        (torch.randn(5, 6), [torch.zeros(8, dtype=torch.long)], torch.randn(8, 6), True),
        {},
    ),
    "index_put with a mask": lambda: (
        aten.index_put.default,
        (torch.randn(5, 6), [torch.zeros(5, dtype=torch.bool)], torch.randn(2, 6)),
        {},
    ),
    "integer division": lambda: (
        aten.remainder.Tensor,
        (torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long)),
        {},
    ),
    "cholesky": lambda: (aten.linalg_cholesky_ex.default, (torch.randn(3, 6, 6),), {"check_errors": True}),
    "out": lambda: (aten.add.out, (torch.randn(8), torch.randn(8)), {"out": torch.empty(8)}),
    "foreach": lambda: (aten._foreach_add_.Scalar, ([torch.randn(3), torch.randn(4)], 1.0), {}),
    "generator": lambda: (
        aten.bernoulli_.float,
        (torch.randn(9), 0.5),
        {"generator": torch.default_generator},
    ),
    "expanded": lambda: (aten.mul.Tensor, (torch.randn(4, 1).expand(4, 8), torch.randn(8, 4).t()), {}),
    "factory": lambda: (aten.arange.default, (9,), {"device": CPU}),
}

DATABASE = (
    "__getitem__", "addmm", "bernoulli", "gather", "index_select", "masked_scatter", "mul",
    "multinomial", "nn.functional.binary_cross_entropy", "nn.functional.embedding", "nn.functional.embedding_bag",
    "nn.functional.max_pool2d", "nn.functional.nll_loss", "remainder", "scatter_add",
)  # fmt: skip
"""Ops whose operands are positions, probabilities, masks or divisors, and some others, with their backward passes."""


@pytest.mark.filterwarnings("ignore")
def runs(call, times):
    """Check that an op runs on made-up operands, without zeros in their place."""
    with outside_of_the_trace(CPU):
        RealOp(call, CPU)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, time_ms = times.cost(call)
    assert 0 < time_ms < 10_000 or is_free(call.func)
    assert not times.not_timed


@pytest.mark.parametrize("name", DATABASE)
def test_made_up_operands_suit_ops_of_the_database(name, times):
    pytest.importorskip("expecttest")
    from benchmarks.models.op_samples import op_database

    (op, *_) = (op for op in op_database() if op.name == name)
    mode, calls = FakeTensorMode(), Ops(lambda call: call)
    for dtype in filter(
        op.supported_dtypes("cpu").__contains__, (torch.float32, torch.bfloat16, torch.complex64)
    ):
        for sample in itertools.islice(op.sample_inputs(CPU, dtype, requires_grad=op.supports_autograd), 2):
            given = (sample.input, sample.args, sample.kwargs)
            x, args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, given)
            with mode, calls:
                out = op.op(x, *args, **kwargs)
                ends = [t for t in tensors_in(out) if t.requires_grad]
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    assert calls.noted
    for call in calls.noted:
        runs(call, times)


@pytest.mark.parametrize("name", OPS)
def test_made_up_operands_suit_the_op(name, times):
    func, args, kwargs = fakes(OPS[name])
    runs(Call(func, args, kwargs, None), times)


def test_an_op_that_cannot_run_gets_the_rooflines_time_and_a_warning(times):
    with torch.library._scoped_library("sacplan_test", "FRAGMENT") as library:
        library.define("picky(Tensor x) -> Tensor")

        def picky(x):
            raise RuntimeError("not with such values\nand more")

        library.impl("picky", picky, "CPU")
        x = torch.randn(64, 64)
        func = torch.ops.sacplan_test.picky.default
        with pytest.warns(UserWarning, match="not with such values"):
            _, time_ms = times.cost(Call(func, (x,), {}, x))
        assert time_ms > 0
        assert times.not_timed == {"sacplan_test.picky.default": "not with such values"}


def test_modes_and_generators_are_left_as_they_were(times):
    state = torch.get_rng_state()
    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x = torch.randn(17, 19)
        times.cost(Call(aten.native_dropout.default, (x, 0.5, True), {}, (x, x)))
        assert isinstance(torch.empty(2), FakeTensor)
    assert torch.equal(state, torch.get_rng_state())


def test_a_profile_by_benchmark():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model, tokens = TokenModel([layer], 16, 50), torch.randint(50, (4, 8))
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = sacplan.profile(
            model, tokens, cross_entropy, device="cpu", runtime="benchmark", optimizer=torch.optim.AdamW
        )
        real = sacplan.profile(model, tokens, cross_entropy, device="cpu", runtime="benchmark", trace="real")
    roofline = sacplan.profile(model, tokens, cross_entropy, device="cpu", optimizer=torch.optim.AdamW)
    assert torch.equal(state, torch.get_rng_state())
    assert measured.program.flops == roofline.program.flops
    assert measured.peak_bytes == roofline.peak_bytes
    assert measured.step_ms > 0
    assert real.step_ms > 0
    assert all(op.time_ms > 0 for op in measured.program.ops if op.flops)
    assert all(p.grad is None for p in model.parameters())


def test_seeds_that_a_kernel_reads_on_the_host_stay_there():
    """On another device than the CPU too: "meta" stands for it here."""

    def make():
        q = torch.randn(2, 4, 8, 16)
        seed, offset = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
        return q, torch.randn(2, 4, 32), seed, offset

    q, logsumexp, seed, offset = fakes(make)
    args = (q, q, q, q, None, q, logsumexp, seed, offset, 0.1, [True, True, True, False])
    op = RealOp(
        Call(aten._scaled_dot_product_efficient_attention_backward.default, args, {}, None),
        torch.device("meta"),
    )
    assert [a.device.type for a in op.args[6:9]] == ["meta", "cpu", "cpu"]


def test_kernels_with_private_data_are_not_run(times):
    """cuDNN's recurrent backward takes the reserve that its forward filled."""
    with FakeTensorMode():
        x, w, h = torch.randn(5, 3, 10), [torch.randn(80, 10), torch.randn(80, 20)], torch.randn(1, 3, 20)
        out, buffer = torch.randn(5, 3, 20), torch.zeros(0)
        reserve = torch.zeros(64, dtype=torch.uint8)
    sizes = (2, 20, 0, 1, False, 0.0, True, False, [], None)
    args = (x, w, 4, buffer, h, h, out, out, None, None, *sizes, reserve)
    with pytest.warns(UserWarning, match="private data"):
        flops, time_ms = times.cost(Call(aten._cudnn_rnn_backward.default, (*args, [True] * 4), {}, None))
    assert flops == 4 * 15 * (80 * 10 + 80 * 20)
    assert time_ms > 0
    forward = (x, w, 4, buffer, h, h, 2, 20, 0, 1, False, 0.0, True, False, [], None)
    assert RealOp(Call(aten._cudnn_rnn.default, forward, {}, None), CPU).args[3] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_here():
    with pytest.raises(DeviceError, match="cost-model"):
        MeasuredTimes(resolve_device("h100"))
