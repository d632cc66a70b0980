"""Small text encoders with tokenizers of their own: every byte is a token, so nothing has to be downloaded."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from mobula.learner.policies.tiny.qwen2_5_vl import build_model, build_processor

CLIP_TOKENS, T5_TOKENS, GEMMA_TOKENS = 77, 64, 64  # longest prompts
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> CLIPTokenizer:
    """One token a byte, another one where it ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=CLIP_TOKENS)


def clip_encoder(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextModelWithProjection:
    """Two layers; the pooled embedding is as wide as the others."""
    return CLIPTextModelWithProjection(_clip_config(tokenizer, hidden_size))


def plain_clip_encoder(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextModel:
    """Two layers, without a projection."""
    return CLIPTextModel(_clip_config(tokenizer, hidden_size))


def _clip_config(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=hidden_size,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer() -> T5Tokenizer:
    """One token for each printable ASCII character."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def t5_encoder(tokenizer: T5Tokenizer, hidden_size: int) -> T5EncoderModel:
    """Two layers."""
    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer, hidden_size)))


def umt5_encoder(tokenizer: T5Tokenizer, hidden_size: int) -> UMT5EncoderModel:
    """Two layers, each with position biases of its own."""
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, hidden_size)))


def _t5_sizes(tokenizer: T5Tokenizer, hidden_size: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": hidden_size,
        "d_kv": 16,
        "d_ff": 2 * hidden_size,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }


def gemma_tokenizer() -> GemmaTokenizer:
    """One token for each printable ASCII character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *map(chr, range(ord("!"), ord("~") + 1))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=GEMMA_TOKENS)


def gemma_encoder(tokenizer: GemmaTokenizer, hidden_size: int) -> Gemma2Model:
    """Two layers."""
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=GEMMA_TOKENS,
    )
    return Gemma2Model(config)


def qwen_encoder(seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer]:
    """The tiny Qwen2.5-VL and its tokenizer, with the chat template that a pipeline without processor looks for."""
    processor = build_processor()
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    return build_model(tokenizer, seed=seed, tie_word_embeddings=False), tokenizer
