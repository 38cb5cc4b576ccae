"""A plan changes when tensors are computed, never a bit of what a step gives; or the step is refused."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sacplan
from sacplan._executor.tensors import checksum, digest
from sacplan._plan.make import unit_plans
from sacplan._plan.plan import Plan
from sacplan._plan.provenance import Provenance
from sacplan._profile.profile import trace_step
from sacplan._program.decisions import as_decisions
from sacplan._program.places import ops_of
from sacplan._program.program import CallSite, Phase
from sacplan._recompute.in_place_groups import without_missing_versions
from sacplan._recompute.rewrite import recomputed
from tests.support.plans import Sites, times_of

BATCH, LENGTH, DIM = 2, 3, 4


# --- random models --------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """Saves its input, its output, and a tensor outside of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        ctx.scale = x.detach().cos()
        return y + ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return grad * (2 * x - ctx.scale.sin() + 0 * y)


class InPlace(torch.autograd.Function):
    """Writes into its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def _attention(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.lin3(x).chunk(3, dim=-1)
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
    p = 0.3 if m.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)


def _mha(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out, weights = F.multi_head_attention_forward(
        x, x, x, DIM, 2, m.lin3.weight, m.lin3.bias, None, None, False, 0.2, m.lin.weight, m.lin.bias,
        training=m.training,
    )  # fmt: skip
    return out * weights.mean()


def _write_into_view(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x)
    z = y.sin() * y
    z[:, 0].mul_(2)
    z[..., 1:].add_(y[..., :-1])
    return z * z


def _index_put(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x).tanh()
    z = y.clone()
    z[:, torch.tensor([0, 2])] = y[:, torch.tensor([1, 1])].exp()
    return z.masked_fill_(z > 1, 0.5).clamp_(-1, 1) + y


def _data_write(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.sigmoid()
    y.data.add_(1)
    return (y * z).exp() * z


def _no_grad(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().mean().exp()
        m.ema.mul_(0.9).add_(scale)
    return (x / scale).tanh() + m.ema


def _inference(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        a = x.abs().exp()
        a.add_(1)
        n = float(a.sum())
    return (x.sin() * n).cos()


def _batch_norm(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    before = x.transpose(1, 2).sub(m.bn.running_mean[:, None]).tanh()
    y = m.bn(x.transpose(1, 2))
    return (y * before + m.bn.running_var[:, None]).transpose(1, 2).sigmoid()


def _complex(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = torch.fft.fft(x.sin(), dim=-1)
    z = z * z.conj()
    parts = torch.view_as_real(torch.complex(x.cos(), x.sin()).exp() * z)
    return parts.select(-1, 0) * parts[..., 1] + z.abs()


def _generator(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=g)
    x = x + torch.poisson(x.detach().sin().abs().nan_to_num(), generator=g) * x
    return x * torch.randn(x.shape, generator=g) * torch.rand_like(x)


def _odd_sizes(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    none = F.dropout(x[:, :0].exp(), 0.5, training=True).sin()
    point = x.mean().sin() * x.sum().tanh()
    return torch.cat([none, x * point], dim=1) * point.exp()


def _sorting(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, order = x.sin().sort(dim=-1)
    top = y.exp().topk(2, dim=-1)
    y = y.scatter(-1, top.indices, top.values.cos()).gather(-1, order)
    return torch.where(y > 0, y.cumsum(1), y * y) + y.cummax(1).values


def _views(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, b = m.lin(x).tanh().split([1, DIM - 1], dim=-1)
    c = a.expand(-1, -1, DIM).mul(torch.einsum("bti,btj->bij", b, b).sum((1, 2))[:, None, None])
    d = c.transpose(0, 1).contiguous()
    return d.as_strided((BATCH, LENGTH, DIM), (DIM, BATCH * DIM, 1)).exp() * x[:1].sin()


def _embedding(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = (x.detach().abs() * 10).long().clamp(max=9)[..., 0]
    return m.emb(tokens).relu() * F.linear(x, m.emb.weight[:DIM]).sigmoid()


def _autocast(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.lin(F.gelu(m.lin(x)))
        return (F.softmax(y @ y.transpose(1, 2), dim=-1) @ x).float()


def _force(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    energy = m.lin(x).tanh().pow(3).sum()
    (force,) = torch.autograd.grad(energy, m.lin.weight, create_graph=True)
    return x.sigmoid() * F.linear(x.exp().reciprocal(), force).sin()


def _rows(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = [row.exp() for row in torch.unbind(m.lin(x).sin(), dim=1)]
    return torch.stack([a * b for a, b in zip(rows, rows[1:] + rows[:1], strict=True)], dim=1)


def _in_place_chain(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x) + x
    early = y.sigmoid()  # reads what is overwritten next
    y.add_(early, alpha=0.5).mul_(0.9).relu_()
    return F.silu(y.mul(2), inplace=True).mul_(early.detach()).masked_fill_(x.detach() > 1, 0.5)


def _conv_block(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(m.bn(m.conv(x.transpose(1, 2))), inplace=True)
    y = m.bn(m.conv(y))
    y += x.transpose(1, 2)
    return y.relu_().transpose(1, 2)


STEPS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, x: m.lin(x),
    "gelu": lambda m, x: F.gelu(m.lin(x)) * x,
    "relu_": lambda m, x: F.relu(m.lin(x), inplace=True),
    "norm": lambda m, x: m.norm(m.norm(x) + x),
    "softmax": lambda m, x: m.lin(x).softmax(-1) * x,
    "dropout": lambda m, x: F.dropout(x, 0.5, m.training) * F.dropout(x.exp(), 0.1, m.training),
    "dropout_": lambda m, x: (
        F.dropout(x.sin(), 0.5, m.training, inplace=True) + F.dropout(x, 1.0, m.training)
    ),
    "conv": lambda m, x: m.conv(F.silu(m.conv(x.transpose(1, 2)))).transpose(1, 2),
    "lstm": lambda m, x: m.lstm(x)[0],
    "gru": lambda m, x: m.gru(x)[0] * x,
    "identity": lambda m, x: x,
    "detach": lambda m, x: x.sin() * x.exp().detach() + x.detach().exp().requires_grad_(),
    "rrelu": lambda m, x: (
        F.rrelu(x, training=m.training) + torch.nn.functional.alpha_dropout(x, 0.2, m.training)
    ),
    "function": lambda m, x: Square.apply(Square.apply(x.sin())),
    "inplace_function": lambda m, x: InPlace.apply(x.sin().mul(2)).exp() * x,
    "foreach": lambda m, x: sum(torch._foreach_exp([x.sin(), x.cos()])) * x,
    "attention": _attention,
    "mha": _mha,
    "write_into_view": _write_into_view,
    "index_put": _index_put,
    "data_write": _data_write,
    "no_grad": _no_grad,
    "inference": _inference,
    "batch_norm": _batch_norm,
    "in_place_chain": _in_place_chain,
    "conv_block": _conv_block,
    "complex": _complex,
    "generator": _generator,
    "odd_sizes": _odd_sizes,
    "sorting": _sorting,
    "views": _views,
    "embedding": _embedding,
    "autocast": _autocast,
    "force": _force,
    "rows": _rows,
}
NOT_FAKE = {"inference", "force", "lstm"}

PARTS: dict[str, Callable[[], nn.Module]] = {
    "lin": lambda: nn.Linear(DIM, DIM),
    "lin3": lambda: nn.Linear(DIM, 3 * DIM),
    "norm": lambda: nn.LayerNorm(DIM),
    "bn": lambda: nn.BatchNorm1d(DIM),
    "conv": lambda: nn.Conv1d(DIM, DIM, 3, padding=1),
    "lstm": lambda: nn.LSTM(DIM, DIM, 2, dropout=0.2, batch_first=True),
    "gru": lambda: nn.GRU(DIM, DIM, batch_first=True),
    "emb": lambda: nn.Embedding(10, DIM),
}
NEEDS = {
    "linear": "lin", "gelu": "lin", "relu_": "lin", "softmax": "lin", "norm": "norm", "conv": "conv", "lstm": "lstm",
    "gru": "gru", "attention": "lin3", "mha": "lin lin3", "write_into_view": "lin", "index_put": "lin",
    "batch_norm": "bn", "in_place_chain": "lin", "conv_block": "conv bn", "views": "lin", "embedding": "emb",
    "autocast": "lin", "force": "lin", "rows": "lin",
}  # fmt: skip


class Step(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for part in NEEDS.get(kind, "").split():
            setattr(self, part, PARTS[part]())
        self.register_buffer("ema", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return STEPS[self.kind](self, x)


class Group(nn.Module):
    """A few steps; ``form`` says how they are called and what comes out."""

    def __init__(self, steps: list[nn.Module], form: str) -> None:
        super().__init__()
        self.steps, self.form = nn.ModuleList(steps), form

    def forward(self, x: torch.Tensor) -> Any:
        for step in self.steps:
            x = (x + step(x)).tanh()
        if self.form == "twice":
            for step in self.steps:
                x = step(x).sin()
        if self.form == "inplace_residual":
            for step in self.steps:
                total = x * 2
                total += step(x)
                x = total
        return {"dict": {"out": x, "again": x}, "tuple": (x, x.exp())}.get(self.form, x)


class Net(nn.Module):
    def __init__(self, groups: list[tuple[list[str], str]], share: bool, tie: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.groups = nn.ModuleList(Group([Step(k) for k in kinds], form) for kinds, form in groups)
        if share:
            self.groups.append(self.groups[0])
        self.head = nn.Linear(DIM, DIM)
        if tie:
            self.head.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for group in self.groups:
            out = group(x)
            if isinstance(out, dict):
                out = out["out"] * out["again"]
            x = out[0] + out[1].cos() if isinstance(out, tuple) else out
        return self.head(x).pow(2).mean()


FORMS = ["plain", "twice", "dict", "tuple", "inplace_residual"]


def nets(kinds: list[str]) -> st.SearchStrategy[Net]:
    groups = st.lists(
        st.tuples(st.lists(st.sampled_from(kinds), min_size=1, max_size=3), st.sampled_from(FORMS)),
        min_size=1,
        max_size=2,
    )

    def make(groups: list[tuple[list[str], str]], share: bool, tie: bool) -> Net:
        torch.manual_seed(0)
        return Net(groups, share, tie)

    return st.builds(make, groups, st.booleans(), st.booleans())


# --- random plans ---------------------------------------------------------------------------------


def plan_of(profile: sacplan.Profile, sites: Mapping[str, Sites]) -> Plan:
    discarded = {fqn: times_of(found, profile.program, fqn) for fqn, found in sites.items()}
    found = recomputed(profile.program, discarded).footprint
    units, sequences = unit_plans(profile.program, discarded, discarded)
    return Plan(
        decisions=as_decisions(discarded),
        units=units, sequences=sequences,
        peak_bytes=found.peak_bytes, baseline_peak_bytes=profile.peak_bytes, budget_bytes=None, recompute_ms=0.0,
        recompute_flops=0, lower_bound_ms=0.0, step_ms=0.0, step_flops=0, status="feasible", gap=None,
        provenance=Provenance.now(profile, "none"), device="cpu", fingerprint=profile.fingerprint,
    )  # fmt: skip


def fitting_sites(profile: sacplan.Profile, fqn: str) -> set[CallSite]:
    """Call sites of a unit that the recording says can run again, in all its calls."""
    r = profile.program
    good: set[CallSite] = set()
    bad: set[CallSite] = set()
    for scope in r.calls[fqn]:
        for i, site in r.sites(scope).items():
            (good if r.ops[i].recomputable and r.ops[i].phase == Phase.FORWARD else bad).add(site)
    return good - bad


def all_sites(profile: sacplan.Profile, fqn: str) -> set[CallSite]:
    """Call sites that a plan may name, whether the recording says that they can run again or not."""
    r = profile.program
    return {site for scope in r.calls[fqn] for _, _, site in ops_of(r.sequence(scope))}


def random_plan(profile: sacplan.Profile, seed: int, *, fitting: bool) -> Plan:
    """Random units that do not nest, and a random share of their call sites."""
    rng = random.Random(seed)
    units: dict[str, list[CallSite]] = {}
    fqns = list(profile.program.calls)
    for fqn in rng.sample(fqns, len(fqns)):
        nested = any(f.startswith(fqn + ".") or fqn.startswith(f + ".") or not f for f in units)
        if nested or (not fqn and rng.random() < 0.7) or (not fqn and units) or len(units) == 4:
            continue
        sites = sorted(fitting_sites(profile, fqn) if fitting else all_sites(profile, fqn))
        share = rng.choice([0.2, 0.5, 0.9, 1.0])
        units[fqn] = [s for s in sites if rng.random() < share]
        if fqn == "":
            break
    if fitting:
        units = {f: list(s) for f, s in without_missing_versions(profile.program, units).items()}
    return plan_of(
        profile, {f: {site: rng.choice([1, 1, 1, 2, 3]) for site in s} for f, s in units.items() if s}
    )


# --- what a step gives ----------------------------------------------------------------------------


def step(model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Loss, gradients, buffers and the generator's state."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    return state(model, loss)


def state(model: nn.Module, *more: torch.Tensor) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*more, *grads, *model.buffers(), torch.get_rng_state())]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)) for x, y in pairs)


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, DIM)


def fuzz(examples: int) -> settings:
    """Every run draws the same examples; they are small, and not worth the minutes to shrink them."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, phases=[Stage.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("form", ["twice", "inplace_residual"])
