"""Blocks of random code, with what is hard to recompute: writes, caches, random numbers, inner gradients.

A block runs instructions one after the other. Each reads two values that earlier ones made, and makes one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 4


class Square(torch.autograd.Function):
    """Saves its input and its output, and something outside of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        ctx.scale = x.detach().cos()
        return y + ctx.scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * (2 * x - ctx.scale.sin() + 0 * y)


class Overwriting(torch.autograd.Function):
    """Computes its gradient in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grads[0])


class Tripled(torch.autograd.Function):
    """Writes into its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Tape(threading.local):
    """The random numbers of a step on this thread.

    Attributes:
        drawn: a copy of what each op drew, where a list is put here.
        given: what each op returns in place of drawing, where a list is put here.
    """

    drawn: list[Tensor] | None = None
    given: list[Tensor] | None = None


tape = Tape()


def noise(kind: int, x: Tensor) -> Tensor:
    """Draw random numbers in the shape of ``x``, by one of several ops."""
    if tape.given is not None:
        return tape.given.pop(0)
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
    if tape.drawn is not None:
        tape.drawn.append(made.clone())
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


def _mha(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    out, weights = F.multi_head_attention_forward(
        x, x, x, DIM, 2, m.lin3.weight, m.lin3.bias, None, None, False, 0.2, m.lin.weight, m.lin.bias,
        training=m.training,
    )  # fmt: skip
    assert weights is not None
    return out * weights.mean()


def _generator(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    g = torch.Generator().manual_seed(7)
    x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=g)
    x = x + torch.poisson(x.detach().sin().abs().nan_to_num(), generator=g) * x
    return x * torch.randn(x.shape, generator=g) * torch.rand_like(x)


def _odd_sizes(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    none = F.dropout(x[:, :0].exp(), 0.5, training=True).sin()
    point = x.mean().sin() * x.sum().tanh()
    return torch.cat([none, x * point], dim=1) * point.exp()


def _inference(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    with torch.inference_mode():
        a = x.abs().exp()
        a.add_(1)
        total = float(a.sum())
    return (x.sin() * total).cos()


def _residual(m: Block, x: Tensor, y: Tensor, n: int) -> Tensor:
    total = x * 2
    total += m.lin(y).sin()
    return total


MORE: dict[str, Instruction] = {
    "lstm": lambda m, x, y, n: m.lstm(x)[0],
    "gru": lambda m, x, y, n: m.gru(x)[0] * x,
    "identity": lambda m, x, y, n: x,
    "dropout": lambda m, x, y, n: F.dropout(x, 0.5, m.training) * F.dropout(x.exp(), 0.1, m.training),
    "dropout_": lambda m, x, y, n: (
        F.dropout(x.sin(), 0.5, m.training, inplace=True) + F.dropout(x, 1.0, m.training)
    ),
    "rrelu": lambda m, x, y, n: F.rrelu(x, training=m.training) + F.alpha_dropout(x, 0.2, m.training),
    "mha": _mha,
    "generator": _generator,
    "odd_sizes": _odd_sizes,
    "inference": _inference,
    "residual": _residual,
}
"""Instructions that no program draws, so that the programs of a seed stay what they are."""

PARTS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(DIM, DIM, 2, dropout=0.2, batch_first=True),
    "gru": lambda: nn.GRU(DIM, DIM, batch_first=True),
    "lin3": lambda: nn.Linear(DIM, 3 * DIM),
}
_NEEDS = {"lstm": "lstm", "gru": "gru", "mha": "lin3"}

FORMS = ("tensor", "tensor", "tuple", "dict", "optional")

Code = tuple[str, int, int, int]
"""An instruction, the two values it reads (counted back from the latest), and a number that varies it."""


class Block(nn.Module):
    """Runs its code; ``form`` says whether a tensor, a tuple or a dict comes out.

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
        for name, *_ in code:
            if name in _NEEDS:
                self.add_module(_NEEDS[name], PARTS[_NEEDS[name]]())
        self.cache: Tensor | None = None
        self.ema: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Any:
        values = [x]
        code = self.branch if self.mode == "branch" else self.code
        for name, first, second, number in code + (self.extra if self.mode == "extra" else []):
            made = (INSTRUCTIONS.get(name) or MORE[name])(
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
        x = self.stem(x)
        for i in self.order:
            out = self.blocks[i](x)
            if isinstance(out, dict):
                out = out["out"] if out["aux"] is None else out["out"] + out["aux"].sin()
            x = out[0] * out[1] if isinstance(out, tuple) else out
            x = x.tanh()
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


def net_of(
    *blocks: Sequence[str],
    form: str = "tensor",
    order: Sequence[int] = (),
    tie: bool = False,
    number: int = 1,
) -> Net:
    """Make a net of these instructions, each of which reads the latest value and the one before it."""
    torch.manual_seed(0)
    made = [Block([(name, 0, 1, number) for name in names], [], [], form) for names in blocks]
    return Net(made, list(order or range(len(made))), tie)
