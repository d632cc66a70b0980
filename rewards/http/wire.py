"""Messages of reward servers, in Mobula's form and in LightRFT's, and the connection to them."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.cluster.user_code import did_you_mean
from mobula.configs.schema.base import Section
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.images import portable_image, without_markers

_STATUSES: Mapping[FailureKind, Literal["failed", "timed_out", "not_finite"]] = {  # others are `failed`
    FailureKind.TIMED_OUT: "timed_out",
    FailureKind.NOT_FINITE: "not_finite",
}


def decode_base64(text: Any) -> bytes:
    """Decodes base64 strictly: other characters and incomplete groups are refused, which Python would skip."""
    if not isinstance(text, str):
        raise ValueError(f"expected base64 text, got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64 ({error})") from error


def encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


Base64 = Annotated[
    bytes,
    BeforeValidator(decode_base64),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "description": "One whole encoded file."}),
]


class WireModel(BaseModel):
    """Base of all messages: exact types, unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Sample(WireModel):
    """One response to score, with its references."""

    response: str
    """The response alone: no prompt, no special tokens."""
    num_tokens: NonNegativeInt
    """Tokens of the response."""
    is_truncated: bool = False
    """Whether it was cut at its length limit."""
    prompt: str = ""
    references: list[str] = []
    metadata: dict[str, Any] = {}
    images: list[Base64] = []
    """Images of the prompt."""
    response_images: list[Base64] = []
    """Generated images; of a video its frames in order."""

    def request(self) -> RewardRequest:
        response = Response(self.response, self.num_tokens, self.is_truncated, tuple(self.response_images))
        return RewardRequest(response, tuple(self.references), self.metadata, self.prompt, tuple(self.images))


class ScoreBody(WireModel):
    """A request."""

    samples: Annotated[list[Sample], Field(min_length=1)]


class OutcomeMessage(WireModel):
    """The outcome of one sample: `value` is a number if and only if `status` is ok."""

    status: Literal["ok", "failed", "timed_out", "not_finite"]
    value: float | None = None
    breakdown: dict[str, float] = {}
    """The unweighted parts of the value, by name."""
    reason: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeMessage:
        if isinstance(outcome, Score):
            return cls(status="ok", value=outcome.value, breakdown=dict(outcome.breakdown), reason=outcome.reason)
        return cls(status=_STATUSES.get(outcome.kind, "failed"), reason=outcome.reason)

    def outcome(self) -> Outcome:
        if self.status != "ok":
            return ScoringFailure(FailureKind(self.status), self.reason)
        if self.value is None:
            raise RewardError("an outcome is ok and has no value")
        return Score(self.value, self.reason, self.breakdown)


class ScoreReply(WireModel):
    """A reply: outcomes in the order of the samples."""

    outcomes: list[OutcomeMessage]

    def read(self) -> list[Outcome]:
        return [message.outcome() for message in self.outcomes]