def test_everything_discarded(kind: str, form: str) -> None:
    torch.manual_seed(0)
    model = Net([([kind, "linear"], form)], share=True, tie=True)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"": sorted(fitting_sites(profile, ""))}))
    for seed in (1, 2):
        assert same_bits(step(model, batch(), seed), step(planned, batch(), seed))


@fuzz(20)
@given(nets(list(STEPS)), st.integers(0, 10**6))
def test_a_plan_that_fits_is_never_refused_and_changes_no_bit(model: Net, seed: int) -> None:
    x = batch()
    profile = sacplan.profile(model, x, device="cpu", trace="real")
    plan = random_plan(profile, seed, fitting=True)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    for seed in (1, 2):
        assert same_bits(step(model, x, seed), step(planned, x, seed))


@fuzz(30)
@given(nets(list(STEPS)), st.integers(0, 10**6))
def test_any_plan_is_refused_or_changes_no_bit(model: Net, seed: int) -> None:
    x = batch()
    plan = random_plan(sacplan.profile(model, x, device="cpu", trace="real"), seed, fitting=False)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan, check=False)
    for seed in (1, 2):
        expected = step(model, x, seed)
        try:
            found = step(planned, x, seed)
        except sacplan.SacplanError:
            return
        assert same_bits(expected, found)


