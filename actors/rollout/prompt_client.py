"""PromptClient: sends prompts of the driver to one rollout actor and receives groups and chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.rollout.messages import Ended, GroupRequest, MessageBatch
from cluster.errors import MobulaError, WorkerDiedError, as_raised_by_role
from cluster.records.partial_response import TokenChunk
from cluster.records.trajectory import GroupReport
from cluster.runtime.ray_actors import on_failure, with_attachments

Take = Callable[[TokenChunk], None]

VALUES_A_STREAM = 4000  # Ray keeps about 100 bytes for each value of a stream until the stream ends


@dataclass(frozen=True)
class _Asked:
    """Who waits for one request."""

    take: Take
    group: asyncio.Future[tuple[Any, GroupReport]]

    def fail(self, error: Exception) -> None:
        if not self.group.done():
            self.group.set_exception(error)


class PromptClient:
    """Requests that are made at one moment go out in one call; one stream brings what comes of all of them.

    The stream is opened before the first request, and again after it broke off.
    """

    def __init__(self, handle: Any, name: str) -> None:
        """`handle` is the Ray handle of a `PromptServer` named `name`."""
        self._handle = handle
        self._name = name
        self._asked: dict[str, _Asked] = {}  # by request id
        self._unsent: list[GroupRequest] = []
        self._listening: asyncio.Task[None] | None = None

    @contextmanager
    def asked(self, request: GroupRequest, take: Take) -> Iterator[asyncio.Future[tuple[Any, GroupReport]]]:
        """A reference to the group and its report, to be awaited in the body; `take` is given each chunk.

        Leaving the body before the request has ended cancels the request. The future raises:
            WorkerDiedError: the actor died, and all that it had reported has been taken; or it is ended.
            DependencyError: the actor itself waited in vain.
            Exception: whatever else the actor or `take` raised.
        """
        self._listen()
        waiting = _Asked(take, asyncio.get_running_loop().create_future())
        self._asked[request.request_id] = waiting
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(request)
        try:
            yield waiting.group
        finally:
            if self._asked.pop(request.request_id, None) is not None:
                self._handle.break_off.remote([request.request_id])  # it takes no slot of the engine any more

    def close(self) -> None:
        """The actor is about to be ended: all that wait for it fail at once."""
        if self._listening is not None:
            self._listening.cancel()
        self._fail(list(self._asked), WorkerDiedError(f"{self._name} is ended"))

    def _send(self) -> None:
        requests = [request for request in self._unsent if request.request_id in self._asked]
        self._unsent = []
        if not requests:
            return
        ids = [request.request_id for request in requests]
        try:
            call = self._handle.begin.remote(requests)
        except Exception as error:  # it cannot be sent; every waiter gets the error
            self._fail(ids, error)
        else:
            on_failure(call, partial(self._fail, ids), what=f"{self._name} to take {len(ids)} prompts")

    def _listen(self) -> None:
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._hear(self._stream()), name=f"listen to {self._name}")

    def _stream(self) -> Any:
        return self._handle.messages.options(num_returns="streaming").remote(VALUES_A_STREAM)

    async def _hear(self, stream: Any) -> None:
        what = f"messages of {self._name}"
        try:
            while True:
                async for batch, groups in with_attachments(stream, _num_groups, what=what):
                    self._take(batch, groups)
                stream = self._stream()
        except Exception as error:  # every waiter gets the error
            self._fail(list(self._asked), error)

    def _take(self, batch: MessageBatch, groups: Sequence[Any]) -> None:
        for chunk in batch.chunks:
            if (waiting := self._asked.get(chunk.request_id)) is not None:
                try:
                    waiting.take(chunk)
                except MobulaError as error:  # of this request alone
                    waiting.fail(error)
        whole = iter(groups)
        for ended in batch.ended:
            self._end(ended, None if ended.error else next(whole))

    def _end(self, ended: Ended, group: Any) -> None:
        if ended.error is not None:
            self._fail([ended.request_id], as_raised_by_role(ended.error))
        elif (waiting := self._asked.pop(ended.request_id, None)) is not None and not waiting.group.done():
            waiting.group.set_result((group, ended.report))

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            if (waiting := self._asked.pop(request_id, None)) is not None:
                waiting.fail(error)


def _num_groups(batch: MessageBatch) -> int:
    return batch.num_groups
