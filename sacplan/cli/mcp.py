"""The command ``mcp``: the commands that answer questions, as tools of a Model Context Protocol server on stdio.

Each tool runs the command of its name with ``--json`` in a process of its own, and has that command's help for its
description.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import typer

from sacplan.cli.command import command
from sacplan.cli.output import CommandResult
from sacplan.errors import SacplanError

if TYPE_CHECKING:
    from mcp.server import MCPServer

TOOLS = ("fit", "plan", "profile", "max-batch", "devices")


@command("mcp", "Serve fit, plan and profile to agents.", examples=[])
def mcp(context: typer.Context) -> CommandResult:
    """Run a Model Context Protocol server on standard input and output, until that is closed.

    Its tools are fit, plan, profile, max-batch and devices. It needs the package mcp: pip install 'sacplan[mcp]'.
    """
    server(context.find_root().command).run("stdio")
    return CommandResult({}, [])


def server(root: Any) -> MCPServer:
    """Return the server; its tools are commands of ``root``, the command line.

    Raises:
        SacplanError: the package ``mcp`` is not installed, or is older than 2.
    """
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        raise SacplanError(
            f"sacplan mcp needs the package mcp 2 ({error}): pip install 'sacplan[mcp]'."
        ) from error
    tools = MCPServer("sacplan")
    for name in TOOLS:
        tools.add_tool(_tool(name), name=name, description=_help(root, name))
    return tools


def _help(root: Any, name: str) -> str:
    """Return the help of a command as it is in a pipe, without boxes."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        root.main([name, "--help"], prog_name="sacplan", standalone_mode=False)
    return said.getvalue()


def _tool(name: str) -> Any:
    def run(arguments: list[str]) -> dict[str, Any]:
        words = [sys.executable, "-m", "sacplan", name, *arguments, "--json"]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer

    return run
