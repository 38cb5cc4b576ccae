"""Batch norm, recurrent layers, optimizers and losses on a CUDA device's fake tensors; cuBLAS workspaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_impls
from torch.optim import optimizer as torch_optimizer

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.core.program import Patch, StorageKind
from sacplan.device import cudnn_rnn
from sacplan.device import library_workspaces as libraries
from sacplan.device.devices import resolve_device, torch_version
from sacplan.device.kernels import device_kernels, fake_device
from sacplan.device.library_workspaces import library_workspace_bytes, library_workspaces
from sacplan.device.overrides import takes_cudnn_batch_norm
from sacplan.record.fake_data import data_rules
from tests.device.test_autocast import HALF_IN, STAYS_HALF
from tests.device.test_kernels import BF16, FP16, FP32, inside, real_step, saved_by
from tests.support.ops import Ops, name_of
from tests.support.threads import at_once
from tests.zoo.layers import FromFunction

aten = torch.ops.aten
MIB = 2**20


# --------------------------------------------------------------------------------------- batch norm


def test_batch_norm_goes_to_cudnn_and_keeps_its_input() -> None:
    with fake_device("h100"):
        norm, x = nn.BatchNorm2d(8), torch.randn(4, 8, 6, 6, requires_grad=True)
        with Ops() as ops:
            y, saved = saved_by(lambda: norm(x))
            y.sum().backward()
    assert ops.noted.count("cudnn_batch_norm") == 1
    assert ops.noted.count("cudnn_batch_norm_backward") == 1
    assert "native_batch_norm" not in ops.noted
    # Weight, running mean and variance, and the two statistics of the batch; an empty reserve.
    assert saved == {((4, 8, 6, 6), FP32): 1, ((8,), FP32): 5, ((0,), torch.uint8): 1}
    assert x.grad is not None
    assert norm.weight.grad is not None


@pytest.mark.parametrize(
    ("want", "change"),
    [
        (True, {}),
        (True, {"training": False}),
        (True, {"input": (4, 8, 6)}),
        (True, {"dtype": FP16}),
        (True, {"running": False}),
        (False, {"running": False, "training": False}),
        (False, {"dtype": BF16}),
        (False, {"dtype": FP16, "weight_dtype": FP16}),
        (False, {"affine": False}),
        (False, {"input": (4, 8)}),
        (False, {"input": (880802, 8, 1)}),
        (False, {"input": (65536, 8, 1), "training": False}),
        (False, {"device": "mi300x"}),
        (False, {"enabled": False}),
    ],
)
def test_when_batch_norm_goes_to_cudnn(want: bool, change: dict[str, Any]) -> None:
    channels = [torch.empty(8, dtype=change.get("weight_dtype", FP32), device="meta") for _ in range(4)]
    affine = channels[:2] if change.get("affine", True) else [None, None]
    running = channels[2:] if change.get("running", True) else [None, None]
    x = torch.empty(change.get("input", (4, 8, 6, 6)), dtype=change.get("dtype", FP32), device="meta")
    spec = resolve_device(change.get("device", "h100"))
    enabled = change.get("enabled", True)
    training = change.get("training", True)
    assert takes_cudnn_batch_norm(spec, x, *affine, *running, training, cudnn_enabled=enabled) is want


# --------------------------------------------------------------------------------------- recurrent layers

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(10, 20, 2, dropout=0.1),
    "lstm, batch first, two directions": lambda: nn.LSTM(10, 20, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(10, 20, 3),
    "tanh": lambda: nn.RNN(10, 20),
    "relu, no bias": lambda: nn.RNN(10, 20, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_are_one_cudnn_op(name: str) -> None:
    real = LAYERS[name]()
    x = torch.randn(5, 3, 10)
    want = real(x)
    with fake_device("h100"):
        layer, x = LAYERS[name](), torch.randn(5, 3, 10, requires_grad=True)
        with Ops() as ops:
            out, state = layer(x)
            out.sum().backward()
        assert ops.noted.count("_cudnn_rnn") == 1
        assert ops.noted.count("_cudnn_rnn_backward") == 1
        # The same shapes as the real layer's, and a gradient for each weight.
        assert out.shape == want[0].shape
        states, wanted = (state, want[1]) if isinstance(state, tuple) else ((state,), (want[1],))
        assert [s.shape for s in states] == [s.shape for s in wanted]
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


def test_what_an_lstm_keeps() -> None:
    """The reserve, as documented: six values a step, layer and unit, and a byte of dropout between layers."""
    with fake_device("h100"):
        layer, x = nn.LSTM(10, 20, 2, dropout=0.1), torch.randn(5, 3, 10, requires_grad=True)
        _, saved = saved_by(lambda: layer(x)[0])
    reserve = [shape for shape, dtype in saved if dtype == torch.uint8]
    states = 5 * 3 * 20
    assert reserve == [(6 * states * 2 * 4 + states,)]
    assert saved[((5, 3, 10), FP32)] == 1
    assert saved[((5, 3, 20), FP32)] == 1


def test_recurrent_layers_that_cudnn_does_not_take() -> None:
    h100, t4, rocm = (resolve_device(name) for name in ("h100", "t4", "mi300x"))
    assert cudnn_rnn.takes_cudnn(h100, BF16)
    assert not cudnn_rnn.takes_cudnn(t4, BF16)
    assert cudnn_rnn.takes_cudnn(t4, FP16)
    assert not cudnn_rnn.takes_cudnn(rocm, FP32)
    with fake_device("h100"), Ops() as ops:
        nn.LSTM(10, 20, proj_size=5)(torch.randn(5, 3, 10))[0].sum().backward()
    assert "_cudnn_rnn" not in ops.noted


def test_recurrent_layers_under_autocast() -> None:
    with fake_device("h100"), torch.autocast("cuda", dtype=BF16):
        layer, x = nn.LSTM(10, 20), torch.randn(5, 3, 10)
        out, saved = saved_by(lambda: layer(x)[0])
    assert out.dtype == BF16
    assert saved[((80, 10), BF16)] == 1


# --------------------------------------------------------------------------------------- plans over them


def _under_autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=BF16):
        return model(batch).float().pow(2).mean()


def recurrent() -> nn.Module:
    head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.RMSNorm(64), nn.Linear(64, 32))
    lstm = nn.LSTM(32, 32, 2, dropout=0.1)
    return FromFunction(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=head)


@pytest.mark.parametrize("loss_fn", [None, _under_autocast], ids=["float32", "autocast"])
def test_a_plan_over_routed_kernels_keeps_its_promise(loss_fn: Any) -> None:
    model, batch = recurrent(), torch.randn(16, 8, 32)
    profile = sacplan.profile(model, batch, loss_fn, torch.optim.AdamW, device="h100")
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < profile.peak_bytes
    result = sacplan.verify(model, batch, plan, loss_fn, torch.optim.AdamW)
    assert result.peak_bytes == plan.peak_bytes


# --------------------------------------------------------------------------------------- losses, gathers


def test_ctc_keeps_what_cuda_keeps() -> None:
    """log_probs, targets, negative log-likelihood, log_alpha [N, T, 2 L + 1]."""
    model = nn.Linear(8, 20)

    def loss_fn(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        log_probs = F.log_softmax(m(batch), -1)
        targets, lengths = torch.ones(4, 10, dtype=torch.long), torch.full((4,), 50)
        return F.ctc_loss(log_probs, targets, lengths, torch.full((4,), 10))

    profile = sacplan.profile(model, torch.randn(50, 4, 8), loss_fn=loss_fn, device="h100")
    (ctc,) = [op for op in profile.program.ops if op.name.startswith("aten._ctc_loss.")]
    assert sorted(profile.program.storage_bytes[s] for s in ctc.writes) == [
        512,
        -(-4 * 50 * 21 * 4 // 512) * 512,
    ]


def test_gather_keeps_its_index_and_source() -> None:
    with fake_device("h100"):
        x, index = torch.randn(4, 9, requires_grad=True), torch.zeros(4, 2, dtype=torch.long)
        _, saved = saved_by(lambda: torch.gather(x, 1, index))
    assert saved == {((4, 9), FP32): 1, ((4, 2), torch.int64): 1}


def test_cross_entropy_keeps_log_probabilities_and_target() -> None:
    with fake_device("h100"):
        x, target = torch.randn(6, 50, requires_grad=True), torch.zeros(6, dtype=torch.long)
        loss, saved = saved_by(lambda: F.cross_entropy(x, target))
        with Ops(lambda call: name_of(call) != "detach" and getattr(call.returned, "shape", None)) as made:
            loss.backward()
    assert saved[((6, 50), FP32)] == 2  # the same storage: log_softmax's output and nll_loss's input
    assert made.noted.count((6, 50)) == 2  # nll_loss's gradient, and log_softmax's


# --------------------------------------------------------------------------------------- optimizers


def step_ops(make: Callable[[Any], torch.optim.Optimizer]) -> list[str]:
    """The ops of a second step on two parameters."""
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    optimizer = make(parameters)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn(8, 8)
        with Ops() as ops:
            optimizer.step()
    return ops.noted


O = torch.optim  # noqa: E741


@pytest.mark.parametrize(
    "make", [O.AdamW, O.Adam, O.SGD, O.RMSprop, O.Adagrad, O.Adadelta, O.NAdam, O.RAdam, O.Adamax]
)
def test_foreach_is_the_default(make: Any) -> None:
    with fake_device("h100"):
        assert any(op.startswith("_foreach_") for op in step_ops(make))
    with fake_device("cpu"):
        assert not any(op.startswith("_foreach_") for op in step_ops(make))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda p: O.AdamW(p, foreach=False), "single"),
        (lambda p: O.AdamW(p, fused=True), "fused"),
        (lambda p: O.Adam(p, fused=True), "fused"),
        (lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True), "fused"),
        (lambda p: O.Adagrad(p, fused=True), "fused"),
        (lambda p: O.AdamW(p, lr=torch.tensor(1e-3)), "single"),
    ],
)
def test_optimizers_that_do_something_else(make: Any, want: str) -> None:
    with fake_device("h100"):
        ops = step_ops(make)
    # The counters of the fused ones are counted up by foreach, and nothing else is.
    assert {op for op in ops if op.startswith("_foreach_")} <= {"_foreach_add_"}
    assert any(op.startswith("_fused_") for op in ops) is (want == "fused")
    if want == "single":
        assert not any(op.startswith("_foreach_") for op in ops)


def test_adafactor_stays_single() -> None:
    """It reads values of its parameters, which a fake step must be told how to answer."""
    with fake_device("h100"), pytest.warns(sacplan.SacplanWarning), data_rules():
        ops = step_ops(O.Adafactor)
    assert not any(op.startswith("_foreach_") for op in ops)


P = 4 * 2 * 256 * 256
"""Bytes of all parameters in the test below."""


@pytest.mark.parametrize(
    ("make", "state", "temporaries"),
    [
        (O.AdamW, 2, 1),
        (lambda p: O.AdamW(p, amsgrad=True), 3, 1),
        (lambda p: O.AdamW(p, foreach=False), 2, 1.5),
        (lambda p: O.AdamW(p, fused=True), 2, 0),
        (lambda p: O.SGD(p, lr=0.1), 0, 0),
        (lambda p: O.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        (lambda p: O.SGD(p, lr=0.1, weight_decay=0.1), 0, 1),
        (O.RMSprop, 1, 1),
        (O.Adagrad, 1, 2),
        (O.Adadelta, 2, 2),
    ],
)
def test_state_and_temporaries_of_optimizers(make: Any, state: float, temporaries: float) -> None:
    """The table of KERNELS: P bytes of parameters here are two of the same size."""
    with fake_device("h100"):
        parameters = [nn.Parameter(torch.randn(256, 256)) for _ in range(2)]
        optimizer = make(parameters)
        for p in parameters:
            p.grad = torch.randn(256, 256)
        optimizer.step()
        held = sum(
            v.nbytes
            for s in optimizer.state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor) and v.dim()
        )
        with sacplan.MemTracker() as tracker:
            tracker.track_external(*parameters, *(p.grad for p in parameters))
            tracker.track_external(optimizer)
            optimizer.step()
    assert held == state * P
    before = (2 + state) * P
    assert tracker.peak_bytes - before == pytest.approx(temporaries * P, abs=0.01 * P)


def untouched() -> tuple[Any, ...]:
    """What real tensors take and keep: kernels, the CPU's autocast, and optimizers."""
    x = torch.randn(8, 8, dtype=BF16)
    with torch.autocast("cpu", BF16):
        types = [run(x).dtype for run in (*HALF_IN.values(), *STAYS_HALF.values())]
        types += [torch.mv(x, x[0]).dtype, torch.cat([x, x.float()]).dtype]
        types.append(F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(x)).dtype)
    out, grad, saved = real_step()
    return out.tolist(), grad.tolist(), saved, types, step_ops(O.AdamW)


