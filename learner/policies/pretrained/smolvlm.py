"""SmolVLM with SmolLM2-135M as decoder; a small vision tower and the connector have random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerBase,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from mobula.learner.policies.pretrained.installing import install_checkpoint
from mobula.learner.policies.pretrained.smollm2 import smollm2_config, smollm2_model, smollm2_tokenizer
from mobula.learner.policies.tiny.tokenizer import chat_template
from mobula.learner.policies.tiny.writing import vision_config

TILE = 64
TOKENS_PER_TILE = 4
MAX_ROWS = 6
# The ids of SmolVLM-256M-Instruct, which has the same decoder.
MEDIA_TOKENS = (
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, MAX_ROWS + 1) for column in range(1, MAX_ROWS + 1)),
    "<fake_token_around_image>",
    "<image>",
)
RESERVED = 88
ADDED_TOKENS = (
    *MEDIA_TOKENS,
    *(f"<|reserved_special_token_{number}|>" for number in range(RESERVED)),
    "<end_of_utterance>",
)


def smolvlm_config() -> SmolVLMConfig:
    """Returns the configuration; 64 x 64 pixels are one tile of 4 tokens."""
    text = smollm2_config().to_dict()
    first = text["vocab_size"]
    return SmolVLMConfig(
        vision_config=vision_config(image_size=TILE, patch_size=16),
        text_config=text | {"vocab_size": first + len(ADDED_TOKENS)},
        image_token_id=first + ADDED_TOKENS.index("<image>"),
        pad_token_id=text["pad_token_id"],
        scale_factor=2,
        tie_word_embeddings=True,
        dtype="float32",
    )


def write_smolvlm(folder: Path, *, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder` and returns `folder`; `seed` seeds tower, connector and new embeddings.

    Raises:
        PreflightError: the packages of the extra `pretrained` are not installed.
    """
    return install_checkpoint(folder, lambda staging: _save(staging, seed))


def _save(folder: Path, seed: int) -> None:
    tokenizer = smollm2_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED_TOKENS)})
    smolvlm_model(seed).save_pretrained(folder)
    _processor(tokenizer).save_pretrained(folder)


def smolvlm_model(seed: int) -> SmolVLMForConditionalGeneration:
    """Returns the model, float32, with output and input embeddings tied as in SmolLM2.

    The embedding of a new token is the mean of the released embeddings plus normal noise of a tenth of their deviation,
    drawn per value. So a new token gets an average logit. With noise of a whole deviation some new tokens were the most
    likely of all tokens.
    """
    decoder = smollm2_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(smolvlm_config())
        model.to(torch.float32)  # type: ignore[arg-type]  # its decorator hides self
        state = decoder.model.state_dict()
        known = state["embed_tokens.weight"]
        drawn = known.mean(dim=0) + 0.1 * known.std(dim=0) * torch.randn(len(ADDED_TOKENS), known.shape[1])
    state["embed_tokens.weight"] = torch.cat([known, drawn])
    model.model.text_model.load_state_dict(state, strict=True)
    model.tie_weights()
    model.generation_config = decoder.generation_config
    return model


def _processor(tokenizer: PreTrainedTokenizerBase) -> SmolVLMProcessor:
    """Scales an image to one tile; renders turns in the format of SmolLM2, without the system prompt."""
    side = {"longest_edge": TILE}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=side, max_image_size=side),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=chat_template(image="<image>"),
    )
