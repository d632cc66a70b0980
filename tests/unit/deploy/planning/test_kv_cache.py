"""The KV cache that one sequence takes, and the refusal of a smaller one before an engine starts."""

from __future__ import annotations

import pytest

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.kv_cache import refuse_small_cache, sequence_bytes
from mobula.learner.policies.shapes import ModelShape, shape_of_values, tiny_shape
from mobula.learner.policies.tiny import TINY

SMOLLM2 = {  # 135M
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MIB = 2**20


def config(*words: str) -> RunConfig:
    return load_config(["experiment=own", "policy.model=some", "data.path=none", *words])


def test_a_sequence_takes_its_blocks_in_every_layer_and_one_block_more() -> None:
    """3,072 tokens x 30 layers x keys and values of 3 heads x 64 x 4 bytes, and 32 tokens that vLLM sets apart."""
    shape = shape_of_values(SMOLLM2)
    assert sequence_bytes(config(), shape, 3072) == (3072 + 32) * 30 * 2 * 3 * 64 * 4 == 143_032_320
    assert sequence_bytes(config("resources=two_gpu"), shape, 3072) == 143_032_320 / 2, "bfloat16"
    assert sequence_bytes(config(), shape, 3073) == (3104 + 32) * 46_080


def test_windowed_layers_keep_their_window_and_the_tokens_of_a_step() -> None:
    shape = tiny_shape("gemma3", tie_word_embeddings=False)
    assert (shape.cache.num_full + shape.cache.num_windowed, shape.cache.num_states) == (shape.text.num_layers, 0)
    token = 4 * shape.cache.width
    windowed = -(-(shape.cache.window + 4096) // 32) * 32
    kinds = [n for n in (shape.cache.num_full, shape.cache.num_windowed) if n]
    expected = shape.cache.num_full * 131072 + shape.cache.num_windowed * windowed + min(kinds) * 32
    assert sequence_bytes(config("sampler.vllm.max_num_batched_tokens=4096"), shape, 131072) == expected * token


def test_layers_with_a_state_keep_one_and_make_blocks_as_long_as_it() -> None:
    """Three states of the tiny Qwen3.5: 3 x (2 x 256 + 512) inputs and 4 heads of 128 x 128; two heads of 64 attend."""
    cache = tiny_shape("qwen3.5", tie_word_embeddings=False).cache
    assert (cache.num_full, cache.num_windowed, cache.num_states) == (1, 0, 3)
    assert cache.state_width == 3 * (2 * 256 + 512) + 4 * 128 * 128 == 68_608
    block = -(-68_608 // (32 * cache.width)) * 32
    tokens = -(-3072 // block) * block + 3 * block + block
    shape = tiny_shape("qwen3.5", tie_word_embeddings=False)
    assert sequence_bytes(config(), shape, 3072) == tokens * cache.width * 4


@pytest.mark.parametrize("name", TINY)
def test_every_family_has_a_cache(name: str) -> None:
    shape = tiny_shape(name, tie_word_embeddings=False)
    cache = shape.cache
    assert cache.num_full + cache.num_windowed + cache.num_states == shape.text.num_layers
    assert cache.width == 2 * shape.text.num_kv_heads * shape.text.head_dim


def test_a_cache_that_holds_no_sequence_is_refused_by_the_keys_that_matter() -> None:
    shape: ModelShape = shape_of_values(SMOLLM2)
    long = ("sampler.max_model_len=3072", "sampler.max_tokens=1024")
    refuse_small_cache(config("sampler.vllm.kv_cache_bytes=143032320", *long), shape)
    with pytest.raises(PreflightError) as refused:
        refuse_small_cache(config(f"sampler.vllm.kv_cache_bytes={128 * MIB}", *long), shape)
    assert "set sampler.vllm.kv_cache_bytes=143032320 or more" in str(refused.value)
    assert "or sampler.max_model_len=2880 or less" in str(refused.value)
    shorter = ("sampler.max_model_len=2880", "sampler.max_tokens=1024")
    refuse_small_cache(config(f"sampler.vllm.kv_cache_bytes={128 * MIB}", *shorter), shape)
    refuse_small_cache(config("sampler=huggingface"), shape)
