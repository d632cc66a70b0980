"""Requests in flight, and prompts fetched ahead."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from mobula.cluster.errors import RolloutError
from mobula.cluster.records.partial_response import NOTHING, Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import EndedResponse, Prompt
from mobula.cluster.roles import Prompts, SamplingSettings
from mobula.cluster.workers.status import InFlightSummary


class PromptPrefetcher:
    """Returns the prompts of `prompts` in order. Up to `num_prefetched` are prepared ahead; with 0 each is chosen when
    it is asked for, because the order depends on the groups that are finished until then.

    Each prompt comes with its own cursor, because the cursor of the source is ahead.
    """

    def __init__(self, prompts: Prompts, num_prefetched: int) -> None:
        self._prompts = prompts
        self._is_ahead = num_prefetched > 0
        self._ready: asyncio.Queue[tuple[Prompt, int]] = asyncio.Queue(num_prefetched)

    async def prepare(self) -> None:
        while self._is_ahead:
            # On a thread: reading and processing an image would block the driver's event loop.
            prompt = await asyncio.to_thread(self._prompts.next)
            await self._ready.put((prompt, self._prompts.cursor))

    async def next(self) -> tuple[Prompt, int]:
        """Returns the next prompt and the source's cursor after it."""
        if not self._is_ahead:
            return await asyncio.to_thread(self._prompts.next), self._prompts.cursor
        return await self._ready.get()


# InFlightRequests: every prompt in flight with the tokens received so far.
#
# The caller holds a request until its group is complete; the sampling side makes attempts:
#
#     with in_flight_requests.held(prompt, settings):         # RetryingRollouts, over all tries
#         in_flight = in_flight_requests.of(prompt, settings)     # RolloutClient, in each try
#         attempt = in_flight.next_attempt()          # goes to the actor, with the tokens of earlier attempts
#         in_flight.add(chunk)                        # for each chunk that the actor streams
#
# After the loss of an actor the next attempt continues from the received tokens. Requests do not survive the driver:
# prompts in flight when the driver is killed are sampled again.

PROMPTS, TOKENS_KEPT, TOKENS_LOST = "prompts", "tokens_kept", "tokens_lost_at_most"


class InFlightRequest:
    """One prompt in flight: its newest attempt and the received part of its siblings."""

    def __init__(self, prompt: Prompt, settings: SamplingSettings, table: InFlightRequests, since_s: float) -> None:
        self.prompt_id = prompt.prompt_id
        self.since_s = since_s
        self._prompt = prompt
        self._settings = settings
        self._table = table
        self._siblings = [NOTHING] * settings.num_samples
        self._attempt: Attempt | None = None

    @property
    def siblings(self) -> tuple[SampledSequence, ...]:
        return tuple(self._siblings)

    @property
    def num_tokens(self) -> int:
        return sum(sibling.num_tokens for sibling in self._siblings)

    def next_attempt(self) -> Attempt:
        """Begins a new attempt from the received tokens. Later chunks of earlier attempts are refused."""
        if self._attempt is not None:
            num_kept = self.num_tokens - sum(sibling.num_tokens for sibling in self._attempt.siblings)
            self._table.resumed.update({PROMPTS: 1, TOKENS_KEPT: num_kept, TOKENS_LOST: self._num_lost()})
        known = self.siblings if self.num_tokens else ()
        self._attempt = Attempt(self._table.new_request_id(self.prompt_id), known)
        self._table.on_attempt(self.prompt_id)
        return self._attempt

    def add(self, chunk: TokenChunk) -> None:
        known = NOTHING if chunk.is_restart else self._siblings[chunk.sibling]
        if self._attempt is None or chunk.request_id != self._attempt.request_id:
            raise RolloutError(f"prompt {self.prompt_id} got a chunk of {chunk.request_id}, which is not its attempt")
        if chunk.start != known.num_tokens:
            raise RolloutError(
                f"sibling {chunk.sibling} of prompt {self.prompt_id} has {known.num_tokens} tokens, its next chunk "
                f"begins after {chunk.start}: chunks were lost or repeated"
            )
        self._siblings[chunk.sibling] = known.followed_by(chunk.tokens)
        if chunk.response is not None:
            self._table.on_ended(EndedResponse(self._prompt, chunk.sibling, chunk.response))

    def _num_lost(self) -> int:
        """Returns the maximum number of tokens that were sampled and not received: less than a chunk for each
        unfinished sibling, one turn for each unfinished episode."""
        max_tokens, chunk_tokens = self._settings.max_tokens, self._table.chunk_tokens
        not_received = chunk_tokens - 1 if max_tokens > chunk_tokens else max_tokens
        unfinished = [sibling for sibling in self._siblings if not sibling.is_finished]
        return sum(max_tokens if s.turns else min(not_received, max_tokens - s.num_tokens) for s in unfinished)


@dataclass(eq=False)
class InFlightRequests:
    """Every in-flight request of a run. `resumed` counts the prompts that continued on another actor, and their kept
    and lost tokens."""

    chunk_tokens: int  # after which actors report a response
    _: KW_ONLY
    on_ended: Callable[[EndedResponse], None] = lambda ended: None  # gets the responses that end before their siblings
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.on_attempt: Callable[[str], None] = lambda prompt_id: None  # called when a prompt is given to an actor
        self.resumed: Counter[str] = Counter({PROMPTS: 0, TOKENS_KEPT: 0, TOKENS_LOST: 0})
        self._in_flight_requests: dict[str, InFlightRequest] = {}  # by prompt id, oldest first
        self._numbers = itertools.count()

    @contextmanager
    def held(self, prompt: Prompt, settings: SamplingSettings) -> Iterator[InFlightRequest]:
        """Keeps the received tokens of the prompt's responses while the body runs."""
        assert prompt.prompt_id not in self._in_flight_requests, f"prompt {prompt.prompt_id} is already in flight"
        in_flight = self._in_flight_requests[prompt.prompt_id] = self._new(prompt, settings)
        try:
            yield in_flight
        finally:
            del self._in_flight_requests[prompt.prompt_id]

    def of(self, prompt: Prompt, settings: SamplingSettings) -> InFlightRequest:
        """Returns the in-flight request of the prompt, or a new one for this attempt alone if none is held."""
        if prompt.prompt_id in self._in_flight_requests:
            return self._in_flight_requests[prompt.prompt_id]
        return self._new(prompt, settings)

    def summary(self) -> InFlightSummary:
        if not self._in_flight_requests:
            return InFlightSummary(0, None, 0.0)
        oldest = next(iter(self._in_flight_requests.values()))
        return InFlightSummary(len(self._in_flight_requests), oldest.prompt_id, self.clock() - oldest.since_s)

    def new_request_id(self, prompt_id: str) -> str:
        return f"{prompt_id}~{next(self._numbers)}"

    def _new(self, prompt: Prompt, settings: SamplingSettings) -> InFlightRequest:
        return InFlightRequest(prompt, settings, self, self.clock())
