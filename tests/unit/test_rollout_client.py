"""Rollout clients wait with a deadline that names what they wait for; the pool keeps its actors equally busy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import SETTINGS, make_group, make_prompt
from handles import LocalHandle, never

from actors.rollout_client import RolloutClient, RolloutPool
from cluster.errors import DeadlineError, RolloutError
from cluster.roles import SamplingSettings
from cluster.trajectory import GroupSummary, Prompt, TrajectoryGroup
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous

PROMPT = make_prompt("0/0/s0")
RENDEZVOUS = Rendezvous("host", 1, 1, 2, "gloo", 5.0)


class FakeActor:
    """A rollout actor that answers at once, or when `gate` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.prompts: list[str] = []
        self.calls: list[tuple] = []

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> tuple[TrajectoryGroup, GroupSummary]:
        self.prompts.append(prompt.prompt_id)
        await self.gate.wait()
        group = make_group(prompt)
        return group, group.summary()

    async def ping(self) -> int:
        return 3

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(prompt.num_tokens - 1, -1.0)

    async def receive_weights(self, *args: object) -> None:
        self.calls.append(args)

    async def load_weights(self, *args: object) -> None:
        self.calls.append(args)


def client(actor: object, name: str = "rollout/0", **deadlines: float) -> RolloutClient:
    return RolloutClient(LocalHandle(actor), name, **{"start_s": 5, "rollout_s": 5, "sync_s": 5, **deadlines})


async def test_a_group_comes_back_as_a_reference_beside_its_summary() -> None:
    reference, summary = await client(FakeActor()).generate(PROMPT, SETTINGS)
    group = await reference.future()
    assert group.prompt is PROMPT
    assert summary == group.summary()


async def test_calls_carry_their_arguments_and_answers() -> None:
    actor = FakeActor()
    asked = client(actor)
    assert await asked.weight_version() == 3
    assert (await asked.prompt_logprobs(PROMPT)).shape == (PROMPT.num_tokens - 1,)
    await asked.receive_weights(Manifest(()), 64, 7)
    await asked.load_weights(Manifest(()), 64, ["bucket"], 8)
    assert actor.calls == [(Manifest(()), 64, 7), (Manifest(()), 64, ["bucket"], 8)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.start(), "waited 0.05 s for rollout/0 to load its engine"),
        (lambda c: c.generate(PROMPT, SETTINGS), "waited 0.05 s for rollout/0 to generate prompt 0/0/s0"),
        (lambda c: c.prompt_logprobs(PROMPT), "rollout/0 to score the probe prompt"),
        (lambda c: c.check_manifest(Manifest(())), "rollout/0 to check the manifest"),
        (lambda c: c.join_transfer(RENDEZVOUS, 1), "rollout/0 to join the transfer group"),
        (lambda c: c.receive_weights(Manifest(()), 64, 7), "rollout/0 to receive version 7"),
        (lambda c: c.load_weights(Manifest(()), 64, [], 7), "rollout/0 to load version 7"),
        (lambda c: c.weight_version(), "rollout/0 to name its weight version"),
    ],
)
async def test_an_actor_that_does_not_answer_is_named_with_what_it_was_asked(call, said: str) -> None:
    methods = "start generate prompt_logprobs check_manifest join_transfer receive_weights load_weights ping"
    silent = SimpleNamespace(**dict.fromkeys(methods.split(), never))
    with pytest.raises(DeadlineError, match=said):
        await call(client(silent, start_s=0.05, rollout_s=0.05, sync_s=0.05))


async def test_the_pool_gives_each_prompt_to_the_least_busy_actor() -> None:
    actors = [FakeActor(), FakeActor()]
    clients = [client(actor, f"rollout/{n}") for n, actor in enumerate(actors)]
    pool = RolloutPool(clients)
    actors[0].gate.clear()
    calls = []
    for n in range(4):  # the first actor holds its first prompt, so the second gets what comes while it is free
        calls.append(asyncio.ensure_future(pool.generate(make_prompt(f"0/{n}/s{n}"), SETTINGS)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert (actors[0].prompts, actors[1].prompts) == (["0/0/s0"], ["0/1/s1", "0/2/s2", "0/3/s3"])
    assert [c.num_in_flight for c in clients] == [1, 0]
    actors[0].gate.set()
    await asyncio.gather(*calls)
    assert [c.num_in_flight for c in clients] == [0, 0]


async def test_a_failed_prompt_no_longer_counts_as_in_flight() -> None:
    class Broken(FakeActor):
        async def generate(self, prompt: Prompt, settings: SamplingSettings) -> tuple[TrajectoryGroup, GroupSummary]:
            raise RolloutError("the engine ended the prompt")

    asked = client(Broken())
    with pytest.raises(RolloutError, match="the engine ended the prompt"):
        await asked.generate(PROMPT, SETTINGS)
    assert asked.num_in_flight == 0
