"""Runs inside vLLM's engine process: its worker computes the M-RoPE positions of a prompt once, not for every sibling.

A request with n samples is n requests to the worker, and vLLM 0.32 derives the same three rows of positions from the
same ids and pictures for each: a share of the whole that grows with the length of prompts and the size of groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_compute = GPUModelRunner._init_mrope_positions


@dataclass(frozen=True)
class _Positions:
    """What was computed last, and of what. Nobody writes into `positions`: pictures are never pruned here."""

    input_ids: list[int]
    pictures: list[Any]
    positions: Tensor  # int64 [3, P]
    delta: int

    def fit(self, request: Any) -> bool:
        return request.prompt_token_ids == self.input_ids and _pictures(request) == self.pictures


def share_positions() -> None:
    """Siblings come one after the other: to remember the last prompt is enough."""
    GPUModelRunner._init_mrope_positions = _shared


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


def _pictures(request: Any) -> list[Any]:
    """What tells pictures and their places apart."""
    return [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
