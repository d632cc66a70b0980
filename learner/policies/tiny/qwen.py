"""Tiny vision models of the Qwen-VL kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mobula.learner.policies.tiny.writing import (
    HIDDEN_SIZE,
    INITIALIZER_RANGE,
    MAX_POSITIONS,
    VISION_TEMPLATE,
    build_tokenizer,
    decoder_config,
    media_token_ids,
    write_checkpoint,
)

# A Qwen2.5-VL of random weights, small enough to train and to sample on one CPU core.
#
# The folder it writes has the layout of a released checkpoint (weights, tokenizer, processors, chat template), so
# everything that runs a real Qwen2.5-VL runs this one, offline and without remote code. It is what tests, examples and
# CPU benchmarks train.

PATCH_SIZE = 14


MERGE_SIZE = 2


TEMPORAL_PATCH_SIZE = 2


QWEN2_5_VL_PIXELS_PER_TOKEN = (PATCH_SIZE * MERGE_SIZE) ** 2


MAX_IMAGE_TOKENS = 64


def write_tiny_qwen2_5_vl(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a random-weight Qwen2.5-VL checkpoint into `folder` and return `folder`.

    About 0.6 M float32 parameters. The same seed gives a byte-identical `model.safetensors`; the caller's random state
    is left as it was. Files already in the folder under the same names are overwritten.

    Example:
        >>> folder = write_tiny_qwen2_5_vl(Path("tiny"), seed=0)
        >>> model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
        >>> engine = vllm.LLM(model=str(folder), dtype="float32", enforce_eager=True)
    """
    processor = build_processor_qwen2_5_vl()
    model = build_model(processor.tokenizer, seed=seed, tie_word_embeddings=tie_word_embeddings)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def build_model(
    tokenizer: Qwen2Tokenizer, *, seed: int, tie_word_embeddings: bool
) -> Qwen2_5_VLForConditionalGeneration:
    """The model in float32 on the CPU, its vocabulary exactly that of `tokenizer`."""
    config = build_config(tokenizer, tie_word_embeddings=tie_word_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        model.to(device="cpu", dtype=torch.float32)  # type: ignore[call-arg]  # its decorator hides self
    # Only stop and pad ids: an engine that takes its sampling defaults from this file samples from the plain policy.
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


def build_config(tokenizer: Qwen2Tokenizer, *, tie_word_embeddings: bool) -> Qwen2_5_VLConfig:
    """Two text layers and two vision blocks; head_dim is 32, so the RoPE sections sum to 16."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=_vision_config(out_hidden_size=text["hidden_size"]),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )


def build_processor_qwen2_5_vl() -> Qwen2_5_VLProcessor:
    """Tokenizer, image and video processor, and the Qwen2.5-VL chat template without a default system prompt.

    An image takes 1 to `MAX_IMAGE_TOKENS` tokens, one for each 28x28 pixels.
    """
    size = {
        "shortest_edge": QWEN2_5_VL_PIXELS_PER_TOKEN,
        "longest_edge": MAX_IMAGE_TOKENS * QWEN2_5_VL_PIXELS_PER_TOKEN,
    }
    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": TEMPORAL_PATCH_SIZE}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=True, **patches
        ),
        chat_template=VISION_TEMPLATE,
    )


def _vision_config(*, out_hidden_size: int) -> dict[str, object]:
    """One windowed block, then one with full attention, so that both kinds are exercised."""
    return {
        "depth": 2,
        "initializer_range": INITIALIZER_RANGE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "window_size": 4 * PATCH_SIZE * MERGE_SIZE,
        "fullatt_block_indexes": [1],
        "out_hidden_size": out_hidden_size,
    }


def write_tiny_qwen2_vl(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.6 M parameters into `folder`; an image takes one token for each 28x28 pixels."""
    tokenizer = build_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        text_config=decoder_config(tokenizer, rope_parameters=rope, tie_word_embeddings=tie_word_embeddings),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN_SIZE,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "initializer_range": INITIALIZER_RANGE,
        },
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    size = {
        "shortest_edge": QWEN2_5_VL_PIXELS_PER_TOKEN,
        "longest_edge": MAX_IMAGE_TOKENS * QWEN2_5_VL_PIXELS_PER_TOKEN,
    }
    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=True, **patches
        ),
        chat_template=VISION_TEMPLATE,
    )
    return write_checkpoint(folder, Qwen2VLForConditionalGeneration, config, processor, seed=seed)


QWEN3_VL_PIXELS_PER_TOKEN = 32 * 32


QWEN3_VL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


def write_tiny_qwen3_vl(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.7 M parameters into `folder`; an image takes one token for each 32x32 pixels."""
    tokenizer = build_tokenizer()
    config = Qwen3VLConfig(
        text_config=decoder_config(
            tokenizer, head_dim=32, rope_parameters=QWEN3_VL_ROPE, tie_word_embeddings=tie_word_embeddings
        ),
        vision_config=vision_of(),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    return write_checkpoint(
        folder, Qwen3VLForConditionalGeneration, config, build_processor_qwen3_vl(tokenizer), seed=seed
    )


def vision_of(**own: Any) -> dict[str, Any]:
    """Three vision layers, of which the first two give DeepStack features."""
    return {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 16,
        "initializer_range": INITIALIZER_RANGE,
        "deepstack_visual_indexes": [0, 1],
    } | own


def build_processor_qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLProcessor:
    """Patches of 16x16, four of them a token."""
    size = {"shortest_edge": QWEN3_VL_PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * QWEN3_VL_PIXELS_PER_TOKEN}
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=False, **patches
        ),
        chat_template=VISION_TEMPLATE,
    )


NUM_EXPERTS = 4


def write_tiny_qwen3_vl_moe(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.9 M parameters into `folder`: two of four experts for each token."""
    tokenizer = build_tokenizer()
    config = Qwen3VLMoeConfig(
        text_config=decoder_config(
            tokenizer,
            head_dim=32,
            rope_parameters=QWEN3_VL_ROPE,
            moe_intermediate_size=32,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            tie_word_embeddings=tie_word_embeddings,
        ),
        vision_config=vision_of(),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    processor = build_processor_qwen3_vl(tokenizer)
    write_checkpoint(folder, Qwen3VLMoeForConditionalGeneration, config, processor, seed=seed)
    _transpose_experts(folder / "model.safetensors")
    return folder


def _transpose_experts(file: Path) -> None:
    """Released checkpoints hold experts as [E, H, 2 I] and [E, I, H]; transformers saves new ones as it computes."""
    state = load_file(file)
    for name, tensor in state.items():
        if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            state[name] = tensor.transpose(1, 2).contiguous()
    save_file(state, file, metadata={"format": "pt"})


QWEN3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}


DELTA_HEAD = 128  # of the kernels on CPU, which refuse 32


def write_tiny_qwen3_5(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 1.5 M parameters into `folder`; an image takes one token for each 32x32 pixels."""
    tokenizer = build_tokenizer()
    text = decoder_config(
        tokenizer,
        num_hidden_layers=4,  # of which the last one has attention
        head_dim=64,
        rope_parameters=QWEN3_5_ROPE,
        linear_key_head_dim=DELTA_HEAD,
        linear_value_head_dim=DELTA_HEAD,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        tie_word_embeddings=tie_word_embeddings,
    )
    vision = vision_of()
    del vision["deepstack_visual_indexes"]
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    return write_checkpoint(
        folder, Qwen3_5ForConditionalGeneration, config, build_processor_qwen3_vl(tokenizer), seed=seed
    )
