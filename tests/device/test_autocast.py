"""CUDA's autocast on fake CPU tensors: the lists against torch's header, what is cast, and what is put back."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import autocast as autocast_class

from sacplan.device.autocast import policies
from sacplan.device.devices import torch_version
from sacplan.device.kernels import fake_device
from sacplan.device.op_kernels import Call
from sacplan.errors import DeviceError
from tests.device.test_kernels import saved_by
from tests.support.ops import Ops, name_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ------------------------------------------------------------------------------------- against torch's own


def header_lists() -> dict[str, set[str]]:
    """The op lists of the header that comes with this torch, by the macro that holds them."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not path.exists():
        pytest.skip("this torch comes without headers")
    text = path.read_text().replace("\\\n", " ")
    lists = {}
    for macro, body in re.findall(r"#define (AT_FORALL_\w+)\(_\)(.*)", text):
        if macro == "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE":
            lists[macro] = set(re.findall(r'"([\w.]+)"', body))
        else:
            entries = re.findall(r"_\(([^)]*)\)", body)
            lists[macro] = {".".join(part.strip() for part in e.split(",")) for e in entries}
    return {
        macro: {name for name in names if not _is_of_named_tensors(name)} for macro, names in lists.items()
    }


def _is_of_named_tensors(name: str) -> bool:
    """Overloads that torch had before 2.13; fake tensors have no names."""
    return "imname" in name or ".names_" in name


@pytest.mark.parametrize(
    ("macro", "policy"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", "lower"),
        ("AT_FORALL_FP32", "fp32"),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", "fp32_dtype"),
        ("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE", "fp32_norm"),
        ("AT_FORALL_PROMOTE", "promote"),
    ],
)
def test_the_lists_are_those_of_the_header(macro: str, policy: str) -> None:
    ours = {name for name, p in policies().items() if p == policy} - {"_cudnn_rnn"}
    assert ours == header_lists()[macro]


def test_every_op_has_a_kernel_for_cuda_in_torch() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = policies()
    assert [n for n in names if n != "_cudnn_rnn" and not has(f"aten::{n}", "AutocastCUDA")] == []
    there = {
        n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if has(n, "AutocastCUDA")
    }
    more = there - names.keys()
    assert {n for n in more if "cudnn" not in n and not _is_of_named_tensors(n)} == set()


def test_rms_norm_joined_the_list_in_2_12() -> None:
    assert "rms_norm" not in policies((2, 11))
    assert policies((2, 12))["rms_norm"] == "fp32"


# ------------------------------------------------------------------------------------- what is cast

