"""The entry point: looks for typer before anything that needs it."""

from __future__ import annotations

import sys
import warnings

from sacplan._cli import interrupts


def main() -> None:
    """Run the command line on ``sys.argv``; ends the process with the exit code (see ``exits.py``)."""
    interrupts.watch()
    try:
        from sacplan._cli.app import app
        from sacplan._cli.output import show_warning

        warnings.showwarning = show_warning
        app(prog_name="sacplan")
    except KeyboardInterrupt:
        sys.exit(interrupts.say_so())
    except ModuleNotFoundError as error:
        if interrupts.seen():
            sys.exit(interrupts.say_so())
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"error: the command line needs {error.name}, which is not installed; run: pip install 'sacplan[cli]'\n"
        )
        sys.exit(2)
