"""What a trace leaves as it was, what a fake one assumes of data, and how the two kinds agree."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sacplan
from benchmarks.harness.steps import real_step
from sacplan.errors import SacplanWarning
from sacplan.record import seen_ops
from sacplan.record.fake_data import data_rules
from sacplan.record.recorder import Recorder
from sacplan.torch_compat.fake_kernels import fake_kernels
from tests.support.slow import slow_after
from tests.zoo.experts import MoE
from tests.zoo.layers import FromFunction, Then


def test_fake_trace_copies_no_weights():
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))  # 16 MiB each
    batch = torch.randn(8, 2048)
    with torch.profiler.profile(profile_memory=True) as profiler:
        sacplan.profile(model, batch)
    assert max((e.self_cpu_memory_usage for e in profiler.events()), default=0) < 2**20


# --- rules for data ---------------------------------------------------------------------------------


def test_routing_is_balanced_and_said_so():
    seen = []

    def loss_fn(model, batch):
        loss = model(batch).sum()
        seen.append(tuple(model.rows))
        return loss

    with pytest.warns(SacplanWarning, match=r"tests.zoo.experts, line \d+, in forward.*balanced"):
        profile = sacplan.profile(MoE(), torch.randn(64, 16), loss_fn=loss_fn)
    assert set(seen) == {(32, 32, 32, 32)}
    assert len(profile.rules) == 1
    assert "balanced" in profile.assumptions[0]


def test_a_plan_says_that_routing_was_taken_for_balanced(tmp_path):
    """The profile, the plan in words, its file, and what a measured step with other routing is compared with."""
    model, x = MoE(), torch.randn(64, 16)
    with pytest.warns(SacplanWarning):
        profile = sacplan.profile(model, x, device="cpu")
    plan = sacplan.plan(profile, "100%")
    plan.save(tmp_path / "plan.json")
    plan = sacplan.Plan.load(tmp_path / "plan.json")
    assert "assumed (balanced)" in str(plan)
    assert 'trace="real"' in str(plan)
    seen = sacplan.verify(model, x, plan, run="real")
    assert any("assumed (balanced)" in sentence for sentence in seen.assumptions)


def test_a_plan_that_takes_no_size_for_granted_says_nothing():
    """Nor of numbers that are read: they decide no size."""

    def loss_fn(model, batch):
        loss = model(batch).pow(2).mean()
        loss.item()
        return loss

    with pytest.warns(SacplanWarning, match="unit value"):
        profile = sacplan.profile(nn.Linear(4, 4), torch.randn(8, 4), loss_fn, device="cpu")
    plan = sacplan.plan(profile, "100%")
    assert plan.provenance.assumed == ()
    assert "assume" not in str(plan)


def ask(question, *real):
    """The answer in a fake step, and the names of the rules that it took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacplanWarning)
        with sacplan.fake_device("h100") as mode, data_rules() as rules:
            twins = []
            for t in real:
                twins.append(mode.from_tensor(t))
                rules.learn(twins[-1], t)
            x = torch.randn(8, 4, requires_grad=True)
            return question(x, *twins), [a.rule for a in rules.applied]


def _pairs():
    """Rows and columns, two tuples of tensors that are single numbers."""
    return tuple(zip(*torch.tensor([[0, 3], [1, 1]]), strict=True))


def _written_in_place(x):
    mask = torch.zeros(8, dtype=torch.bool)
    mask[2:5] = True
    mask[1:4].logical_not_()
    return mask.tolist()


