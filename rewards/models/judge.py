"""The reward function `judge`: a generative model behind the OpenAI chat API reads an answer and gives its score."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from cluster.errors import RewardError
from rewards.contract import Outcome, RewardRequest, Score, ScoringFailure, failure_kind
from rewards.functions.parsing.extraction import WAYS, Extractor, extractor
from rewards.http.connection import Connection
from rewards.http.poster import JsonPoster
from rewards.models.loading import one_of, positive_int
from rewards.models.question import QuestionFinder
from rewards.pictures import data_url
from rewards.tools import Tools

PLACEHOLDERS = ("question", "response", "references")
PICTURES = ("none", "prompt", "response", "both")
OWN_FIELDS = ("model", "messages", "max_tokens", "temperature", "stream", "n")
QUOTED_CHARS = 300  # of a reply in a reason
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _ChatReply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class Judge:
    r"""Asks `urls`, whole chat-completion URLs such as http://127.0.0.1:8000/v1/chat/completions, one answer a request.

    `template` is the user's turn, with {question}, {response} and {references} in it; `system` goes before it, or null.
    `pictures` are sent ahead of the text: none, prompt, response or both; of those of a response (a video's frames)
    every `frame_stride`-th, from the first on. `verdict` names where in the reply the score stands: a way of
    `rewards/functions/parsing/extraction.py`, or `regex:` and an expression whose last match has a group `score`. A
    score outside of `minimum` and `maximum`, or none at all, is a failure. `extra` is added to the request, e.g.
    {seed: 0, response_format: {...}}. `question_pattern` is as in `QuestionFinder`; see `Connection` for the other
    options, of which `max_request_bytes` bounds one answer with its pictures.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        system: str | None,
        template: str,
        pictures: str,
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
        if not minimum < maximum:
            raise ValueError(f"options.minimum={minimum} is not below maximum={maximum}: say what scores there are")
        clash = sorted(set(extra) & set(OWN_FIELDS))
        if clash:
            raise ValueError(f"options.extra has {', '.join(clash)}, which the judge sets itself: use its own options")
        self._pictures = one_of("pictures", pictures, PICTURES)
        self._template = _checked_template(template, self._pictures)
        self._system = system
        self._find_score = _verdict(verdict)
        self._range = (float(minimum), float(maximum))
        self._frame_stride = positive_int("frame_stride", frame_stride)
        limits = {"max_tokens": positive_int("max_tokens", max_tokens), "temperature": float(temperature)}
        self._fields = {"model": model, **limits, **extra}
        self._questions = QuestionFinder(question_pattern)
        self._connection = Connection.of("judge", connection)
        self._poster = JsonPoster(self._connection)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """One outcome a request, within `total_timeout_s`."""
        return self._poster.run(lambda: self._score_all(requests))

    async def _score_all(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        deadline = asyncio.get_running_loop().time() + self._connection.total_timeout_s
        return list(await asyncio.gather(*(self._score(request, deadline) for request in requests)))

    async def _score(self, request: RewardRequest, deadline: float) -> Outcome:
        try:
            return self._read(await self._poster.post(self._body(request), deadline))
        except RewardError as error:
            return ScoringFailure(failure_kind(error), str(error))

    def _body(self, request: RewardRequest) -> bytes:
        content: Any = self._filled(request)
        urls = self._picture_urls(request)
        if urls:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [*parts, {"type": "text", "text": content}]
        messages = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        body = json.dumps({**self._fields, "messages": messages}).encode()
        limit = self._connection.max_request_bytes
        if len(body) > limit:
            raise RewardError(f"the request has {len(body)} bytes, max_request_bytes is {limit}: raise it")
        return body

    def _filled(self, request: RewardRequest) -> str:
        """The template with everything put in at once: what is put in is not looked at again."""
        values = {"question": self._questions.find(request), "response": request.response.text}
        if "{references}" in self._template:
            if not request.references:
                raise RewardError("the template has {references}, and the prompt has none")
            values["references"] = "\n".join(request.references)
        return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), self._template)

    def _picture_urls(self, request: RewardRequest) -> list[str]:
        chosen: list[tuple[str, Sequence[bytes]]] = []
        if self._pictures in ("prompt", "both"):
            chosen.append(("prompt", request.prompt_pictures))
        if self._pictures in ("response", "both"):
            chosen.append(("response", request.response.pictures[:: self._frame_stride]))
        return [
            data_url(file, f"picture {number} of the {source}")
            for source, files in chosen
            for number, file in enumerate(files, start=1)
        ]

    def _read(self, reply: bytes) -> Score:
        """The score in a reply.

        Raises:
            RewardError: there is none, or it is out of range.
        """
        try:
            choice = _ChatReply.model_validate_json(reply).choices[0]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the reply"
            raise RewardError(f"the judge's server replied with no chat completion: {where}: {first['msg']}") from error
        text = choice.message.content or ""
        found, flaw = self._find_score(text)
        if not flaw and not _NUMBER.fullmatch(found):
            flaw = f"{found!r} is no number"
        if flaw:
            cut = "; its reply was cut off at max_tokens" if choice.finish_reason == "length" else ""
            raise RewardError(f"the judge gave no score ({flaw}{cut}): {text[-QUOTED_CHARS:]!r}")
        value, (low, high) = float(found), self._range
        if not low <= value <= high:
            raise RewardError(f"the judge's score {found} is not between {low:g} and {high:g}")
        return Score(value, text[-QUOTED_CHARS:])


def _checked_template(template: str, pictures: str) -> str:
    named = set(_PLACEHOLDER.findall(template))
    unknown = sorted(named - set(PLACEHOLDERS))
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"options.template has {{{unknown[0]}}}: use {known}")
    if "response" not in named and pictures not in ("response", "both"):
        raise ValueError("options.template has no {response}, so every answer would get one score: put it in")
    return template


def _verdict(verdict: str) -> Extractor:
    kind, _, pattern = verdict.partition(":")
    if kind != "regex":
        try:
            return extractor(verdict)
        except ValueError as error:
            raise ValueError(f"options.verdict={verdict!r} is no way to find a score: use regex:..., {WAYS}") from error
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"options.verdict={verdict!r} is no regular expression ({error}): fix it") from error
    if "score" not in expression.groupindex:
        raise ValueError(f"options.verdict={verdict!r} has no group (?P<score>...): add it")

    def find(text: str) -> tuple[str, str]:
        found = [None, *expression.finditer(text)][-1]
        return ((found["score"] or "").strip(), "") if found else ("", "nothing matches the verdict's expression")

    return find
