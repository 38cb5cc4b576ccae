"""Random programs: no plan may change a bit of what a step gives, and the planner's own plan is never refused.

    python -m benchmarks.random_programs [--programs N] [--seed N] [--only N] [--json FILE]

Each program is a small model of random blocks and a random way to step it, made from a seed. Blocks write in place,
into views, through .data and under no_grad, draw random numbers, keep buffers and caches that the first call fills,
call custom autograd functions (one overwrites what it saved), share modules, take inner gradients, and return tensors,
tuples or dicts. Steps 2 and 3 of five differ from the recorded one: another batch size, ops that ran in no recorded
step, or another branch.

Every program is trained with five kinds of decisions. Those of the planner at some budget, and those of its policy
"full"; random ones; everything that can be discarded; and adversarial ones: every call site of every unit, whether it
can be discarded or not. After each step, the loss, all gradients, weights, buffers and the state of the generator are
compared, bit for bit, with those of the model without a plan. A refusal (a SacplanError while training) is counted, and
is a failure of the planner's own decisions in a step like the recorded one. Nor may such a step be said to differ from
it, but for the first, which may fill caches.

One program in four is then trained with the planner's decisions on two threads at once, in half of the cases while a
third one draws from the same generator. What each drew is noted, and the model without a plan computes the same step
with these numbers.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

import sacplan
from benchmarks import common
from benchmarks.common import describe, machine, write_results
from sacplan._plan.make import unit_plans
from sacplan._program.decisions import as_decisions
from sacplan._program.elements import CallSite
from sacplan._program.program import Phase, Program
from sacplan._torch.ops import is_computation

BATCH, LENGTH, DIM = 3, 3, 4
STEPS = 5
OWN = ("planned", "full")
"""Decisions that the planner made."""
KINDS = (*OWN, "random", "everything", "adversarial")


# --- blocks ---------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """Saves its input and its output, and something outside of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Forward."""
        y = x * x
        ctx.save_for_backward(x, y)
        ctx.scale = x.detach().cos()
        return y + ctx.scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Backward."""
        x, y = ctx.saved_tensors
        return grads[0] * (2 * x - ctx.scale.sin() + 0 * y)


class Overwriting(torch.autograd.Function):
    """Computes its gradient in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Forward."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Backward."""
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grads[0])


