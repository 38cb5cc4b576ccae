"""All commands under one name. Each calls one function of the library, and shows what that returns."""

from __future__ import annotations

from typing import Annotated

import typer

from sacplan._cli import options as o
from sacplan._cli import steps, surveys
from sacplan._cli.group import Command, Group

app = typer.Typer(
    cls=Group,
    name="sacplan",
    help="Plan which activations a PyTorch training step keeps and which it recomputes, under a memory budget.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"sacplan {version('sacplan')}")
        except PackageNotFoundError:  # run from a clone that is not installed
            import sacplan

            typer.echo(f"sacplan {sacplan.__version__}")
        raise typer.Exit


@app.callback()
def everything(
    ctx: typer.Context,
    debug: o.DebugOption = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Plan which activations a PyTorch training step keeps and which it recomputes, under a memory budget."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


_COMMANDS = (
    ("profile", steps.profile_command, "Record one training step."),
    ("plan", steps.plan_command, "Choose what to discard, under a budget."),
    ("verify", steps.verify_command, "Run one step with a plan applied."),
    ("frontier", surveys.frontier_command, "Peak against recomputation, all solvers and modes."),
    ("report", surveys.report_command, "A page, figures and a trace."),
    ("max-batch", surveys.max_batch_command, "The largest batch that a plan holds."),
    ("throughput", surveys.throughput_command, "The batch with the most samples per second."),
    ("devices", surveys.devices_command, "The devices that are known."),
)
# a short help is always shown whole, where the first line of a long one is cut
for _name, _function, _short in _COMMANDS:
    app.command(_name, cls=Command, short_help=_short)(_function)
