"""Posts JSON to servers concurrently, with balancing, retries and a deadline."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import TimedOutError
from mobula.rewards.http.wire import Connection

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
            raise _AgainError(kind(f"{endpoint.url} answered {status}: {said}"), _retry_after(response))
        raise RefusedError(endpoint.url, status, said)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        limit, chunks, num_bytes = self._connection.max_reply_bytes, [], 0
        async for chunk in response.content.iter_chunked(READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise RewardError(f"{response.url} replied with more than max_reply_bytes={limit}: raise it")
            chunks.append(chunk)
        return b"".join(chunks)


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Returns the seconds that a busy server (429, 503) asks for; None without a header, or for a date."""
    said = response.headers.get("Retry-After", "")
    return float(said) if response.status in (429, 503) and said.isdecimal() else None
