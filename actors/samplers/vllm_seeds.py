"""Runs inside vLLM's engine process: its CPU sampler draws the seeds of a step's tokens into place, not one by one.

Every response has a generator of its own, so that it can be sampled again. For each token vLLM 0.32 makes a tensor of
one number, reads the number and writes it into another tensor: a twentieth of a step of a small model. Drawn into
place, the numbers are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

SEEDS = 2**31  # that a token may have

_forward = TopKTopPSampler.forward_cpu


def draw_seeds_in_place() -> None:
    TopKTopPSampler.forward_cpu = _drawn_in_place


def _drawn_in_place(
    sampler: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Gumbel-max sampling of [B, V] logits: the tokens, int64 [B], and float32 [B, V] log-probs where they are kept.

    `generators` are those of the rows that have one; the others draw from torch's own.
    """
    if sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
        return _forward(sampler, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p).to(torch.float32)
    seeds = torch.randint(0, SEEDS, logits.shape[:1])
    rows = seeds.split(1)
    for row, generator in generators.items():
        rows[row].random_(0, SEEDS, generator=generator)
    logprobs = logits.log_softmax(dim=-1)
    return torch.ops._C.fused_gumbel_argmax(logits, seeds), logprobs
