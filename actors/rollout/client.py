"""RolloutClient: calls of the driver to one rollout actor, for prompts, weights and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.rollout.server import Ended, GroupRequest, MessageBatch
from mobula.cluster.errors import MobulaError, WorkerDiedError, as_raised_by_role
from mobula.cluster.records.partial_response import TokenChunk
from mobula.cluster.records.trajectory import Generated, GroupReport, Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.concurrency import RenewableTimeout
from mobula.cluster.runtime.ray_actors import answer, on_failure, stop, with_attachments
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous

Take = Callable[[TokenChunk], None]

VALUES_A_STREAM = 4000  # Ray keeps about 100 bytes for each value of a stream until the stream ends


@dataclass(eq=False)
class RolloutClient:
    """Typed calls to one `RolloutActor`, each with a deadline; also a weight-sync `Receiver`."""

    handle: Any  # Ray handle of the actor
    name: str
    _: KW_ONLY
    in_flight_requests: InFlightRequests  # streamed chunks are added to them
    start_s: float
    rollout_s: float  # bounds the wait for a group, or for its next chunk
    sync_s: float
    sign_s: float
    probe_s: float
    stop_s: float

    def __post_init__(self) -> None:
        self._prompts = PromptClient(self.handle, self.name)
        self._version = -1  # newest version that the actor is known to serve
        self._held: list[RenewableTimeout] = []  # of prompts that wait in the actor for a push

    async def start(self) -> None:
        await self._answer(self.handle.start.remote(), "load its engine", self.start_s)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Returns a reference to the group, owned by the caller so that it outlives the actor, and the report. The
        actor continues from the chunks of the prompt's in-flight request, which collects the new chunks. If the prompt
        needs the weights of a push, the timeout starts at the end of the push."""
        in_flight, timeout = self.in_flight_requests.of(prompt, settings), self._timeout(settings.min_version)

        def take(chunk: TokenChunk) -> None:
            in_flight.add(chunk)
            timeout.renew()

        with self._prompts.asked(GroupRequest(prompt, settings, in_flight.next_attempt()), take) as answered:
            group, report = await timeout.wait_for(answered, f"{self.name} to generate prompt {prompt.prompt_id}")
        return Generated.of(prompt, group, report)

    def begin_sample(self, prompt: Prompt, settings: SamplingSettings) -> Any:
        """Samples a prompt outside the run; returns an object reference of the `TrajectoryGroup`."""
        return self.handle.sample_apart.remote(prompt, settings)

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        """Scores a prompt with served weights. Raises: ValueError: the adapter is not served."""
        call = self.handle.score_prompt.remote(prompt, adapter, num_top)
        return await self._answer(call, f"score prompt {prompt.prompt_id}", self.rollout_s)

    async def serve(self, adapter: str, folder: Path) -> None:
        """Loads an adapter. Raises: ValueError: the engine cannot serve it."""
        await self._answer(self.handle.serve.remote(adapter, folder), f"load adapter {adapter}")

    async def withdraw(self, adapter: str) -> None:
        """Unloads an adapter after its running requests. Raises: ValueError: it is not served."""
        await self._answer(self.handle.withdraw.remote(adapter), f"withdraw adapter {adapter}", self.rollout_s)

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return await self._answer(self.handle.prompt_logprobs.remote(prompt), "score the probe prompt")

    async def check_manifest(self, manifest: Manifest) -> None:
        await self._answer(self.handle.check_manifest.remote(manifest), "check the manifest")

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        await self._answer(self.handle.join_transfer.remote(rendezvous, rank), "join the transfer group")

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        call = self.handle.receive_weights.remote(manifest, bucket_bytes, version)
        try:
            self._version = await self._answer(call, f"receive version {version}")
        finally:  # after a failed push, too, prompts stop waiting for it
            for timeout in self._held:
                timeout.renew()
            self._held.clear()
        return self._version

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        call = self.handle.load_weights.remote(manifest, bucket_bytes, buckets, version)
        await self._answer(call, f"load version {version}")
        self._version = version

    async def is_alive(self) -> Vitals:
        """Returns the resource usage of the process, also while it computes."""
        return await self._answer(self.handle.is_alive.remote(), "answer that it is alive", self.sign_s)

    async def probe(self) -> None:
        await self._answer(self.handle.probe.remote(), "sample one token", self.probe_s)

    async def sleep(self) -> None:
        await self._answer(self.handle.sleep.remote(), "go to sleep")

    async def wake_up(self, tag: str) -> None:
        await self._answer(self.handle.wake_up.remote(tag), f"wake up ({tag})")

    async def close(self) -> None:
        """Ends the process, in any state."""
        self._prompts.close()
        await stop(self.handle, timeout_s=self.stop_s, what=self.name)

    async def weight_version(self) -> int:
        self._version = await self._answer(self.handle.ping.remote(), "name its weight version")
        return self._version

    def _timeout(self, min_version: int) -> RenewableTimeout:
        is_held = min_version > self._version
        timeout = RenewableTimeout(self.rollout_s, is_held=is_held)
        if is_held:
            self._held.append(timeout)
        return timeout

    async def _answer(self, reference: Any, what: str, timeout_s: float | None = None) -> Any:
        """Waits for the reply to a call; without `timeout_s` as long as for a part of a weight sync."""
        seconds = self.sync_s if timeout_s is None else timeout_s
        return await answer(reference, timeout_s=seconds, what=f"{self.name} to {what}")


