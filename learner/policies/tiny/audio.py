"""Tiny models that hear."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from mobula.learner.policies.tiny.writing import (
    HIDDEN_SIZE,
    INITIALIZER_RANGE,
    audio_template,
    build_tokenizer,
    decoder_config,
    token_id,
    write_checkpoint,
)

MEL_BINS = 32


WINDOW_S = 30  # which engines insist on


def write_tiny_qwen2_audio(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; a second of sound takes 25 tokens."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = build_tokenizer(special)
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=WINDOW_S),
        tokenizer=tokenizer,
        chat_template=audio_template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    config = Qwen2AudioConfig(  # type: ignore[call-arg]  # it takes what every configuration does
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 1,  # windows of 1,500 states are long for a model this small
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 50 * WINDOW_S,
            "initializer_range": INITIALIZER_RANGE,
        },
        text_config=decoder_config(tokenizer, model_type="qwen2", tie_word_embeddings=tie_word_embeddings),
        audio_token_index=token_id(tokenizer, "<|AUDIO|>"),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        Qwen2AudioForConditionalGeneration,
        config,
        processor,
        seed=seed,
        renamed={"language_model.model.model.": "language_model.model."},
    )


PIXELS_PER_TOKEN = 28 * 28


MAX_IMAGE_TOKENS = 64


NAMED = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def write_tiny_qwen2_5_omni(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.8 M parameters into `folder`; a second of sound takes 25 tokens.

    A released checkpoint holds a talker beside the thinker, this one does not.
    """
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), NAMED)
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN}
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        video_processor=Qwen2VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=True, **patches
        ),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=WINDOW_S, return_attention_mask=True
        ),
        tokenizer=tokenizer,
        chat_template=audio_template(
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
            image="<|vision_bos|><|IMAGE|><|vision_eos|>",
            video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        ),
    )
    config = Qwen2_5OmniThinkerConfig(  # type: ignore[call-arg]  # it takes what every configuration does
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 50 * WINDOW_S,
            "n_window": 50,
            "output_dim": HIDDEN_SIZE,
            "initializer_range": INITIALIZER_RANGE,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "out_hidden_size": HIDDEN_SIZE,
            "initializer_range": INITIALIZER_RANGE,
        },
        text_config=decoder_config(
            tokenizer,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
            tie_word_embeddings=tie_word_embeddings,
        ),
        position_id_per_seconds=25,
        seconds_per_chunk=2,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        image_token_index=token_id(tokenizer, "<|IMAGE|>"),
        video_token_index=token_id(tokenizer, "<|VIDEO|>"),
        audio_token_index=token_id(tokenizer, "<|AUDIO|>"),
        audio_start_token_id=token_id(tokenizer, "<|audio_bos|>"),
        audio_end_token_id=token_id(tokenizer, "<|audio_eos|>"),
        vision_start_token_id=token_id(tokenizer, "<|vision_bos|>"),
        vision_end_token_id=token_id(tokenizer, "<|vision_eos|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5OmniThinkerForConditionalGeneration(config)
        model.to(device="cpu", dtype=torch.float32)  # type: ignore[call-arg]  # its decorator hides self
    folder.mkdir(parents=True, exist_ok=True)
    tied = set(model.all_tied_weights_keys)
    state = {f"thinker.{name}": tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    whole = Qwen2_5OmniConfig(  # type: ignore[call-arg]  # the same
        thinker_config=config.to_dict(),
        enable_audio_output=False,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    whole.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    whole.save_pretrained(folder)
    # Only stop and pad ids: an engine that takes its sampling defaults from this file samples from the plain policy.
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