@fuzz(15)
@given(nets([k for k in STEPS if k not in NOT_FAKE]), st.integers(0, 10**6))
def test_the_replayed_peak_is_that_of_the_step(model: Net, seed: int) -> None:
    x = batch()
    assert_peak_is_replayed(model, random_plan(sacplan.profile(model, x, device="cpu"), seed, fitting=True))


def assert_peak_is_replayed(model: nn.Module, plan: Plan) -> None:
    seen = trace_step(
        model, batch(), None, None, "cpu", "cost-model", "fake",
        prepare=lambda fake: sacplan.apply(fake, plan), saved="observe",
    )  # fmt: skip
    assert seen.program.footprint.peak_bytes == plan.peak_bytes


# --- one thing at a time --------------------------------------------------------------------------


class Unit(nn.Module):
    """Linear, dropout and what the test hands in."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.first(x)), 0.3, self.training)
        return self.second(self.middle(x).exp())


class Outer(nn.Module):
    def __init__(self, *units: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x).tanh()
        return x.pow(2).mean()


def outer(*middles: Callable[[torch.Tensor], torch.Tensor]) -> Outer:
    torch.manual_seed(0)
    return Outer(*(Unit(m) for m in middles or (torch.sin, torch.cos)))


def discard_all(
    model: nn.Module, fqns: list[str] | None = None, **kwargs: Any
) -> tuple[nn.Module, sacplan.Handle]:
    """A copy of the model with everything that may be discarded discarded."""
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    fqns = [f for f in profile.program.calls if f.count(".") == 1] if fqns is None else fqns
    planned = copy.deepcopy(model)
    plan = plan_of(profile, {f: sorted(fitting_sites(profile, f)) for f in fqns})
    return planned, sacplan.apply(planned, plan, **kwargs)


def count_ops(f: Callable[[], Any]) -> int:
    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += str(func) in ("aten.addmm.default", "aten.exp.default", "aten.mul.Tensor")
            return func(*args, **(kwargs or {}))

    with Count() as count:
        f()
    return count.ops


def test_the_plans_of_these_tests_do_recompute() -> None:
    model = outer()
    planned, handle = discard_all(model)
    plain = count_ops(lambda: step(model, batch()))
    assert count_ops(lambda: step(planned, batch())) > plain
    handle.remove()
    assert count_ops(lambda: step(planned, batch())) == plain


def accumulated(model: nn.Module, *, together: bool) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    a, b = model(batch()), model(batch() * 2)
    if together:
        (a + b).backward()
    else:
        b.backward()
        a.backward()
    return state(model, a, b)


def retained(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch())
    loss.backward(retain_graph=True)
    loss.backward()
    return state(model, loss)


def double(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch())
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.pow(2).sum() for g in grads)).backward()
    return state(model, loss, *grads)


def partial(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = batch().requires_grad_()
    return [*torch.autograd.grad(model(x), [x, next(model.parameters())]), torch.get_rng_state()]


def evaluated_between(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(batch())
    model.eval()
    with torch.no_grad():
        between = model(batch())
    evaluated = model(batch())
    model.train()
    (loss + evaluated).backward()
    return state(model, loss, between, evaluated)


def under_autocast(model: nn.Module, backward: bool) -> list[torch.Tensor]:
    """Either pass under autocast, the other one without."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not backward):
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(batch())
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        loss.backward()
    return state(model, loss)


