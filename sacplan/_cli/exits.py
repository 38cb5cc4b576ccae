"""Exit codes, and the one line that is said about what went wrong."""

from __future__ import annotations

import re
import traceback
from typing import Any

import typer

from sacplan._cli.output import err_console, print_json
from sacplan.errors import InfeasibleBudget, SacplanError

UNEXPECTED = 1
BAD_INPUT = 2
INFEASIBLE = 3
VERIFICATION_FAILED = 4
INTERRUPTED = 130

MEANING = {
    0: "done",
    UNEXPECTED: "an unexpected error",
    BAD_INPUT: "bad input",
    INFEASIBLE: "no plan fits the budget",
    VERIFICATION_FAILED: "verification failed",
    INTERRUPTED: "interrupted",
}

# typer brings its own copy of click since 0.26; before, it used the installed one
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class TargetError(SacplanError):
    """A target that cannot be loaded, or whose own code failed."""


class OutputError(SacplanError):
    """A file that cannot be written, or must not be."""


class VerificationFailed(SacplanError):
    """The plan does not hold what it says; ``facts`` is what the JSON output gets."""

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = facts


def exit_code_of(error: BaseException) -> int:
    """Which code an error ends the process with."""
    if isinstance(error, InfeasibleBudget):
        return INFEASIBLE
    if isinstance(error, VerificationFailed):
        return VERIFICATION_FAILED
    if isinstance(error, (SacplanError, OSError, UsageProblem)):
        return BAD_INPUT
    return UNEXPECTED


def report_error(error: Exception, *, as_json: bool, debug: bool) -> int:
    """One line on stderr, with ``--json`` an object on stdout; returns the exit code."""
    code = exit_code_of(error)
    if debug:
        traceback.print_exception(error)
    message, hints = _message(error)
    if as_json:
        print_json(_facts(error, message, code))
    console = err_console()
    console.print(f"error: {message}", style="bold red", soft_wrap=True, markup=False)
    if code == UNEXPECTED and not debug:
        hints = [*hints, "--debug shows where it comes from"]
    for hint in hints:
        console.print(f"hint: {hint}", soft_wrap=True, markup=False)
    return code


def _facts(error: Exception, message: str, code: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
    if isinstance(error, InfeasibleBudget):
        facts |= {
            "budget_bytes": error.budget_bytes,
            "smallest_feasible_bytes": error.smallest_feasible_bytes,
            "binding": error.binding,
        }
    if isinstance(error, VerificationFailed):
        return error.facts | {"error": facts}
    return {"error": facts}


# arguments of the library in its messages, and what they are here
_OPTIONS = (
    (r'budget="(\w+)"', r"--budget \1"),
    (r"\bfsdp_units: ", "--fsdp-unit: "),
    (r'fsdp_units=\[\.\.\., ""\]', "--fsdp-unit ''"),
    (r"leave world_size at 1", "leave --world-size out"),
)


def _with_options(text: str) -> str:
    for argument, option in _OPTIONS:
        text = re.sub(argument, option, text)
    return text


def _message(error: Exception) -> tuple[str, list[str]]:
    """One line, and what to try; notes on the exception (PEP 678) are hints."""
    hints = list(getattr(error, "__notes__", ()))
    if isinstance(error, UsageProblem):
        context = getattr(error, "ctx", None)
        if context is not None:
            hints.append(f"{context.command_path} --help")
        text = error.format_message()  # type: ignore[attr-defined]
    elif isinstance(error, InfeasibleBudget):
        text = _with_options(str(error))
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, SacplanError):
        text = _with_options(str(error))
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split()), hints
