"""The server for agents, asked by the official client over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

pytest.importorskip("mcp.server", reason="the package mcp is not installed")

from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client


async def _asked(*questions: tuple[str, list[str]]) -> tuple[dict[str, str], list[Any]]:
    """The tools with their descriptions, and the answers."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "sacplan", "mcp"], env=dict(os.environ)
    )
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools = {tool.name: tool.description or "" for tool in (await session.list_tools()).tools}
        found = [await session.call_tool(name, {"arguments": words}) for name, words in questions]
        return tools, [json.loads(getattr(answer.content[0], "text")) for answer in found]  # noqa: B009


def test_tools_answer_as_the_command_line_does() -> None:
    tools, (devices, failed) = asyncio.run(_asked(("devices", []), ("fit", ["hf:gpt2", "--bacth", "2"])))
    assert list(tools) == ["fit", "plan", "profile", "max-batch", "devices"]
    assert "--device" in tools["fit"]
    assert "h100" in {row["name"] for row in devices["devices"]}
    assert "--bacth" in failed["error"]["message"]