def inside_checkpoint(model: nn.Module, reentrant: bool) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant)
    loss.backward()
    return state(model, loss)


def with_hooks_around(model: nn.Module) -> list[torch.Tensor]:
    """Hooks that scale and unscale see what is kept."""
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        loss = model(batch())
    loss.backward()
    return state(model, loss)


OTHER_OPS = pytest.mark.filterwarnings("ignore:the step is not the one")


@pytest.mark.parametrize(
    "run",
    [
        lambda m: accumulated(m, together=True),
        lambda m: accumulated(m, together=False),
        retained,
        double,
        partial,
        evaluated_between,
        pytest.param(lambda m: under_autocast(m, False), marks=OTHER_OPS),
        lambda m: under_autocast(m, True),
        lambda m: inside_checkpoint(m, False),
        pytest.param(lambda m: inside_checkpoint(m, True), marks=OTHER_OPS),
        with_hooks_around,
    ],
)
def test_ways_to_run_a_step(run: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    model = outer(torch.sin, lambda x: F.layer_norm(x, (DIM,)) * x.softmax(-1))
    for fqns in (None, [""]):
        planned, _ = discard_all(model, fqns)
        for _ in range(2):
            assert same_bits(run(model), run(planned))


def test_kept_tensors_go_through_the_hooks_around_the_model() -> None:
    model = outer()
    planned, _ = discard_all(model, ["units.0"])
    packed: list[torch.Size] = []
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        planned(batch())
    everything, packed = packed, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        model(batch())
    assert 0 < len(everything) < len(packed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_of_a_unit(reentrant: bool) -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: F.dropout(t.sin(), 0.5).exp(), x, use_reentrant=reentrant)

    model, plain = outer(middle), outer(torch.sin)
    profile = sacplan.profile(plain, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"units.0": sorted(all_sites(profile, "units.0"))}))
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_hooks_on_a_unit_run_once_and_may_change_its_output() -> None:
    calls = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        return output.sin()

    model = outer()
    planned, _ = discard_all(model)
    for m in (model, planned):
        m.units[0].register_forward_hook(hook)
        m.units[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2 if gi[0] is not None else None,))
    assert same_bits(step(model, batch()), step(planned, batch()))
    assert len(calls) == 2


