"""Colours of figures and of the page: grey for what exists before the step, three colours for what it makes.

Blue, orange and yellow stay apart for colour-blind readers, and in lightness when printed; see Okabe and Ito,
"Color Universal Design" (2008).
"""

from __future__ import annotations

import json
from pathlib import Path

from sacplan.core.program import StorageKind

COLOURS: dict[str, tuple[str, str]] = json.loads(Path(__file__).with_name("palette.json").read_bytes())
"""By name, on a light page and on a dark one. Figures use the light ones."""

PAGE, INK, FAINT, MARK = (COLOURS[name][0] for name in ("page", "ink", "faint", "mark"))
SERIES = tuple(COLOURS[name][0] for name in ("activation", "gradient", "green", "purple", "buffer"))
"""For curves that are told apart by their labels and dashes as well."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")

STACK = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.OPTIMIZER_STATE: "optimizer state",
    StorageKind.BUFFER: "buffers",
    StorageKind.OTHER: "batch, workspaces and other",
    StorageKind.GRADIENT: "gradients",
    StorageKind.ACTIVATION: "activations",
    StorageKind.TEMPORARY: "temporaries",
}
"""Names of the kinds from the bottom of a stack to its top. What stays through the step is at the bottom."""


def css_name(kind: StorageKind) -> str:
    """Return the name of a kind's colour."""
    return kind.name.lower().replace("_", "-")


def kind_colour(kind: StorageKind) -> str:
    """Return the colour of a kind in figures."""
    return COLOURS[css_name(kind)][0]


def css_variables() -> str:
    """Return the colours as CSS variables that follow the page's colour scheme."""
    return " ".join(f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in COLOURS.items())
