"""Agent programs as environments: calls wait for the policy, and failures are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from episode_data import write_program
from waiting import wait_until

from mobula.actors.environments.adapters.agent_endpoint import AgentEndpoint
from mobula.actors.environments.adapters.agents import Program
from mobula.actors.environments.base import SEEDS_A_SPLIT, Action, EpisodeError, Message
from mobula.actors.environments.hosts.pool import EnvironmentPool
from mobula.actors.environments.registry import build_environment
from mobula.configs.load import load_config


@contextmanager
def program(folder: Path, *kinds: str) -> Iterator[Program]:
    made = build_environment("program", write_program(folder, *kinds))
    try:
        yield made
    finally:
        made.close()


def test_an_episode_is_a_run_of_the_program(tmp_path: Path) -> None:
    with program(tmp_path) as made:
        assert made.reset(seed=1, options={}).observation == (Message("user", "Say b."),)
        step = made.step(Action("well, b"))
        assert step == ((Message("user", "That has 7 letters. Again."),), 0.0, False, False, {})
        end = made.step(Action("b"))
        assert (end.reward, end.terminated, end.truncated) == ({"has_letter": 1.0, "is_short": 1.0}, True, False)
        held_out = [made.reset(seed=s, options={}).observation[0].text for s in (SEEDS_A_SPLIT, 2 * SEEDS_A_SPLIT)]
        assert held_out == ["Say e.", "Say f."]


def test_a_program_that_gave_up_keeps_its_rewards(tmp_path: Path) -> None:
    with program(tmp_path, "tired") as made:
        made.reset(seed=0, options={})
        made.step(Action("b"))
        end = made.step(Action("b"))
        assert (end.reward, end.terminated, end.truncated) == ({"has_letter": 0.0, "is_short": 1.0}, False, True)


@pytest.mark.parametrize(
    ("kind", "counted", "said"),
    [("silent", "program_failed", "ended with 1: no key for the tool"),
     ("wordless", "program_failed", "no reward: it is 'done'"),
     ("forgets", "conversation_branched", "does not continue the one before")],
)  # fmt: skip
def test_a_program_without_a_reward_is_a_failure_and_no_reward_of_0(
    tmp_path: Path, kind: str, counted: str, said: str
) -> None:
    with program(tmp_path, kind) as made:
        with pytest.raises(EpisodeError, match=said) as raised:
            made.reset(seed=0, options={})
            made.step(Action("a"))
            made.step(Action("a"))
        assert raised.value.kind == counted
        made.reset(seed=1, options={})  # the next episode is not touched


async def test_a_program_that_hangs_is_killed_at_the_deadline_with_what_it_started(tmp_path: Path) -> None:
    words = ["environment=program", "data=environment", "rewards=environment", "environment.step_timeout_s=3"]
    config = load_config(words, is_complete=False).environment
    pool = EnvironmentPool(config.model_copy(update={"options": write_program(tmp_path, "hang")}), takes_images=True)
    try:
        with pytest.raises(EpisodeError) as raised:
            async with pool.session() as session:
                await session.reset(0)
                await session.step(Action("a"))
        assert raised.value.kind == "timed_out"
        assert (tmp_path / "started").exists()
        own = str(tmp_path).encode()  # of the program and its child
        wait_until(lambda: own not in command_lines(), 20, lambda: "one of both outlives the episode")
    finally:
        pool.close()


def command_lines() -> bytes:
    """Those of all processes; one that ends meanwhile has none."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += path.read_bytes()
    return found


def test_unfit_options_are_refused(tmp_path: Path) -> None:
    asked = write_program(tmp_path)
    for options, said in [
        ({"command": []}, "environment.options.command is empty"),
        ({"tasks": "/none.jsonl"}, "environment.options.tasks=/none.jsonl cannot be read"),
        ({"num_test": 5}, "leave none to train on"),
    ]:
        with pytest.raises(ValueError, match=said):
            build_environment("program", {**asked, **options})
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{oops')
    with pytest.raises(ValueError, match="line 2 of .* is no JSON"):
        build_environment("program", asked)
    (tmp_path / "tasks.jsonl").write_text('{"letter": "a"}\n' * 4)
    with pytest.raises(EpisodeError, match="/none cannot be started"):
        build_environment("program", {**asked, "command": ["/none"]}).reset(seed=0, options={})


HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    made = AgentEndpoint()
    yield made
    made.close()


@pytest.fixture
def later() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def ask(threads: ThreadPoolExecutor, url: str, body: dict[str, Any]) -> Future[httpx.Response]:
    return threads.submit(httpx.post, f"{url}/chat/completions", json=body, timeout=20)


def test_a_call_waits_for_its_answer(endpoint: AgentEndpoint, later: ThreadPoolExecutor) -> None:
    talk = endpoint.open()
    reply = ask(later, talk.url, HELLO)
    call = talk.events.get(timeout=20)
    assert call.messages == (Message("user", "hello"),) and not reply.done()
    call.answer("good day", is_cut=True)
    body = reply.result().json()
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "good day"}, "finish_reason": "length"}
    ]
    assert (body["object"], body["model"]) == ("chat.completion", "m")


def test_a_streamed_answer_is_one_event_and_its_end(endpoint: AgentEndpoint, later: ThreadPoolExecutor) -> None:
    talk = endpoint.open()
    reply = ask(later, talk.url, {**HELLO, "stream": True})
    talk.events.get(timeout=20).answer("good day", is_cut=False)
    *chunks, last = [line.removeprefix("data: ") for line in reply.result().text.split("\n\n") if line]
    deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [d["delta"].get("content") for d in deltas] == ["good day", None]
    assert [d["finish_reason"] for d in deltas] == [None, "stop"] and last == "[DONE]"


def test_a_call_of_an_episode_that_is_over_is_refused(endpoint: AgentEndpoint, later: ThreadPoolExecutor) -> None:
    talk = endpoint.open()
    waits = ask(later, talk.url, HELLO)
    talk.events.get(timeout=20)
    talk.close()
    assert waits.result().status_code == 410
    assert ask(later, talk.url, HELLO).result().status_code == 410
    endpoint.open()
    assert ask(later, talk.url, HELLO).result().status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**HELLO, "tools": [{"type": "function"}]}, "tools cannot be had"),
        ({**HELLO, "n": 2}, "n above 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}]}, "fetched"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is int"),
        ({}, "messages"),
    ],
)
def test_an_unfit_call_is_refused_and_is_no_turn(endpoint: AgentEndpoint, body: Any, message: str) -> None:
    talk = endpoint.open()
    reply = httpx.post(f"{talk.url}/chat/completions", json=body, timeout=20)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]
    assert talk.events.empty()
