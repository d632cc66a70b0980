"""Log-probs of sampled tokens alone are those that vLLM itself keeps; who asks for more gets what vLLM makes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from mobula.actors.samplers.vllm.outputs import OutputReader
from mobula.actors.samplers.vllm.patches.logprobs import SampledLogprobs
from mobula.cluster.errors import RolloutError


def request(**params: Any) -> Any:
    return SimpleNamespace(sampling_params=SamplingParams(flat_logprobs=True, detokenize=False, **params))


def step(logprobs: np.ndarray) -> Any:
    """What the engine's core returns for one step; the first column is of the sampled tokens."""
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
def test_requests_for_more_get_vllms_own(tokenizer: Any, params: dict[str, Any]) -> None:
    assert type(SampledLogprobs.from_new_request(tokenizer, request(**params))) is LogprobsProcessor


def kept_by_vllm(rows: list[list[float]]) -> FlatLogprobs:
    """What vLLM makes of steps whose first column is the sampled token and the others fall."""
    found = FlatLogprobs()
    for n, row in enumerate(rows):
        found.append_fast([100 + n, *range(10, 9 + len(row))], row, itertools.repeat(1), itertools.repeat(None))
    return found


def completion(logprobs: FlatLogprobs | None) -> Any:
    spans = [SimpleNamespace(version="3", start=0, end=2)]
    own = {"index": 0, "token_ids": [100, 101], "finish_reason": "stop", "stop_reason": None}
    return SimpleNamespace(outputs=[SimpleNamespace(**own, logprobs=logprobs, weight_versions=spans)])


def test_kept_sets_are_the_tokens_of_finite_log_prob() -> None:
    gone = float("-inf")
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    found = kept_by_vllm([[-0.7, -0.1, -0.7, gone], [-0.2, -0.2, gone, gone]])
    [(_, piece)] = reader.read(completion(found))
    assert piece.logprobs.tolist() == pytest.approx([-0.7, -0.2])
    assert (piece.actions.kept.counts.tolist(), piece.actions.kept.ids.tolist()) == ([2, 1], [10, 11, 10])


def test_a_set_that_may_be_larger_than_what_is_reported_is_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=True)
    with pytest.raises(RolloutError, match="more than the 2 tokens that it reports.*lower sampler.top_k"):
        list(reader.read(completion(kept_by_vllm([[-0.7, -0.1, -0.7], [-0.2, -0.2, -3.0]]))))


def test_tokens_without_log_probs_are_refused() -> None:
    reader = OutputReader(SimpleNamespace(output_processor=None), "r", keeps_sets=False)
    with pytest.raises(RolloutError, match="2 tokens but 0 log-probs"):
        list(reader.read(completion(None)))


def test_a_request_that_is_not_flat_gets_vllms_own() -> None:
    params = SamplingParams(logprobs=0, detokenize=False)
    found = SampledLogprobs.from_new_request(None, SimpleNamespace(sampling_params=params))
    assert type(found) is LogprobsProcessor
