"""What a trace leaves behind: nothing. Fake steps leave no fake tensors, real ones put everything back."""

import collections
import copy
import functools
import math
import random
import threading
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from tests.support.processes import run_python
from tests.support.steps import assert_carried_out, mean_square
from tests.zoo.layers import FromFunction

CACHE = {"old": 1}
SEEN = []
_angles = None


@functools.lru_cache(None)
def positions(n):
    return torch.arange(float(n))


@dataclass
class Running:
    mean: torch.Tensor
    history: list = field(default_factory=list)


class Slotted:
    __slots__ = ("count", "mean")

    def __init__(self):
        self.mean = torch.zeros(4)


class Busy(nn.Module):
    """Changes everything that a forward may reach."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(5, 4, max_norm=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("resized", torch.zeros(1))
        self.memory = [torch.zeros(3, 4)]
        self.queue = collections.deque([torch.zeros(4)], maxlen=2)
        self.names = {"a"}
        self.nested = {"x": [{"y": torch.zeros(4)}]}
        self.space = types.SimpleNamespace(t=torch.ones(4), n=0)
        self.running = Running(torch.zeros(4))
        self.slotted = Slotted()
        self.array = np.zeros(3)
        self.ema = torch.zeros(4)
        self.swapped = torch.zeros(2)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.random = random.Random(1)
        self.numpy = np.random.default_rng(2)
        self.linear.weight.main_grad = torch.zeros(4, 4)
        self.linear.weight.tag = "column"
        self.lock, self.code = threading.Lock(), math
        self.fail = None
        self.freezes = True

    def forward(self, x):
        self.calls += 1
        x.detach().add_(1)
        assert self.linear.weight.tag == "column"
        with self.lock:
            y = self.linear(x) * self.space.t.clone() * self.code.pi
        y = self.norm(y + self.embedding.weight.sum() * 0)
        self.embedding(torch.tensor([0, 1, 2, 3, 4]))  # renormalizes its weights in place
        found = y.detach()
        self.replaced = self.replaced + found.mean(0)
        self.resized.resize_(6).fill_(2.0)
        self.memory[0] = found
        self.memory.append(found)
        self.queue.append(found)
        self.names.add("b")
        self.nested["x"][0]["y"].add_(1)
        self.nested["z"] = found
        self.space.n += 1
        self.space.t.mul_(2)
        self.running.history.append(1)
        self.running.mean = found
        self.slotted.mean = found
        self.slotted.count = 3
        self.array += self.numpy.random() + self.random.random() + np.random.rand() + random.random()
        self.ema.mul_(0.9).add_(found.mean(0))
        self.swapped.data = torch.ones(3)
        self.linear.weight.main_grad.add_(1)
        if self.freezes:
            self.linear.bias.requires_grad_(False)
        self.late = found
        if self.fail is not None and self.calls > 1:
            raise self.fail
        return y * torch.rand(y.shape, generator=self.generator) + torch.rand_like(y)


def picture(model, optimizer, batch):
    """All state as plain values, and the identities of tensors."""
    ids = [id(t) for t in (*model.parameters(), *model.buffers(), *model.memory, *model.queue)]
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.memory,
        *model.queue,
        model.nested["x"][0]["y"],
        model.space.t,
        model.running.mean,
        model.slotted.mean,
        model.ema,
        model.swapped,
        model.linear.weight.main_grad,
        model.generator.get_state(),
        torch.get_rng_state(),
        batch,
        *(t for state in optimizer.state.values() for t in state.values()),
    ]
    plain = (
        ids,
        model.calls,
        model.names,
        list(model.nested),
        model.space.n,
        model.running.history,
        hasattr(model.slotted, "count"),
        hasattr(model, "late"),
        model.array.tolist(),
        model.random.getstate(),
        model.numpy.bit_generator.state,
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [p.requires_grad for p in model.parameters()],
        [t.storage_offset() for t in tensors],
        [tuple(t.shape) for t in tensors],
        len(optimizer.state),
        [
            (m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for m in model.modules()
        ],
        [id(p.grad) for p in model.parameters()],
        [t._version for t in model.parameters()],
    )
    return copy.deepcopy(plain), [t.detach().clone() for t in tensors]


def assert_same(before, after):
    assert before[0] == after[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def busy(warm):
    torch.manual_seed(0)
    model, batch = Busy(), torch.randn(3, 4)
    model.embedding.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if warm:
        model.linear(batch).sum().backward()
        optimizer.step()
    return model, optimizer, batch


@pytest.mark.parametrize("trace", ["fake", "real"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_step_puts_everything_back(warm, trace):
    model, optimizer, batch = busy(warm)
    before = picture(model, optimizer, batch)
    sacplan.profile(model, batch, None, optimizer, device="cpu", trace=trace)
    assert_same(before, picture(model, optimizer, batch))
    calls = []
    with model.linear.register_forward_hook(lambda *_: calls.append(1)):
        sacplan.profile(model, batch, device="cpu", trace=trace)
    assert calls  # what a closure collects is the caller's
    assert_same(before, picture(model, optimizer, batch))


def test_a_measured_step_puts_everything_back():
    model, optimizer, batch = busy(True)
    model.freezes = False  # then the plan would not fit the second step
    profile = sacplan.profile(model, batch, device="cpu", trace="real")
    plan = sacplan.policy("full", profile=profile, layers="norm")
    before = picture(model, optimizer, batch)
    with pytest.warns(sacplan.SacplanWarning, match="optimizer: none in the plan"):
        sacplan.verify(model, batch, plan, None, optimizer, run="real")
    assert_same(before, picture(model, optimizer, batch))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_whatever_happens_in_a_real_step(error):
    model, optimizer, batch = busy(True)
    model.fail = error
    model.calls = 1
    before = picture(model, optimizer, batch)
    with pytest.raises(type(error)):
        sacplan.profile(model, batch, None, optimizer, device="cpu", trace="real")
    assert_same(before, picture(model, optimizer, batch))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:module '0' was made by torch.jit")
def test_buffers_of_a_scripted_module_are_put_back():
    model, batch = nn.Sequential(torch.jit.script(nn.BatchNorm1d(8)), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    sacplan.profile(model, batch, None, optimizer, device="cpu", trace="real")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_graph_from_before_is_still_valid():
    model, batch = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    loss = model(batch).sin().sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sacplan.profile(model, batch, None, optimizer, device="cpu", trace="real")
    loss.backward()
    expected = nn.functional.linear(batch, model.weight, model.bias).cos() @ model.weight
    torch.testing.assert_close(batch.grad, expected)


class Caching(nn.Module):
    shared: dict = {}  # noqa: RUF012
    filled = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        global _angles
        if _angles is None:
            _angles = torch.arange(4.0).cos()
        if Caching.filled is None:
            Caching.filled = torch.ones(4)
        if 4 not in CACHE:
            CACHE[4] = (torch.arange(4.0).sin(), torch.ones(4))
        self.shared.setdefault("key", []).append(x)
        SEEN.append(x)
        return self.linear(x) * CACHE[4][0] * _angles * Caching.filled * positions(4)


def clear_caches():
    global _angles
    _angles = Caching.filled = None
    Caching.shared.clear()
    CACHE.pop(4, None)
    SEEN.clear()


def test_no_fake_tensor_stays_in_the_models_code():
    clear_caches()
    model, batch = Caching(), torch.randn(2, 4)
    sacplan.profile(model, batch, device="cpu")
    assert CACHE == {"old": 1}
    assert SEEN == []
    assert _angles is None
    assert Caching.filled is None
    assert Caching.shared == {}
    expected = model(batch)
    sacplan.profile(model, batch, device="cpu")  # now the caches hold real tensors
    assert torch.equal(model(batch), expected)
    assert type(CACHE[4][0]) is torch.Tensor
    clear_caches()


def test_no_fake_tensor_stays_after_an_error():
    clear_caches()

    def loss_fn(model, batch):
        model(batch)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        sacplan.profile(Caching(), torch.randn(2, 4), loss_fn, device="cpu")
    assert CACHE == {"old": 1}
    assert _angles is None
    clear_caches()


def test_a_warning_says_where_fake_tensors_stay():
    """What the loss function holds itself gets its entries of before; what that holds in turn is left alone."""

    class Registry:
        def __init__(self):
            self.kept = []

    registry, outer = types.SimpleNamespace(inner=Registry()), Registry()

    def loss_fn(model, batch):
        outer.last = model(batch)
        registry.inner.kept.append((outer.last,))
        outer.kept.append(outer.last)
        return outer.last.sum()

    with pytest.warns(sacplan.SacplanWarning, match="fake tensors outside of the model, in a .*Registry"):
        sacplan.profile(nn.Linear(4, 4), torch.randn(2, 4), loss_fn, device="cpu")
    assert vars(outer) == {"kept": []}


class Rebuilt(torch.autograd.Function):
    """Runs a module again in the backward pass, as reversible nets do with what they rebuild."""

    @staticmethod
    def forward(ctx, x, module, *parameters):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            made = ctx.module(x)
        found = torch.autograd.grad(made, [x, *ctx.module.parameters()], grad)
        return found[0], None, *found[1:]


def test_a_reversible_net_is_no_checkpointing():
    def forward(self, x):
        x = Rebuilt.apply(self.into(x).sin().exp(), self.inner, *self.inner.parameters())
        return self.out(x.tanh().sigmoid())

    parts = ({name: nn.Linear(8, 8) for name in ("into", "inner", "out")} for _ in range(3))
    model, batch = nn.Sequential(*(FromFunction(forward, **own) for own in parts)), torch.randn(300, 8)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < 0.6 * profile.peak_bytes
    assert_carried_out(model, batch, plan)


_SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch, sacplan
from torch import nn
ops = dict(sgn=torch.sgn, sign=torch.sign, round=torch.round, floor=torch.floor, ceil=torch.ceil, trunc=torch.trunc,
    fix=torch.fix, frac=torch.frac, heaviside=lambda y: torch.heaviside(y.detach(), y.detach()) * y,
    complex_sgn=lambda y: torch.sgn(torch.complex(y, y)).real, angle=lambda y: torch.angle(torch.complex(y, y)),
    conj=lambda y: torch.complex(y, y).conj().imag, neg=lambda y: torch.complex(y, y).conj().imag.neg(),
    made=lambda y: torch._efficientzerotensor((1, 2)) * y + y,
    floordiv=lambda y: torch.div(y, 3, rounding_mode="floor"))
class Net(nn.Module):
    def __init__(self, op, both):
        super().__init__()
        self.linear, self.op, self.both = nn.Linear(2, 2), op, both
    def forward(self, x):
        y = self.linear(x)
        z = self.op(y * 2) / self.linear.weight[0].sgn()
        return z.sum() + y.sum() if self.both else self.op(y).sum()
for i, (name, op) in enumerate(ops.items()):
    assert sacplan.profile(Net(op, i % 3), torch.ones(1, 2), device="cpu").peak_bytes > 0, name
for trace in ("fake", "real"):
    assert sacplan.profile(Net(torch.sgn, True), torch.ones(1, 2), device="cpu", trace=trace).peak_bytes > 0
print("alive")
"""


@pytest.mark.slow
def test_gradients_without_memory_end_no_interpreter():
    done = run_python("-c", _SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "alive"


def test_an_optimizer_that_lays_parameters_out_anew():
    """The classes of bitsandbytes do in their first step, so a convolution that was channels last is so no more."""

    class Plain(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data, p.grad = p.data.contiguous(), p.grad.contiguous()
            return super().step(closure)

    def make(params):
        return Plain(params, lr=0.1, momentum=0.9)

    batch = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    peaks = set()
    for memory_format in (torch.channels_last, torch.contiguous_format):
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()).to(memory_format=memory_format)
        peaks.add(sacplan.profile(model, batch, mean_square, make, device="cpu").peak_bytes)
    assert len(peaks) == 1
