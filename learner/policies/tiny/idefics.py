"""An Idefics 3 and a SmolVLM of random weights: images in rows and columns of tiles, a Llama decoder."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import build_tokenizer, chat_template, token_id
from mobula.learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

TILE = 64
TOKENS_PER_TILE = 4
MAX_ROWS = 6
ARCHITECTURES = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
}


def write_tiny_idefics(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the model `name` of 0.5 M parameters into `folder`; a tile of 64x64 pixels takes 4 tokens."""
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
    config_class, model_class = ARCHITECTURES[name]
    config = config_class(
        vision_config=vision_config(image_size=TILE, patch_size=16),
        text_config=decoder_config(tokenizer, model_type="llama", tie_word_embeddings=tie_word_embeddings),
        image_token_id=token_id(tokenizer, "<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, model_class, config, _processor(name, tokenizer), seed=seed)


def _processor(name: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    side = {"longest_edge": TILE}
    sizes = {"size": {"longest_edge": 2 * TILE}, "max_image_size": side}
    template = chat_template(image="<image>", video="<video>", end="<end_of_utterance>")
    if name == "idefics3":
        images = Idefics3ImageProcessor(**sizes)
        return Idefics3Processor(images, tokenizer, image_seq_len=TOKENS_PER_TILE, chat_template=template)
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=template,
    )
