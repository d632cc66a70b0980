"""Minimum KV cache of an engine: one sequence of the maximum length in vLLM."""

from __future__ import annotations

from math import ceil

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.learner.policies.shapes import ModelShape


def sequence_bytes(config: RunConfig, shape: ModelShape, length: int) -> int:
    """Bytes of KV cache with which a vLLM engine takes one sequence of `length` tokens.

    Every layer keeps whole blocks: all tokens, those of its window and of one engine step, or one block with a state.
    vLLM sets one more block apart, and makes blocks so long that a state fits into one.
    """
    vllm, cache = config.sampler.vllm, shape.cache
    token = max(1, cache.width // config.resources.rollout.tensor_parallel) * DTYPE_BYTES[config.resources.dtype]
    block = vllm.block_size
    if cache.num_states:
        state = cache.state_width * DTYPE_BYTES[config.resources.dtype]
        block *= ceil(state / (block * token))
    whole = ceil(length / block)
    windowed = ceil(min(cache.window + vllm.max_num_batched_tokens, length) / block)
    kinds = [n for n in (cache.num_full, cache.num_windowed, cache.num_states) if n]
    blocks = cache.num_full * whole + cache.num_windowed * windowed + cache.num_states + min(kinds)
    return blocks * block * token


def refuse_small_cache(config: RunConfig, shape: ModelShape) -> None:
    """Checks that the KV cache holds one sequence of the longest length; vLLM checks it when its model is loaded.

    Raises:
        PreflightError: the KV cache is too small.
    """
    sampler, vllm = config.sampler, config.sampler.vllm
    if sampler.kind is not SamplerKind.VLLM or config.offline.is_on or vllm.kv_cache_bytes == 0:
        return  # a cache that follows from the plan holds one
    needed = sequence_bytes(config, shape, sampler.max_model_len)
    if vllm.kv_cache_bytes >= needed:
        return
    shorter = range(0, sampler.max_model_len, vllm.block_size)
    length = max(n for n in shorter if n == 0 or sequence_bytes(config, shape, n) <= vllm.kv_cache_bytes)
    shorten = f", or sampler.max_model_len={length} or less" if length else ""
    raise PreflightError(
        f"sampler.vllm.kv_cache_bytes={vllm.kv_cache_bytes} holds no sequence of sampler.max_model_len="
        f"{sampler.max_model_len} tokens of policy.model={config.policy.model} in {config.resources.dtype}, which "
        f"takes {needed} bytes: set sampler.vllm.kv_cache_bytes={needed} or more, several times this for as many "
        f"sequences at a time{shorten}"
    )
