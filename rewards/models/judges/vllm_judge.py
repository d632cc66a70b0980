"""The reward function `vllm_judge`: a generative model in a vLLM engine of the reward worker scores an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, ScoringFailure, TimedOutError, failure_kind
from mobula.rewards.models.judges.server_judge import Grading, checked_extra
from mobula.rewards.models.judges.vllm_engine import Reply, sampling_params, shared_engine
from mobula.rewards.models.loading import positive_int
from mobula.rewards.tools import Tools

OWN_FIELDS = ("max_tokens", "temperature", "n", "output_kind")
TEMPLATE_FIELD = "chat_template_kwargs"


class VllmJudge:
    """Scores with the checkpoint `model`; all requests of a batch are answered together.

    `engine` holds arguments of vLLM's engine: max_model_len, kv_cache_memory_bytes, gpu_memory_utilization,
    tensor_parallel_size, limit_mm_per_prompt, ... Functions of one worker with the same `model` share the engine.
    `extra` holds further fields of `vllm.SamplingParams`, e.g. {seed: 0, structured_outputs: {regex: "..."}}, and
    `chat_template_kwargs`; defaults are the checkpoint's generation_config.json. See `Grading` for the conversation and
    the verdict.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        engine: dict[str, Any],
        system: str | None,
        template: str,
        images: str,
        verdict: str,
        minimum: float,
        maximum: float,
        max_tokens: int,
        temperature: float,
        extra: dict[str, Any],
        question_pattern: str | None,
        frame_stride: int = 1,
    ) -> None:
        self._grading = Grading(
            system=system,
            template=template,
            images=images,
            verdict=verdict,
            minimum=minimum,
            maximum=maximum,
            question_pattern=question_pattern,
            frame_stride=frame_stride,
        )
        limits = {"max_tokens": positive_int("max_tokens", max_tokens), "temperature": float(temperature)}
        fields = limits | checked_extra(extra, OWN_FIELDS)
        self._template_fields = fields.pop(TEMPLATE_FIELD, {})
        sampling_params(fields)  # refused before a model is loaded
        self._engine = shared_engine(model, engine, tools)
        self._params = sampling_params({**self._engine.sampling_defaults, **fields})
        self._in_time = tools.in_time

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Returns one outcome per request. A request that cannot be sent or answered does not affect the others."""
        outcomes: dict[int, Outcome] = {}
        asked: dict[int, list[dict[str, Any]]] = {}
        for index, request in enumerate(requests):
            try:
                asked[index] = self._grading.messages(request)
            except RewardError as error:
                outcomes[index] = ScoringFailure(failure_kind(error), str(error))
        if asked:
            outcomes.update(zip(asked, self._scored(list(asked.values())), strict=True))
        return [outcomes[index] for index in range(len(requests))]

    def _scored(self, conversations: Sequence[list[dict[str, Any]]]) -> list[Outcome]:
        num = len(conversations)
        try:
            replies = self._in_time.call(
                lambda: self._engine.replies(conversations, self._params, self._template_fields),
                f"{num} replies of the judge",
                num,
            )
        except TimedOutError as error:
            return [ScoringFailure(FailureKind.TIMED_OUT, str(error))] * num
        return [self._outcome(reply) for reply in replies]

    def _outcome(self, reply: Reply | RewardError) -> Outcome:
        try:
            if isinstance(reply, RewardError):
                raise reply
            return self._grading.score(reply.text, is_cut=reply.is_cut)
        except RewardError as error:
            return ScoringFailure(failure_kind(error), str(error))
