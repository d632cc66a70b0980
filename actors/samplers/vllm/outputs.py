"""Reads the outputs of a running vLLM request incrementally, each token with its weight version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from mobula.cluster.errors import RolloutError
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.partial_response import SampledSequence, clipped, shifted
from mobula.cluster.records.trajectory import FinishReason, WeightSpan
from mobula.cluster.roles import PromptScores

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT, None: None}


class OutputReader:
    """Reads the outputs of one request, in steps (RequestOutputKind.DELTA) or at the end."""

    def __init__(self, engine: AsyncLLM, request_id: str, *, keeps_sets: bool) -> None:
        """`keeps_sets`: the request asks for log-probs of all kept tokens and some further tokens."""
        self._processor = engine.output_processor
        self._request_id = request_id
        self._keeps_sets = keeps_sets
        self._num_read: Counter[int] = Counter()  # sibling -> tokens
        self._states: dict[int, RequestState] = {}  # sibling -> state in vLLM

    def read(self, output: RequestOutput) -> Iterator[tuple[int, SampledSequence]]:
        """Returns (sibling, new tokens) for each sibling in the output.

        Raises:
            RolloutError: the engine gave tokens without log-probs or versions, or kept more tokens than it reports.
        """
        for completion in output.outputs:
            yield completion.index, self._piece(completion)

    def _piece(self, completion: CompletionOutput) -> SampledSequence:
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        logprobs, kept = self._logprobs(completion.logprobs)
        if logprobs.shape != token_ids.shape:
            raise RolloutError(f"the engine gave {token_ids.shape[0]} tokens but {logprobs.shape[0]} log-probs")
        start = self._num_read[completion.index]
        end = self._num_read[completion.index] = start + int(token_ids.shape[0])
        spans: Sequence[WeightSpan] = self._spans(completion, end)
        if start > 0 or any(span.end > end for span in spans):
            spans = shifted(clipped(spans, start, end), -start)
        reason = FINISH_REASONS[completion.finish_reason]
        if isinstance(completion.stop_reason, str):
            reason = FinishReason.STOP_STRING
        return SampledSequence(TokenActions(token_ids, kept), logprobs, tuple(spans), reason)

    def _logprobs(self, steps: SampleLogprobs | None) -> tuple[np.ndarray, KeptSets | None]:
        """Returns float32 [T] of the sampled tokens, and the kept sets if requested.

        For each step vLLM gives the sampled token, then the requested tokens by decreasing log-prob; tokens that are
        not kept have the log-prob -inf.
        """
        if not isinstance(steps, FlatLogprobs):  # floats, from `patches.logprobs`
            return np.asarray(steps or [], dtype=np.float32), None
        num_steps = len(steps)
        values = np.array(steps.logprobs, dtype=np.float32).reshape(num_steps, -1 if num_steps else 1)
        if not self._keeps_sets:
            return values[:, 0], None
        ids = np.array(steps.token_ids, dtype=np.int32).reshape(values.shape)[:, 1:]
        is_kept = np.isfinite(values[:, 1:])
        if is_kept.shape[1] and is_kept[:, -1].any():
            raise RolloutError(
                f"the engine kept more than the {is_kept.shape[1]} tokens that it reports of a step, since their "
                "logits are equal: lower sampler.top_k, or set resources.dtype=float32"
            )
        return values[:, 0], KeptSets(is_kept.sum(axis=1, dtype=np.int32), ids[is_kept])

    def _spans(self, completion: CompletionOutput, end: int) -> list[WeightSpan]:
        """Returns the versions of at least the first `end` tokens of a sibling in this request.

        vLLM returns versions at the end of a response. Until then they are read from the request state in vLLM,
        which may be ahead of the tokens read here.
        """
        if completion.weight_versions is not None:
            return [WeightSpan(int(span.version), span.start, span.end) for span in completion.weight_versions]
        starts = self._state(completion.index).weight_version_starts
        if not starts:
            raise RolloutError(f"the engine does not say which weights sampled {end} tokens of {self._request_id}")
        bounds = [start for _, start in starts] + [max(end, starts[-1][1])]
        return [WeightSpan(int(v), s, e) for (v, _), (s, e) in zip(starts, pairwise(bounds), strict=True)]

    def _state(self, sibling: int) -> RequestState:
        if sibling not in self._states:
            processor = self._processor
            known = [processor.request_states[name] for name in processor.external_req_ids.get(self._request_id, ())]
            self._states |= {state.request_index: state for state in known}
        return self._states[sibling]


def prompt_scores(output: RequestOutput, num_top: int) -> PromptScores:
    """Reads the log-probs of a prompt from the output of a request with `prompt_logprobs=num_top`."""
    ids, rows = output.prompt_token_ids, output.prompt_logprobs
    assert ids is not None and rows is not None, "the request asks for them"
    found = [row for row in rows[1:] if row is not None]
    logprobs = np.asarray([row[token].logprob for token, row in zip(ids[1:], found, strict=True)], dtype=np.float32)
    if num_top == 0:
        return PromptScores(logprobs)
    ranked = (
        sorted(((token, entry.logprob) for token, entry in row.items()), key=lambda pair: -pair[1]) for row in found
    )
    return PromptScores(logprobs, [row[:num_top] for row in ranked])
