"""What ``sacplan report`` writes, and where it may."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sacplan._cli.exits import OutputError
from sacplan._cli.files import check_output, replacing

if TYPE_CHECKING:
    import pandas as pd

    from sacplan import Plan, Profile

_FIGURES = ("memory", "frontier", "tradeoffs")
_FORMATS = ("png", "svg")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where each kind of report goes; None for one that was not asked for."""

    page: Path | None
    figures: Path | None
    trace: Path | None


def check(wanted: Wanted, force: bool) -> None:
    """``OutputError`` where nothing is asked for, or something is in the way. Before any work."""
    if wanted.page is None and wanted.figures is None and wanted.trace is None:
        raise OutputError(
            "nothing to write: give -o report.html, --png DIR, --trace memory.json, or several."
        )
    if wanted.page is not None:
        check_output(wanted.page, "report", force)
    if wanted.trace is not None:
        check_output(wanted.trace, "trace", force)
    if wanted.figures is not None:
        _check_directory(wanted.figures, force)


def _check_directory(directory: Path, force: bool) -> None:
    if not directory.exists():
        if not directory.parent.is_dir():
            raise OutputError(f"{directory} cannot be made: there is no directory {directory.parent}.")
        return
    if not directory.is_dir():
        raise OutputError(f"{directory} is a file; --png takes a directory.")
    for path in (directory / f"{name}.{suffix}" for name in _FIGURES for suffix in _FORMATS):
        # matplotlib signs what it draws
        if not force and path.exists() and b"atplotlib" not in path.read_bytes()[:4096]:
            raise OutputError(
                f"{path} is there and is not a figure of ours; choose another directory, or overwrite it with --force."
            )


def write(wanted: Wanted, profile: Profile, plan: Plan | None, curve: pd.DataFrame | None) -> list[str]:
    """Write what is wanted; returns the files."""
    written: list[Path] = []
    if wanted.page is not None:
        from sacplan._report.page import write_report

        with replacing(wanted.page) as part:
            write_report(part, profile, plan, curve)
        written.append(wanted.page)
    if wanted.trace is not None:
        from sacplan._report.trace_events import write_memory_trace

        with replacing(wanted.trace) as part:
            write_memory_trace(part, profile, plan)
        written.append(wanted.trace)
    if wanted.figures is not None:
        from sacplan._report.figures import save_figures

        written += save_figures(wanted.figures, profile, plan, curve, formats=_FORMATS)
    return [str(path) for path in written]
