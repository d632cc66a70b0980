"""Calls of the driver to a rollout actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import SETTINGS, LocalHandle, make_group, make_prompt, never
from waiting import until

from mobula.actors.rollout import client
from mobula.actors.rollout.actor import MediaBatcher
from mobula.actors.rollout.client import PromptClient, RolloutClient
from mobula.actors.rollout.server import GroupRequest, MessageBatch, PromptServer
from mobula.cluster.errors import DeadlineError, DependencyError, LostObjectError, RolloutError, WorkerDiedError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import Answers, GroupReport, Prompt, TrajectoryGroup, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous

PROMPT = make_prompt("0/0/s0")
DEADLINES_S = dict.fromkeys(("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s"), 5.0)
RENDEZVOUS = Rendezvous("host", 1, 1, 2, "gloo", 5.0)


class Server(PromptServer):
    """Reports `num_chunks` chunks of each request, and answers once `gate` is open; `before_answer` may raise."""

    def __init__(self, num_chunks: int = 0, before_answer: Callable[[str], Any] | None = None) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[list[str]] = []  # request ids, by call
        self.broken_off: list[str] = []  # prompt ids
        self.num_streams = 0
        self._num_chunks = num_chunks
        self._before_answer = before_answer

    async def begin(self, requests: Sequence[GroupRequest]) -> None:
        self.calls.append([request.request_id for request in requests])
        await super().begin(requests)

    async def messages(self, num_values: int) -> AsyncIterator[MessageBatch | TrajectoryGroup]:
        self.num_streams += 1
        async for value in super().messages(num_values):
            yield value

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        for start in range(self._num_chunks):
            self.report([chunk(attempt.request_id, start)])
            await asyncio.sleep(0)
        try:
            await self.gate.wait()
            if self._before_answer is not None:
                await self._before_answer(attempt.request_id)
        except asyncio.CancelledError:
            self.broken_off.append(prompt.prompt_id)
            raise
        group = make_group(prompt)
        return group, (group.summary(), group.small_responses())


class FakeActor(Server):
    """It also takes weights."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[object, ...]] = []

    async def ping(self) -> int:
        return 3

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(prompt.num_tokens - 1, -1.0)

    async def receive_weights(self, *args: object) -> int:
        self.pushed.append(args)
        return 7

    async def load_weights(self, *args: object) -> None:
        self.pushed.append(args)


async def no_messages(num_values: int) -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


def rollout_client(
    actor: object, name: str = "rollout/0", in_flight_requests: InFlightRequests | None = None, **deadlines: float
) -> RolloutClient:
    return RolloutClient(
        LocalHandle(actor),
        name,
        in_flight_requests=in_flight_requests or InFlightRequests(64),
        **DEADLINES_S | deadlines,
    )


async def test_a_group_comes_back_as_a_reference_beside_its_summary() -> None:
    reference, summary, answers = await rollout_client(FakeActor()).generate(PROMPT, SETTINGS)
    group = await reference.future()
    assert group.prompt is PROMPT
    assert summary == group.summary()
    assert answers == Answers(PROMPT, (0, 1), group.small_responses())


async def test_calls_carry_their_arguments_and_answers() -> None:
    actor = FakeActor()
    asked = rollout_client(actor)
    assert await asked.weight_version() == 3
    assert (await asked.prompt_logprobs(PROMPT)).shape == (PROMPT.num_tokens - 1,)
    assert await asked.receive_weights(Manifest(()), 64, 7) == 7
    await asked.load_weights(Manifest(()), 64, ["bucket"], 8)
    assert actor.pushed == [(Manifest(()), 64, 7), (Manifest(()), 64, ["bucket"], 8)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.start(), "waited 0.05 s for rollout/0 to load its engine"),
        (lambda c: c.generate(PROMPT, SETTINGS), "waited 0.05 s for rollout/0 to generate prompt 0/0/s0"),
        (lambda c: c.prompt_logprobs(PROMPT), "rollout/0 to score the probe prompt"),
        (lambda c: c.check_manifest(Manifest(())), "rollout/0 to check the manifest"),
        (lambda c: c.join_transfer(RENDEZVOUS, 1), "rollout/0 to join the transfer group"),
        (lambda c: c.receive_weights(Manifest(()), 64, 7), "rollout/0 to receive version 7"),
        (lambda c: c.load_weights(Manifest(()), 64, [], 7), "rollout/0 to load version 7"),
        (lambda c: c.weight_version(), "rollout/0 to name its weight version"),
        (lambda c: c.is_alive(), "rollout/0 to answer that it is alive"),
        (lambda c: c.probe(), "rollout/0 to sample one token"),
    ],
)
async def test_an_actor_that_does_not_answer_is_named_with_what_it_was_asked(call, message: str) -> None:
    methods = (
        "start begin break_off prompt_logprobs check_manifest join_transfer receive_weights load_weights ping is_alive "
        "probe"
    )
    silent = SimpleNamespace(**dict.fromkeys(methods.split(), never), messages=no_messages)
    with pytest.raises(DeadlineError, match=message):
        await call(rollout_client(silent, **dict.fromkeys(DEADLINES_S, 0.05)))


