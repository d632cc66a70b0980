"""Runs inside vLLM's engine process: its worker keeps the pictures of every running request.

vLLM 0.32 does not send a picture to the worker when the prefix cache covers its tokens, as it does for every sibling
but the first. If such a request is preempted later, by a push or for want of KV blocks, and the prefix cache no longer
covers them, the worker has nothing to embed and the engine dies. Pictures that are sent cost nothing here: worker and
scheduler share one process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched import output


def keep_pictures() -> None:
    """Send every picture of a new request to the worker, whatever the prefix cache covers."""
    output.strip_covered_mm_data = _all_of_them


def _all_of_them(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features
