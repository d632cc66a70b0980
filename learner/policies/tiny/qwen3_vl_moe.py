"""A Qwen3-VL of random weights with a mixture of experts in every layer of its decoder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from mobula.learner.policies.tiny.qwen3_vl import ROPE, build_processor, vision_of
from mobula.learner.policies.tiny.tokenizer import build_tokenizer, media_token_ids
from mobula.learner.policies.tiny.writing import decoder_config, write_checkpoint

NUM_EXPERTS = 4


def write_tiny_qwen3_vl_moe(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.9 M parameters into `folder`: two of four experts for each token."""
    tokenizer = build_tokenizer()
    config = Qwen3VLMoeConfig(
        text_config=decoder_config(
            tokenizer,
            head_dim=32,
            rope_parameters=ROPE,
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
    processor = build_processor(tokenizer)
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