KNOWN = {
    "item": (lambda x: torch.arange(5).sum().item(), 10),
    "tolist": (lambda x: torch.ones(3, dtype=torch.long).cumsum(0).tolist(), [1, 2, 3]),
    "mask": (lambda x: tuple(x[torch.arange(8) > 2].shape), (5, 4)),
    "mask beside an index": (lambda x: tuple(x[torch.arange(8) > 2, 1].shape), (5,)),
    "masked_select": (lambda x: tuple(torch.masked_select(x, (torch.arange(8) > 2)[:, None]).shape), (20,)),
    "repeat_interleave": (lambda x: tuple(torch.repeat_interleave(x, torch.arange(8), dim=0).shape), (28, 4)),
    "unique": (lambda x: torch.unique(torch.tensor([1, 2, 2])).tolist(), [1, 2]),
    "arange": (lambda x: len(torch.arange(torch.tensor([3, 5]).max())), 5),
    "split": (lambda x: [len(s) for s in x.split(torch.tensor([3, 5]).tolist())], [3, 5]),
    "equal": (lambda x: torch.equal(torch.arange(3), torch.arange(3)), True),
    "numpy": (lambda x: torch.arange(3).numpy().tolist(), [0, 1, 2]),
    "rows and columns": (lambda x: torch.arange(8).view(2, 4)[_pairs()].tolist(), [3, 5]),
    "numbers from tensors": (lambda x: torch.tensor([torch.arange(3).sum(), 2]).tolist(), [3, 2]),
    "formatted": (lambda x: f"expert_{torch.arange(3)[1]}", "expert_1"),
    "written in place": (_written_in_place, [False, True, False, False, True, False, False, False]),
    "like something unknown": (
        lambda x: x.new_zeros(3).tolist() + torch.ones_like(x)[0].tolist(),
        [0.0] * 3 + [1.0] * 4,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_exact(name):
    question, answer = KNOWN[name]
    assert ask(question) == (answer, [])


def test_values_of_a_real_batch_are_followed():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert ask(lambda x, m: (m.sum(-1).tolist(), x[:2, :3][m.bool()].shape[0]), mask) == (([2, 1], 3), [])


def test_an_index_of_single_numbers_is_the_one_of_a_real_step():
    """Rows and columns as sequences of tensors: PyTorch reads those in C++, and makes an index of them."""

    def marked():
        mask = torch.ones(2, 4, dtype=torch.bool)
        mask[_pairs()] = False
        return mask.tolist(), mask[_pairs()[0], 3].tolist(), mask[_pairs()].tolist()

    assert ask(lambda x: marked())[0] == marked()


RULED = {
    "topk": (lambda x: torch.bincount(x.topk(2).indices.flatten()).tolist(), [4, 4, 4, 4], "balanced"),
    "argmax": (lambda x: torch.bincount(x.argmax(-1)).tolist(), [2, 2, 2, 2], "balanced"),
    "max": (lambda x: x.max(dim=-1).indices.tolist(), [0, 1, 2, 3] * 2, "balanced"),
    "multinomial": (
        lambda x: torch.multinomial(x.softmax(-1), 1).flatten().tolist(),
        [0, 1, 2, 3] * 2,
        "balanced",
    ),
    "histc": (lambda x: torch.histc(x.argmax(-1).float(), 4, 0, 3).tolist(), [2.0] * 4, "balanced"),
    "argsort": (lambda x: x.argsort(-1)[0].tolist(), [0, 1, 2, 3], "in order"),
    "rand, rare": (lambda x: bool(torch.rand([]) < 0.1), False, "even spread"),
    "rand, likely": (lambda x: bool(torch.rand([]) < 0.9), True, "even spread"),
    "share": (lambda x: (torch.rand(1000) < 0.15).sum().item(), 150, "even spread"),
    "randperm": (lambda x: sorted(torch.randperm(5).tolist()), [0, 1, 2, 3, 4], "even spread"),
    "uniform_": (lambda x: torch.empty([]).uniform_(2, 4).item(), 3.0, "even spread"),
    "finite": (lambda x: bool(torch.isfinite(x * x).all()), True, "finite"),
    "no padding": (lambda x: bool((x * x == 0.0).any()), False, "not zero"),
    "nan": (lambda x: bool(torch.isnan(x * x).any()), False, "finite"),
    "mask": (lambda x: tuple(x[x > 0].shape), (32,), "all elements"),
    "where": (lambda x: len(torch.where(x > 0)[0]), 32, "all elements"),
    "masked_select": (lambda x: len(torch.masked_select(x, x > 0)), 32, "all elements"),
    "any": (lambda x: bool((x > 0).any()), True, "all elements"),
    "float": (lambda x: float(x.sum()), 1.0, "unit value"),
    "numpy": (lambda x: x.detach().numpy().sum(), 0.0, "zeros"),
}


@pytest.mark.parametrize("name", RULED)
def test_rules(name):
    question, answer, rule = RULED[name]
    assert ask(question) == (answer, [rule])


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x[x > 0].sum(),
        lambda x: torch.masked_select(x, x > 0).sum(),
        lambda x: x[torch.arange(8) > 2].sum(),
    ],
)
def test_gradients_flow_through(question):
    def step(x):
        question(x).backward()
        return tuple(x.grad.shape)

    assert ask(step)[0] == (8, 4)


