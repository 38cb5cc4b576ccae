"""Nets drawn from three dozen kinds of steps: whatever autograd, in-place writes and random numbers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, DIM = 2, 3, 4


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


class RandomNet(nn.Module):
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


def nets(kinds: list[str]) -> st.SearchStrategy[RandomNet]:
    groups = st.lists(
        st.tuples(st.lists(st.sampled_from(kinds), min_size=1, max_size=3), st.sampled_from(FORMS)),
        min_size=1,
        max_size=2,
    )

    def make(groups: list[tuple[list[str], str]], share: bool, tie: bool) -> RandomNet:
        torch.manual_seed(0)
        return RandomNet(groups, share, tie)

    return st.builds(make, groups, st.booleans(), st.booleans())


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, DIM)


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
