"""typer's command and group, with help that folds and errors in one line.

Help is rich's on a terminal that is wide enough, and plain text in a pipe or in a narrow one, where boxes would only
break lines.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sacplan._cli.examples import EXAMPLES
from sacplan._cli.exits import INTERRUPTED, MEANING, report_error

_WIDE = 72  # columns that typer's panels need for our options


def _markup() -> Any:
    wide = sys.stdout.isatty() and shutil.get_terminal_size().columns >= _WIDE
    return "rich" if wide and not os.environ.get("NO_COLOR") else None


def _fit(formatter: Any) -> None:
    """Plain help as narrow as the terminal: click stops at 50 columns, and keeps 30 for the names of options."""
    columns = shutil.get_terminal_size().columns
    if columns < _WIDE:
        formatter.width = max(columns - 2, 20)
        formatter.write_dl = functools.partial(formatter.write_dl, col_max=max(columns // 5, 6))


def _write_examples(formatter: Any, name: str) -> None:
    lines = EXAMPLES.get(name, ())
    if lines:
        formatter.write("\nExamples:\n")
        for line in lines:
            formatter.write(f"  {line}\n")  # not wrapped: it is there to be copied


class Command(TyperCommand):
    """A command whose help ends in examples."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Help, then examples."""
        _fit(formatter)
        self.rich_markup_mode = _markup()
        super().format_help(ctx, formatter)
        _write_examples(formatter, self.name or "")


class Group(TyperGroup):
    """All commands; what any of them raises ends here, as one line and an exit code."""

    debug = False
    as_json = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Help, then examples and the exit codes."""
        _fit(formatter)
        self.rich_markup_mode = _markup()
        super().format_help(ctx, formatter)
        _write_examples(formatter, "")
        formatter.write("\nExit codes:\n")
        for code, meaning in MEANING.items():
            formatter.write(f"  {code:<3} {meaning}\n")

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse, run, and end the process; ``standalone_mode=False`` returns the code instead."""
        code = self._run(args, prog_name, complete_var, windows_expand_args, extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(
        self,
        args: Sequence[str] | None,
        prog_name: str | None,
        complete_var: str | None,
        windows_expand_args: bool,
        extra: dict[str, Any],
    ) -> int:
        self.debug = self.as_json = False
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except BrokenPipeError:
            return _reader_is_gone()
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                return _reader_is_gone()
            return report_error(error, as_json=self.as_json, debug=self.debug)


def _reader_is_gone() -> int:
    """``sacplan devices | head -1``: nobody reads on, and Python must not complain of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def set_debug(ctx: typer.Context, value: bool) -> bool:
    """Callback of ``--debug``, which counts wherever it stands."""
    root: Any = ctx.find_root().command
    root.debug = root.debug or value
    return value


def set_json(ctx: typer.Context, value: bool) -> bool:
    """Callback of ``--json``: errors are objects too."""
    root: Any = ctx.find_root().command
    root.as_json = root.as_json or value
    return value