REFUSED = {
    "a single comparison": lambda x: bool(x.sum() > 0),
    "an index": lambda x: x[tuple((x[:2, 0] > 0).long()), 0],
    "something unknown written": lambda x: bool(torch.ones(8, dtype=torch.bool).copy_(x[:, 0] > 0)[0]),
    "a count": lambda x: (x > 0).sum().item(),
    "unique": lambda x: torch.unique(x),
    "repeats": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0),
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_rule_is_an_error_that_says_where(name):
    with pytest.raises(
        sacplan.errors.DataDependentError, match=r'test_trace, line \d+, in <lambda>.*aten.*trace="real"'
    ):
        ask(REFUSED[name])


def test_a_refusal_inside_a_model_is_an_error_of_the_profile():
    def forward(y):
        return y if y.mean() > 0 else y * 2

    model = Then(forward, 4)
    with pytest.raises(sacplan.errors.DataDependentError, match="in forward"):
        sacplan.profile(model, torch.randn(2, 4))
    assert sacplan.profile(model, torch.randn(2, 4), device="cpu", trace="real").peak_bytes > 0


def test_rules_draw_no_random_numbers():
    state = torch.get_rng_state()
    ask(lambda x: (torch.rand(5), torch.randperm(4), torch.empty(3).uniform_(), x.topk(2)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_module_may_convert_itself_in_the_step():
    def converts(self, x):
        self.linear = self.linear.to(torch.float32)
        return self.linear(x)

    model = FromFunction(converts, linear=nn.Linear(4, 4)).bfloat16()
    sacplan.profile(model, torch.randn(2, 4))
    assert model.linear.weight.dtype == torch.bfloat16


# --- what makes a trace fast ------------------------------------------------------------------------


def _varied(self, x):
    for i, layer in enumerate(self.layers):
        a, b = layer(x).chunk(2, -1)
        y = torch.cat([a * i, b * float(i), b.t().contiguous().t() * bool(i)], -1)[:, :16]
        y = F.dropout(y, 0.1).mul_(2).add_(x)
        top, where = y.topk(2)
        x = y + top.sum(-1, keepdim=True) + y.gather(1, where).mean() + y[self.mask].sum()
        x = self.norm(x).to(torch.float64).float()
    return x


def varied():
    """Views, in-place ops, several outputs, an index, a mask, a scalar of each type."""
    layers, mask = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), torch.arange(8) % 2 == 0
    return FromFunction(_varied, layers=layers, norm=nn.BatchNorm1d(16), mask=mask)


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
@pytest.mark.parametrize(("device", "optimizer"), [("cpu", torch.optim.AdamW), ("h100", None)])
def test_ops_that_are_looked_up_give_the_recording_that_they_give_without(device, optimizer, monkeypatch):
    def profile():
        torch.manual_seed(0)
        return sacplan.profile(varied(), torch.rand(8, 16), device=device, optimizer=optimizer)

    quick = profile()
    again = profile()  # its outputs are those that the first one has seen
    monkeypatch.setattr(Recorder, "_make_seen_ops", lambda self: None)
    slow = profile()
    assert quick.program == again.program == slow.program


def _kernels(self, x):
    """Ops with more kernels than one: what they return beside their result is the kernel's choice."""
    x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(2).transpose(1, 2)
    x = self.linear(F.layer_norm(self.lstm(x)[0], (8,)))
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).cumsum(2).logsumexp(-1)


def recorded_kernels(device):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
    lstm, linear = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
    model = FromFunction(_kernels, conv=conv, norm=norm, lstm=lstm, linear=linear)
    return sacplan.profile(model, torch.rand(2, 4, 8, 8), device=device).program


