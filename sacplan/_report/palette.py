"""Colours of reports: what a step works with is grey, what it makes has one of three colours.

Blue, orange and yellow stay apart for colour-blind readers, and in lightness when printed; see Okabe and Ito,
"Color Universal Design" (2008). The page has the dark ones in ``page.html``, under the same names.
"""

from __future__ import annotations

from sacplan._trace.recording import Kind

STACK = (
    Kind.PARAMETER,
    Kind.OPTIMIZER_STATE,
    Kind.BUFFER,
    Kind.OTHER,
    Kind.GRADIENT,
    Kind.ACTIVATION,
    Kind.TEMPORARY,
)
"""Kinds from the bottom of a stack to its top: what stays first."""

KIND_COLOURS = {
    Kind.PARAMETER: "#8a929c",
    Kind.OPTIMIZER_STATE: "#aab1b9",
    Kind.BUFFER: "#737b85",
    Kind.OTHER: "#c6cbd1",
    Kind.GRADIENT: "#d9772b",
    Kind.ACTIVATION: "#3a78b5",
    Kind.TEMPORARY: "#ecc65a",
}
INK, FAINT, MARK = "#1d2329", "#6a737d", "#b3261e"
SERIES = ("#3a78b5", "#d9772b", "#3d8f6f", "#8d6bb0", "#737b85")
"""For curves that are told apart by their labels and dashes as well."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")


def kind_name(kind: Kind) -> str:
    """For people: ``"optimizer state"``, ``"activations"``."""
    names = {
        Kind.PARAMETER: "parameters",
        Kind.BUFFER: "buffers",
        Kind.GRADIENT: "gradients",
        Kind.ACTIVATION: "activations",
        Kind.TEMPORARY: "temporaries",
        Kind.OPTIMIZER_STATE: "optimizer state",
        Kind.OTHER: "batch, workspaces and other",
    }
    return names[kind]
