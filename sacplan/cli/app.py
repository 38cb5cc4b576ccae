"""All commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

from sacplan.cli import capacity, certify, fit, mcp, steps, surveys
from sacplan.cli import options as o
from sacplan.cli.command import Command, CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    name="sacplan",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        import sacplan

        typer.echo(f"sacplan {sacplan.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: o.Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Plan which activations a PyTorch training step keeps and which it recomputes, under a memory budget."""
    # ``sacplan`` alone: the help, with exit code 0.
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for _entry in (
    fit.fit,
    certify.certify,
    steps.profile,
    steps.plan,
    steps.verify,
    surveys.show_file,
    surveys.frontier,
    surveys.report,
    capacity.max_batch,
    capacity.throughput,
    surveys.layouts,
    surveys.devices,
    mcp.mcp,
):
    # A short help is always shown whole; of a long help, the first line would be cut.
    app.command(_entry.name, cls=Command, short_help=_entry.short)(_entry.run)
