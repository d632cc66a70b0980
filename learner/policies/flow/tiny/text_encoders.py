"""Small text encoders with tokenizers of their own: every byte is a token, so nothing has to be downloaded."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CLIP_TOKENS, T5_TOKENS = 77, 64  # longest prompts
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> CLIPTokenizer:
    """One token a byte, another one where it ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=CLIP_TOKENS)


def clip_encoder(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextModelWithProjection:
    """Two layers; the pooled embedding is as wide as the others."""
    config = CLIPTextConfig(
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
    return CLIPTextModelWithProjection(config)


def t5_tokenizer() -> T5Tokenizer:
    """One token for each printable ASCII character."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def t5_encoder(tokenizer: T5Tokenizer, hidden_size: int) -> T5EncoderModel:
    """Two layers."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=16,
        d_ff=2 * hidden_size,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5EncoderModel(config)