async def test_an_actor_stops_requests_without_a_waiting_caller() -> None:
    actor = FakeActor()
    asked = rollout_client(actor, rollout_s=0.05)
    await asked.generate(PROMPT, SETTINGS)
    actor.gate.clear()
    with pytest.raises(DeadlineError):
        await asked.generate(make_prompt("0/1/s1"), SETTINGS)
    asking = asyncio.create_task(asked.generate(make_prompt("0/2/s2"), SETTINGS))
    await until(lambda: len(actor.calls) == 3)
    asking.cancel()
    await until(lambda: actor.broken_off == ["0/1/s1", "0/2/s2"])


async def test_a_prompt_that_waits_for_a_push_has_its_time_from_the_end_of_the_push() -> None:
    actor = FakeActor()
    actor.gate.clear()
    asked = rollout_client(actor, rollout_s=0.1)
    settings = replace(SETTINGS, min_version=7)
    call = asyncio.create_task(asked.generate(PROMPT, settings))
    await asyncio.sleep(0.3)
    assert not call.done(), "the push has a deadline of its own"
    await asked.receive_weights(Manifest(()), 64, 7)
    with pytest.raises(DeadlineError, match="to generate prompt 0/0/s0"):
        await call
    with pytest.raises(DeadlineError, match="to generate prompt 0/0/s0"):
        await asked.generate(PROMPT, settings)


async def test_a_push_that_fails_ends_the_wait_for_it_as_well() -> None:
    actor = FakeActor()
    actor.gate.clear()
    actor.receive_weights = never
    asked = rollout_client(actor, rollout_s=0.1, sync_s=0.1)
    call = asyncio.create_task(asked.generate(PROMPT, replace(SETTINGS, min_version=7)))
    with pytest.raises(DeadlineError, match="receive version 7"):
        await asked.receive_weights(Manifest(()), 64, 7)
    with pytest.raises(DeadlineError, match="to generate prompt 0/0/s0"):
        await call


# Requests to actors: streams, losses, and media read together.


def request(number: int) -> GroupRequest:
    return GroupRequest(make_prompt(f"0/{number}/s"), SETTINGS, Attempt(f"r{number}"))


def chunk(request_id: str, start: int, num: int = 1) -> TokenChunk:
    ids, spans = np.zeros(num, dtype=np.int32), (WeightSpan(0, 0, num),)
    return TokenChunk(request_id, 0, start, SampledSequence(TokenActions(ids), ids.astype(np.float32), spans, None))


def client_of(server: Server) -> PromptClient:
    return PromptClient(LocalHandle(server), "rollout/0")


async def ask(asked: PromptClient, number: int, take: Callable[[TokenChunk], None] = lambda chunk: None) -> Any:
    """The group of one request, by value."""
    with asked.asked(request(number), take) as answered:
        reference, (summary, _) = await answered
    group = await reference.future()
    assert group.group_id == summary.group_id == f"0/{number}/s"
    return group


async def test_requests_of_one_moment_go_out_in_one_call_and_each_gets_its_own_group() -> None:
    server = Server()
    asked = client_of(server)
    await asyncio.gather(*(ask(asked, number) for number in range(5)))
    await ask(asked, 5)
    assert server.calls == [["r0", "r1", "r2", "r3", "r4"], ["r5"]]
    assert server.num_streams == 1


async def test_groups_that_end_in_another_order_than_they_were_asked_for_reach_who_asked() -> None:
    async def the_last_first(request_id: str) -> None:
        for _ in range(10 - 2 * int(request_id[1:])):
            await asyncio.sleep(0)

    asked = client_of(Server(before_answer=the_last_first))
    await asyncio.gather(*(ask(asked, number) for number in range(5)))


async def test_each_gets_its_own_chunks_in_order_and_all_of_them_before_its_group() -> None:
    asked, taken = client_of(Server(num_chunks=7)), {0: [], 1: []}
    await asyncio.gather(*(ask(asked, number, taken[number].append) for number in taken))
    for number, chunks in taken.items():
        assert [(new_chunk.request_id, new_chunk.start) for new_chunk in chunks] == [
            (f"r{number}", start) for start in range(7)
        ]


