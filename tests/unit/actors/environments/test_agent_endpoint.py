"""Chat completions that wait for the policy, and what of them is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mobula.actors.environments.adapters.agent_endpoint import AgentEndpoint
from mobula.actors.environments.base import Message

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
