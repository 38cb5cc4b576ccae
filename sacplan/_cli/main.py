"""The entry point: looks for typer before anything that needs it."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Run the command line on ``sys.argv``; ends the process with the exit code (see ``exits.py``)."""
    try:
        from sacplan._cli.app import app
        from sacplan._cli.output import show_warning
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"error: the command line needs {error.name}, which is not installed; run: pip install 'sacplan[cli]'\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    warnings.showwarning = show_warning
    app(prog_name="sacplan")
