"""Tool calls in the text of a policy: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mobula.actors.environments.base import Tool, ToolCall
from mobula.actors.environments.programs.call_text import CLOSE, MAX_CALLS, OPEN, CallText, read_calls

__all__ = ["CLOSE", "MAX_CALLS", "OPEN", "describe_tools", "parse_tool_calls"]


def parse_tool_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """Parses every call in `text`, each with a status. Never raises: the policy observes the error of a malformed call.

    The time is linear in the length of the text; calls after the first 32 are ignored.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [Tool("f", "", {})])
        (ToolCall(name='f', arguments={}, status='ok', detail=''),)
    """
    known = {tool.name: tool for tool in tools}
    return tuple(_checked(call, known.get(call.name)) for call in read_calls(text))


def describe_tools(tools: Sequence[Tool]) -> str:
    """Describes tools and the call syntax, for the first observation of an environment."""
    described = [
        json.dumps({"name": t.name, "description": t.description, "arguments": dict(t.parameters)}) for t in tools
    ]
    example = f'{OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}'
    return "\n".join(["Tools:", *described, f"Call a tool with {example}"])


def _checked(call: CallText, tool: Tool | None) -> ToolCall:
    """Checks a call against the parameters of the tool."""
    if call.status != "ok":
        return ToolCall(*call)
    if tool is None:
        return ToolCall(call.name, call.arguments, "unknown_tool", f"there is no tool {call.name!r}")
    unknown = sorted(set(call.arguments) - set(tool.parameters))
    if unknown and not any(name.startswith("**") for name in tool.parameters):
        takes = ", ".join(tool.parameters) or "none"
        return ToolCall(
            call.name, {}, "unknown_argument", f"{call.name} has no argument {unknown[0]!r}: it has {takes}"
        )
    return ToolCall(*call)