def test_a_module_that_calls_itself() -> None:
    class Recursive(Unit):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = super().forward(x)
            return self(y.tanh(), depth - 1) + y if depth else y

    torch.manual_seed(0)
    model = Outer(Recursive())
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_units_that_share_a_module_do_not_nest_at_run_time() -> None:
    model = outer()
    model.units[1].first = model.units[0].first
    planned, _ = discard_all(model, ["units.0.first", "units.1"])
    assert same_bits(step(model, batch()), step(planned, batch()))
    profile = sacplan.profile(model, batch(), device="cpu")
    fqns = ["units.0.first", "units.1"]
    assert_peak_is_replayed(model, plan_of(profile, {f: sorted(fitting_sites(profile, f)) for f in fqns}))


def test_occurrences_are_counted_in_each_call_anew() -> None:
    model = outer(torch.sin, torch.sin)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    plan = plan_of(profile, {"units.0": [("aten.exp.default", 0)]})
    counts = []
    for _ in range(2):
        planned = copy.deepcopy(model)
        sacplan.apply(planned, plan)
        counts += [count_ops(lambda m=planned: step(m, batch())) for _ in range(2)]
    assert counts == [count_ops(lambda: step(model, batch())) + 1] * 4


def test_dropouts_are_recomputed_one_by_one() -> None:
    """Keeping one random op and recomputing a later one does not shift the generator."""
    model = Outer(nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(3))))
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    for kept in range(3):
        sites = [s for s in fitting_sites(profile, "units.0") if s[1] != kept]
        planned = copy.deepcopy(model)
        sacplan.apply(planned, plan_of(profile, {"units.0": sites}))
        assert same_bits(step(model, batch()), step(planned, batch()))


