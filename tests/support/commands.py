"""Commands of sacplan in the process of the tests."""

from __future__ import annotations

import shlex
from typing import Any

from typer.testing import CliRunner

from sacplan.cli.app import app

INHERITED = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
"""Variables that whoever runs the tests may have set."""


def run(command: str, **env: str) -> Any:
    """Run a command; ``stdout`` and ``stderr`` of the result are apart."""
    clean: dict[str, str | None] = dict.fromkeys(INHERITED)
    result = CliRunner().invoke(app, shlex.split(command), prog_name="sacplan", env=clean | env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
