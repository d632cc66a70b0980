"""Posts requests to servers with balancing, retries and a deadline; the reward function `http` uses it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pydantic import ValidationError

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, TimedOutError, failure, score_prepared
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

T = TypeVar("T")
Closer = Callable[[], Awaitable[None]]
CLOSE_S = 2.0


class LoopThread:
    """Runs coroutines for any thread. The daemon thread ends with this object or with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closers: list[Closer] = []
        thread = threading.Thread(target=_serve, args=(self._loop, self._closers), name=name, daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, self._loop, thread)

    def at_close(self, closer: Closer) -> None:
        """Registers `closer`, which the loop awaits at its end."""
        self._closers.append(closer)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine, which has its own deadline."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the waiting call was interrupted; without effect on a finished coroutine


def _serve(loop: asyncio.AbstractEventLoop, closers: list[Closer]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        for closer in closers:
            loop.run_until_complete(closer())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():  # the garbage collector may call this in any thread
        thread.join(CLOSE_S)


@dataclass(eq=False)
class Endpoint:
    """One URL with the state of its server; times are on the clock of its `Endpoints`."""

    url: str
    num_in_flight: int = 0
    num_failures: int = 0  # in a row
    aside_until: float = 0.0
    last_used: int = 0


class Endpoints:
    """Balances over URLs by requests in flight; of equal URLs the longest unused is first. A URL that failed
    `max_failures` times in a row is set aside for `aside_s`; then one request at a time tests whether it is back. If
    all URLs are set aside, the one that is due first is used."""

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


READ_BYTES = 1 << 16
QUOTED_CHARS = 300  # of a server's message in an error


class RefusedError(RewardError):
    """A server refuses a request (4xx) and would refuse it again."""

    def __init__(self, url: str, status: int, said: str) -> None:
        super().__init__(url, status, said)
        self.status = status
        self.said = said

    def __str__(self) -> str:
        return f"{self.args[0]} refused with {self.status}: {self.said}"


class _AgainError(Exception):
    """A failed attempt that may succeed later; `retry_after_s` is the pause that the server asks for."""

    def __init__(self, error: RewardError, retry_after_s: float | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.retry_after_s = retry_after_s


class JsonPoster:
    """Posts request bodies; usable from any thread. Connection errors, timeouts, 5xx and 429 are retried after a random
    pause of up to `backoff_s` * 2^attempt ("full jitter"), or after Retry-After; any other 4xx is final."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._headers = {**connection.headers(), "Content-Type": "application/json"}
        self._endpoints = Endpoints(connection.urls, max_failures=connection.max_failures, aside_s=connection.aside_s)
        self._slots = asyncio.Semaphore(connection.max_concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._loop: LoopThread | None = None
        self._starting = threading.Lock()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work()`, which may call `post`, on this poster's loop."""
        with self._starting:
            if self._loop is None:
                self._loop = LoopThread("mobula-http-rewards")
        return self._loop.run(self._enter(work))

    async def post(self, body: bytes, deadline: float) -> bytes:
        """Posts `body` and returns the reply, by `deadline` on the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline):
                async with self._slots:
                    return await self._try(body, deadline)
        except TimeoutError as error:
            urls = ", ".join(self._connection.urls)
            raise TimedOutError(
                f"waited {self._connection.total_timeout_s:g} s (total_timeout_s) for {urls}: raise it, "
                "or start more servers"
            ) from error

    async def _enter(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._connection.timeout_s)
            self._session = aiohttp.ClientSession(
                timeout=timeout, headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
            assert self._loop is not None, "run starts it"
            self._loop.at_close(self._session.close)
        return await work()

    async def _try(self, body: bytes, deadline: float) -> bytes:
        for attempt in range(self._connection.max_attempts):
            endpoint = self._endpoints.take()
            try:
                reply = await self._attempt(endpoint, body)
            except _AgainError as again:
                last = again
            except RefusedError:
                self._endpoints.succeeded(endpoint)
                raise
            except BaseException:
                self._endpoints.released(endpoint)
                raise
            else:
                self._endpoints.succeeded(endpoint)
                return reply
            if last.retry_after_s is None:
                self._endpoints.failed(endpoint)
            else:
                self._endpoints.rested(endpoint, last.retry_after_s)
            if attempt + 1 < self._connection.max_attempts:
                await self._pause(attempt, last, deadline)
        raise last.error

    async def _pause(self, attempt: int, last: _AgainError, deadline: float) -> None:
        pause_s = random.uniform(0, min(self._connection.max_backoff_s, self._connection.backoff_s * 2**attempt))
        if last.retry_after_s is not None and not self._endpoints.is_any_free():
            pause_s = max(pause_s, last.retry_after_s)
        if asyncio.get_running_loop().time() + pause_s >= deadline:
            raise last.error  # more specific than the deadline
        await asyncio.sleep(pause_s)

    async def _attempt(self, endpoint: Endpoint, body: bytes) -> bytes:
        assert self._session is not None, "post is called inside run"
        try:
            async with self._session.post(endpoint.url, data=body, allow_redirects=False) as response:
                reply = await self._read(response)
        except TimeoutError as error:
            seconds = self._connection.timeout_s
            raise _AgainError(TimedOutError(f"waited {seconds:g} s for {endpoint.url} (timeout_s)")) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _AgainError(RewardError(f"{endpoint.url} cannot be reached or broke off ({error!r})")) from error
        status = response.status
        if status == 200:
            return reply
        said = reply[:QUOTED_CHARS].decode("utf-8", "replace")
        if status == 429 or status >= 500:
            kind = TimedOutError if status == 504 else RewardError
            wait_s = response.headers.get("Retry-After", "")  # or a date, which is not read
            is_busy = status in (429, 503) and wait_s.isdecimal()
            raise _AgainError(kind(f"{endpoint.url} answered {status}: {said}"), float(wait_s) if is_busy else None)
        raise RefusedError(endpoint.url, status, said)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        limit, chunks, num_bytes = self._connection.max_reply_bytes, [], 0
        async for chunk in response.content.iter_chunked(READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise RewardError(f"{response.url} replied with more than max_reply_bytes={limit}: raise it")
            chunks.append(chunk)
        return b"".join(chunks)


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