def test_threads_run_the_same_model() -> None:
    model = outer().eval()
    planned, _ = discard_all(model)
    expected = partial(model)[:2]
    found: list[list[torch.Tensor]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(5):
            x = batch_of_thread.clone().requires_grad_()
            found.append(list(torch.autograd.grad(planned(x), [x, next(planned.parameters())])))

    batch_of_thread = batch()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 20
    assert all(same_bits(expected, f) for f in found)


def test_a_long_chain() -> None:
    model = outer(lambda x: [x := x.sin() for _ in range(3000)][-1])
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_a_backward_pass_inside_of_the_forward_does_not_shift_call_sites() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return slope * x.cos()

    model = outer(middle, middle)
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_vmap_inside_of_a_unit() -> None:
    model = outer(torch.vmap(lambda row: row.sin() * row.sum().exp()))
    planned, _ = discard_all(model)
    assert same_bits(step(model, batch()), step(planned, batch()))


# --- refused --------------------------------------------------------------------------------------


def test_a_weight_that_changed_before_the_backward_pass() -> None:
    planned, _ = discard_all(outer())
    loss = planned(batch())
    with torch.no_grad():
        planned.units[0].first.weight.mul_(2)
    with pytest.raises(sacplan.RecipeError, match="written in place"):
        loss.backward()


def test_an_input_that_changed_before_the_backward_pass() -> None:
    planned, _ = discard_all(outer())
    x = batch()
    loss = planned(x)
    x.add_(1)
    with pytest.raises(sacplan.RecipeError, match="written in place"):
        loss.backward()


@pytest.mark.parametrize("discarded", ["aten.mul.Tensor", "aten.exp.default"])
def test_an_activation_that_changed_before_the_backward_pass(discarded: str) -> None:
    """Whether it is discarded or kept."""
    held: list[torch.Tensor] = []
    model = outer(lambda x: held.append(x) or x.sin())
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    held.clear()
    sacplan.apply(model, plan_of(profile, {"units.0": [(discarded, 0)]}))
    loss = model(batch())
    held[0].detach().mul_(2)
    with pytest.raises(sacplan.RecipeError, match="written in place"):
        loss.backward()


def write_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.sin()
    y.data.add_(1)
    return z.exp() * z


@pytest.mark.parametrize("discarded", [[("aten.mul.Tensor", 1)], [("aten.sin.default", 0)]])
def test_a_write_through_data_in_the_forward(discarded: list[tuple[str, int]]) -> None:
    """It counts no version. What was saved of it and is discarded is refused, and so is what would be made of it."""
    model = outer(write_data)
    plan = plan_of(sacplan.profile(model, batch(), device="cpu", trace="real"), {"units.0": discarded})
    sacplan.apply(model, plan, check=False)
    with pytest.raises(sacplan.RecipeError, match="written in place"):
        step(model, batch())


class NumpyInPlace(torch.autograd.Function):
    """Writes where no mode sees it, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] = 0.5
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0


def test_a_version_that_only_autograd_counted() -> None:
    model = outer(lambda x: NumpyInPlace.apply(x * 2).sin() * x)
    planned, _ = discard_all(model, check=False)
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_a_buffer_that_the_next_forward_writes() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x.sin())
            return (x - self.norm.num_batches_tracked).sin().exp()

    model = Outer(Shifted())
    planned, _ = discard_all(model)
    first = planned(batch())
    planned(batch())
    with pytest.raises(sacplan.RecipeError, match="written in place"):
        first.backward()


def test_transforms_that_forbid_hooks() -> None:
    planned, _ = discard_all(outer())
    with pytest.raises(sacplan.RecipeError, match="hooks"):
        torch.func.grad(lambda x: planned(x))(batch())
    assert len(_get_current_dispatch_mode_stack()) == 0


# --- what no dispatch mode sees -------------------------------------------------------------------


def fill_empty(x: torch.Tensor) -> torch.Tensor:
    """A kernel that fills a buffer through its pointer."""
    y = torch.empty_like(x)
    y.numpy()[:] = x.detach().numpy() * 2
    return y.cos() * x


def overwrite_output(x: torch.Tensor) -> torch.Tensor:
    """A kernel that writes into what an op made."""
    y = x * 2
    y.detach().numpy()[:] = 1.5
    return y * x


def overwrite_argument(x: torch.Tensor) -> torch.Tensor:
    """A kernel that writes into what a recipe needs."""
    y = torch.empty_like(x).copy_(x)
    z = y.sin()
    y.detach().numpy()[:] = 0
    return z * z


def test_a_buffer_that_is_filled_unseen_is_kept() -> None:
    model = outer(fill_empty)
    planned, _ = discard_all(model, check=False)
    assert same_bits(step(model, batch()), step(planned, batch()))


@pytest.mark.parametrize(
    ("middle", "message"), [(overwrite_output, "other bits"), (overwrite_argument, "holds other values")]
)
def test_the_first_step_finds_what_was_written_unseen(
    middle: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    model = outer(middle)
    planned, _ = discard_all(model)
    with pytest.raises(sacplan.RecipeError, match=message):
        step(planned, batch())
    unchecked, _ = discard_all(model, check=False)  # or the test above would prove nothing
    assert not same_bits(step(model, batch()), step(unchecked, batch()))


class Scaled(nn.Module):
    """Its product is recomputed from its input and its weight."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(*shape) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin().exp()


def scaled(*shape: int) -> tuple[nn.Module, torch.Tensor]:
    """A model with that unit, and a batch, after its first step: from then on there are no checksums."""
    torch.manual_seed(0)
    model, x = Outer(Scaled(*shape)), torch.randn(*shape)
    profile = sacplan.profile(model, x, device="cpu")
    sacplan.apply(model, plan_of(profile, {"units.0": sorted(fitting_sites(profile, "units.0"))}))
    model(x).backward()
    return model, x


def swap_rows(t: torch.Tensor) -> None:
    t.data[[0, 1]] = t.data[[1, 0]]


UNSEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "one element, numpy": lambda t: t.detach().numpy().__setitem__((3, 5), 9.0),
    "one element, .data": lambda t: t.data.__setitem__((-1, -1), 9.0),
    "one row, DLPack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach()))[2].fill_(9.0),
    "64 bytes, a pointer": lambda t: ctypes.memset(t.data_ptr() + t.nbytes // 3 // 4 * 4, 1, 64),
    "two rows that change places": swap_rows,
}


@pytest.mark.parametrize("write", UNSEEN)
@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("shape", [(24, 16), (1500, 16)])  # hashed, and added up in blocks
def test_every_step_finds_what_autograd_cannot_see(write: str, what: str, shape: tuple[int, ...]) -> None:
    model, x = scaled(*shape)
    loss = model(x)
    UNSEEN[write](x if what == "input" else next(model.parameters()))
    with pytest.raises(sacplan.RecipeError, match=rf"{shape[0]}, {shape[1]}\) holds other values"):
        loss.backward()
    model(x).backward()  # what is written before the forward pass is no concern


@given(st.data())
@fuzz(100)
def test_any_write_changes_the_digest(data: st.DataObject) -> None:
    n_bytes = data.draw(st.integers(1, 2**14) | st.integers(2**14 + 1, 2**16))
    t = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes))
    before = digest(t)
    assert digest(t.clone()) == before
    at = data.draw(st.integers(0, n_bytes - 1))
    t[at] += data.draw(st.integers(1, 255))
    assert digest(t) != before


