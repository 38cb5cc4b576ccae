"""Exit codes, and the one line that reports an error."""

from __future__ import annotations

import re
import traceback
from typing import Any

import typer

from sacplan.cli.output import CommandResult, print_json, say
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
    INFEASIBLE: "no plan fits the budget; of fit: the step does not fit as it is",
    VERIFICATION_FAILED: "verification failed",
    INTERRUPTED: "interrupted",
}

# Since 0.26 typer bundles click; before, it used the installed one. Either way its errors derive from this class.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class OutputError(SacplanError):
    """A file that cannot be written, or that must not be overwritten."""


class VerificationFailed(SacplanError):
    """The step is not what the plan says. ``answer`` holds what was observed."""

    def __init__(self, message: str, answer: CommandResult) -> None:
        super().__init__(message)
        self.answer = answer


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    # The order matters: the first two are ``SacplanError`` as well. Whatever is none of these is a bug, here
    # or in a target.
    if isinstance(error, InfeasibleBudget):
        return INFEASIBLE
    if isinstance(error, VerificationFailed):
        return VERIFICATION_FAILED
    if isinstance(error, (SacplanError, OSError, _UsageProblem)):
        return BAD_INPUT
    return UNEXPECTED


def report_error(error: Exception, *, as_json: bool, debug: bool) -> int:
    """Report an error in one line on stderr, and with ``--json`` as an object on stdout. Return the exit code."""
    code = exit_code_of(error)
    if debug:
        traceback.print_exception(error)
    # One line, since scripts read it.
    message = " ".join(_message(error).split())
    # A failed verification still has figures, which are shown as those of a successful one.
    answer = error.answer if isinstance(error, VerificationFailed) else CommandResult({}, ())
    if as_json:
        print_json({**answer.facts, "error": _facts(error, message, code)})
    else:
        answer.print(as_json=False)
    say(f"error: {message}", "bold red")
    for hint in _hints(error):
        say(f"hint: {hint}")
    if code == UNEXPECTED and not debug:
        say("hint: --debug shows where it comes from")
    return code


def _facts(error: Exception, message: str, code: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
    if isinstance(error, InfeasibleBudget):
        facts |= {
            "budget_bytes": error.budget_bytes,
            "smallest_feasible_bytes": error.smallest_feasible_bytes,
            "binding": error.binding,
        }
    return facts


# The library names its arguments in messages. These are the options that stand for them.
_OPTIONS = (
    (r'budget="(\w+)"', r"--budget \1"),
    (r"\bunits: ", "--fsdp-unit: "),
    (r"FSDP2\((\d+)\)", r"--world-size \1"),
    (r'units=\[\.\.\., ""\]', "--fsdp-unit ''"),
)


def _message(error: Exception) -> str:
    # Errors of parsing know how to name the option.
    if isinstance(error, _UsageProblem):
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, SacplanError):
        text = str(error)
        for argument, option in _OPTIONS:
            text = re.sub(argument, option, text)
        return text
    # Not ``str``, which begins with the error's number.
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _hints(error: Exception) -> list[str]:
    context = getattr(error, "ctx", None) if isinstance(error, _UsageProblem) else None
    usage = [] if context is None else [f"{context.command_path} --help"]
    return [*getattr(error, "__notes__", ()), *usage]
