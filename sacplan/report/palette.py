"""Colours of figures and of the page: grey for what exists before the step, three colours for what it makes.

Blue, orange and yellow stay apart for colour-blind readers, and in lightness when printed; see Okabe and Ito,
"Color Universal Design" (2008).
"""

from __future__ import annotations

from sacplan.core.program import StorageKind

COLOURS = {
    "page": ("#ffffff", "#15181c"),
    "ink": ("#1d2329", "#e4e7ea"),
    "faint": ("#5d6670", "#9aa3ad"),
    "rule": ("#dde1e6", "#333a42"),
    "grid": ("#e9ecef", "#262b31"),
    "mark": ("#b3261e", "#ff8a80"),
    "parameter": ("#8a929c", "#626b76"),
    "optimizer-state": ("#aab1b9", "#4f5761"),
    "buffer": ("#737b85", "#747d88"),
    "other": ("#c6cbd1", "#3f464e"),
    "gradient": ("#d9772b", "#e08a45"),
    "activation": ("#3a78b5", "#5a96d0"),
    "temporary": ("#ecc65a", "#d9b650"),
    "green": ("#3d8f6f", "#5cb392"),
    "purple": ("#8d6bb0", "#b094d4"),
}
"""By name, on a light page and on a dark one. Figures use the light ones. No two of those are equal, so that the page
can find the name of each colour in a figure."""

PAGE, INK, FAINT, GRID, MARK = (COLOURS[name][0] for name in ("page", "ink", "faint", "grid", "mark"))
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