class Tripled(torch.autograd.Function):
    """Writes into its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Forward."""
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Backward."""
        return grads[0] * 3


class Tape(threading.local):
    """The random numbers of a step on this thread: what each op drew, or what it is to return instead."""

    drawn: list[Tensor] | None = None
    given: list[Tensor] | None = None


_tape = Tape()


def noise(kind: int, x: Tensor) -> Tensor:
    """Random numbers in the shape of ``x``, by one of several ops."""
    if _tape.given is not None:
        return _tape.given.pop(0)
    x = x.detach()
    makers: list[Callable[[], Tensor]] = [
        lambda: F.dropout(torch.ones_like(x), 0.5, True),
        lambda: torch.rand_like(x),
        lambda: torch.bernoulli(torch.full_like(x, 0.5)),
        lambda: torch.randn_like(x),
        lambda: torch.empty_like(x).uniform_(-1, 1),
        lambda: torch.native_dropout(torch.ones_like(x), 0.3, True)[0],
        lambda: torch.poisson(x.abs().clamp(max=2).nan_to_num()),
        lambda: torch.randint_like(x, 3),
        lambda: torch.normal(x.tanh(), 0.5),
        lambda: torch.bernoulli(x.sigmoid().nan_to_num()),
    ]
    made = makers[kind % len(makers)]()
    if _tape.drawn is not None:
        _tape.drawn.append(made.clone())
    return made


def _view_write(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x.sin()
    z[:, 0].mul_(2)
    z[..., 1:].add_(y[..., :-1].detach())
    return z * z if n % 2 else z


def _data_write(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x * 2
    s = z.sigmoid()
    z.data.add_(1)
    return (z * s).tanh() * y


def _buffer(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        m.ema.mul_(0.9).add_(x.mean((0, 1)))
        m.count += 1
    return (x - m.ema).tanh() / m.count


def _buffer_data(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    out = x * m.ema.sin()
    m.ema.data.mul_(0.5)
    return out + m.ema


def _cache(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    if m.cache is None:
        m.cache = torch.arange(DIM, dtype=x.dtype).mul(0.1).cos().add(n % 3).exp()
    return x.sin() * m.cache + y


def _force(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    energy = m.lin(x).tanh().pow(3).sum()
    (force,) = torch.autograd.grad(energy, m.lin.weight, create_graph=bool(n % 2))
    return F.linear(y.sigmoid(), force).sin()


def _no_grad(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean().exp()
        shift = m.lin(y).tanh().add_(1)
    return (x / scale).tanh() + shift


def _in_place_chain(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = m.lin(x) + y
    early = z.sigmoid()
    z.add_(early, alpha=0.5).mul_(0.9)
    z = z.relu_() if n % 2 else F.silu(z.mul(2), inplace=True)
    return z.mul_(early.detach()).masked_fill_(x.detach() > 1, 0.5)


def _overwriting(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x.sin()
    other = (z * 3.0).cos()  # saves what is made from what will be overwritten
    return Overwriting.apply(z) + other  # type: ignore[no-untyped-call]


def _conv(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = F.relu(m.bn(m.conv(x.transpose(1, 2))), inplace=bool(n % 2))
    return z.transpose(1, 2) + y


def _batch_norm(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    before = x.transpose(1, 2).sub(m.bn.running_mean[:, None]).tanh()
    return (m.bn(x.transpose(1, 2)) * before + m.bn.running_var[:, None]).transpose(1, 2).sigmoid() * y


def _attention(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (m.lin(x), m.lin(y), x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=bool(n % 2)).transpose(1, 2).flatten(2)


def _embedding(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    tokens = (x.detach().abs() * 5).nan_to_num().long().clamp(0, 7)[..., 0]
    return m.emb(tokens).relu() * F.linear(y, m.emb.weight[:DIM]).sigmoid()


def _views(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    a, b = m.lin(x).tanh().split([1, DIM - 1], dim=-1)
    c = a.expand(-1, -1, DIM) * b.sum((1, 2))[:, None, None]
    d = c.transpose(0, 1).contiguous()
    return d.transpose(0, 1).exp() * y[:1].sin()


def _rows(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    rows = [row.tanh() for row in torch.unbind(x.sin(), dim=1)]
    return torch.stack([a * b for a, b in zip(rows, rows[1:] + rows[:1], strict=True)], dim=1)


def _index_put(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x.tanh().clone()
    z[:, torch.tensor([0, 2])] = y[:, torch.tensor([1, 1])].sin()
    return z.clamp_(-1, 1) + x


def _autocast(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=bool(n % 2)):
        z = m.lin(F.gelu(m.lin(x)))
        return (F.softmax(z @ z.transpose(1, 2), dim=-1) @ y.to(z.dtype)).float()


def _sorting(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z, order = x.sin().sort(dim=-1)
    return z.gather(-1, order) * z.topk(2, dim=-1).values[..., :1].exp() + y.cummax(1).values


def _hooked(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = x.sigmoid()
    if z.requires_grad:
        z.register_hook(lambda grad: grad * 0.5)
    return z.exp() * y


def _write_argument(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    z = y.sin()
    out = x * z.detach()  # may be discarded with what is overwritten next
    z = z + 1
    with torch.no_grad():
        z.detach().mul_(1.0)
    return out.exp().tanh() + z


Instruction = Callable[["Block", Tensor, Tensor, int], Any]

INSTRUCTIONS: dict[str, Instruction] = {
    "linear": lambda m, x, y, n: m.lin(x),
    "gelu": lambda m, x, y, n: F.gelu(m.lin(x)) * y,
    "norm": lambda m, x, y, n: m.norm(x + y),
    "softmax": lambda m, x, y, n: x.softmax(-1) * y,
    "product": lambda m, x, y, n: x * y,
    "exp": lambda m, x, y, n: x.tanh().exp() + y,
    "where": lambda m, x, y, n: torch.where(x > y, x.sin(), y.cos()),
    "detach": lambda m, x, y, n: x.sin() * y.exp().detach() + x.detach().tanh().requires_grad_(),
    "relu_": lambda m, x, y, n: F.relu(m.lin(x), inplace=True),
    "noise": lambda m, x, y, n: x * noise(n, x),
    "noises": lambda m, x, y, n: (x * noise(n, x)).sin() * noise(n + 1, y) + y,
    "function": lambda m, x, y, n: Square.apply(Square.apply(x.sin())) * y,  # type: ignore[no-untyped-call]
    "in_place_function": lambda m, x, y, n: Tripled.apply(x.sin().mul(2)).tanh() * y,  # type: ignore[no-untyped-call]
    "foreach": lambda m, x, y, n: sum(torch._foreach_exp([x.tanh(), y.cos()])) * x,
    "called": lambda m, x, y, n: m.inner(x) if n % 2 else m.inner.forward(x),
    "complex": lambda m, x, y, n: torch.view_as_real(torch.complex(x.cos(), y.sin()).exp()).sum(-1),
    "overwriting": _overwriting,
    "view_write": _view_write,
    "data_write": _data_write,
    "buffer": _buffer,
    "buffer_data": _buffer_data,
    "cache": _cache,
    "force": _force,
    "no_grad": _no_grad,
    "in_place_chain": _in_place_chain,
    "conv": _conv,
    "batch_norm": _batch_norm,
    "attention": _attention,
    "embedding": _embedding,
    "views": _views,
    "rows": _rows,
    "index_put": _index_put,
    "autocast": _autocast,
    "sorting": _sorting,
    "hooked": _hooked,
    "write_argument": _write_argument,
}
FORMS = ("tensor", "tensor", "tuple", "dict", "optional")

Code = tuple[str, int, int, int]
"""An instruction, the two values it reads (counted back from the latest), and a number that varies it."""


class Block(nn.Module):
    """Runs its code; ``form`` says what comes out.

    Attributes:
        mode: "plain"; "extra", which runs ``extra`` too; "branch", which runs ``branch`` instead of ``code``.
    """

    def __init__(self, code: list[Code], extra: list[Code], branch: list[Code], form: str) -> None:
        super().__init__()
        self.code, self.extra, self.branch, self.form = code, extra, branch, form
        self.mode = "plain"
        self.lin = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.bn = nn.BatchNorm1d(DIM)
        self.emb = nn.Embedding(8, DIM)
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.register_buffer("ema", torch.ones(DIM))
        self.register_buffer("count", torch.ones(()))
        self.cache: Tensor | None = None
        self.ema: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Any:
        """Run the code."""
        values = [x]
        code = self.branch if self.mode == "branch" else self.code
        for name, first, second, number in code + (self.extra if self.mode == "extra" else []):
            made = INSTRUCTIONS[name](
                self, values[-1 - first % len(values)], values[-1 - second % len(values)], number
            )
            values.append(made.tanh() if number % 3 == 0 else made)
        out = x + values[-1]
        if self.form == "tuple":
            return out, values[-1].cos()
        if self.form == "dict":
            return {"out": out, "aux": values[len(values) // 2]}
        return {"out": out, "aux": None} if self.form == "optional" else out


class Net(nn.Module):
    """Blocks in a row, some of them more than once, between two linear layers."""

    def __init__(self, blocks: list[Block], order: list[int], tie: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.order = order
        self.head = nn.Linear(DIM, DIM)
        if tie:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        x = self.stem(x)
        for i in self.order:
            out = self.blocks[i](x)
            if isinstance(out, dict):
                out = out["out"] if out["aux"] is None else out["out"] + out["aux"].sin()
            x = out[0] * out[1] if isinstance(out, tuple) else out
            x = x.tanh()
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomProgram:
    """A model and how its steps go.

    Attributes:
        seed: it is made from.
        modes, sizes: of each step, the blocks' ``mode`` and the batch size.
        twice: whether a step has two forward passes before its backward pass.
        trace: how it is profiled.
    """

    seed: int
    net: Net
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    twice: bool
    trace: str
    train: bool

    def batch(self, i: int) -> Tensor:
        """The batch of step ``i``; equal each time."""
        return torch.randn(self.sizes[i], LENGTH, DIM, generator=torch.Generator().manual_seed(self.seed + i))

    def for_threads(self) -> bool:
        """Whether threads may run it at once: autocast's cache of weights is shared by all, and emptied by any."""
        codes = [c for b in self.net.blocks for c in (*b.code, *b.extra, *b.branch)]  # type: ignore[misc]
        return not any(name == "autocast" and number % 2 for name, _, _, number in codes)

    def like_recorded(self, i: int) -> bool:
        """Whether step ``i`` is the one that was profiled."""
        return self.modes[i] == "plain" and self.sizes[i] == BATCH

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The loss of one step."""
        loss: Tensor = model(batch)
        return loss + model(batch.flip(0)) if self.twice else loss

    def __str__(self) -> str:
        lines = [
            f"program {self.seed}: {len(self.net.order)} calls of blocks {self.net.order}, trace {self.trace}, "
            f"modes {self.modes}, sizes {self.sizes}{', two forward passes' if self.twice else ''}"
        ]
        for i, block in enumerate(self.net.blocks):
            assert isinstance(block, Block)
            lines.append(
                f"  block {i} ({block.form}): {block.code} extra {block.extra} branch {block.branch}"
            )
        return "\n".join(lines)


def make_program(seed: int) -> RandomProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = list(INSTRUCTIONS)

    def code(least: int, most: int) -> list[Code]:
        return [
            (rng.choice(names), rng.randrange(3), rng.randrange(4), rng.randrange(100))
            for _ in range(rng.randint(least, most))
        ]

    blocks = [Block(code(1, 4), code(1, 2), code(1, 3), rng.choice(FORMS)) for _ in range(rng.randint(1, 3))]
    order = list(range(len(blocks))) + [rng.randrange(len(blocks)) for _ in range(rng.randint(0, 1))]
    net = Net(blocks, order, rng.random() < 0.3)
    train = rng.random() < 0.9
    net.train(train)
    differ = [rng.choice([("plain", 2), ("plain", 5), ("extra", BATCH), ("branch", BATCH)]) for _ in range(2)]
    steps = [("plain", BATCH)] * 2 + differ + [("plain", BATCH)] * (STEPS - 4)
    modes, sizes = zip(*steps, strict=True)
    return RandomProgram(
        seed, net, modes, sizes, rng.random() < 0.15, rng.choice(["fake", "real", "real"]), train
    )


# --- decisions ------------------------------------------------------------------------------------


def decisions(
    program: RandomProgram, profile: sacplan.Profile, kinds: Collection[str] = KINDS
) -> Iterator[tuple[str, sacplan.Plan]]:
    """Plans of the kinds that the module's docstring names."""
    rng = random.Random(program.seed)
    at, share, whole = rng.choice([0.0, 0.2, 0.5, 0.8]), rng.choice([0.3, 0.6, 0.9]), rng.random() < 0.3
    if "planned" in kinds:
        smallest = sacplan.plan_smallest(profile, "greedy")
        budget = int(smallest.peak_bytes + (profile.peak_bytes - smallest.peak_bytes) * at)
        yield "planned", sacplan.plan(profile, f"{budget}B", "greedy") if at else smallest
    if "full" in kinds:
        with contextlib.suppress(sacplan.PlanError):  # the blocks keep nothing that could be discarded
            yield "full", sacplan.policy("full", profile=profile, layers="blocks.*")
    units = [""] if whole else [f"blocks.{i}" for i in range(len(program.net.blocks))]
    recorded, anything = profile.program, sacplan.plan(profile, "200%")
    fitting: dict[str, list[Any]] = {}
    every: dict[str, list[Any]] = {}
    for unit in units:
        sites: dict[Any, bool] = {}
        for scope in recorded.calls.get(unit, ()):
            for op, site in recorded.sites(scope).items():
                if not is_computation(recorded.ops[op].name):
                    continue
                fits = recorded.ops[op].recomputable and recorded.ops[op].phase == Phase.FORWARD
                sites[site] = sites.get(site, True) and fits
        every[unit] = list(sites)
        fitting[unit] = [site for site, fits in sites.items() if fits]
    if "random" in kinds:
        times = {
            unit: {site: rng.choice([1, 1, 1, 2]) for site in sites if rng.random() < share}
            for unit, sites in fitting.items()
        }
        yield "random", _deciding(anything, recorded, times)
    if "everything" in kinds:
        once = {unit: dict.fromkeys(sites, 1) for unit, sites in fitting.items()}
        yield "everything", _deciding(anything, recorded, once)
    if "adversarial" in kinds:
        once = {unit: dict.fromkeys(sites, 1) for unit, sites in every.items()}
        yield "adversarial", _deciding(anything, recorded, once)