def test_real_tensors_and_other_threads_keep_their_kernels() -> None:
    before = untouched()
    assert not any(op.startswith("_foreach_") for op in before[-1])
    types = list(torch_optimizer._foreach_supported_types)
    devices = torch_optimizer._get_foreach_kernels_supported_devices
    implementations = dict(fake_impls.op_implementations_dict)
    with device_kernels("h100"):
        assert [untouched(), *at_once(untouched)] == [before] * 2
    assert untouched() == before
    assert torch_optimizer._foreach_supported_types == types
    assert torch_optimizer._get_foreach_kernels_supported_devices is devices
    assert fake_impls.op_implementations_dict == implementations


# --------------------------------------------------------------------------------------- cuBLAS


@pytest.mark.parametrize(
    ("device", "version", "nbytes"),
    [
        ("t4", (2, 13), 8_519_680),
        ("a100-80gb", (2, 13), 8_519_680),
        ("l4", (2, 13), 8_519_680),
        ("h100", (2, 11), 32 * MIB),
        ("h200", (2, 13), 32 * MIB),
        ("b200", (2, 11), 8_519_680),
        ("b200", (2, 12), 32 * MIB),
        ("rtx-5090", (2, 13), 32 * MIB),
        ("mi250x", (2, 13), 32 * MIB),
        ("mi300x", (2, 13), 128 * MIB),
        ("cpu", (2, 13), 0),
    ],
)
def test_size_of_a_cublas_workspace(
    device: str, version: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert library_workspace_bytes(resolve_device(device), version) == nbytes


def test_a_cublas_workspace_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve_device("a100-80gb")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert library_workspace_bytes(spec) == 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:4096:2")
    assert library_workspace_bytes(spec) == 8_519_680
    assert library_workspace_bytes(replace(spec, matmul_workspace_bytes=7)) == 7
    assert library_workspace_bytes(replace(spec, matmul_workspace_bytes=0)) == 0


def profiled(device: str) -> sacplan.Profile:
    """A step of two layers, no optimizer."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return sacplan.profile(model, torch.randn(32, 64), device=device)


@pytest.mark.skipif(not libraries.workspaces_stay(), reason="torch 2.15 keeps no workspaces")
def test_a_profile_counts_them_and_a_plan_keeps_its_promise() -> None:
    counted, bare = profiled("h100"), profiled("h100 without workspaces")
    # One of cuBLAS for each thread, and one of cuBLASLt for the products that add a bias.
    expected = 64 * MIB + libraries.bias_workspace_bytes(counted.spec)
    assert expected == (65 if torch_version() < (2, 14) else 64) * MIB
    assert counted.peak_bytes - bare.peak_bytes == expected
    assert (
        counted.program.liveness.peak.by_kind[StorageKind.OTHER]
        - bare.program.liveness.peak.by_kind[StorageKind.OTHER]
        == expected
    )
    assert len(counted.program.ops) == len(bare.program.ops)
    model, batch = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.GELU()), torch.randn(4096, 512)
    for device in ("h100", "h100 without workspaces"):
        profile = sacplan.profile(model, batch, device=device)
        plan = sacplan.plan(profile, f"{profile.peak_bytes - 2 * MIB}B")
        result = sacplan.verify(model, batch, plan)
        assert result.peak_bytes == plan.peak_bytes == result.predicted_peak_bytes
        assert result.within_budget


@pytest.mark.skipif(not libraries.workspaces_stay(), reason="torch 2.15 keeps no workspaces")
def test_a_plan_may_change_which_products_come_first() -> None:
    """What runs again multiplies before gradients do; with a loss in slices, the forward pass may have no product."""
    scores = nn.Sequential(nn.Embedding(256, 32), nn.LayerNorm(32), nn.Linear(32, 256))
    step = FromFunction(
        lambda self, x: F.cross_entropy(self.scores(x).flatten(0, 1), x.flatten()), scores=scores
    )
    model, batch = nn.Sequential(step), torch.zeros(2, 48, dtype=torch.long)
    profile = sacplan.profile(model, batch, device="h100")
    again = sacplan.policy("full", profile=profile, layers="0")
    slices = plan_with(profile, [Chunk("0.scores.2", "rest", 8, 1)])
    for plan in (again, slices):
        assert plan.peak_bytes == sacplan.verify(model, batch, plan).peak_bytes
    assert slices.peak_bytes < profile.peak_bytes - 32 * MIB


def test_no_workspaces_where_none_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, spec = profiled("h100 without workspaces").program, resolve_device("h100")
    assert library_workspaces(plain, spec, (2, 15)) == Patch()
    assert library_workspaces(plain, resolve_device("cpu"), (2, 13)) == Patch()
    assert library_workspaces(plain, spec.without_workspaces(), (2, 13)) == Patch()
    norms = nn.LayerNorm(64)
    none = sacplan.profile(norms, torch.randn(32, 64), device="h100").program
    assert library_workspaces(none, spec, (2, 13)) == Patch()
    # From 2.15 on each product has its own.
    x = torch.empty(4, 4, device="meta")
    assert inside(aten.mm.default, x, x, out=x, device="h100") == 0
    for module in (libraries, "sacplan.device.kernel_workspaces"):
        target = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{target}.workspaces_stay", lambda version=None: False)
    assert inside(aten.mm.default, x, x, out=x, device="h100") == 32 * MIB
    assert inside(aten.relu.default, x, out=x, device="h100") == 0


# --------------------------------------------------------------------------------------- other workspaces


def test_a_convolution_copies_what_is_in_the_other_format() -> None:
    x = torch.empty(2, 16, 8, 8, device="meta")
    weight = torch.empty(32, 16, 3, 3, device="meta")
    last = x.to(memory_format=torch.channels_last)

    def workspace(*operands: torch.Tensor) -> int:
        rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return inside(aten.convolution.default, *operands, *rest, device="h100")

    assert workspace(x, weight) == 0
    assert workspace(last, weight) == weight.numel() * 4
    assert workspace(last, weight.to(memory_format=torch.channels_last)) == 0
    assert workspace(x[:, :, ::2], weight) == x.numel() * 2
    out = torch.empty(2, 32, 8, 8, device="meta")
    args = (out, last, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    want = out.numel() * 4 + weight.numel() * 4
    assert inside(aten.convolution_backward.default, *args, device="h100") == want
