"""InFlightRequests: every prompt in flight, with what is known of its responses while they are sampled.

The caller holds a request until the group is there, the sampling side makes attempts at it:

    with in_flight_requests.held(prompt, settings):         # RetryingRollouts, over all tries
        in_flight = in_flight_requests.of(prompt, settings)     # RolloutClient, in each try
        attempt = in_flight.next_attempt()          # goes to the actor, with what earlier ones left
        in_flight.add(chunk)                        # for each chunk that the actor streams

The tokens of an actor that is lost stay; the next one goes on from them. Nothing here survives the driver: a prompt
that was in flight when the driver was killed is sampled again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mobula.cluster.errors import RolloutError
from mobula.cluster.records.partial_response import NOTHING, Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import EndedResponse, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.workers.status import InFlightSummary

PROMPTS, TOKENS_KEPT, TOKENS_LOST = "prompts", "tokens_kept", "tokens_lost_at_most"


class InFlightRequest:
    """One prompt in flight: its newest attempt, and its siblings as far as they are known."""

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
        """A new try, from what is known; chunks of the one before are refused from now on."""
        if self._attempt is not None:
            self._table.count_resumed(self._num_new(self._attempt), self._num_lost())
        known = self.siblings if self.num_tokens else ()
        self._attempt = Attempt(self._table.new_request_id(self.prompt_id), known)
        self._table.on_attempt(self.prompt_id)
        return self._attempt

    def add(self, chunk: TokenChunk) -> None:
        """Take a chunk of the newest attempt.

        Raises:
            RolloutError: it is of another attempt, or does not begin where what is known ends.
        """
        known = NOTHING if chunk.is_restart else self._siblings[chunk.sibling]
        if self._attempt is None or chunk.request_id != self._attempt.request_id:
            raise RolloutError(f"prompt {self.prompt_id} got a chunk of {chunk.request_id}: a try that is over")
        if chunk.start != known.num_tokens:
            raise RolloutError(
                f"sibling {chunk.sibling} of prompt {self.prompt_id} has {known.num_tokens} tokens, its next chunk "
                f"begins after {chunk.start}: chunks were lost or came twice"
            )
        self._siblings[chunk.sibling] = known.followed_by(chunk.tokens)
        if chunk.response is not None:
            self._table.on_ended(EndedResponse(self._prompt, chunk.sibling, chunk.response))

    def _num_new(self, attempt: Attempt) -> int:
        return self.num_tokens - sum(sibling.num_tokens for sibling in attempt.siblings)

    def _num_lost(self) -> int:
        """Tokens that may have been sampled and not been heard of: less than a chunk for each unfinished sibling, and
        one turn for each unfinished episode.
        """
        max_tokens, chunk_tokens = self._settings.max_tokens, self._table.chunk_tokens
        unheard = chunk_tokens - 1 if max_tokens > chunk_tokens else max_tokens
        unfinished = [sibling for sibling in self._siblings if not sibling.is_finished]
        return sum(max_tokens if s.turns else min(unheard, max_tokens - s.num_tokens) for s in unfinished)


class InFlightRequests:
    """Every in-flight request of a run. `resumed` counts prompts that were handed on, and their tokens kept and lost
    thereby."""

    def __init__(
        self,
        chunk_tokens: int,
        *,
        on_ended: Callable[[EndedResponse], None] = lambda ended: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Actors report a response every `chunk_tokens` tokens; `on_ended` is called for those that end before their
        siblings.
        """
        self.chunk_tokens = chunk_tokens
        self.on_ended = on_ended
        self.on_attempt: Callable[[str], None] = lambda prompt_id: None  # a prompt is given to an actor
        self.resumed: Counter[str] = Counter({PROMPTS: 0, TOKENS_KEPT: 0, TOKENS_LOST: 0})
        self._clock = clock
        self._in_flight_requests: dict[str, InFlightRequest] = {}  # by prompt id, oldest first
        self._numbers = itertools.count()

    @contextmanager
    def held(self, prompt: Prompt, settings: SamplingSettings) -> Iterator[InFlightRequest]:
        """Keep what is known of the prompt's responses while the body runs."""
        assert prompt.prompt_id not in self._in_flight_requests, f"prompt {prompt.prompt_id} is in flight already"
        in_flight = self._in_flight_requests[prompt.prompt_id] = self._new(prompt, settings)
        try:
            yield in_flight
        finally:
            del self._in_flight_requests[prompt.prompt_id]

    def of(self, prompt: Prompt, settings: SamplingSettings) -> InFlightRequest:
        """The in-flight request of the prompt; where none is held, one that ends with this try."""
        if prompt.prompt_id in self._in_flight_requests:
            return self._in_flight_requests[prompt.prompt_id]
        return self._new(prompt, settings)

    def summary(self) -> InFlightSummary:
        if not self._in_flight_requests:
            return InFlightSummary(0, None, 0.0)
        oldest = next(iter(self._in_flight_requests.values()))
        return InFlightSummary(len(self._in_flight_requests), oldest.prompt_id, self._clock() - oldest.since_s)

    def new_request_id(self, prompt_id: str) -> str:
        return f"{prompt_id}~{next(self._numbers)}"

    def count_resumed(self, num_kept: int, num_lost: int) -> None:
        self.resumed.update({PROMPTS: 1, TOKENS_KEPT: num_kept, TOKENS_LOST: num_lost})

    def _new(self, prompt: Prompt, settings: SamplingSettings) -> InFlightRequest:
        return InFlightRequest(prompt, settings, self, self._clock())
