"""The entry point of the command line."""

from __future__ import annotations

import gc
import sys
import warnings

_BETWEEN_COLLECTIONS = 1_000_000, 20, 50
"""Thresholds of the garbage collector for its three generations.

Importing PyTorch and transformers makes some 700,000 objects, which Python's defaults scan many times.
"""


def main() -> None:
    """Run the command line on ``sys.argv``, and end the process with its exit code (see ``exits.py``)."""
    gc.set_threshold(*_BETWEEN_COLLECTIONS)
    try:
        from sacplan.cli.app import app
        from sacplan.cli.output import show_warning
    except KeyboardInterrupt:  # later ones end in ``CommandGroup.main``
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    warnings.showwarning = show_warning
    app(prog_name="sacplan")
