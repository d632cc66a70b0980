"""The reward function `judge`: a generative model behind the OpenAI chat API scores an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, Score, ScoringFailure, failure_kind
from mobula.rewards.http.connection import Connection
from mobula.rewards.http.poster import JsonPoster
from mobula.rewards.models.judges.grading import Grading, checked_extra
from mobula.rewards.models.loading import positive_int
from mobula.rewards.tools import Tools

OWN_FIELDS = ("model", "messages", "max_tokens", "temperature", "stream", "n")


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _ChatReply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class Judge:
    """Sends each answer to one of `urls`, whole chat-completion URLs like http://127.0.0.1:8000/v1/chat/completions.

    `extra` is added to the request, e.g. {seed: 0, response_format: {...}}. See `Grading` for the conversation and the
    verdict, and `Connection` for the other options; `max_request_bytes` bounds one answer with its images.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
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
        **connection: Any,
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
        self._fields = {"model": model, **limits, **checked_extra(extra, OWN_FIELDS)}
        self._connection = Connection.of("judge", connection)
        self._poster = JsonPoster(self._connection)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Returns one outcome per request, within `total_timeout_s`."""
        return self._poster.run(lambda: self._score_all(requests))

    async def _score_all(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        deadline = asyncio.get_running_loop().time() + self._connection.total_timeout_s
        return list(await asyncio.gather(*(self._score(request, deadline) for request in requests)))

    async def _score(self, request: RewardRequest, deadline: float) -> Outcome:
        try:
            body = json.dumps({**self._fields, "messages": self._grading.messages(request)}).encode()
            limit = self._connection.max_request_bytes
            if len(body) > limit:
                raise RewardError(f"the request has {len(body)} bytes, max_request_bytes is {limit}: raise it")
            return self._read(await self._poster.post(body, deadline))
        except RewardError as error:
            return ScoringFailure(failure_kind(error), str(error))

    def _read(self, reply: bytes) -> Score:
        """Reads the score in a reply.

        Raises:
            RewardError: the reply has no score, or the score is out of range.
        """
        try:
            choice = _ChatReply.model_validate_json(reply).choices[0]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the reply"
            raise RewardError(f"the judge's server replied with no chat completion: {where}: {first['msg']}") from error
        return self._grading.score(choice.message.content or "", is_cut=choice.finish_reason == "length")
