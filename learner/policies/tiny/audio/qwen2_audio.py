"""A Qwen2-Audio of random weights: a Whisper encoder of 30 s windows, a Qwen2 decoder."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from mobula.learner.policies.tiny.tokenizer import INITIALIZER_RANGE, audio_template, build_tokenizer, token_id
from mobula.learner.policies.tiny.writing import decoder_config, write_checkpoint

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
