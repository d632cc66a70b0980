"""Tool calls in the text of a policy: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from actors.environments.base import Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 32  # of one turn that are read


def parse_tool_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """Every call in `text`, each with a status. Never raises: a malformed call is an observation for the policy.

    The time is linear in the length of the text; calls after the first 32 are not read.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [Tool("f", "", {})])
        (ToolCall(name='f', arguments={}, status='ok'),)
    """
    known = {tool.name for tool in tools}
    calls: list[ToolCall] = []
    start = text.find(OPEN)
    while start >= 0 and len(calls) < MAX_CALLS:
        begin = start + len(OPEN)
        end = text.find(CLOSE, begin)
        if end < 0:
            calls.append(ToolCall("", {}, "unclosed_block"))
            break
        calls.append(_call(text[begin:end], known))
        start = text.find(OPEN, end + len(CLOSE))
    return tuple(calls)


def describe_tools(tools: Sequence[Tool]) -> str:
    """How to call the tools, for the first observation of an environment."""
    described = [
        json.dumps({"name": t.name, "description": t.description, "arguments": dict(t.parameters)}) for t in tools
    ]
    example = f'{OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}'
    return "\n".join(["Tools:", *described, f"Call a tool with {example}"])


def _call(body: str, known: set[str]) -> ToolCall:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # nested too deeply, or no JSON
        return ToolCall("", {}, "invalid_json")
    if not isinstance(value, dict):
        return ToolCall("", {}, "malformed_structure")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "missing_name")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "malformed_structure")
    return ToolCall(name, arguments, "ok" if name in known else "unknown_tool")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