def test_what_leaves_no_digest() -> None:
    """Tensors with gaps, in which others may write. Those whose dimensions lie in another order are looked at."""
    t = torch.rand(64, 64)
    assert digest(t[:, ::2]) is None
    assert digest(t[:, :32]) is None
    assert digest(torch.rand(1).expand(8)) is None
    assert digest(t.t()) is not None
    assert digest(t.reshape(4, 4, 16, 16).permute(0, 2, 3, 1)) is not None


def test_words_that_keep_all_sums_are_not_noticed() -> None:
    """The limit that the documentation names: +1 and -1 at the corners of a rectangle of places and blocks."""
    t = torch.zeros(8, 512, dtype=torch.int64)
    before = digest(t)
    t[0, 0] += 1
    t[0, 1] -= 1
    assert digest(t) != before  # the places tell
    t[1, 0] -= 1
    t[1, 1] += 1
    assert digest(t) == before


@pytest.mark.parametrize("look", [digest, checksum])
@pytest.mark.parametrize("n", [2**10, 2**16])
def test_digests_and_checksums_allocate_nothing_of_pytorchs(n: int, look: Callable[..., Any]) -> None:
    t = torch.rand(n)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(8)
        look(t)
    seen = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(n_bytes > 0 for n_bytes in seen) == 1  # the profiler sees allocations, and this is not one