async def test_a_request_that_is_given_up_before_it_is_sent_is_not_sent() -> None:
    server = Server()
    asked = client_of(server)
    with asked.asked(request(0), lambda chunk: None):
        pass
    await ask(asked, 1)
    assert server.calls == [["r1"]]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RolloutError("the engine is dead"), RolloutError),
        (DeadlineError("an image did not come"), DependencyError),
        (WorkerDiedError("the node that held it"), DependencyError),
        (KeyError("a mistake"), KeyError),
    ],
)
async def test_what_an_actor_raises_fails_one_request_and_has_the_place_where_it_was_raised(
    raised: Exception, seen: type[Exception]
) -> None:
    async def fails(request_id: str) -> None:
        if request_id == "r0":
            raise raised

    asked = client_of(Server(before_answer=fails))
    failing, fine = await asyncio.gather(ask(asked, 0), ask(asked, 1), return_exceptions=True)
    assert type(failing) is seen and isinstance(fine, TrajectoryGroup)
    assert str(raised) in str(failing)
    if seen is not DependencyError:
        assert "in fails\n" in failing.__notes__[0]


async def test_an_error_that_cannot_travel_becomes_one_with_the_same_message() -> None:
    class Peculiar(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(text)

    async def fails(request_id: str) -> None:
        raise Peculiar(7, "of a library")

    with pytest.raises(RolloutError, match="(?s)in fails\n.*Peculiar: of a library"):
        await ask(client_of(Server(before_answer=fails)), 0)


async def test_a_chunk_that_is_refused_fails_its_request_alone_which_is_broken_off() -> None:
    async def never_ends(request_id: str) -> None:
        await asyncio.sleep(0 if request_id == "r1" else 60)

    def refuse(new_chunk: TokenChunk) -> None:
        raise RolloutError("chunks were lost or came twice")

    server = Server(num_chunks=1, before_answer=never_ends)
    asked = client_of(server)
    failing, fine = await asyncio.gather(ask(asked, 0, refuse), ask(asked, 1), return_exceptions=True)
    assert isinstance(failing, RolloutError) and isinstance(fine, TrajectoryGroup)
    await until(lambda: server.broken_off == ["0/0/s"])


async def test_an_actor_that_dies_fails_all_that_wait_after_what_it_had_sent() -> None:
    taken: list[TokenChunk] = []
    server = Server(num_chunks=3, before_answer=lambda request_id: asyncio.Event().wait())
    handle = LocalHandle(server)
    asked = PromptClient(handle, "rollout/0")
    waiting = [asyncio.create_task(ask(asked, number, taken.append)) for number in range(2)]
    await until(lambda: server.calls)
    for _ in range(3):
        await asyncio.sleep(0)
    server.report([chunk("r0", 3), chunk("r1", 3)])
    await asyncio.sleep(0)
    handle.die(WorkerDiedError("SIGKILL"))
    for task in waiting:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await task
    assert [new_chunk.start for new_chunk in taken if new_chunk.request_id == "r0"] == [0, 1, 2, 3]


async def test_a_wait_for_an_actor_that_is_ended_fails_at_once() -> None:
    server = Server(before_answer=lambda request_id: asyncio.Event().wait())
    asked = client_of(server)
    waiting = asyncio.create_task(ask(asked, 0))
    await until(lambda: server.calls)
    asked.close()
    with pytest.raises(WorkerDiedError, match="rollout/0 is ended"):
        async with asyncio.timeout(5):
            await waiting


async def test_requests_that_an_actor_cannot_take_in_fail() -> None:
    class Choosy(Server):
        async def begin(self, requests: Sequence[GroupRequest]) -> None:
            if len(requests) > 1:
                raise MemoryError(f"{len(requests)} are too many")
            await super().begin(requests)

    asked = client_of(Choosy())
    failed = await asyncio.gather(*(ask(asked, number) for number in range(3)), return_exceptions=True)
    assert [str(error) for error in failed] == ["3 are too many"] * 3
    await ask(asked, 3)


async def test_requests_that_cannot_be_sent_fail() -> None:
    class Wire(LocalHandle):
        """Takes nothing."""

        @property
        def begin(self) -> Any:
            raise TypeError("cannot pickle a lock")

    asked = PromptClient(Wire(Server()), "rollout/0")
    with pytest.raises(TypeError, match="cannot pickle a lock"):
        async with asyncio.timeout(5):
            await ask(asked, 0)


async def test_between_two_streams_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "VALUES_A_STREAM", 3)
    server, taken = Server(num_chunks=20), {number: [] for number in range(4)}
    asked = client_of(server)
    await asyncio.gather(*(ask(asked, number, taken[number].append) for number in taken))
    assert all([new_chunk.start for new_chunk in chunks] == list(range(20)) for chunks in taken.values())
    assert server.num_streams > 5


