"""Rollout clients wait with a deadline that names what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import SETTINGS, make_group, make_prompt
from handles import LocalHandle, never
from waiting import until

from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import DeadlineError
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Answers, GroupReport, Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous

PROMPT = make_prompt("0/0/s0")
DEADLINES_S = dict.fromkeys(("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s"), 5.0)
RENDEZVOUS = Rendezvous("host", 1, 1, 2, "gloo", 5.0)


class FakeActor(PromptServer):
    """A rollout actor that answers at once, or when `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.prompts: list[str] = []
        self.broken_off: list[str] = []
        self.calls: list[tuple] = []

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        self.prompts.append(prompt.prompt_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.broken_off.append(prompt.prompt_id)
            raise
        group = make_group(prompt)
        return group, (group.summary(), group.small_responses())

    async def ping(self) -> int:
        return 3

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(prompt.num_tokens - 1, -1.0)

    async def receive_weights(self, *args: object) -> int:
        self.calls.append(args)
        return 7

    async def load_weights(self, *args: object) -> None:
        self.calls.append(args)


async def no_messages(num_values: int) -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


def client(
    actor: object, name: str = "rollout/0", in_flight_requests: InFlightRequests | None = None, **deadlines: float
) -> RolloutClient:
    return RolloutClient(
        LocalHandle(actor),
        name,
        in_flight_requests=in_flight_requests or InFlightRequests(64),
        **DEADLINES_S | deadlines,
    )


async def test_a_group_comes_back_as_a_reference_beside_its_summary() -> None:
    reference, summary, answers = await client(FakeActor()).generate(PROMPT, SETTINGS)
    group = await reference.future()
    assert group.prompt is PROMPT
    assert summary == group.summary()
    assert answers == Answers(PROMPT, (0, 1), group.small_responses())


async def test_calls_carry_their_arguments_and_answers() -> None:
    actor = FakeActor()
    asked = client(actor)
    assert await asked.weight_version() == 3
    assert (await asked.prompt_logprobs(PROMPT)).shape == (PROMPT.num_tokens - 1,)
    assert await asked.receive_weights(Manifest(()), 64, 7) == 7
    await asked.load_weights(Manifest(()), 64, ["bucket"], 8)
    assert actor.calls == [(Manifest(()), 64, 7), (Manifest(()), 64, ["bucket"], 8)]


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
        await call(client(silent, **dict.fromkeys(DEADLINES_S, 0.05)))


async def test_an_actor_stops_requests_without_a_waiting_caller() -> None:
    actor = FakeActor()
    asked = client(actor, rollout_s=0.05)
    await asked.generate(PROMPT, SETTINGS)
    actor.gate.clear()
    with pytest.raises(DeadlineError):
        await asked.generate(make_prompt("0/1/s1"), SETTINGS)
    asking = asyncio.create_task(asked.generate(make_prompt("0/2/s2"), SETTINGS))
    await until(lambda: len(actor.prompts) == 3)
    asking.cancel()
    await until(lambda: actor.broken_off == ["0/1/s1", "0/2/s2"])


async def test_a_prompt_that_waits_for_a_push_has_its_time_from_the_end_of_the_push() -> None:
    actor = FakeActor()
    actor.gate.clear()
    asked = client(actor, rollout_s=0.1)
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
    asked = client(actor, rollout_s=0.1, sync_s=0.1)
    call = asyncio.create_task(asked.generate(PROMPT, replace(SETTINGS, min_version=7)))
    with pytest.raises(DeadlineError, match="receive version 7"):
        await asked.receive_weights(Manifest(()), 64, 7)
    with pytest.raises(DeadlineError, match="to generate prompt 0/0/s0"):
        await call
