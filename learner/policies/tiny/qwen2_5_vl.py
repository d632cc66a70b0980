"""A Qwen2.5-VL of random weights, small enough to train and to sample on one CPU core.

The folder it writes has the layout of a released checkpoint (weights, tokenizer, processors, chat template), so
everything that runs a real Qwen2.5-VL runs this one, offline and without remote code. It is what tests, examples and
CPU benchmarks train.
"""

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import (
    INITIALIZER_RANGE,
    MAX_POSITIONS,
    VISION_TEMPLATE,
    build_tokenizer,
    media_token_ids,
)

PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
PIXELS_PER_TOKEN = (PATCH_SIZE * MERGE_SIZE) ** 2
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
    processor = build_processor()
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


def build_processor() -> Qwen2_5_VLProcessor:
    """Tokenizer, image and video processor, and the Qwen2.5-VL chat template without a default system prompt.

    An image takes 1 to `MAX_IMAGE_TOKENS` tokens, one for each 28x28 pixels.
    """
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN}
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
