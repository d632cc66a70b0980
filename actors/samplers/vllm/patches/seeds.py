"""Runs inside vLLM's engine process: on CPU, the random numbers of a token depend only on the request's seed and the
token's position.

vLLM 0.32's CPU sampler has a `torch.Generator` per request, which advances with every engine step. A step with only a
part of a prefill also samples a token, which is discarded, and vLLM then rewinds the generator by `set_offset`. CPU
generators have no offset, so the engine dies when a prefill is split by a long prompt, a small token budget, a small KV
cache, or recomputation after a preemption or a weight push.

Here the generator of a request is replaced by the stateless `TokenSeeds`, so that discarded, preempted and recomputed
steps do not change later draws. vLLM's GPU runners need no patch: the V2 runner hashes seed and position, and the V1
runner's CUDA generators have an offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu_input_batch import InputBatch

SEEDS = 2**31  # seeds are below this, like in vLLM
FIRST_INCREMENT, SECOND_INCREMENT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)

_forward = TopKTopPSampler.forward_cpu
_add_request = InputBatch.add_request


class TokenSeeds:
    """The seeds of one request's tokens; replaces the `torch.Generator` in vLLM's batch."""

    def __init__(self, request: Any) -> None:
        """`request` is vLLM's `CachedRequestState`, whose list of sampled tokens grows."""
        self.seed: int = request.sampling_params.seed
        self._request = request

    @property
    def position(self) -> int:
        """Returns the index of the next sampled token of the response."""
        return len(self._request.output_token_ids)

    def generator(self) -> torch.Generator:
        """Returns a generator for the next token, for samplers of vLLM that need one."""
        seed = token_seeds(np.array([self.seed]), np.array([self.position]))[0]
        return torch.Generator().manual_seed(int(seed))

    def get_offset(self) -> int:
        """Returns 0: vLLM rewinds the generator if a sampled token is discarded, and this one has no state."""
        return 0

    def set_offset(self, offset: int) -> None:
        """See `get_offset`."""


def token_seeds(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Hashes int64 [B] request seeds and [B] positions to int64 [B] below `SEEDS`.

    Uses one step of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") for each.
    """
    with np.errstate(over="ignore"):
        hashed = _mixed(seeds.astype(np.uint64) * FIRST_INCREMENT + FIRST_INCREMENT)
        hashed = _mixed(hashed + (positions.astype(np.uint64) + np.uint64(1)) * SECOND_INCREMENT)
    return (hashed >> np.uint64(33)).astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer; uint64, wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_by_position() -> None:
    """Patches the CPU engines of this process; engines on GPUs are unchanged."""
    InputBatch.add_request = _added  # type: ignore[method-assign, assignment]  # a patch of vLLM
    TopKTopPSampler.forward_cpu = _sampled  # type: ignore[method-assign, assignment]  # and of its generators


def _added(batch: InputBatch, request: Any) -> int:
    if request.generator is not None and batch.device.type == "cpu" and not isinstance(request.generator, TokenSeeds):
        request.generator = TokenSeeds(request)
    return _add_request(batch, request)


def _sampled(
    sampler: TopKTopPSampler, logits: Tensor, generators: dict[int, TokenSeeds], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Samples [B, V] logits by Gumbel-max: returns tokens, int64 [B], and optionally float32 [B, V] log-probs.

    `generators` has the rows of requests with a seed; other rows use torch's global generator.
    """
    if sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
        return _forward(sampler, logits, {row: drawn.generator() for row, drawn in generators.items()}, k, p)
    logits = apply_top_k_top_p(logits, k, p).to(torch.float32)
    seeds = torch.randint(0, SEEDS, logits.shape[:1])
    if generators:
        drawn = list(generators.values())
        values = token_seeds(np.array([one.seed for one in drawn]), np.array([one.position for one in drawn]))
        seeds[list(generators)] = torch.from_numpy(values)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, seeds), logprobs
