"""The protocol of our reward service: samples in, one typed outcome per sample out."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, WithJsonSchema

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure

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
        """Converts the message to an outcome of the contract.

        Raises:
            RewardError: the status is ok and there is no value.
        """
        if self.status != "ok":
            return ScoringFailure(FailureKind(self.status), self.reason)
        if self.value is None:
            raise RewardError("an outcome is ok and has no value")
        return Score(self.value, self.reason, self.breakdown)


class ScoreReply(WireModel):
    """A reply: outcomes in the order of the samples."""

    outcomes: list[OutcomeMessage]


def encode_sample(request: RewardRequest) -> bytes:
    """Encodes one request as JSON.

    Raises:
        RewardError: its metadata cannot be encoded as JSON.
    """
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
    """Joins encoded samples to one request body."""
    return b'{"samples":[' + b",".join(samples) + b"]}"
