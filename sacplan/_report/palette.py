"""Colours of reports: what a step works with is grey, what it makes has one of three colours.

Blue, orange and yellow stay apart for colour-blind readers, and in lightness when printed; see Okabe and Ito,
"Color Universal Design" (2008). The page has the dark ones in ``page.html``, under the same names.
"""

from __future__ import annotations

from sacplan._program.program import StorageKind

STACK = (
    StorageKind.PARAMETER,
    StorageKind.OPTIMIZER_STATE,
    StorageKind.BUFFER,
    StorageKind.OTHER,
    StorageKind.GRADIENT,
    StorageKind.ACTIVATION,
    StorageKind.TEMPORARY,
)
"""Kinds from the bottom of a stack to its top: what stays first."""

KIND_COLOURS = {
    StorageKind.PARAMETER: "#8a929c",
    StorageKind.OPTIMIZER_STATE: "#aab1b9",
    StorageKind.BUFFER: "#737b85",
    StorageKind.OTHER: "#c6cbd1",
    StorageKind.GRADIENT: "#d9772b",
    StorageKind.ACTIVATION: "#3a78b5",
    StorageKind.TEMPORARY: "#ecc65a",
}
INK, FAINT, MARK = "#1d2329", "#6a737d", "#b3261e"
SERIES = ("#3a78b5", "#d9772b", "#3d8f6f", "#8d6bb0", "#737b85")
"""For curves that are told apart by their labels and dashes as well."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")


def kind_name(kind: StorageKind) -> str:
    """For people: ``"optimizer state"``, ``"activations"``."""
    names = {
        StorageKind.PARAMETER: "parameters",
        StorageKind.BUFFER: "buffers",
        StorageKind.GRADIENT: "gradients",
        StorageKind.ACTIVATION: "activations",
        StorageKind.TEMPORARY: "temporaries",
        StorageKind.OPTIMIZER_STATE: "optimizer state",
        StorageKind.OTHER: "batch, workspaces and other",
    }
    return names[kind]