async def test_a_stream_that_broke_off_is_opened_again_with_the_next_request() -> None:
    class Broken(Server):
        async def messages(self, num_values: int) -> AsyncIterator[MessageBatch | TrajectoryGroup]:
            async for value in super().messages(num_values):
                if self.num_streams == 1:
                    raise ValueError("a value that cannot be sent")
                yield value

    asked = client_of(Broken())
    with pytest.raises(ValueError, match="a value that cannot be sent"):
        await ask(asked, 0)
    await ask(asked, 1)


async def test_the_newest_listener_gets_the_messages_and_the_one_before_is_let_go() -> None:
    server, got = Server(), []

    async def listen(name: str) -> None:
        async for value in server.messages(100):
            starts = (
                [chunk.start for chunk in value.chunks] if isinstance(value, MessageBatch) else value.prompt.prompt_id
            )
            got.append((name, starts))

    server.report([chunk("a", 0)])
    old = asyncio.create_task(listen("old"))
    await asyncio.sleep(0)
    server.report([chunk("a", 1)])
    server.report([chunk("a", 2)])
    await asyncio.sleep(0.01)
    await server.begin([request(1)])
    await asyncio.sleep(0.01)
    new = asyncio.create_task(listen("new"))
    await asyncio.wait_for(old, 1)
    server.report([chunk("a", 3)])
    await asyncio.sleep(0.01)
    new.cancel()
    assert got == [("old", [0]), ("old", [1, 2]), ("old", []), ("old", "0/1/s"), ("new", [3])]


PATIENCE_S = 30.0


class Reader:
    """A `MediaReader` that has everything at hand but `late`, and fails with what is `lost`."""

    def __init__(self, *, late: str = "", lost: str = "", before: Callable[[], object] = lambda: None) -> None:
        self.together: list[int] = []  # how many were read for in one go
        self.alone: list[str] = []
        self._late = late
        self._lost = lost
        self._before = before

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        self.alone.append(handles[0].key)
        if handles[0].key == self._lost:
            raise LostObjectError("the node that held it is gone")
        return [handle.reference for handle in handles]

    def read_at_hand(self, wanted: Sequence[Sequence[MediaHandle]]) -> list[list[ProcessedMedia] | None]:
        self.together.append(len(wanted))
        self._before()
        keys = [handles[0].key for handles in wanted]
        if self._lost in keys:
            raise LostObjectError("some node is gone")
        return [
            None if key == self._late else [h.reference for h in own] for key, own in zip(keys, wanted, strict=True)
        ]


def image(key: str) -> tuple[MediaHandle, ...]:
    media = ProcessedMedia("image", {"pixel_values": np.zeros(1, np.float32)})
    return (MediaHandle(key, "image", media.num_bytes, media, key),)


async def read(reads: MediaBatcher, *keys: str) -> list[list[ProcessedMedia] | BaseException]:
    images = [image(key) for key in keys]
    found = await asyncio.wait_for(asyncio.gather(*map(reads.read, images), return_exceptions=True), timeout=PATIENCE_S)
    for own, media in zip(images, found, strict=True):
        assert isinstance(media, BaseException) or media == [own[0].reference]
    return found


async def test_those_that_come_during_a_read_share_the_next() -> None:
    is_reading, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert goes_on.wait(PATIENCE_S)

    reader = Reader(before=wait)
    reads = MediaBatcher(reader)
    first = asyncio.create_task(read(reads, "a"))
    assert await asyncio.to_thread(is_reading.wait, PATIENCE_S)
    others = [asyncio.create_task(read(reads, key)) for key in "bcd"]
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(first, *others)
    await read(reads, "e")
    assert (reader.together, reader.alone) == ([1, 3, 1], [])


async def test_what_is_not_here_yet_is_waited_for_alone() -> None:
    reader = Reader(late="b")
    await read(MediaBatcher(reader), "a", "b", "c")
    assert (reader.together, reader.alone) == ([3], ["b"])


async def test_a_loss_reaches_its_own_caller_alone_and_the_next_are_read_together_again() -> None:
    reader = Reader(lost="b")
    reads = MediaBatcher(reader)
    a, b, c = await read(reads, "a", "b", "c")
    assert isinstance(b, LostObjectError) and isinstance(a, list) and isinstance(c, list)
    await read(reads, "d", "e")
    assert (reader.together, sorted(reader.alone)) == ([3, 2], ["a", "b", "c"])


async def test_one_who_gave_up_does_not_hold_up_the_others() -> None:
    reader = Reader()
    reads = MediaBatcher(reader)
    gone = asyncio.create_task(reads.read(image("a")))
    await asyncio.sleep(0)
    gone.cancel()
    await read(reads, "b")
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_prompt_without_images_reads_nothing() -> None:
    reader = Reader()
    assert await MediaBatcher(reader).read(()) == []
    assert reader.together == []