@functools.cache
def kept_without_setting(device):
    """The outputs that a recording keeps under the settings that the process begins with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_ops, "_kept", {})
        recorded_kernels(device)
        return seen_ops._kept


@contextmanager
def changed(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


SETTINGS = {
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "default type": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "float32 products": lambda: changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "oneDNN deterministic": lambda: torch.backends.mkldnn.flags(enabled=True, deterministic=True),
    "cuDNN off": lambda: torch.backends.cudnn.flags(enabled=False),
    "cuDNN benchmark": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "NNPACK off": lambda: torch.backends.nnpack.flags(enabled=False),
    "attention by products": lambda: sdpa_kernel(SDPBackend.MATH),
    "fast path off": lambda: changed(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
@pytest.mark.parametrize(
    ("setting", "device"),
    slow_after(
        2,
        [
            ("deterministic", "cpu"),
            *((name, "h100") for name in ("cuDNN off", "attention by products")),
            *((name, "cpu") for name in SETTINGS if name != "deterministic"),
        ],
    ),
)
def test_outputs_that_are_kept_are_those_of_the_setting_of_the_process(setting, device, monkeypatch):
    """They are kept for the life of the process, so whatever a kernel of torch reads is in the key or its arguments."""
    before = {where: dict(outputs) for where, outputs in kept_without_setting(device).items()}
    monkeypatch.setattr(seen_ops, "_kept", before)
    with SETTINGS[setting]():
        kept = recorded_kernels(device)
        monkeypatch.setattr(seen_ops, "_kept", {})
        assert kept == recorded_kernels(device)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("threads", torch.get_num_threads),
        ("default type", torch.get_default_dtype),
        ("deterministic", torch.are_deterministic_algorithms_enabled),
        ("oneDNN off", lambda: torch.backends.mkldnn.enabled),
        ("cuDNN off", lambda: torch.backends.cudnn.enabled),
    ],
)
def test_a_kernel_that_reads_a_setting_is_asked_for_each_value(setting, read):
    asked = []

    def kernel(*args, **kwargs):
        asked.append(read())
        return NotImplemented

    def profile():
        model = Then(lambda x: x.logsumexp(-1))
        sacplan.profile(model, torch.rand(4, 8), lambda model, x: model(x).sum(), device="cpu")

    # An op of which no kernel of ours is asked first.
    with fake_kernels({torch.ops.aten.logsumexp.default: kernel}):
        profile()
        profile()
        assert len(asked) == 1
        with SETTINGS[setting]():
            profile()
    assert len(set(asked)) == 2


def test_a_mask_that_masks_nothing_is_left_out_as_in_a_real_step():
    pytest.importorskip("transformers")
    from benchmarks.models import hf_models

    model, batch, loss_fn = hf_models.build("bert", "small", "cpu")
    batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    fake, real = (sacplan.profile(model, batch, loss_fn, device="cpu", trace=t) for t in ("fake", "real"))
    assert [op.name for op in fake.program.ops] == [op.name for op in real.program.ops]


def _part(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the part computes, without a call of a module."""
    return F.gelu(x @ part[0].weight.T) @ part[2].weight.T


@pytest.mark.parametrize(("trace", "as_functions"), [("fake", False), ("fake", True), ("real", False)])
def test_a_step_in_several_threads_is_refused(trace: str, as_functions: bool) -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda part: _part(part, x) if as_functions else part(x), self.parts))

    parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    model, x = FromFunction(forward, parts=parts), torch.randn(24, 16)
    for _ in range(3):  # threads meet now and then
        with pytest.raises(sacplan.errors.TraceError, match="another thread") as refused:
            sacplan.profile(model, x, lambda m, b: m(b).pow(2).mean(), device="cpu", trace=trace)
        assert ("module 'parts." in str(refused.value)) is not as_functions
    model(x).sum().backward()  # nothing is left behind


# --- models that hold or call what is out of the ordinary ------------------------------------------------------------


