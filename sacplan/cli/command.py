"""Turn a function into a command: its options, its help, and one place for what it returns and raises.

    @command("plan", "Choose what to discard.", examples=["sacplan plan train.py:make --budget 70%"])
    def plan(source: o.Source, *, step: o.StepOptions) -> CommandResult: ...

A parameter that is a dataclass stands for one option per field. Every command has ``--json`` and ``--debug`` as well.
Rich formats the help on a terminal that is wide enough. In a pipe or on a narrow terminal it is plain text, since boxes
would break the lines.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from sacplan.cli import options as o
from sacplan.cli.exits import INTERRUPTED, MEANING, report_error
from sacplan.cli.output import CommandResult, say

_WIDE = 72  # columns that typer's panels need for our options

EXAMPLES: dict[str, Sequence[str]] = {
    "": (
        "sacplan plan hf:gpt2 --batch 16 --seq 1024 --budget 70% -o plan.json",
        "sacplan verify hf:gpt2 plan.json",
    )
}
"""Lines that ``--help`` shows to be copied, by command. The tests run every one."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: its name, its line in the list of commands, and the function that typer is given."""

    name: str
    short: str
    run: Callable[..., None]


def command(
    name: str, short: str, *, examples: Sequence[str], omit: Collection[str] = ()
) -> Callable[[Callable[..., CommandResult]], CommandEntry]:
    """Make a command of a function that returns a ``CommandResult``.

    Args:
        name: as a person types it.
        short: its line in the list of commands.
        examples: lines for ``--help``.
        omit: fields of option groups that this command does not offer. They keep their defaults.
    """
    EXAMPLES[name] = examples

    def entry(function: Callable[..., CommandResult]) -> CommandEntry:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, Any] = {}
        # Typer reads the parameters of a function. So a function is made whose signature has an option for
        # each field of a group, and which builds the groups again from what typer passes.
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            hint = hints[parameter.name]
            # ``Annotated[group, options]``: a dataclass of the library, with an option for each field.
            group: Any = getattr(hint, "__origin__", hint)
            extra: Any = getattr(hint, "__metadata__", ({},))[0]
            if is_dataclass(group):
                groups[parameter.name] = group
                types = get_type_hints(group, include_extras=True)
                options = [
                    (f.name, Annotated[types[f.name], extra[f.name]] if extra else types[f.name], f.default)
                    for f in fields(group)
                    if f.name not in omit
                ]
            else:
                options = [(parameter.name, hint, parameter.default)]
            parameters += (_parameter(*option) for option in options)
        parameters += [_parameter("as_json", o.Json, False), _parameter("debug", o.Debug, False)]

        def run(*, as_json: bool, debug: bool, **given: Any) -> None:
            for parameter, group in groups.items():
                # Fields that the command omits are not given, and keep their defaults.
                names = {f.name for f in fields(group)} & given.keys()
                given[parameter] = group(**{n: given.pop(n) for n in names})
            result = function(**given)
            result.print(as_json=as_json)
            raise typer.Exit(result.exit_code)

        run.__doc__ = function.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        return CommandEntry(name, short, run)

    return entry


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _choose_help(command: TyperCommand | TyperGroup) -> None:
    """Choose rich help where there is room, and plain help elsewhere."""
    wide = shutil.get_terminal_size().columns >= _WIDE
    rich = sys.stdout.isatty() and wide and not os.environ.get("NO_COLOR")
    command.rich_markup_mode = "rich" if rich else None


def _write_lines(formatter: Any, title: str, lines: Sequence[str]) -> None:
    formatter.write(f"\n{title}:\n" + "".join(f"  {line}\n" for line in lines))  # not wrapped: to be copied


class Command(TyperCommand):
    """A command whose help ends in examples. ``--compile`` without a pattern means the whole model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command."""
        words = []
        for word, after in itertools.pairwise([*args, "-"]):
            words += [word, ""] if word == "--compile" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the examples."""
        _choose_help(self)
        super().format_help(ctx, formatter)
        _write_lines(formatter, "Examples", EXAMPLES[self.name or ""])


class CommandGroup(TyperGroup):
    """All commands. An error that one of them raises becomes one line and an exit code here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the examples and the exit codes."""
        _choose_help(self)
        super().format_help(ctx, formatter)
        _write_lines(formatter, "Examples", EXAMPLES[""])
        _write_lines(formatter, "Exit codes", [f"{code:<3} {meaning}" for code, meaning in MEANING.items()])

    def main(  # type: ignore[override]  # nobody gives more by position
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Parse, run, and end the process. With ``standalone_mode=False`` return the exit code instead."""
        words = sys.argv[1:] if args is None else args
        try:
            # Never in click's standalone mode, in which it prints errors in its own way and ends the process.
            code = super().main(args, standalone_mode=False, **extra)
            # Here and not when Python ends, so that a closed pipe is an error that is caught below.
            sys.stdout.flush()
            code = code if isinstance(code, int) else 0
        except typer.Abort:  # the user has ended a question
            code = INTERRUPTED
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # sacplan devices | head -1: the reader has gone, and Python would complain when it flushes stdout.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = 0
            else:
                # Looked up in the words: parsing may have failed before it reached these options.
                code = report_error(error, as_json="--json" in words, debug="--debug" in words)
        # Typer has turned an interrupt into this code.
        if code == INTERRUPTED:
            say("interrupted")
        # A test, or code that calls ``main``, wants the code and not the end of the process.
        if standalone_mode:
            sys.exit(code)
        return code