def test_only_the_first_step_leaves_checksums() -> None:
    planned, _ = discard_all(outer())

    class Hashes(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += "hash_tensor" in str(func)
            return func(*args, **(kwargs or {}))

    counts = []
    for _ in range(2):
        with Hashes() as mode:
            step(planned, batch())
        counts.append(mode.seen)
    assert counts[0] > 0
    assert counts[1] == 0


# --- nothing is left behind -----------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Weak references to every storage that an op makes; those of the model's own tensors do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.refs: list[weakref.ref[Any]] = []
        own = [
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
        self.own = {t.untyped_storage()._cdata for t in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.refs.append(weakref.ref(t.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        return len({s._cdata for r in self.refs if (s := r()) is not None} - self.own)


@contextlib.contextmanager
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("fqns", [None, [""]])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_lives_on_after_a_step(fqns: list[str] | None, backward: bool) -> None:
    planned, _ = discard_all(outer(torch.sin, lambda x: F.layer_norm(x, (DIM,)).softmax(-1) * x), fqns)
    for p in planned.parameters():
        p.grad = torch.zeros_like(p)
    with no_collector(), Storages(planned) as storages:
        loss = planned(batch())
        if backward:
            loss.backward()
        assert storages.alive
        del loss
        assert storages.alive == 0


def test_an_argument_that_is_written_later_makes_no_cycle() -> None:
    """The tensor's new autograd node leads to the node that saved the recipe that holds the tensor."""

    def middle(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += y.exp().sin()
        return y

    model = outer(middle)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"units.0": [("aten.exp.default", 0)]}))
    with no_collector(), Storages(planned) as storages:
        planned(batch())
        assert storages.alive == 0


def test_a_value_dies_with_its_last_use() -> None:
    """When the backward pass arrives at the first unit, nothing is left of the second one."""

    def alive_between(model: Outer) -> int:
        seen = []
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with no_collector(), Storages(model) as storages:
            x = model.units[1](batch().requires_grad_())
            x.register_hook(lambda grad: seen.append(storages.alive))
            loss = model.units[0](x).pow(2).mean()
            del x
            loss.backward()
        return seen[0]

    model = outer()
    kept_first, _ = discard_all(model, ["units.0"])
    assert alive_between(kept_first) == alive_between(model)


def test_an_error_in_the_forward_leaves_nothing_behind() -> None:
    fail = True

    def middle(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise ValueError("broken")
        return x.sin()

    model = outer()
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    model.units[0].middle = middle
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"units.0": sorted(fitting_sites(profile, "units.0"))}))
    with no_collector(), Storages(planned) as storages:
        with pytest.raises(ValueError, match="broken"):
            planned(batch())
        assert storages.alive == 0
    assert len(_get_current_dispatch_mode_stack()) == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    fail = False
    assert same_bits(step(model, batch()), step(planned, batch()))


def test_running_statistics_that_a_later_call_writes_are_refused_without_the_check_too() -> None:
    torch.manual_seed(0)
    model = Net([(["batch_norm"], "twice")], share=False, tie=False)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    unit = "groups.0.steps.0"
    sites = {s for scope in profile.program.calls[unit] for s in profile.program.sites(scope).values()}
    reads_statistics = [s for s in sites if s[0] in ("aten.add.Tensor", "aten.sigmoid.default")]
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {unit: reads_statistics}), check=False)
    with pytest.raises(sacplan.RecipeError, match="written in place since"):
        step(planned, batch())
