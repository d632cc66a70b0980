"""Structured concurrency in one call: await several coroutines side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_all(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order. The first failure cancels the rest and is raised as itself, so that callers catch it by type."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* Exception as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in running]


async def outcomes(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order, an `Exception` where a call failed; the others are waited for. Cancelling it cancels all."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
    return list(found)
