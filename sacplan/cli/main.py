"""The entry point of the command line."""

from __future__ import annotations

import gc
import sys
import warnings

from sacplan.cli import interrupts

_BETWEEN_COLLECTIONS = 1_000_000, 20, 50
"""Thresholds of the garbage collector for its three generations.

Importing PyTorch and transformers makes some 700,000 objects, which Python's defaults scan many times.
"""


def main() -> None:
    """Run the command line on ``sys.argv``, and end the process with its exit code (see ``exits.py``)."""
    # Before any other import: PyTorch and transformers take seconds to import.
    interrupts.watch()
    gc.set_threshold(*_BETWEEN_COLLECTIONS)
    try:
        from sacplan.cli.app import app
        from sacplan.cli.output import show_warning

        warnings.showwarning = show_warning
        app(prog_name="sacplan")
    except KeyboardInterrupt:
        sys.exit(interrupts.say_so())
    except ModuleNotFoundError:
        # An import that was interrupted may end in this error. Otherwise it is a bug, or one of the user's target.
        if interrupts.seen():
            sys.exit(interrupts.say_so())
        raise
