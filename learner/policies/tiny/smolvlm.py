"""A SmolVLM of random weights: pictures in rows and columns of tiles, a Llama decoder."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from learner.policies.tiny.tokenizer import build_tokenizer, chat_template
from learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

TILE = 64
TOKENS_PER_TILE = 4
MAX_ROWS = 6


def write_tiny_smolvlm(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; a tile of 64x64 pixels takes 4 tokens."""
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
        "video_token": "<video>",
    }
    places = [f"<row_{i}_col_{j}>" for i in range(1, MAX_ROWS + 1) for j in range(1, MAX_ROWS + 1)]
    special = ("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", *places)
    tokenizer = build_tokenizer(special, named, eos="<end_of_utterance>")
    side = {"longest_edge": TILE}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size={"longest_edge": 2 * TILE}, max_image_size=side),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template(image="<image>", video="<video>", end="<end_of_utterance>"),
    )
    config = SmolVLMConfig(
        vision_config=vision_config(image_size=TILE, patch_size=16),
        text_config=decoder_config(tokenizer, model_type="llama", tie_word_embeddings=tie_word_embeddings),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, SmolVLMForConditionalGeneration, config, processor, seed=seed)
