"""The estimate of activations against the tensors that autograd keeps, on real models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from kept_bytes import kept_bytes
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.memory import Microbatch, checkpointing, logits_bytes, media_patches, training_bytes
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.head import Distribution, token_logprobs
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.shapes import shape_of_config
from mobula.learner.policies.tiny import TINY

TOLERANCE = 0.15
TOKENS = 256


def config(dtype: str, *words: str) -> RunConfig:
    words = words or ("learner.activation_checkpointing=none",)
    return load_config(["experiment=own", "resources=gpu_1", *words, f"resources.dtype={dtype}"], is_complete=False)


def vision_model() -> Qwen2_5_VLForConditionalGeneration:
    tiny = TINY["qwen2.5-vl"]
    found = tiny.new_config(tiny.new_tokenizer())
    text, vision = found.text_config, found.vision_config
    text.hidden_size, text.intermediate_size, text.num_attention_heads = 128, 384, 4
    vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.depth = 128, 384, 4, 6
    vision.out_hidden_size = 128
    return Qwen2_5_VLForConditionalGeneration(found)


def text_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=100,
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [text_model, vision_model])
def test_blocks_of_the_language_model_keep_what_is_estimated(build: Callable[[], torch.nn.Module], dtype: str) -> None:
    model = build().to(getattr(torch, dtype))
    hidden = model.config.get_text_config().hidden_size
    embeds = torch.randn(1, TOKENS, hidden, dtype=getattr(torch, dtype), requires_grad=True)
    measured = kept_bytes(
        lambda: model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state, model.parameters()
    )
    shape = shape_of_config(model.config)
    width = 2 * (shape.text.hidden + shape.text.intermediate) * getattr(torch, dtype).itemsize
    estimated = training_bytes(config(dtype), shape, Microbatch(1, TOKENS, TOKENS, 0))[0] - TOKENS * width
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_the_vision_tower_keep_what_is_estimated(dtype: str) -> None:
    model = vision_model().to(getattr(torch, dtype))
    pixels = torch.randn(256, 1176, dtype=getattr(torch, dtype), requires_grad=True)
    grid = torch.tensor([[1, 16, 16]])
    measured = kept_bytes(
        lambda: model.model.get_image_features(pixels, grid, return_dict=True).pooler_output, model.parameters()
    )
    shape = shape_of_config(model.config)
    assert shape.vision is not None
    width = 2 * (shape.vision.hidden + shape.vision.intermediate) * getattr(torch, dtype).itemsize
    estimated = training_bytes(config(dtype), shape, Microbatch(1, 0, 0, 256))[0] - 256 * width
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def test_log_probs_take_what_is_estimated_at_their_peak() -> None:
    """Bytes allocated by one call, counted operation by operation with the profiler."""
    rows, vocab = 128, 2048
    shape = replace(shape_of_config(text_model().config), vocab=vocab)
    hidden, head = torch.randn(rows, 64), torch.randn(vocab, 64, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)

    def forward() -> torch.Tensor:
        logits = hidden @ head.T  # held while log-probs are computed, as TokenPolicy does
        return token_logprobs(logits, targets, Distribution(0.7, (1, 2))).logprobs

    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        forward()
    now = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert logits_bytes(config("float32"), shape, rows) == pytest.approx(peak, rel=TOLERANCE)


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    shape = shape_of_config(text_model().config)
    batch = Microbatch(1, TOKENS, TOKENS, 0)
    with_blocks = config("float32", "learner.activation_checkpointing=blocks")
    assert (checkpointing(config("float32")), checkpointing(with_blocks)) == ("none", "blocks")
    assert training_bytes(with_blocks, shape, batch)[0] < training_bytes(config("float32"), shape, batch)[0] / 2


def test_the_largest_microbatch_shares_images_between_siblings() -> None:
    shape = shape_of_config(vision_model().config)
    found = Microbatch.of(
        config("float32", "learner.share_prompts=false", "learner.tokens_per_microbatch=30720"), shape
    )
    assert (found.rows, found.tokens, found.targets) == (10, 30720, 10240)
    assert found.patches == 2 * 2 * 3072  # two groups of eight siblings, two images of 768 tokens each


SHARED = ("learner.packing=true", "learner.share_prompts=true", "learner.tokens_per_microbatch=30720")


def test_the_largest_microbatch_has_each_prompt_once() -> None:
    """A group of eight responses of 1,024 tokens and a prompt of 2,048 takes 10,240 tokens."""
    shape = shape_of_config(vision_model().config)
    found = Microbatch.of(config("float32", *SHARED), shape)
    assert (found.rows, found.tokens, found.targets) == (24, 30720, 30720)
    assert found.patches == 15 * 2 * 3072, "responses of a few tokens leave space for 15 prompts"


def test_no_microbatch_of_shared_prompts_is_larger_than_estimated() -> None:
    shape, rng = shape_of_config(vision_model().config), np.random.default_rng(0)
    run = config("float32", *SHARED)
    largest = Microbatch.of(run, shape)
    for longest in (4, 64, 1024):
        lengths = [(int(rng.integers(1700, 2048)), rng.integers(1, longest + 1, 8).tolist()) for _ in range(40)]
        rows = [(n, RowOutline(own, prompt, (own,), 0, ())) for n, (prompt, owns) in enumerate(lengths) for own in owns]
        groups = [n for n, _ in rows]
        [plan] = split_microbatches([row for _, row in rows], run.learner, 1, groups)
        for batch in plan:
            prompts = {groups[i] for i in batch}
            own = sum(rows[i][1].num_targets for i in batch)
            assert own <= largest.targets and own + sum(lengths[n][0] for n in prompts) <= largest.tokens
            assert len(prompts) <= largest.patches // media_patches(run, shape) + 2, "prompts are up to a sixth shorter"
