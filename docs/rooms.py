"""The rooms of the package and the imports between them: a table, and the picture in ``docs/architecture.md``.

python docs/rooms.py                                       # lines of each room, and its imports
python docs/rooms.py --draw docs/images/rooms.svg
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "sacplan"

ROOMS = (
    "errors", "_torch", "_factors", "_program", "_device", "_rewrites", "_record", "_shard", "_ranks", "_solve",
    "_technique", "_executor", "_recompute", "_chunk", "_offload", "_techniques", "_rotor", "_classical", "_profile",
    "_placing", "_plan", "_apply", "_verify", "_questions", "_report", "testing", "integrations", "_cli",
)  # fmt: skip
"""From the ground up: a room imports only from rooms before it."""

_FLOORS = (
    {"errors": 1},
    {"_torch": 0},
    {"_factors": 0, "_program": 1, "_solve": 3},
    {"_device": 1},
    {"_rewrites": 1},
    {"_record": 2},
    {"_shard": 0},
    {"_ranks": 1},
    {"_technique": 1, "_executor": 2},
    {"_recompute": 1, "_chunk": 0},
    {"_offload": 1},
    {"_techniques": 0, "_rotor": 1, "_classical": 2},
    {"_profile": 1},
    {"_placing": 0},
    {"_plan": 1},
    {"_apply": 1},
    {"_verify": 1},
    {"_questions": 0},
    {"_report": 0, "integrations": 1, "testing": 3},
    {"_cli": 2},
)
"""The floors of the picture from the ground up: rooms and their columns. Arrows go to lower floors."""

_SAYS = {
    "errors": "what can go wrong",
    "_torch": "private APIs of PyTorch",
    "_factors": "which dimensions go together",
    "_program": "program, patch, fold",
    "_solve": "problems of numbers",
    "_device": "kernels, allocator, times",
    "_rewrites": "versions, workspaces",
    "_record": "step to program",
    "_shard": "models on a mesh",
    "_ranks": "run by FSDP2, DDP",
    "_technique": "what a technique is",
    "_executor": "what executors share",
    "_recompute": "the technique",
    "_chunk": "ops in slices",
    "_offload": "copies on the host",
    "_techniques": "all of them",
    "_rotor": "chains",
    "_classical": "PyTorch's prototype",
    "_profile": "profile()",
    "_placing": "what to cut",
    "_plan": "plan()",
    "_apply": "apply()",
    "_verify": "verify()",
    "_questions": "what fits, what helps",
    "_report": "tables, figures, a page",
    "testing": "for test suites",
    "integrations": "trainers, models",
    "_cli": "the command line",
}


def floor_of(room: str) -> int | None:
    """The floor of a room in the picture, from 0 on the ground; None if it is not drawn."""
    return next((floor for floor, rooms in enumerate(_FLOORS) if room in rooms), None)


def room_of(module: str) -> str | None:
    """The room of a module of the package; None for the package's own face."""
    parts = module.split(".")
    return parts[1] if parts[0] == "sacplan" and len(parts) > 1 and parts[1] in ROOMS else None


def files() -> list[Path]:
    """The Python files in rooms."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if _room(path) is not None]


def _room(path: Path) -> str | None:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return first if first in ROOMS else None


def lines() -> Counter[str]:
    """Lines of Python by room."""
    found: Counter[str] = Counter()
    for path in files():
        found[str(_room(path))] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def imports() -> Counter[tuple[str, str]]:
    """How many imports there are from one room to another, those for type checkers included."""
    found: Counter[tuple[str, str]] = Counter()
    for path in files():
        here = str(_room(path))
        for node in _imports(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                there = room_of(name)
                if there is not None and there != here:
                    found[here, there] += 1
    return found


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Those for type checkers, and inside of functions, too."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def module_circles() -> list[list[str]]:
    """Modules that import each other, directly or not."""
    import networkx

    graph = networkx.DiGraph()
    known = {module_name(path) for path in files()}
    for path in files():
        here = module_name(path)
        for node in _imports(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                names = [alias.name for alias in node.names]
            graph.add_edges_from((here, name) for name in names if name in known and name != here)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def module_name(path: Path) -> str:
    """Dotted name of a file."""
    return ".".join(("sacplan", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def arrows_up() -> list[tuple[str, str]]:
    """Imports against the order of the rooms; there should be none."""
    return [(here, there) for here, there in imports() if ROOMS.index(there) > ROOMS.index(here)]


def arrows() -> list[tuple[str, str]]:
    """Imports between rooms, less those that a path of others implies."""
    import networkx

    down = networkx.DiGraph(imports().keys() - set(arrows_up()))
    return sorted(networkx.transitive_reduction(down).edges)


def draw(path: Path) -> None:
    """The picture: an arrow from each room to those that it imports from."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rooms"  # the same picture gives the same file
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, axes = plt.subplots(figsize=(8.4, 9))
    places = {
        room: (2.3 * column, floor) for floor, rooms in enumerate(_FLOORS) for room, column in rooms.items()
    }
    for above, below in arrows():
        _draw_arrow(axes, places[above], places[below])
    for room, place in places.items():
        _draw_room(axes, place, room)
    axes.set_xlim(-1, 7.9)
    axes.set_ylim(-0.5, len(_FLOORS) - 0.5)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


_HALF_WIDTH, _HALF_HEIGHT = 0.95, 0.3  # of a box
_MIDDLE = 2.3  # the column of the pipeline


def _draw_room(axes: Any, place: tuple[float, float], room: str) -> None:
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
    axes.text(x, y + 0.1, room, ha="center", va="center", fontsize=10, color="#263238")
    axes.text(x, y - 0.15, _SAYS[room], ha="center", va="center", fontsize=7.5, color="#546e7a")


def _draw_arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A straight line to the floor below or in the same column, else one with a corner."""
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
    for room in reversed(ROOMS):
        below = ", ".join(there for there in ROOMS if (room, there) in found)
        print(f"{room:14} {sizes[room]:6,}  {below}")
    print(f"{'all':14} {sum(sizes.values()):6,}")


if __name__ == "__main__":
    main()
