"""Runs inside vLLM's engine process: its worker computes M-RoPE positions once for siblings, and once a step for all.

A request with n samples is n requests to the worker, and vLLM 0.32 derives the same three rows of positions from the
same ids and pictures for each: a share of the whole that grows with the length of prompts and the size of groups. In
every step after, it makes an array of one number for each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_compute = GPUModelRunner._init_mrope_positions
_fill = GPUModelRunner._calc_mrope_positions


@dataclass(frozen=True)
class _Positions:
    """What was computed last, and from what. `positions` is never written to: pictures are never pruned here."""

    input_ids: list[int]
    pictures: list[Any]
    positions: Tensor  # int64 [3, P]
    delta: int

    def fit(self, request: Any) -> bool:
        return request.prompt_token_ids == self.input_ids and _pictures(request) == self.pictures


def compute_positions_once() -> None:
    """Of a prompt and of a step. Siblings come one after the other: to remember the last prompt is enough."""
    GPUModelRunner._init_mrope_positions = _shared
    GPUModelRunner._calc_mrope_positions = _filled


def _shared(runner: GPUModelRunner, request: Any) -> None:
    last: _Positions | None = getattr(runner, "_mobula_positions", None)
    if last is not None and last.fit(request):
        request.mrope_positions, request.mrope_position_delta = last.positions, last.delta
        return
    _compute(runner, request)
    if request.prompt_token_ids is not None:
        runner._mobula_positions = _Positions(
            request.prompt_token_ids, _pictures(request), request.mrope_positions, request.mrope_position_delta
        )


def _filled(runner: GPUModelRunner, scheduled: Any) -> None:
    """Fill in the positions of a step's tokens, in one go where each request has one token behind its prompt."""
    batch = runner.input_batch
    num_known = batch.num_computed_tokens_cpu[: batch.num_reqs]
    is_decoding = scheduled.total_num_scheduled_tokens == batch.num_reqs  # one at least is scheduled of each
    if not is_decoding or (num_known < batch.num_prompt_tokens[: batch.num_reqs]).any():
        _fill(runner, scheduled)
        return
    deltas = [runner.requests[request_id].mrope_position_delta for request_id in batch.req_ids]
    runner.mrope_positions.np[:, : batch.num_reqs] = num_known + np.asarray(deltas)


def _pictures(request: Any) -> list[Any]:
    """What distinguishes pictures and their places."""
    return [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
