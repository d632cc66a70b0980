"""Patch of vLLM's scheduler, in the process of the engine core: sends every image of a new request to the worker.

Replaces `vllm.v1.core.sched.output.strip_covered_mm_data`. vLLM 0.32 does not send an image to the worker when the
prefix cache covers its tokens, as it does for every sibling but the first. If such a request is preempted later, by a
weight push or for lack of KV blocks, and the prefix cache no longer covers them, the worker has nothing to embed and
the engine dies. With one rank the worker shares the core's process, so an image that is sent costs nothing; with
`resources.rollout.tensor_parallel` above 1 it is copied to the worker processes once for each sibling.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched import output


def keep_images() -> None:
    """Patches this process: the scheduler also sends images of a new request that the prefix cache covers."""
    output.strip_covered_mm_data = _all_of_them


def _all_of_them(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return mm_features
