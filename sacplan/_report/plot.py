"""Small drawings in HTML: a stretched SVG for areas and lines, and text beside it that keeps its size.

A plot is as wide as its column. Areas and lines are in an SVG without aspect ratio, in units of a thousandth of the
plot; text, ticks and points are elements of the page at positions in percent, so they look the same at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

SIDE = 1000  # units of the SVG in both directions
NARROW_PX = 300
"""The narrowest plot that labels are placed for."""
_LETTER_PX, _LINE_PX = 6.6, 16
# Where a label may be: to the right or left of its point or centred, and how many lines down.
_PLACES = (
    ("r", 0),
    ("l", 0),
    ("c", -1),
    ("c", 1),
    ("r", -0.8),
    ("r", 0.8),
    ("l", -0.8),
    ("l", 0.8),
    ("r", -1.6),
    ("r", 1.6),
)
_PLACES_LEFT = tuple(({"r": "l", "l": "r"}.get(side, side), shift) for side, shift in _PLACES)


def text_px(text: str) -> float:
    """How wide a label is, about."""
    return len(text) * _LETTER_PX


def number(value: float) -> str:
    """A coordinate, as short as it may be."""
    return f"{value:.1f}".rstrip("0").rstrip(".") or "0"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """``0.25``, ``12``, ``1,500``."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def steps(xs: Sequence[float], tops: Sequence[float], bottoms: Sequence[float]) -> str:
    """SVG path of an area with vertical steps: value i holds from ``xs[i]`` to ``xs[i + 1]``."""
    upper = _edge(xs, tops)
    lower = _edge(xs, bottoms)[::-1]
    points = [*upper, *lower]
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + "Z"


def _edge(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a staircase; nothing where it is level."""
    corners = [(xs[0], ys[0])]
    for x, y in zip(xs[1:-1], ys[1:], strict=True):
        if number(y) != number(corners[-1][1]):
            corners.append((x, corners[-1][1]))
            corners.append((x, y))
    corners.append((xs[-1], ys[-1]))
    return corners


@dataclass(slots=True)
class Plot:
    """One plot; coordinates are in its data's units.

    Args:
        x_max, y_max: what the axes go to, from ``x_min`` and 0.
        height_px: of the plot itself.
        x_title, y_title: with units.
        said: what it shows, for those who cannot see it.
    """

    x_max: float
    y_max: float
    height_px: int
    x_title: str
    y_title: str
    said: str
    x_min: float = 0.0
    css: str = ""
    after: str = ""
    shapes: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def x(self, value: float) -> float:
        """To units of the SVG."""
        return (value - self.x_min) / (self.x_max - self.x_min) * SIDE

    def y(self, value: float) -> float:
        """To units of the SVG, downwards."""
        return (1 - value / self.y_max) * SIDE

    def area(self, xs: Sequence[float], tops: Sequence[float], bottoms: Sequence[float], css: str) -> None:
        """A staircase area."""
        path = steps([self.x(x) for x in xs], [self.y(t) for t in tops], [self.y(b) for b in bottoms])
        self.shapes.append(f'<path class="{css}" d="{path}"/>')

    def line(self, points: Iterable[tuple[float, float]], css: str, dash: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{number(self.x(x))},{number(self.y(y))}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<polyline class="line {css}"{dashes} points="{path}"/>')

    def dot(self, x: float, y: float, css: str) -> None:
        """A point that keeps its shape."""
        left, top = self.x(x) / SIDE * 100, self.y(y) / SIDE * 100
        self.marks.append(f'<i class="dot {css}" style="left:{left:.2f}%;top:{top:.2f}%"></i>')
        self._take(left / 100 * NARROW_PX - 4, top / 100 * self.height_px - 4, 8, 8)

    def text(self, x: float, y: float, text: str, css: str = "", *, inside: bool = False) -> None:
        """A label beside a point (or centred on it), where no other one is yet."""
        left, top = self.x(x) / SIDE, self.y(y) / SIDE
        width = text_px(text)
        px, py = left * NARROW_PX, top * self.height_px
        if inside:
            self._put(left, top, "c", text, css)
            self._take(px - width / 2, py - _LINE_PX / 2, width, _LINE_PX)
            return
        for side, shift in _PLACES if left < 0.6 else _PLACES_LEFT:
            x0 = {"r": px + 7, "l": px - 7 - width, "c": px - width / 2}[side]
            y0 = py - _LINE_PX / 2 + shift * _LINE_PX
            fits = x0 >= 0 and x0 + width <= NARROW_PX and y0 >= 0 and y0 + _LINE_PX <= self.height_px
            if fits and not any(_overlap((x0, y0, width, _LINE_PX), other) for other in self.taken):
                self._take(x0, y0, width, _LINE_PX)
                self._put(left, top + shift * _LINE_PX / self.height_px, side, text, css)
                return
        self._put(left, top, "l" if left > 0.5 else "r", text, css)

    def _put(self, left: float, top: float, side: str, text: str, css: str) -> None:
        at = f"left:{left * 100:.2f}%;top:{top * 100:.2f}%"
        self.marks.append(f'<span class="label {side} {css}" style="{at}">{escape(text)}</span>')

    def _take(self, x: float, y: float, width: float, height: float) -> None:
        self.taken.append((x, y, width, height))

    def html(self, y_ticks: int = 5, x_ticks: int = 5) -> str:
        """The figure."""
        marks = []
        for value in ticks(0.0, self.y_max, y_ticks):
            top = self.y(value) / SIDE * 100
            marks.append(f'<span class="tick y" style="top:{top:.2f}%">{tick_text(value)}</span>')
            self.shapes.insert(0, f'<path class="grid" d="M0 {number(top * 10)}H{SIDE}"/>')
        for value in ticks(self.x_min, self.x_max, x_ticks):
            left = self.x(value) / SIDE * 100
            edge = " end" if left > 96 else ""
            marks.append(f'<span class="tick x{edge}" style="left:{left:.2f}%">{tick_text(value)}</span>')
        size = f'data-x-max="{self.x_max:.6g}" style="height:{self.height_px}px"'
        return (
            f'<div class="chart {self.css}"><div class="axis-title">{escape(self.y_title)}</div>'
            f'<div class="plot" {size} role="img" aria-label="{escape(self.said)}">'
            f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">'
            f"{''.join(self.shapes)}</svg>"
            f"{''.join(marks)}{''.join(self.marks)}{self.after}</div>"
            f'<div class="axis-title x">{escape(self.x_title)}</div></div>'
        )


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
