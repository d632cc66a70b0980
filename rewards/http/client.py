"""The reward function `http`: sends responses to a service with our protocol or LightRFT's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, failure, score_prepared
from mobula.rewards.http.poster import JsonPoster, RefusedError
from mobula.rewards.http.wire import (
    ColumnRow,
    Connection,
    QueryForm,
    ScoreReply,
    encode_sample,
    join_rows,
    join_samples,
    read_lightrft_reply,
)
from mobula.rewards.tools import Tools

FRAME_BYTES = 128  # overhead of a body beside its samples
MAY_BE_ONE_SAMPLE = (413, 422)  # refusals that a single sample may cause


@dataclass(frozen=True)
class Dialect:
    """A protocol: encodes one request, whose length is its size in a body, joins a body, and decodes a reply, which may
    have the wrong number of outcomes."""

    encode: Callable[[RewardRequest], Sized]
    body: Callable[[Sequence[Any]], bytes]
    outcomes: Callable[[bytes], Sequence[float | Outcome]]


def _lightrft(queries_are: QueryForm) -> Dialect:
    """LightRFT's protocol: columns in, numbers out. Queries hold prompt and response, or the response alone."""
    return Dialect(lambda request: ColumnRow(request, queries_are), join_rows, read_lightrft_reply)


DIALECTS: dict[str, Dialect] = {
    "mobula": Dialect(encode_sample, join_samples, lambda reply: ScoreReply.model_validate_json(reply).read()),
    "lightrft": _lightrft("full"),
    "lightrft_responses": _lightrft("response"),
}


class HttpReward:
    """Sends responses to a service in batches and reads one outcome each; see `Connection` for the other options.

    `dialect` is mobula, lightrft, or lightrft_responses for services that score queries as a whole. A request has at
    most `batch_size` samples, and fewer if they are large. A reply with a wrong number of outcomes is an error of the
    request, not of a sample. A request that may be refused because of one sample (413, 422) is halved until this sample
    is alone.
    """

    def __init__(self, tools: Tools, *, dialect: str, batch_size: int, **connection: Any) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"options.dialect={dialect!r} is unknown: use {', '.join(DIALECTS)}")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"options.batch_size={batch_size!r} is no number of samples: give 1 or more")
        self._dialect = DIALECTS[dialect]
        self._batch_size = batch_size
        self._connection = Connection.of("http", connection)
        self._poster = JsonPoster(self._connection)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        """Returns one outcome per request, within `total_timeout_s`."""
        return score_prepared(requests, self._encode, lambda samples: self._poster.run(lambda: self._post_all(samples)))

    def _encode(self, request: RewardRequest) -> Sized:
        sample, limit = self._dialect.encode(request), self._connection.max_request_bytes
        if len(sample) + FRAME_BYTES > limit:
            raise RewardError(f"one sample has {len(sample)} bytes, max_request_bytes is {limit}: raise it")
        return sample

    async def _post_all(self, samples: Sequence[Sized]) -> list[float | Outcome]:
        deadline = asyncio.get_running_loop().time() + self._connection.total_timeout_s
        batches = list(self._batches(samples))
        answers = await asyncio.gather(*(self._post(batch, deadline) for batch in batches))
        return [outcome for answer in answers for outcome in answer]

    def _batches(self, samples: Sequence[Sized]) -> Iterator[list[Sized]]:
        batch: list[Sized] = []
        num_bytes = FRAME_BYTES
        for sample in samples:
            size = len(sample) + 8  # with one separator per column
            if batch and (len(batch) == self._batch_size or num_bytes + size > self._connection.max_request_bytes):
                yield batch
                batch, num_bytes = [], FRAME_BYTES
            batch.append(sample)
            num_bytes += size
        yield batch

    async def _post(self, batch: Sequence[Sized], deadline: float) -> Sequence[float | Outcome]:
        try:
            return self._read(await self._poster.post(self._dialect.body(batch), deadline), len(batch))
        except RewardError as error:
            is_refused = isinstance(error, RefusedError) and error.status in MAY_BE_ONE_SAMPLE
            if not is_refused or len(batch) == 1:
                return [failure(error)] * len(batch)
        middle = len(batch) // 2
        halves = await asyncio.gather(*(self._post(half, deadline) for half in (batch[:middle], batch[middle:])))
        return [outcome for half in halves for outcome in half]

    def _read(self, reply: bytes, num_samples: int) -> Sequence[float | Outcome]:
        urls = ", ".join(self._connection.urls)
        try:
            outcomes = self._dialect.outcomes(reply)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the reply"
            raise RewardError(f"{urls} replied with something else than agreed: {where}: {first['msg']}") from error
        if len(outcomes) != num_samples:
            raise RewardError(f"{urls} replied with {len(outcomes)} rewards for {num_samples} samples: fix it")
        return outcomes