def _deciding(
    plan: sacplan.Plan, recorded: Program, times: Mapping[str, Mapping[CallSite, int]]
) -> sacplan.Plan:
    times = {unit: sites for unit, sites in times.items() if sites}
    units, sequences = unit_plans(recorded, times, times)
    return structs.replace(plan, decisions=as_decisions(times), units=units, sequences=sequences)


# --- steps ----------------------------------------------------------------------------------------


def _step(program: RandomProgram, model: Net, i: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What step ``i`` gives: the loss, gradients, and after the optimizer weights and buffers."""
    for block in model.blocks:
        block.mode = program.modes[i]  # type: ignore[assignment]
    optimizer.zero_grad(set_to_none=True)
    loss = program.loss(model, program.batch(i))
    loss.backward()  # type: ignore[no-untyped-call]
    found = [loss.detach()]
    found += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return found + [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)) for x, y in pairs)


@dataclass
class Outcome:
    """What happened to one program.

    Attributes:
        steps: that were compared.
        skipped: why the program was not tried, if it was not.
        refused: kind of decisions, and of step ("recorded" or "differs"), to how many steps were refused.
        failures: wrong bits, and refusals and differences that should not be.
    """

    seed: int
    steps: int = 0
    discarded: int = 0
    threaded: int = 0
    skipped: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(seed: int, *, kinds: Collection[str] = KINDS, threads: bool | None = None) -> Outcome:
    """Make the program of a seed, and try decisions on it.

    Args:
        seed: of the program.
        kinds: of decisions.
        threads: whether it also runs on several threads; by default one program in four does.
    """
    program, outcome = make_program(seed), Outcome(seed)
    plain = copy.deepcopy(program.net)
    optimizer = _optimizer(plain)
    expected: list[list[Tensor]] = []
    states: list[Tensor] = []
    try:
        for i in range(STEPS):
            torch.manual_seed(seed + i)
            expected.append(_step(program, plain, i, optimizer))
            states.append(torch.get_rng_state())
    except RuntimeError as error:  # autograd's own rules: the program is not one that trains
        outcome.skipped = f"step {len(expected)} without a plan: {str(error)[:100]}"
        if len(expected) < 2:
            return outcome
    profiled = copy.deepcopy(program.net)
    try:
        profile = sacplan.profile(profiled, program.batch(0), program.loss, device="cpu", trace=program.trace)
    except sacplan.TraceError:
        if program.trace == "real":
            raise
        profile = sacplan.profile(profiled, program.batch(0), program.loss, device="cpu", trace="real")
    own: list[sacplan.Plan] = []
    for kind, plan in decisions(program, profile, kinds):
        if kind in OWN:
            own.append(plan)
        outcome.discarded += sum(map(len, plan.discarded.values()))
        model = copy.deepcopy(program.net)
        optimizer = _optimizer(model)
        handle = sacplan.apply(model, plan, check=kind in OWN or seed % 2 == 0)
        for i, wanted in enumerate(expected):
            torch.manual_seed(seed + i)
            handle.forget_differences()
            try:
                with _differences_expected():
                    found = _step(program, model, i, optimizer)
            except sacplan.SacplanError as error:
                like = program.like_recorded(i)
                outcome.refused[f"{kind}, {'recorded' if like else 'differs'}"] += 1
                if kind in OWN and like:
                    outcome.failures.append(f"{kind}: step {i} refused: {error}")
                break
            outcome.steps += 1
            if i and program.like_recorded(i) and handle.differences:  # the first step may fill caches
                outcome.failures.append(f"{kind}: step {i} is said to differ: {handle.differences[0]}")
            if not _same(found, wanted) or not torch.equal(torch.get_rng_state(), states[i]):
                outcome.failures.append(f"{kind}: wrong bits in step {i}")
                break
    if (seed % 4 == 0 if threads is None else threads) and program.for_threads():
        for plan in own:
            _run_on_threads(program, plan, len(expected), outcome)
    return outcome


@contextlib.contextmanager
def _differences_expected() -> Iterator[None]:
    """Without the warning that a step is not the recorded one; ``Handle.differences`` says it, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step is not the one", sacplan.SacplanWarning)
        yield


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Meanwhile, another thread draws from the default generator."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(7)
            torch.randn(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _run_on_threads(program: RandomProgram, plan: sacplan.Plan, steps: int, outcome: Outcome) -> None:
    """Two models with the plan train at once, and one without computes what each should have got."""
    planned = [copy.deepcopy(program.net) for _ in range(2)]
    tapes: list[list[list[Tensor]]] = [[], []]
    found: list[list[list[Tensor]]] = [[], []]
    errors: list[tuple[int, BaseException]] = []

    def train(which: int) -> None:
        model = planned[which]
        optimizer = _optimizer(model)
        try:
            for i in range(steps):
                _tape.drawn = []
                found[which].append(_step(program, model, i, optimizer))
                tapes[which].append(_tape.drawn)
        except BaseException as error:
            errors.append((len(found[which]), error))  # told below
        finally:
            _tape.drawn = None

    for model in planned:
        sacplan.apply(model, plan)
    workers = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    with drawing() if program.seed % 8 == 0 else contextlib.nullcontext(), _differences_expected():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for i, error in errors:
        if not isinstance(error, sacplan.SacplanError):
            raise error
        like = program.like_recorded(i)
        outcome.refused[f"threads, {'recorded' if like else 'differs'}"] += 1
        if like:
            outcome.failures.append(f"threads: step {i} refused: {error}")
    for results, drawn in zip(found, tapes, strict=True):
        plain = copy.deepcopy(program.net)
        optimizer = _optimizer(plain)
        for i, (result, numbers) in enumerate(zip(results, drawn, strict=False)):
            _tape.given = list(numbers)
            try:
                wanted = _step(program, plain, i, optimizer)
            finally:
                _tape.given = None
            outcome.threaded += 1
            if not _same(result, wanted):
                outcome.failures.append(f"threads: wrong bits in step {i}")
                break


def main() -> None:
    parser = common.parser(__doc__, "random_programs.json")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--only", type=int, help="one program, shown; no figures are written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        print(make_program(arguments.only))
        print(run(arguments.only, threads=True))
        return
    print(describe(machine()))
    began = time.monotonic()
    total, refused = Counter[str](), Counter[str]()
    rows = []
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        outcome = run(seed)
        total.update(
            programs=1, tried=outcome.discarded > 0, steps=outcome.steps, threaded_steps=outcome.threaded,
            discarded_call_sites=outcome.discarded, failed=bool(outcome.failures),
        )  # fmt: skip
        refused.update(outcome.refused)
        for failure in outcome.failures:
            rows.append({"seed": seed, "failure": failure})
            print(f"program {seed}: {failure}", flush=True)
        if total["programs"] % 100 == 0:
            print(
                f"{total['programs']} programs, {total['steps']} steps, {total['failed']} failed", flush=True
            )
    print(f"{dict(total)}, refused steps: {dict(refused)}, {time.monotonic() - began:.0f} s")
    write_results(arguments.json, rows, first_seed=arguments.seed, total=dict(total), refused=dict(refused))


if __name__ == "__main__":
    main()
