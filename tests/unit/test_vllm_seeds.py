"""Seeds that are drawn in place are the ones that vLLM draws, and so are the tokens and log-probs."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from actors.samplers import vllm_seeds

ROWS, VOCABULARY = 6, 50


def generators(*rows: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(100 + row) for row in rows}


def sampled(forward: object, mode: str, rows: tuple[int, ...], k: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Three steps in a row, each with the generators as the one before left them."""
    sampler, own = TopKTopPSampler(mode), generators(*rows)
    torch.manual_seed(0)
    logits = torch.randn(3, ROWS, VOCABULARY)
    at_most = None if k is None else torch.full((ROWS,), k)
    steps = [forward(sampler, step.clone(), own, at_most, None) for step in logits]  # type: ignore[operator]
    return torch.stack([tokens for tokens, _ in steps]), torch.stack([kept for _, kept in steps])


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("rows", [(), (0, 1, 2, 3, 4, 5), (4, 1)], ids=["none", "all", "some"])
@pytest.mark.parametrize("k", [None, 3], ids=["whole", "top 3"])
def test_tokens_and_log_probs_are_those_of_vllm(mode: str, rows: tuple[int, ...], k: int | None) -> None:
    ours = sampled(vllm_seeds._drawn_in_place, mode, rows, k)
    theirs = sampled(vllm_seeds._forward, mode, rows, k)
    assert torch.equal(ours[0], theirs[0]) and ours[0].shape == (3, ROWS)
    assert torch.equal(ours[1], theirs[1])


def test_a_row_with_a_generator_does_not_depend_on_the_others() -> None:
    alone = sampled(vllm_seeds._drawn_in_place, "processed_logprobs", (2,), None)
    beside = sampled(vllm_seeds._drawn_in_place, "processed_logprobs", (0, 2, 5), None)
    assert torch.equal(alone[0][:, 2], beside[0][:, 2])
    assert len(alone[0][:, 2].unique()) > 1, "three steps draw three numbers"
