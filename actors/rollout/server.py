"""PromptServer: the side of a rollout actor that receives requests for groups and reports their outcomes.

A call to an actor costs its engine's core about as much as a small model takes for a token of a whole group. So prompts
that are sent at one moment come in one call that does not wait for them, and all reports of them go out in
one stream.
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
    """One try at a prompt: sample all its siblings, from where an earlier try left them."""

    prompt: Prompt
    settings: SamplingSettings
    attempt: Attempt

    @property
    def request_id(self) -> str:
        return self.attempt.request_id


@dataclass(frozen=True)
class Ended:
    """How a request ended: with a group and its report, or with an error."""

    request_id: str
    outcome: GroupReport | Exception


@dataclass(frozen=True)
class MessageBatch:
    """The messages of all requests of an actor at one moment: first the chunks, then the requests that have ended.

    The groups themselves follow the messages in the same stream, one value each, in the order of `ended`: a receiver of
    the messages need not fetch them.
    """

    chunks: Sequence[TokenChunk]
    ended: Sequence[Ended]

    @property
    def num_groups(self) -> int:
        return sum(not isinstance(ended.outcome, Exception) for ended in self.ended)


class MessageQueue:
    """One stream for all requests of an actor: what is put while messages are on their way travels together in the
    next.

    It keeps everything until a listener comes.
    """

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._ended: list[Ended] = []
        self._groups: list[TrajectoryGroup] = []
        self._has_messages = asyncio.Event()
        self._num_listeners = 0  # that have come so far; the newest one gets everything

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks += chunks
        self._has_messages.set()

    def end(self, ended: Ended, group: TrajectoryGroup | None = None) -> None:
        """A request is over; `group` is what came of it unless it failed."""
        assert (group is None) == isinstance(ended.outcome, Exception), f"{ended.request_id}: a group or an error"
        self._ended.append(ended)
        if group is not None:
            self._groups.append(group)
        self._has_messages.set()

    async def messages(self) -> AsyncIterator[tuple[MessageBatch, list[TrajectoryGroup]]]:
        """Batches of messages in order, with the groups that belong to them; ends when another listener comes."""
        self._num_listeners += 1
        listener = self._num_listeners
        self._has_messages.set()  # ends the iterator of the listener before
        while True:
            while not (self._chunks or self._ended):
                self._has_messages.clear()
                await self._has_messages.wait()
                if listener != self._num_listeners:
                    return
            batch, groups = MessageBatch(self._chunks, self._ended), self._groups
            self._chunks, self._ended, self._groups = [], [], []
            yield batch, groups


class PromptServer:
    """Works at any number of requests at a time, each by the role's own `generate`. Runs in one event loop."""

    def __init__(self) -> None:
        self._messages = MessageQueue()
        self._at_work: dict[str, asyncio.Task[None]] = {}  # by request id

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        """A group of the prompt and its report for the driver; chunks go to `report` as they are sampled."""
        raise NotImplementedError

    async def begin(self, requests: Sequence[GroupRequest]) -> None:
        """Take the requests in; what comes of them is in the messages."""
        for request in requests:
            self._at_work[request.request_id] = asyncio.create_task(self._answer(request), name=request.request_id)

    async def break_off(self, request_ids: Sequence[str]) -> None:
        """Stop working at requests whose groups are no longer awaited; those that have ended are ignored."""
        for request_id in request_ids:
            if request_id in self._at_work:
                self._at_work[request_id].cancel()

    async def messages(self, num_values: int) -> AsyncIterator[MessageBatch | TrajectoryGroup]:
        """The reports of all requests, as they come: messages, each followed by the number of groups that it names.

        It ends with the first messages that make it `num_values` values or more, or when another caller asks.
        """
        async for batch, groups in self._messages.messages():
            yield batch
            for group in groups:
                yield group
            num_values -= 1 + len(groups)
            if num_values <= 0:
                return

    def report(self, chunks: Sequence[TokenChunk]) -> None:
        """Put chunks into the messages."""
        self._messages.put(chunks)

    async def _answer(self, request: GroupRequest) -> None:
        try:
            group, report = await self.generate(request.prompt, request.settings, request.attempt)
        except Exception as error:  # whatever it is, the caller gets it
            self._messages.end(Ended(request.request_id, _fit_to_travel(error)))
        else:
            self._messages.end(Ended(request.request_id, report), group)
        finally:
            del self._at_work[request.request_id]


def _fit_to_travel(error: Exception) -> Exception:
    """The error with its traceback as a note, or an equivalent one where it cannot be pickled."""
    report = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of a library may hold anything, or want arguments that it does not keep
        return RolloutError(report)
    error.add_note(report)
    return error
