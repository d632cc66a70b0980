"""Endpoints of reward servers: Mobula's form and LightRFT's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, RewardRequest, ScoringFailure
from mobula.rewards.http.wire import WireModel, decode_base64, encode_base64
from mobula.rewards.images import portable_image, without_markers


@dataclass(eq=False)
class Endpoint:
    """One URL with the state of its server; times are on the clock of its `Endpoints`."""

    url: str
    num_in_flight: int = 0
    num_failures: int = 0  # in a row
    aside_until: float = 0.0
    last_used: int = 0


class Endpoints:
    """Balances over URLs by requests in flight; of equal URLs the longest unused is first.

    A URL that failed `max_failures` times in a row is set aside for `aside_s`; then one request at a time tests whether
    it is back. If all URLs are set aside, the one that is due first is used.
    """

    def __init__(
        self, urls: Sequence[str], *, max_failures: int, aside_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._max_failures = max_failures
        self._aside_s = aside_s
        self._clock = clock
        self._num_taken = 0

    def take(self) -> Endpoint:
        """Returns the endpoint of the next request. Release it with `succeeded`, `failed`, `rested` or `released`."""
        free = self._free()
        if free:
            endpoint = min(free, key=lambda e: (e.num_in_flight, e.last_used))
        else:
            endpoint = min(self._endpoints, key=lambda e: (e.aside_until, e.num_in_flight, e.last_used))
        self._num_taken += 1
        endpoint.last_used = self._num_taken
        endpoint.num_in_flight += 1
        return endpoint

    def is_any_free(self) -> bool:
        """Whether an endpoint is not set aside."""
        return bool(self._free())

    def succeeded(self, endpoint: Endpoint) -> None:
        endpoint.num_in_flight -= 1
        endpoint.num_failures = 0
        endpoint.aside_until = 0.0

    def failed(self, endpoint: Endpoint) -> None:
        """Releases the endpoint: its server is unreachable or broken."""
        endpoint.num_in_flight -= 1
        endpoint.num_failures += 1
        if endpoint.num_failures >= self._max_failures:
            endpoint.aside_until = self._clock() + self._aside_s

    def rested(self, endpoint: Endpoint, seconds: float) -> None:
        """Releases the endpoint: its healthy server asks for a pause of `seconds`."""
        endpoint.num_in_flight -= 1
        endpoint.aside_until = max(endpoint.aside_until, self._clock() + seconds)

    def released(self, endpoint: Endpoint) -> None:
        """Releases the endpoint without information about its server."""
        endpoint.num_in_flight -= 1

    def _free(self) -> list[Endpoint]:
        now = self._clock()
        return [e for e in self._endpoints if e.aside_until <= now and not self._is_on_trial(e)]

    def _is_on_trial(self, endpoint: Endpoint) -> bool:
        return endpoint.num_failures >= self._max_failures and endpoint.num_in_flight > 0


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


class LightrftReplyOfAnybody(BaseModel):
    """A reply of any server: further fields are ignored, and each reward is checked separately."""

    rewards: list[Any]

    def outcomes(self) -> list[float | ScoringFailure]:
        return [_outcome(reward) for reward in self.rewards]


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
    """Joins rows to one request body."""
    columns = (b'"%b":[%b]' % (name.encode(), b",".join(row.columns[name] for row in rows)) for name in rows[0].columns)
    return b"{" + b",".join(columns) + b"}"


def _outcome(reward: Any) -> float | ScoringFailure:
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return ScoringFailure(FailureKind.FAILED, f"the service replied with {reward!r} for a reward")
    return reward  # the contract refuses non-finite numbers


def _images(images: str | list[str] | None, row: int) -> tuple[bytes, ...]:
    files = [images] if isinstance(images, str) else images or []
    try:
        return tuple(decode_base64(f.partition(";base64,")[2] if f.startswith("data:") else f) for f in files)
    except ValueError as error:
        raise RewardError(f"sample {row}: an image is {error}: send base64 of whole files") from error