@dataclass(frozen=True)
class _Asked:
    take: Take
    group: asyncio.Future[tuple[Any, GroupReport]]

    def fail(self, error: Exception) -> None:
        if not self.group.done():
            self.group.set_exception(error)


class PromptClient:
    """Sends simultaneous requests in one call, and receives the messages of all requests in one stream."""

    def __init__(self, handle: Any, name: str) -> None:
        """`handle` is the Ray handle of a `PromptServer` named `name`."""
        self._handle = handle
        self._name = name
        self._asked: dict[str, _Asked] = {}  # by request id
        self._unsent: list[GroupRequest] = []
        self._listening: asyncio.Task[None] | None = None

    @contextmanager
    def asked(self, request: GroupRequest, take: Take) -> Iterator[asyncio.Future[tuple[Any, GroupReport]]]:
        """Yields a future of the group's reference and report; calls `take` with each chunk.

        Leaving the body before the request has ended cancels the request. The future raises:
            WorkerDiedError: the actor died, after its reported chunks were taken, or is being closed.
            DependencyError: a call of the actor timed out.
            Exception: any other error of the actor or of `take`.
        """
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._hear(self._stream()), name=f"listen to {self._name}")
        waiting = _Asked(take, asyncio.get_running_loop().create_future())
        self._asked[request.request_id] = waiting
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(request)
        try:
            yield waiting.group
        finally:
            if self._asked.pop(request.request_id, None) is not None:
                self._handle.break_off.remote([request.request_id])  # frees the slot in the engine

    def close(self) -> None:
        """Fails all waiting requests, before the actor is ended."""
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
        except Exception as error:  # raised in the waiting calls
            self._fail(ids, error)
        else:
            on_failure(call, partial(self._fail, ids), what=f"{self._name} to take {len(ids)} prompts")

    def _stream(self) -> Any:
        return self._handle.messages.options(num_returns="streaming").remote(VALUES_A_STREAM)

    async def _hear(self, stream: Any) -> None:
        what = f"messages of {self._name}"
        try:
            while True:
                async for batch, groups in with_attachments(stream, lambda batch: batch.num_groups, what=what):
                    self._take(batch, groups)
                stream = self._stream()
        except Exception as error:  # raised in the waiting calls
            self._fail(list(self._asked), error)

    def _take(self, batch: MessageBatch, groups: Sequence[Any]) -> None:
        for chunk in batch.chunks:
            if (waiting := self._asked.get(chunk.request_id)) is not None:
                try:
                    waiting.take(chunk)
                except MobulaError as error:  # fails this request only
                    waiting.fail(error)
        whole = iter(groups)
        for ended in batch.ended:
            self._end(ended, None if isinstance(ended.outcome, Exception) else next(whole))

    def _end(self, ended: Ended, group: Any) -> None:
        if isinstance(ended.outcome, Exception):
            self._fail([ended.request_id], as_raised_by_role(ended.outcome))
        elif (waiting := self._asked.pop(ended.request_id, None)) is not None and not waiting.group.done():
            waiting.group.set_result((group, ended.outcome))

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            if (waiting := self._asked.pop(request_id, None)) is not None:
                waiting.fail(error)
