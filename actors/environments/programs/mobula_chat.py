"""The harness `mobula-chat` of verifiers: a conversation with tools as plain text, in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
from call_text import CLOSE, OPEN, CallText, read_calls
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["MobulaChat"]

HOW = f'Call a tool with {OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}'

Wire = dict[str, Any]


class MobulaChat(Harness[HarnessConfig]):  # type: ignore[misc]  # verifiers has an environment of its own
    """Needs no sandbox and no download, unlike the chat programs of verifiers.

    A segment ends with the first answer without a tool call. The system message describes the tools, calls are parsed
    from the answer's text, and results are the next user message. The endpoint needs no support of `tools`, and the
    messages contain the exact text that the model read and wrote.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            messages = self._opening(data, tools)
            # No timeout: the rollout has one. No proxy: the endpoint is on this machine.
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            while True:
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                if reply.is_error:  # also if verifiers ends the rollout at a limit
                    return ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                text = reply.json()["choices"][0]["message"]["content"] or ""
                calls = read_calls(text) if tools else []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                results = [await _result(call, connected, dispatch) for call in calls]
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": _joined(results)}]

    def _opening(self, data: TaskData, tools: Sequence[Wire]) -> list[Wire]:
        system, prompt = self.resolve_prompt(data)
        described = "\n".join(["Tools:", *(json.dumps(tool["function"]) for tool in tools), HOW]) if tools else ""
        first = "\n\n".join(filter(None, (system, described)))
        messages: list[Wire] = [{"role": "system", "content": first}] if first else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        conversation = [message_to_wire(message) for message in prompt or ()]
        if first and conversation and conversation[0]["role"] == "system" and conversation[0]["content"] == first:
            return conversation  # a later segment already starts with the system message
        return [*messages, *conversation]


async def _result(call: CallText, connected: Mapping[str, Any], dispatch: Mapping[str, tuple[str, str]]) -> list[Wire]:
    """Runs a call and returns the parts of a message; errors are text for the model."""
    if call.status != "ok":
        return [{"type": "text", "text": f"error: no call ({call.status}: {call.detail}); {HOW}"}]
    if call.name not in dispatch:
        return [{"type": "text", "text": f"error: there is no tool {call.name!r}"}]
    result = await call_mcp(dict(connected), dict(dispatch), call.name, dict(call.arguments))
    return result if isinstance(result, list) else [{"type": "text", "text": result}]


def _joined(results: Sequence[list[Wire]]) -> str | list[Wire]:
    parts = [part for result in results for part in result]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
