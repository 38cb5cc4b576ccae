"""Models whose memory is in a few wide ops: attention, an Evoformer block, a U-Net."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[..., T, C] as [..., heads, T, C / heads]."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def merged(x: Tensor) -> Tensor:
    """The inverse of ``heads_of``."""
    return x.transpose(-3, -2).flatten(-2)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention with its scores in memory."""
    scores = torch.matmul(q / math.sqrt(q.shape[-1]), k.transpose(-1, -2))
    return torch.matmul(torch.softmax(scores if bias is None else scores + bias, -1), v)


class EagerAttention(nn.Module):
    """Self-attention: [B, T, C] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(layer(x), self.heads) for layer in (self.q, self.k, self.v))
        return self.o(merged(attended(q, k, v)))


class EagerBlock(nn.Module):
    """A layer of a transformer: [B, T, C] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = EagerAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Transformer(nn.Sequential):
    """Layers of width C."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__(*(EagerBlock(width, heads) for _ in range(layers)))


# --- Evoformer, after the supplement of AlphaFold 2, 1.6 ---------------------------------------------------


class _Gated(nn.Module):
    """Attention with a gate along the last but one dimension of [B, I, J, C], with an optional bias."""

    def __init__(self, width: int, heads: int, head: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * head, bias=False)
        self.gate, self.out = nn.Linear(width, heads * head), nn.Linear(heads * head, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        return self.out(merged(attended(q, k, v, bias)) * torch.sigmoid(self.gate(x)))


class Rows(nn.Module):
    """Attention within rows of the alignment, biased by pairs."""

    def __init__(self, alignment: int, pairs: int, heads: int = 8) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(alignment), nn.LayerNorm(pairs)
        self.bias, self.attention = nn.Linear(pairs, heads, bias=False), _Gated(alignment, heads)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        return self.attention(self.n1(m), self.bias(self.n2(z)).permute(0, 3, 1, 2).unsqueeze(1))


class Columns(nn.Module):
    """Attention within columns of the alignment."""

    def __init__(self, alignment: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(alignment), _Gated(alignment, heads)

    def forward(self, m: Tensor) -> Tensor:
        return self.attention(self.norm(m.transpose(1, 2))).transpose(1, 2)


class PairTransition(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """From the alignment to pairs."""

    def __init__(self, alignment: int, pairs: int, width: int = 32) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(alignment), nn.Linear(width * width, pairs)
        self.a, self.b = nn.Linear(alignment, width), nn.Linear(alignment, width)

    def forward(self, m: Tensor) -> Tensor:
        x = self.norm(m)
        products = torch.einsum("bsic,bsjd->bijcd", self.a(x), self.b(x)) / m.shape[1]
        return self.out(products.flatten(-2))


class TriangleProduct(nn.Module):
    """Pairs updated along outgoing or incoming edges."""

    def __init__(self, pairs: int, edges: str) -> None:
        super().__init__()
        self.edges = edges
        self.n1, self.n2 = nn.LayerNorm(pairs), nn.LayerNorm(pairs)
        self.ab, self.gates = nn.Linear(pairs, 2 * pairs), nn.Linear(pairs, 2 * pairs)
        self.gate, self.out = nn.Linear(pairs, pairs), nn.Linear(pairs, pairs)

    def forward(self, z: Tensor) -> Tensor:
        x = self.n1(z)
        a, b = (self.ab(x) * torch.sigmoid(self.gates(x))).chunk(2, -1)
        return self.out(self.n2(torch.einsum(self.edges, a, b))) * torch.sigmoid(self.gate(x))


class TriangleAttention(nn.Module):
    """Pairs updated by attention around their first, or their second, residue."""

    def __init__(self, pairs: int, heads: int = 4, *, ending: bool = False) -> None:
        super().__init__()
        self.ending = ending
        self.norm, self.bias = nn.LayerNorm(pairs), nn.Linear(pairs, heads, bias=False)
        self.attention = _Gated(pairs, heads)

    def forward(self, z: Tensor) -> Tensor:
        x = self.norm(z.transpose(1, 2) if self.ending else z)
        out = self.attention(x, self.bias(x).permute(0, 3, 1, 2).unsqueeze(1))
        return out.transpose(1, 2) if self.ending else out


class Evoformer(nn.Module):
    """One block: an alignment [B, S, R, C] and pairs [B, R, R, C'] to the same."""

    def __init__(self, alignment: int = 256, pairs: int = 128) -> None:
        super().__init__()
        self.rows, self.columns = Rows(alignment, pairs), Columns(alignment)
        self.transition, self.outer = PairTransition(alignment), OuterProductMean(alignment, pairs)
        self.updates = nn.ModuleList(
            (
                TriangleProduct(pairs, "bikc,bjkc->bijc"),
                TriangleProduct(pairs, "bkic,bkjc->bijc"),
                TriangleAttention(pairs),
                TriangleAttention(pairs, ending=True),
                PairTransition(pairs),
            )
        )

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.rows(m, z)
        m = m + self.columns(m)
        m = m + self.transition(m)
        z = z + self.outer(m)
        for update in self.updates:
            z = z + update(z)
        return m, z


# --- a U-Net in the shape of diffusers' UNet2DModel --------------------------------------------------------


class TimedResidual(nn.Module):
    """Two convolutions and an embedding of the time: [B, C, H, W] to [B, C', H, W]."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(32, width, 1e-5), nn.GroupNorm(32, out, 1e-5)
        self.c1, self.c2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))


class PixelAttention(nn.Module):
    """Attention of all pixels to all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, width), EagerAttention(width, width // 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        return out.transpose(1, 2).reshape(x.shape) + x


class Level(nn.Module):
    """Residual blocks at one resolution, with attention where ``attends``, and what leads to the next."""

    def __init__(self, widths: list[int], out: int, time: int, attends: bool, next_: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TimedResidual(width, out, time) for width in widths)
        self.attention = nn.ModuleList(PixelAttention(out) if attends else nn.Identity() for _ in widths)
        self.next = next_


class UNet(nn.Module):
    """Image [B, 3, H, W] and time [B] to an image."""

    def __init__(self, widths: tuple[int, ...] = (224, 448, 672, 896), layers: int = 2) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.width = widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        now, skips = widths[0], [widths[0]]
        for i, width in enumerate(widths):
            last = i == len(widths) - 1
            next_: nn.Module = nn.Identity() if last else nn.Conv2d(width, width, 3, 2, 1)
            self.down.append(Level([now] + [width] * (layers - 1), width, time, i > 0, next_))
            now = width
            skips += [width] * (layers if last else layers + 1)
        self.middle = nn.ModuleList(
            (TimedResidual(now, now, time), PixelAttention(now), TimedResidual(now, now, time))
        )
        for i, width in reversed(list(enumerate(widths))):
            taken = [now] + [width] * layers
            inputs = [size + skips.pop() for size in taken]
            self.up.append(
                Level(
                    inputs, width, time, i > 0, nn.Conv2d(width, width, 3, padding=1) if i else nn.Identity()
                )
            )
            now = width
        self.norm, self.last = nn.GroupNorm(32, now, 1e-5), nn.Conv2d(now, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(1e4) / half * torch.arange(half, dtype=torch.float32))
        angles = t[:, None].float() * frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.first(x)
        skips = [x]
        for level in self.down:
            for block, attention in zip(level.blocks, level.attention, strict=True):
                x = attention(block(x, time))
                skips.append(x)
            if not isinstance(level.next, nn.Identity):
                x = level.next(x)
                skips.append(x)
        before, attention, after = self.middle
        x = after(attention(before(x, time)), time)
        for level in self.up:
            for block, attention in zip(level.blocks, level.attention, strict=True):
                x = attention(block(torch.cat([x, skips.pop()], 1), time))
            if not isinstance(level.next, nn.Identity):
                x = level.next(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.norm(x)))