def encode_sample(request: RewardRequest) -> bytes:
    response = request.response
    sample = {
        "response": response.text,
        "num_tokens": response.num_tokens,
        "is_truncated": response.is_truncated,
        "prompt": request.prompt_text,
        "references": list(request.references),
        "metadata": dict(request.metadata),
        "images": [encode_base64(image) for image in request.prompt_images],
        "response_images": [encode_base64(image) for image in response.images],
    }
    try:
        return json.dumps(sample, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the prompt's metadata cannot be sent as JSON ({error}): keep to JSON's types") from error


def join_samples(samples: Sequence[bytes]) -> bytes:
    return b'{"samples":[' + b",".join(samples) + b"]}"


QueryForm = Literal["full", "response"]


class LightrftBody(WireModel):
    """A request in columns, one row per sample; further fields of a client are ignored."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(min_length=1)]
    """Decoded prompt and response with special tokens and padding, or the response alone."""
    prompts: list[str] | None = None
    """The prompts, as in the queries."""
    references: list[str | list[str] | None] | None = None
    images: list[str | list[str] | None] | None = None
    """Images of each sample as base64 files or data URLs; a single image needs no list."""

    def requests(self, queries_are: QueryForm) -> list[RewardRequest]:
        """Returns one request per query. The response is the text after the prompt."""
        for name, column in self._columns().items():
            if column is not None and len(column) != len(self.queries):
                raise RewardError(f"{name} has {len(column)} rows for {len(self.queries)} queries: send one each")
        return [self._request(row, queries_are) for row in range(len(self.queries))]

    def _columns(self) -> dict[str, Sequence[Any] | None]:
        return {"prompts": self.prompts, "references": self.references, "images": self.images}

    def _request(self, row: int, queries_are: QueryForm) -> RewardRequest:
        columns = {name: column[row] if column else None for name, column in self._columns().items()}
        prompt = without_markers(columns["prompts"] or "")
        text = without_markers(self.queries[row])
        if queries_are == "full":
            if self.prompts is None or not text.startswith(prompt):
                raise RewardError(
                    f"sample {row}: its query does not begin with its prompt, so where its response begins is unknown: "
                    "send the prompt as it was decoded, or responses alone with ?queries=response"
                )
            text = without_markers(text[len(prompt) :])
        references = columns["references"] or []
        references = (references,) if isinstance(references, str) else tuple(references)
        # The protocol has no token count, so the length of a response is its number of words.
        response = Response(text.strip(), num_tokens=len(text.split()), is_truncated=False)
        return RewardRequest(response, references, {}, prompt, _images(columns["images"], row))


class LightrftReply(WireModel):
    """A reply with one number per sample; it cannot express a failure."""

    rewards: list[FiniteFloat]


class _AnyLightrftReply(BaseModel):
    rewards: list[Any]


def read_lightrft_reply(reply: bytes) -> list[float | Outcome]:
    """Reads a reply of any server: further fields are ignored, and each reward is checked separately."""
    return [
        ScoringFailure(FailureKind.FAILED, f"the service replied with {reward!r} for a reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float)
        else reward  # the contract refuses non-finite numbers
        for reward in _AnyLightrftReply.model_validate_json(reply).rewards
    ]


class ColumnRow:
    """One request as encoded rows of the columns, so that its size is known."""

    def __init__(self, request: RewardRequest, queries_are: QueryForm) -> None:
        if request.response.images:
            raise RewardError("this protocol has no place for generated images: use dialect mobula")
        prompt = request.prompt_text
        images = []
        for number, image in enumerate(request.prompt_images, start=1):
            _, file = portable_image(image, f"image {number} of the prompt")
            images.append(encode_base64(file))
        query = prompt + request.response.text if queries_are == "full" else request.response.text
        values = {"queries": query, "prompts": prompt, "references": list(request.references), "images": images}
        self.columns = {name: json.dumps(value).encode() for name, value in values.items()}

    def __len__(self) -> int:
        return sum(len(value) for value in self.columns.values())


def join_rows(rows: Sequence[ColumnRow]) -> bytes:
    columns = (b'"%b":[%b]' % (name.encode(), b",".join(row.columns[name] for row in rows)) for name in rows[0].columns)
    return b"{" + b",".join(columns) + b"}"


def _images(images: str | list[str] | None, row: int) -> tuple[bytes, ...]:
    files = [images] if isinstance(images, str) else images or []
    try:
        return tuple(decode_base64(f.partition(";base64,")[2] if f.startswith("data:") else f) for f in files)
    except ValueError as error:
        raise RewardError(f"sample {row}: an image is {error}: send base64 of whole files") from error


class Connection(Section):
    """Servers, limits and timeouts; `of` reads them from the options of a reward function."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Whole URLs of the service; requests are balanced over them."""
    max_concurrency: PositiveInt
    """Requests in flight at a time, over all URLs."""
    timeout_s: PositiveFloat
    """How long one attempt may take, from connecting to the last byte of the reply."""
    total_timeout_s: PositiveFloat
    """How long one call of the reward function may take, all its requests and their attempts together."""
    max_attempts: PositiveInt
    """How often one request is sent at most."""
    backoff_s: PositiveFloat
    """Upper end of the first random pause between two attempts; it doubles with each."""
    max_backoff_s: PositiveFloat
    """Upper bound of the pause."""
    max_request_bytes: PositiveInt
    """A larger request is split; a single sample above it is refused."""
    max_reply_bytes: PositiveInt
    """A larger reply is refused while it is read."""
    max_failures: PositiveInt
    """A URL that fails so often in a row is set aside."""
    aside_s: PositiveFloat
    """For how long."""
    token_env: str | None
    """The environment variable that holds the bearer token; null sends none."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Reads the connection options of the reward function `name`."""
        for option in options:
            if option not in cls.model_fields:
                hint = did_you_mean(option, cls.model_fields)
                raise ValueError(f"{name} has no option {option!r}{hint}: it has {', '.join(cls.model_fields)}")
        urls = options.get("urls")
        try:
            connection = cls.model_validate({**options, "urls": [urls] if isinstance(urls, str) else urls})
        except ValidationError as error:
            raise ValueError("; ".join(_sentence(dict(detail)) for detail in error.errors())) from error
        connection.headers()
        return connection

    @model_validator(mode="after")
    def _check(self) -> Self:
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"options.urls has {url!r}: give whole URLs, e.g. http://127.0.0.1:8000/score")
            if "@" in urlsplit(url).netloc:  # the configuration is written to the run folder
                raise ValueError(f"options.urls has credentials for {urlsplit(url).hostname}: use options.token_env")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"options.urls names one server twice ({', '.join(self.urls)}): name each once")
        if self.total_timeout_s < self.timeout_s:
            raise ValueError(
                f"options.total_timeout_s={self.total_timeout_s:g} is shorter than timeout_s={self.timeout_s:g} of one "
                "attempt: raise it"
            )
        return self

    def headers(self) -> dict[str, str]:
        if self.token_env is None:
            return {}
        token = os.environ.get(self.token_env, "")
        if not token:
            raise ValueError(f"options.token_env={self.token_env!r} is not set in the environment: set it or use null")
        return {"Authorization": f"Bearer {token}"}


def _sentence(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    name = ".".join(str(part) for part in detail["loc"])
    if detail["input"] is None or detail["type"] == "missing":
        return f"options.{name} is not set: {detail['msg']}"
    return f"options.{name} got {detail['input']!r}: {detail['msg']}"
