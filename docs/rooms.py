"""The rooms of the package and the imports between them: a table, and the picture in ``docs/architecture.md``.

python docs/rooms.py                                       # lines of each room, and its imports
python docs/rooms.py --draw docs/images/rooms.svg
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sacplan"

ROOMS = (
    "errors", "_torch", "_program", "_device", "_rewrites", "_record", "_ranks", "_solve", "_recompute", "_rotor",
    "_classical", "_profile", "_plan", "_apply", "_verify", "_report", "integrations", "_cli",
)  # fmt: skip
"""From the ground up: a room imports only from rooms before it."""

_FLOORS = (
    ("errors",), ("_torch",), ("_program",), ("_device", "_solve"), ("_rewrites",), ("_record", "_ranks"),
    ("_recompute",), ("_rotor", "_classical"), ("_profile",), ("_plan",), ("_apply",), ("_verify",),
    ("_report", "integrations"), ("_cli",),
)  # fmt: skip


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
    """How many imports there are from one room to another, those for type checkers left out."""
    found: Counter[tuple[str, str]] = Counter()
    for path in files():
        here = str(_room(path))
        for node in _run_time_imports(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                there = room_of(name)
                if there is not None and there != here:
                    found[here, there] += 1
    return found


def _run_time_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    skipped = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    return [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) and n not in skipped]


def module_circles() -> list[list[str]]:
    """Modules that import each other at run time, directly or not."""
    import networkx

    graph = networkx.DiGraph()
    known = {module_name(path) for path in files()}
    for path in files():
        here = module_name(path)
        for node in _run_time_imports(ast.parse(path.read_text(encoding="utf-8"))):
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


def draw(path: Path) -> None:
    """The picture: rooms as boxes, higher rooms use lower ones."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    sizes, arrows = lines(), imports()
    figure, axes = plt.subplots(figsize=(9, 11))
    places = {}
    for floor, rooms in enumerate(_FLOORS):
        for i, room in enumerate(rooms):
            places[room] = ((i + 0.5) / len(rooms) * 6 - 3, floor)
    for (above, below), count in arrows.items():
        if below == "errors":
            continue  # every room raises these
        (x0, y0), (x1, y1) = places[above], places[below]
        bend = 0.0 if y0 - y1 <= 1 else 0.22 * (1 if (x0 + x1) >= 0 else -1)
        axes.add_patch(
            FancyArrowPatch(
                (x0, y0 - 0.26), (x1, y1 + 0.26), arrowstyle="-|>", mutation_scale=8, color="#78909c",
                linewidth=0.4 + 0.25 * count**0.5, alpha=0.55, connectionstyle=f"arc3,rad={bend}",
            )
        )  # fmt: skip
    for room, (x, y) in places.items():
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.85, y - 0.24),
                1.7,
                0.48,
                boxstyle="round,pad=0.02",
                facecolor="#eceff1",
                edgecolor="#37474f",
            )
        )
        axes.text(x, y + 0.04, room, ha="center", va="center", fontsize=10, color="#263238")
        axes.text(
            x, y - 0.14, f"{sizes[room]:,} lines", ha="center", va="center", fontsize=7, color="#546e7a"
        )
    axes.set_xlim(-3.6, 3.6)
    axes.set_ylim(-0.5, len(_FLOORS) - 0.5)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


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
    sizes, arrows = lines(), imports()
    for room in reversed(ROOMS):
        below = ", ".join(there for there in ROOMS if (room, there) in arrows)
        print(f"{room:14} {sizes[room]:6,}  {below}")
    print(f"{'all':14} {sum(sizes.values()):6,}")


if __name__ == "__main__":
    main()
