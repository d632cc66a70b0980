"""Judge: a model behind an OpenAI-compatible server grades answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, Score, failure
from mobula.rewards.functions.parsing.extraction import WAYS, Extractor, extractor
from mobula.rewards.http.client import JsonPoster
from mobula.rewards.http.wire import Connection
from mobula.rewards.images import data_url
from mobula.rewards.models.loading import QuestionFinder, one_of, positive_int
from mobula.rewards.tools import Tools

PLACEHOLDERS = ("question", "response", "references")
IMAGES = ("none", "prompt", "response", "both")
QUOTED_CHARS = 300  # end of a reply that a reason quotes
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


class Grading:
    r"""Builds a judge's conversation about a response, and reads the score in the reply.

    `template` is the user turn with {question}, {response} and {references}; `system` is the system turn or null.
    `images` precede the text: none, prompt, response or both; of the response's images (frames of a video) every
    `frame_stride`-th, starting with the first. `verdict` selects the score in the reply: a method of
    `rewards/functions/parsing/extraction.py`, or `regex:` with an expression whose last match has a group `score`. A
    missing score, or a score outside `minimum` and `maximum`, is a failure. `question_pattern`: see `QuestionFinder`.
    """

    def __init__(
        self,
        *,
        system: str | None,
        template: str,
        images: str,
        verdict: str,
        minimum: float,
        maximum: float,
        question_pattern: str | None,
        frame_stride: int,
    ) -> None:
        if not minimum < maximum:
            raise ValueError(f"options.minimum={minimum} is not below maximum={maximum}: say what scores there are")
        self._images = one_of("images", images, IMAGES)
        named = set(_PLACEHOLDER.findall(template))
        unknown = sorted(named - set(PLACEHOLDERS))
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"options.template has {{{unknown[0]}}}: use {known}")
        if "response" not in named and self._images not in ("response", "both"):
            raise ValueError("options.template has no {response}, so every answer would get one score: put it in")
        self._template = template
        self._system = system
        self._find_score = _verdict(verdict)
        self._range = (float(minimum), float(maximum))
        self._frame_stride = positive_int("frame_stride", frame_stride)
        self._questions = QuestionFinder(question_pattern)

    def messages(self, request: RewardRequest) -> list[dict[str, Any]]:
        """Builds the conversation about one response for OpenAI's chat API, with images as data URLs."""
        values = {"question": self._questions.find(request), "response": request.response.text}
        if "{references}" in self._template:
            if not request.references:
                raise RewardError("the template has {references}, and the prompt has none")
            values["references"] = "\n".join(request.references)
        # One pass, so that a placeholder in a response is not replaced.
        content: Any = _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), self._template)
        urls = self._image_urls(request)
        if urls:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [*parts, {"type": "text", "text": content}]
        messages = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def score(self, reply: str, *, is_cut: bool) -> Score:
        """Reads the score in a reply. `is_cut`: the reply was cut off at max_tokens."""
        number, flaw = self._find_score(reply)
        if not flaw and not _NUMBER.fullmatch(number):
            flaw = f"{number!r} is no number"
        if flaw:
            cut = "; its reply was cut off at max_tokens" if is_cut else ""
            raise RewardError(f"the judge gave no score ({flaw}{cut}): {reply[-QUOTED_CHARS:]!r}")
        value, (low, high) = float(number), self._range
        if not low <= value <= high:
            raise RewardError(f"the judge's score {number} is not between {low:g} and {high:g}")
        return Score(value, reply[-QUOTED_CHARS:])

    def _image_urls(self, request: RewardRequest) -> list[str]:
        chosen: list[tuple[str, Sequence[bytes]]] = []
        if self._images in ("prompt", "both"):
            chosen.append(("prompt", request.prompt_images))
        if self._images in ("response", "both"):
            chosen.append(("response", request.response.images[:: self._frame_stride]))
        return [
            data_url(file, f"image {number} of the {source}")
            for source, files in chosen
            for number, file in enumerate(files, start=1)
        ]


def checked_extra(extra: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    clash = sorted(set(extra) & set(own))
    if clash:
        raise ValueError(f"options.extra has {', '.join(clash)}, which the judge sets itself: use its own options")
    return dict(extra)


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
        match = [None, *expression.finditer(text)][-1]
        return ((match["score"] or "").strip(), "") if match else ("", "nothing matches the verdict's expression")

    return find


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
            return failure(error)

    def _read(self, reply: bytes) -> Score:
        try:
            choice = _ChatReply.model_validate_json(reply).choices[0]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the reply"
            raise RewardError(f"the judge's server replied with no chat completion: {where}: {first['msg']}") from error
        return self._grading.score(choice.message.content or "", is_cut=choice.finish_reason == "length")
