"""PromptServer: receives requests for groups in a rollout actor and reports their outcomes.

A call to an actor costs the engine's core about as much time as a small model needs for one token of a whole group.
Therefore simultaneous prompts arrive in one call, which does not wait for them, and all reports leave in one stream.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from mobula.cluster.errors import RolloutError
from mobula.cluster.records.partial_response import Attempt, TokenChunk
from mobula.cluster.records.trajectory import GroupReport, Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings


@dataclass(frozen=True)
class GroupRequest:
    """One attempt at a prompt: sample all siblings, continuing an earlier attempt."""

    prompt: Prompt
    settings: SamplingSettings
    attempt: Attempt

    @property
    def request_id(self) -> str:
        return self.attempt.request_id


@dataclass(frozen=True)
class Ended:
    """The end of a request: the report of a group, or an error."""

    request_id: str
    outcome: GroupReport | Exception


@dataclass(frozen=True)
class MessageBatch:
    """Messages of all requests of an actor: chunks, then ended requests. The groups follow as separate values of the
    stream, in the order of `ended`, so that a receiver of the messages need not fetch them."""

    chunks: Sequence[TokenChunk]
    ended: Sequence[Ended]

    @property
    def num_groups(self) -> int:
        return sum(not isinstance(ended.outcome, Exception) for ended in self.ended)


class PromptServer:
    """Handles any number of concurrent requests with the subclass's `generate`, in one event loop. Messages of all
    requests leave in one stream. Those that come while a batch is sent form the next batch, and are kept until a
    listener exists."""

    def __init__(self) -> None:
        self._at_work: dict[str, asyncio.Task[None]] = {}  # by request id
        self._chunks: list[TokenChunk] = []
        self._ended: list[Ended] = []
        self._groups: list[TrajectoryGroup] = []
        self._has_messages = asyncio.Event()
        self._num_listeners = 0  # so far; only the newest receives messages

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        """Returns a group of the prompt and a report for the driver; passes sampled chunks to `report`."""
        raise NotImplementedError

    async def begin(self, requests: Sequence[GroupRequest]) -> None:
        """Starts the requests; results are in the messages."""
        for request in requests:
            self._at_work[request.request_id] = asyncio.create_task(self._answer(request), name=request.request_id)

    async def break_off(self, request_ids: Sequence[str]) -> None:
        """Cancels requests; ended requests are ignored."""
        for request_id in request_ids:
            if request_id in self._at_work:
                self._at_work[request_id].cancel()

    async def messages(self, num_values: int) -> AsyncIterator[MessageBatch | TrajectoryGroup]:
        """Yields the messages of all requests, each batch followed by its groups. Ends after the batch that reaches
        `num_values` values, or when another caller starts to listen."""
        self._num_listeners += 1
        listener = self._num_listeners
        self._has_messages.set()  # ends the stream of the previous listener
        while num_values > 0:
            while not (self._chunks or self._ended):
                self._has_messages.clear()
                await self._has_messages.wait()
                if listener != self._num_listeners:
                    return
            batch, groups = MessageBatch(self._chunks, self._ended), self._groups
            self._chunks, self._ended, self._groups = [], [], []
            yield batch
            for group in groups:
                yield group
            num_values -= 1 + len(groups)

    def report(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks += chunks
        self._has_messages.set()

    async def _answer(self, request: GroupRequest) -> None:
        try:
            group, report = await self.generate(request.prompt, request.settings, request.attempt)
        except Exception as error:  # raised in the waiting call
            self._ended.append(Ended(request.request_id, _fit_to_travel(error)))
        else:
            self._ended.append(Ended(request.request_id, report))
            self._groups.append(group)
        finally:
            del self._at_work[request.request_id]
        self._has_messages.set()


def _fit_to_travel(error: Exception) -> Exception:
    """Adds the traceback to an error as a note, or converts an error that cannot be pickled."""
    report = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries may hold any object, or need constructor arguments that they do not keep
        return RolloutError(report)
    error.add_note(report)
    return error
