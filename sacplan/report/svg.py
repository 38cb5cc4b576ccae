"""Put figures into an HTML page as SVG, with text as text and with the page's CSS variables as colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

from sacplan.report.figures import need_matplotlib
from sacplan.report.palette import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {light: name for name, (light, _) in COLOURS.items()}
_PLOT = "plot"
_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def page_style() -> Iterator[None]:
    """Draw figures in matplotlib's default style, whatever the caller has set up."""
    need_matplotlib()
    import matplotlib.style

    with matplotlib.style.context(["default", {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}]):
        yield


def inline_svg(figure: Figure, said: str, salt: str) -> str:
    """Return the figure as an ``<svg>`` element that is as wide as its container.

    The area that data is drawn in has the class ``plot``.

    Args:
        figure: drawn under ``page_style``, in colours of the palette.
        said: a description for people who cannot see it.
        salt: different for each figure on a page, so that their ids differ.
    """
    import matplotlib

    for axis in figure.axes:
        axis.patch.set_gid(_PLOT)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata=_NOTHING)
    svg = file.getvalue()
    # The XML header has no place in HTML. Sizes are dropped, so that the page decides; ids would clash with
    # those of other figures, unless something refers to them: matplotlib puts these on other elements than
    # ``<g>``.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{escape(said)}">', svg
    )
    svg = re.sub(r"<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace(f'<g id="{_PLOT}">', f'<g class="{_PLOT}">')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Each colour of the palette has one name, see ``COLOURS``. Another colour is a mistake, and raises
    # ``KeyError``.
    svg = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda colour: f"var(--{_NAMES[colour[0]]})", svg)
    svg = re.sub(r' d="[^"]*"', _shorter, svg)
    return re.sub(r"\s*\n\s*", " ", svg)


def _shorter(path: re.Match[str]) -> str:
    """Round coordinates to a tenth of a point, below which nothing can be seen."""
    return re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", path[0])
