"""The packages in ``sacplan/`` and the imports between them: a table, and the picture in ``docs/architecture.md``.

python docs/packages.py                                    # lines of each package, and its imports
python docs/packages.py --draw docs/images/packages.svg
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "sacplan"

PACKAGES = {
    "errors": (0, 1, "what can go wrong"),
    "torch_compat": (1, 0, "private APIs of PyTorch"),
    "core.factors": (2, 0, "dimensions that go together"),
    "core": (2, 1, "program, patch, fold"),
    "device": (3, 1, "kernels, allocator, times"),
    "record": (5, 2, "step to program"),
    "distributed.sharding": (6, 0, "models on a mesh"),
    "distributed.ranks": (7, 1, "run by FSDP2, DDP"),
    "solvers": (2, 3, "problems of numbers"),
    "techniques.base": (8, 1, "what a technique is"),
    "techniques.runtime": (8, 2, "what executors share"),
    "techniques.recompute": (9, 1, "ops run again"),
    "techniques.chunk": (9, 0, "ops in slices"),
    "techniques.offload": (10, 1, "copies on the host"),
    "techniques.registry": (11, 0, "all of them"),
    "solvers.rotor": (11, 1, "chains"),
    "classic": (11, 2, "PyTorch's prototype"),
    "profiling": (12, 1, "profile()"),
    "planning": (14, 1, "plan()"),
    "running": (15, 1, "apply(), verify()"),
    "questions": (16, 0, "what fits, what helps"),
    "report": (17, 0, "tables, figures, a page"),
    "testing": (17, 3, "for test suites"),
    "integrations": (17, 1, "trainers, models"),
    "cli": (18, 2, "the command line"),
}
"""From the ground up: a package imports only from those before it. Row and column in the picture, where arrows only go
down, and what is in the package. A module belongs to the package with the longest name that it is in."""

_ORDER = list(PACKAGES)


def package_of(module: str) -> str | None:
    """The package of a module; None for what ``import sacplan`` reads itself."""
    parts = module.split(".")[1:] if module.startswith("sacplan.") else []
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in PACKAGES), None)


def files() -> list[Path]:
    """The Python files of packages."""
    return [path for path in sorted(ROOT.rglob("*.py")) if package_of(module_name(path)) is not None]


def lines() -> Counter[str]:
    """Lines of Python by package."""
    found: Counter[str] = Counter()
    for path in files():
        found[str(package_of(module_name(path)))] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def imports() -> Counter[tuple[str, str]]:
    """How many imports there are from one package to another, those for type checkers included."""
    found: Counter[tuple[str, str]] = Counter()
    for path in files():
        here = str(package_of(module_name(path)))
        for node in _imports(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                there = package_of(name)
                if there is not None and there != here:
                    found[here, there] += 1
    return found


@functools.cache
def _imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Those for type checkers, and inside of functions, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def module_circles() -> list[list[str]]:
    """Modules that import each other, directly or not."""
    import networkx

    graph = networkx.DiGraph()
    known = {module_name(path) for path in files()}
    for path in files():
        here = module_name(path)
        for node in _imports(path):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                names = [alias.name for alias in node.names]
            graph.add_edges_from((here, name) for name in names if name in known and name != here)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def module_name(path: Path) -> str:
    """Dotted name of a file."""
    return ".".join(("sacplan", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def arrows_up() -> list[tuple[str, str]]:
    """Imports against the order of the packages; there should be none."""
    return [(here, there) for here, there in imports() if _ORDER.index(there) > _ORDER.index(here)]


def arrows() -> list[tuple[str, str]]:
    """Imports between packages, less those that a path of others implies."""
    import networkx

    down = networkx.DiGraph(imports().keys() - set(arrows_up()))
    return sorted(networkx.transitive_reduction(down).edges)


def draw(path: Path) -> None:
    """The picture: an arrow from each package to those that it imports from."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "packages"  # the same picture gives the same file
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, axes = plt.subplots(figsize=(9.4, 9.4))
    places = {name: (2.3 * column, row) for name, (row, column, _) in PACKAGES.items()}
    for above, below in arrows():
        _draw_arrow(axes, places[above], places[below])
    for name, place in places.items():
        _draw_package(axes, place, name)
    axes.set_xlim(-1, 7.9)
    axes.set_ylim(-0.5, max(row for row, _, _ in PACKAGES.values()) + 0.5)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


_HALF_WIDTH, _HALF_HEIGHT = 0.95, 0.3  # of a box
_MIDDLE = 2.3  # the column of the pipeline


def _draw_package(axes: Any, place: tuple[float, float], name: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    box = FancyBboxPatch(
        (x - _HALF_WIDTH, y - _HALF_HEIGHT),
        2 * _HALF_WIDTH,
        2 * _HALF_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor="#eceff1",
        edgecolor="#455a64",
    )
    axes.add_patch(box)
    axes.text(x, y + 0.1, name, ha="center", va="center", fontsize=9, color="#263238")
    axes.text(x, y - 0.15, PACKAGES[name][2], ha="center", va="center", fontsize=7, color="#546e7a")


def _draw_arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A straight line to the row below or in the same column, else one with a corner."""
    from matplotlib.patches import FancyArrowPatch

    (x0, y0), (x1, y1) = start, end
    side = _HALF_WIDTH if x1 > x0 else -_HALF_WIDTH
    if x0 == x1:
        a, b, style = (x0, y0 - _HALF_HEIGHT), (x1, y1 + _HALF_HEIGHT), "arc3"
    elif y0 - y1 == 1 and abs(x0 - x1) <= _MIDDLE:
        a, b, style = (x0 + side / 2, y0 - _HALF_HEIGHT), (x1 - side / 2, y1 + _HALF_HEIGHT), "arc3"
    elif abs(x0 - _MIDDLE) > abs(x1 - _MIDDLE):  # in from the side: down first
        a, b, style = (x0, y0 - _HALF_HEIGHT), (x1 + -side, y1), "angle,angleA=-90,angleB=180,rad=6"
    else:
        a, b, style = (x0 + side, y0), (x1, y1 + _HALF_HEIGHT), "angle,angleA=180,angleB=-90,rad=6"
    arrow = FancyArrowPatch(
        a,
        b,
        arrowstyle="-|>",
        mutation_scale=10,
        color="#78909c",
        connectionstyle=style,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(arrow)


def main() -> None:
    """Print the table, or draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.draw:
        draw(asked.draw)
        return
    sizes, found = lines(), imports()
    for name in reversed(PACKAGES):
        below = ", ".join(there for there in PACKAGES if (name, there) in found)
        print(f"{name:20} {sizes[name]:6,}  {below}")
    print(f"{'all':20} {sum(sizes.values()):6,}")


if __name__ == "__main__":
    main()
