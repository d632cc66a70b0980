"""A LLaVA 1.5 of random weights: it has no family file, so it shows the path of unknown families."""

from __future__ import annotations

from pathlib import Path

from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from mobula.learner.policies.tiny.tokenizer import build_tokenizer, chat_template, token_id
from mobula.learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

SIDE = 56
PATCH_SIZE = 14


def write_tiny_llava(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; every image takes 16 tokens."""
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"))
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image="<image>\\n"),
    )
    config = LlavaConfig(
        vision_config=vision_config(
            model_type="clip_vision_model", image_size=SIDE, patch_size=PATCH_SIZE, projection_dim=64
        ),
        text_config=decoder_config(tokenizer, model_type="llama", tie_word_embeddings=tie_word_embeddings),
        image_token_index=token_id(tokenizer, "<image>"),
        image_seq_length=(SIDE // PATCH_SIZE) ** 2,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        LlavaForConditionalGeneration,
        config,
        processor,
        seed=seed,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    )
