"""The harness `mobula-chat` of verifiers: a conversation with tools, in this process, with all of it in its texts."""

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
    """Needs neither a sandbox nor a download, as the chat programs of verifiers do.

    A segment ends with the first answer without a tool call. Tools are described in the system message, calls are read
    from the answer's text and their results are the user's next message: an endpoint needs no `tools`, and what the
    model saw and wrote is in the messages, to the letter.
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
            # The rollout has a deadline; the endpoint is on this machine, which no proxy reaches.
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            while True:
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                if reply.is_error:  # also where verifiers ends the rollout for a limit of its own
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
        said = [message_to_wire(message) for message in prompt or ()]
        if first and said and said[0]["role"] == "system" and said[0]["content"] == first:
            return said  # a later segment, whose conversation begins with it
        return [*messages, *said]


async def _result(call: CallText, connected: Mapping[str, Any], dispatch: Mapping[str, tuple[str, str]]) -> list[Wire]:
    """The result of a call as parts of a message; an error is reported to the model as text."""
    if call.status != "ok":
        return [{"type": "text", "text": f"error: no call ({call.status}: {call.detail}); {HOW}"}]
    if call.name not in dispatch:
        return [{"type": "text", "text": f"error: there is no tool {call.name!r}"}]
    given = await call_mcp(dict(connected), dict(dispatch), call.name, dict(call.arguments))
    return given if isinstance(given, list) else [{"type": "text", "text": given}]


def _joined(results: Sequence[list[Wire]]) -> str | list[Wire]:
    """The results of all calls as the content of one message: a text where they hold no images."""
    parts = [part for result in results for part in result]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