HALF_IN = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "sum": lambda x: x.sum(),
    "sum over a dimension": lambda x: x.sum(-1),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "norm": torch.norm,
    "norm over a dimension": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "prod": lambda x: torch.prod(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long)),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "addcmul with float32": lambda x: torch.addcmul(x, x, x.float()),
    # Where torch's own kernel is kept it agrees.
    "mse_loss": lambda x: F.mse_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(8, dtype=torch.long)),
    "kl_div": lambda x: F.kl_div(x, x),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
}
STAYS_HALF = {
    "gelu": F.gelu,
    "add": lambda x: x + x,
    "mean": lambda x: x.mean(),
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)),
    "reflection_pad2d": lambda x: F.pad(x[None], (1, 1, 1, 1), mode="reflect"),
    "sum with a type": lambda x: x.sum(dtype=BF16),
}
GOES_LOW = {
    "mv": lambda x: torch.mv(x, torch.randn(8)),
    "addmv": lambda x: torch.addmv(torch.randn(8), x, torch.randn(8)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "lstm_cell": lambda x: nn.LSTMCell(8, 8)(x)[0],
    "gru_cell": lambda x: nn.GRUCell(8, 8)(x),
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "conv1d": lambda x: F.conv1d(x[None], torch.randn(4, 8, 3)),
    "conv2d": lambda x: F.conv2d(x[None, None], torch.randn(4, 1, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], torch.randn(1, 4, 3, 3)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "sdpa": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3),
    "convolution": lambda x: torch.convolution(
        x[None], torch.randn(4, 8, 3), None, [1], [0], [1], False, [0], 1
    ),
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", [*HALF_IN, *STAYS_HALF, *GOES_LOW])
def test_results_have_the_type_that_cuda_gives(name: str, device_type: str) -> None:
    with fake_device("h100"), torch.autocast(device_type, dtype=BF16):
        if name in HALF_IN:
            assert HALF_IN[name](torch.randn(8, 8, dtype=BF16)).dtype == FP32
        elif name in STAYS_HALF:
            assert STAYS_HALF[name](torch.randn(8, 8, dtype=BF16)).dtype == BF16
        else:
            assert GOES_LOW[name](torch.randn(8, 8)).dtype == BF16


def test_rms_norm() -> None:
    with fake_device("h100"), torch.autocast("cuda", dtype=BF16):
        out = F.rms_norm(torch.randn(8, 8, dtype=BF16), (8,))
    assert out.dtype == (FP32 if torch_version() >= (2, 12) else BF16)


def test_default_types() -> None:
    with fake_device("h100"):
        x = torch.randn(8, 8)
        with torch.autocast("cuda"):
            assert (x @ x).dtype == FP16
            assert torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == FP32
                assert not torch.is_autocast_enabled("cuda")
            assert (x @ x).dtype == FP16
        with torch.autocast("cpu"):
            assert (x @ x).dtype == BF16
        with pytest.warns(FutureWarning, match="deprecated"), torch.cuda.amp.autocast(dtype=BF16):
            assert (x @ x).dtype == BF16
        with torch.amp.autocast("cuda", dtype=BF16):
            assert (x @ x).dtype == BF16
        assert torch.autocast("cuda", dtype=BF16)(lambda: x @ x)().dtype == BF16


def test_double_is_left_alone() -> None:
    with fake_device("h100"), torch.autocast("cuda", dtype=BF16):
        x = torch.randn(8, 8, dtype=torch.float64)
        assert (x @ x).dtype == torch.float64
        assert torch.exp(x).dtype == torch.float64


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with fake_device("h100"), torch.autocast("cuda", dtype=BF16):
        x = torch.rand(8)
        with pytest.raises(DeviceError, match="with_logits"):
            F.binary_cross_entropy(x, x)


def _name_and_shape(call: Call) -> tuple[str, Any]:
    return name_of(call), getattr(call.args[0], "shape", None) if call.args else None


@pytest.mark.parametrize("op", ["linear", "mv"])
def test_weights_are_cast_once(op: str) -> None:
    """``linear`` by torch's cache, ``mv`` by ours."""
    with fake_device("h100"):
        weight = nn.Parameter(torch.randn(16, 8))
        run = {"linear": lambda: F.linear(torch.randn(4, 8), weight), "mv": lambda: weight.mv(torch.randn(8))}
        for _ in range(2):  # the cache ends with the context
            with Ops(_name_and_shape) as casts, torch.autocast("cuda", dtype=BF16):
                run[op]()
                run[op]()
            assert casts.noted.count(("_to_copy", (16, 8))) == 1
        with Ops(_name_and_shape) as casts, torch.autocast("cuda", dtype=BF16, cache_enabled=False):
            run[op]()
            run[op]()
        assert casts.noted.count(("_to_copy", (16, 8))) == 2
        with Ops(_name_and_shape) as casts, torch.autocast("cuda", dtype=BF16):
            detached = weight.detach()
            F.linear(torch.randn(4, 8), detached)
            F.linear(torch.randn(4, 8), detached)
        assert casts.noted.count(("_to_copy", (16, 8))) == 2


def test_a_step_keeps_what_cuda_keeps() -> None:
    """linear, gelu, layer_norm and cross entropy: the norm's input in float32, the products' in bfloat16."""
    with fake_device("h100"):
        first, norm, second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 10)
        x = torch.randn(4, 8)
        with torch.autocast("cuda", dtype=BF16):
            loss, saved = saved_by(
                lambda: F.cross_entropy(second(norm(F.gelu(first(x)))), torch.zeros(4, dtype=torch.long))
            )
        loss.backward()
        assert first.weight.grad is not None
        assert first.weight.grad.dtype == FP32
    assert saved[(4, 8), BF16] == 1  # the input of the first product, cast
    assert saved[(4, 16), BF16] == 2  # gelu's input, and the second product's
    assert saved[(4, 16), FP32] == 1  # layer norm's
    # cross_entropy_loss asks log_softmax for its input's type, and nll_loss is on the float32 list: two copies.
    assert saved[(4, 10), BF16] == 1
    assert saved[(4, 10), FP32] == 1


# ------------------------------------------------------------------------------------- nothing is left


def test_everything_is_put_back() -> None:
    methods = [getattr(autocast_class, n) for n in ("__init__", "__enter__", "__exit__")]
    outside = torch.autocast("cpu", BF16)

    def fail() -> None:
        with fake_device("h100"), torch.autocast("cuda", dtype=BF16), outside:
            assert torch.exp(torch.randn(2, dtype=BF16)).dtype == FP32
            raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            fail()
    assert [getattr(autocast_class, n) for n in ("__init__", "__enter__", "__exit__")] == methods
    assert outside.device == "cpu"
    for device in ("cpu", "cuda"):
        assert not torch.is_autocast_enabled(device)
    with FakeTensorMode(), torch.autocast("cpu", BF16):
        assert torch.exp(torch.randn(2, dtype=BF16)).dtype == BF16
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            torch.autocast("cuda")


def test_a_cpu_keeps_its_own() -> None:
    with fake_device("cpu"), torch.autocast("cpu", BF16):
        assert torch.exp(torch.randn(2, dtype=BF16)).dtype == BF16


def test_an_autocast_that_was_entered_before() -> None:
    before = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast("cuda") does where there is CUDA
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with fake_device("h100"):
            x = torch.randn(8, 8)
            assert (x @ x).dtype == BF16
            assert torch.exp(x @ x).dtype == FP32
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
