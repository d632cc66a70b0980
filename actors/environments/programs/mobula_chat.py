"""The harness `mobula-chat` of verifiers: each segment is one answer to the conversation, asked for in this process."""

from __future__ import annotations

from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["MobulaChat"]


class MobulaChat(Harness[HarnessConfig]):
    """Needs neither a sandbox nor a download, as the chat programs of verifiers do. It calls no tools."""

    APPENDS_SYSTEM_PROMPT = True
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
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with httpx.AsyncClient(timeout=None) as client:  # the rollout's own deadline counts
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        return ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text if answer.is_error else "")