class _Missing:
    """What stands for a package that is not installed: monai's ``optional_import`` makes such an object."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("No module named 'monai._C'")


_C = _Missing()  # beside the class of the model below


class _WithoutLength(tuple[int, ...]):
    """As ``e3nn.o3.Irrep``, which cannot be copied by its ``__new__`` either."""

    def __new__(cls, order: int, parity: int) -> _WithoutLength:
        return super().__new__(cls, (order, parity))

    def __len__(self) -> int:
        raise NotImplementedError


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.irrep = nn.Linear(8, 8), _WithoutLength(1, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.div(x.shape[0], 3, rounding_mode="trunc") - 1  # on numbers alone, as in Longformer
        return self.linear(x)[: int(tokens)]


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_objects_that_do_not_let_themselves_be_looked_at(trace: Any) -> None:
    model, batch = _Odd(), torch.randn(16, 8)
    profile = sacplan.profile(model, batch, device="cpu", trace=trace)
    assert profile.peak_bytes == real_step(model, batch).peak_bytes


def _jagged(self: FromFunction, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
    return self.second(F.gelu(self.first(rows))).values()


def test_jagged_tensors() -> None:
    """Their own classes hide the ops that they run from a mode that does not ask for them."""
    model = FromFunction(_jagged, first=nn.Linear(16, 64), second=nn.Linear(64, 16))
    batch = (torch.randn(30, 16), torch.randn(50, 16))
    plain = real_step(model, batch)
    profile = sacplan.profile(model, batch, device="cpu", trace="real")
    assert profile.peak_bytes == plain.peak_bytes
    plan = sacplan.plan(profile, "smallest")
    planned = real_step(model, batch, plan=plan)
    assert planned.peak_bytes == plan.peak_bytes
    assert planned.same_bits(plain)
    with pytest.raises(sacplan.errors.TraceError, match="nested"):
        sacplan.profile(model, batch, device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made_by", ["script", "trace"])
def test_scripted_modules(made_by: str) -> None:
    inner, batch = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh()), torch.randn(512, 8)
    scripted = torch.jit.script(inner) if made_by == "script" else torch.jit.trace(inner, (batch,))
    others = [m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(scripted, torch.nn.Sequential(*others))
    with pytest.raises(sacplan.errors.TraceError, match=r"module '0' was made by torch\.jit.*trace=\"real\""):
        sacplan.profile(model, batch, device="cpu")
    with pytest.warns(sacplan.SacplanWarning, match=r"module '0' was made by torch\.jit"):
        profile = sacplan.profile(model, batch, device="cpu", trace="real")
    for _ in range(3):  # what TorchScript makes of the code after that has other last bits
        plain = real_step(model, batch)
        assert profile.peak_bytes == plain.peak_bytes
    plan = sacplan.plan(profile, "smallest")
    assert set(plan.discarded) == {"1"}
    planned = real_step(model, batch, plan=plan)
    assert planned.peak_bytes == plan.peak_bytes < plain.peak_bytes
    assert planned.same_bits(plain)
    with pytest.raises(sacplan.errors.TraceError, match="the model was made by"):
        sacplan.profile(scripted, batch, device="cpu", trace="real")


def test_ops_that_refuse_the_zeros_of_a_fake_step() -> None:
    """PyTorch runs ops of some packages for real where they have no fake kernel, such as torchaudio's RNN-T loss."""
    library = torch.library.Library("torchaudio", "FRAGMENT")
    library.define("sum_of_rows_for_a_test(Tensor x, Tensor lengths) -> Tensor")

    def kernel(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not bool((lengths > 0).all()):
            raise RuntimeError("lengths must be positive")
        return x.sum(1)

    library.impl("sum_of_rows_for_a_test", kernel, "CPU")
    model, lengths = torch.nn.Linear(8, 8), torch.tensor([3, 4])

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y = model(batch)
        rows: torch.Tensor = torch.ops.torchaudio.sum_of_rows_for_a_test(y.detach(), lengths)
        return rows.sum() + y.sum()

    try:
        with pytest.raises(
            sacplan.errors.TraceError, match=r"sum_of_rows.* no kernel for fake.* positive.*\"real\""
        ):
            sacplan.profile(model, torch.randn(4, 8), loss_fn, device="cpu")
        assert sacplan.profile(model, torch.randn(4, 8), loss_fn, device="cpu", trace="real").peak_bytes
    finally:
        library._destroy()
