"""Log-probs of sampled tokens alone are those that vLLM itself keeps; who asks for more gets what vLLM makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from actors.samplers.vllm.patches.logprobs import SampledLogprobs


def request(**params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(flat_logprobs=True, detokenize=False, **params))


def step(logprobs: np.ndarray) -> Any:
    """What the engine's core says of one step; the first column is of the sampled tokens."""
    ids = np.arange(logprobs.size, dtype=np.int32).reshape(logprobs.shape)
    lists = LogprobsLists(ids, logprobs, np.ones(len(logprobs), dtype=np.int32))
    return SimpleNamespace(new_logprobs=lists, new_prompt_logprobs_tensors=None, prompt_token_id_logprobs=None)


def test_they_are_the_ones_that_vllm_keeps_of_any_stretch() -> None:
    rng = np.random.default_rng(0)
    ours = SampledLogprobs.from_new_request(None, request(logprobs=0))
    theirs = LogprobsProcessor.from_new_request(None, request(logprobs=0))
    for num_tokens in (1, 1, 3, 1, 2):  # more than one where the engine drafts tokens
        sampled = rng.standard_normal((num_tokens, 1)).astype(np.float32)
        for processor in (ours, theirs):
            processor.update_from_output(step(sampled))
        assert ours.logprobs == theirs.logprobs.logprobs
        assert ours.logprobs[-num_tokens:] == theirs.logprobs[-num_tokens:].logprobs
    assert len(ours.logprobs) == 8
    ours.update_from_output(SimpleNamespace(new_logprobs=None))
    assert len(ours.logprobs) == 8


@pytest.mark.parametrize(
    ("tokenizer", "params"),
    [
        (None, {"logprobs": 2}),
        (None, {"logprobs": None}),
        (None, {"logprobs": 0, "prompt_logprobs": 0}),
        (object(), {"logprobs": 0}),
    ],
)
def test_whoever_asks_for_more_gets_vllms_own(tokenizer: Any, params: dict[str, Any]) -> None:
    assert type(SampledLogprobs.from_new_request(tokenizer, request(**params))) is LogprobsProcessor


def test_a_request_that_is_not_flat_gets_vllms_own() -> None:
    params = SamplingParams(logprobs=0, detokenize=False)
    found = SampledLogprobs.from_new_request(None, SimpleNamespace(sampling_params=params))
    assert type(found) is LogprobsProcessor
