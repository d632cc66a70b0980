"""Environments behind HTTP: the same episodes, exactly once, with failures named and nothing lost."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from episode_data import episode_config

from mobula.actors.environments.base import Action, EpisodeError, Reset, Step, ToolCall
from mobula.actors.environments.hosts.pool import EnvironmentPool, RemoteEnvironment
from mobula.actors.environments.server import CallBody, EnvironmentServer, make_app
from mobula.actors.environments.wire import action_to_json, step_from_json, step_to_json
from mobula.configs.schema.data import EnvironmentConfig

NAME = "episode_data:Scripted"


def config(*words: str, fault: str = "") -> EnvironmentConfig:
    given = [f"environment.options={{fault: '{fault}'}}", "environment.step_timeout_s=1"]
    host = [] if any("host=" in word for word in words) else ["environment.host=inline"]
    return episode_config(Path("model"), *given, *host, *words).environment


@contextmanager
def served(
    environment: EnvironmentConfig, *, port: int = 0, idle_s: float = 60
) -> Iterator[tuple[str, EnvironmentServer]]:
    """The server on a thread of its own, on loopback."""
    server = EnvironmentServer(environment, idle_s=idle_s)
    listener = socket.create_server(("127.0.0.1", port))
    running = uvicorn.Server(uvicorn.Config(make_app(server), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        running.should_exit = True
        thread.join(10)


def connected(url: str, *, seconds: float = 5) -> RemoteEnvironment:
    return RemoteEnvironment(NAME, url, token_env="", start_timeout_s=seconds, reset_timeout_s=seconds, step_s=seconds)


def whole_episode(environment: Any) -> tuple[Reset, list[Step]]:
    return environment.reset(seed=5, options={}), [environment.step(Action(f"turn {n}")) for n in range(3)]


def test_a_remote_episode_equals_a_local_one() -> None:
    from episode_data import Scripted

    with served(config()) as (url, server):
        remote = connected(url)
        assert remote.spec == Scripted().spec
        assert whole_episode(remote) == whole_episode(Scripted())
        assert server.num_sessions == 1
        remote.close()
        assert server.num_sessions == 0


def test_a_call_that_comes_twice_is_made_once() -> None:
    with served(config()) as (url, _):
        opened = httpx.post(f"{url}/v1/sessions", json={}).json()["session"]
        path = f"{url}/v1/sessions/{opened}"
        httpx.post(f"{path}/reset", json={"call": 1, "seed": 3})
        body = {"call": 2, "action": action_to_json(Action("go"))}
        first, again = (httpx.post(f"{path}/step", json=body).json() for _ in range(2))
        assert first == again and first["result"]["reward"] == 1
        assert httpx.post(f"{path}/step", json={**body, "call": 3}).json()["result"]["reward"] == 2
        assert httpx.post(f"{path}/dance", json=body).status_code == 404


@pytest.mark.parametrize(
    ("fault", "kind"), [("raise", "raised"), ("role", "unknown_role"), ("nan", "reward_not_finite")]
)
def test_what_an_environment_does_wrong_keeps_its_name(fault: str, kind: str) -> None:
    with served(config(fault=fault)) as (url, server):
        remote = connected(url)
        remote.reset(seed=1, options={})
        with pytest.raises(EpisodeError) as caught:
            remote.step(Action("go"))
        assert caught.value.kind == kind
        remote.close()
        assert server.num_sessions == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_server_that_is_down_is_named_at_the_deadline_and_one_that_comes_back_is_used() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(EpisodeError, match="cannot be reached") as caught:
        connected(f"http://127.0.0.1:{port}", seconds=0.5)
    assert caught.value.kind == "server_unreachable" and time.monotonic() - start < 3
    with served(config(), port=port) as (url, _):
        remote = connected(url)
        remote.reset(seed=1, options={})
    with served(config(), port=port):  # it was started again, and knows no session
        with pytest.raises(EpisodeError) as caught:
            remote.step(Action("go"))
        assert caught.value.kind == "session_lost"
    remote.close()


async def test_a_pool_of_remote_environments_counts_what_fails_and_goes_on() -> None:
    with served(config(fault="raise")) as (url, server):
        words = ("environment.host=remote", f"environment.url={url}", "environment.max_concurrent=4")
        pool = EnvironmentPool(config(*words, fault="raise"), takes_images=True)

        async def episode(seed: int) -> str:
            try:
                async with pool.session() as session:
                    await session.reset(seed)
                    await session.step(Action("go"))
            except EpisodeError as error:
                return error.kind
            return ""

        assert await asyncio.gather(*map(episode, range(8))) == ["raised"] * 8
        pool.close()
        deadline = time.monotonic() + 5
        while server.num_sessions and time.monotonic() < deadline:  # sessions are ended from threads of the pool
            await asyncio.sleep(0.05)
        assert server.num_sessions == 0


def test_a_full_server_is_asked_again_and_an_abandoned_session_ends() -> None:
    with served(config("environment.max_concurrent=1"), idle_s=0.4) as (url, server):
        left = connected(url)
        left.reset(seed=1, options={})  # and nothing more comes from it
        next_one = connected(url, seconds=5)
        assert next_one.reset(seed=2, options={}).observation
        assert server.num_sessions == 1
        next_one.close()
        with pytest.raises(EpisodeError) as caught:
            left.step(Action("go"))
        assert caught.value.kind == "session_lost"


def test_the_token_has_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVIRONMENT_TOKEN", raising=False)
    with pytest.raises(EpisodeError, match="ENVIRONMENT_TOKEN"):
        RemoteEnvironment(
            NAME, "http://127.0.0.1:9", token_env="ENVIRONMENT_TOKEN", start_timeout_s=1, reset_timeout_s=1, step_s=1
        )


def test_messages_come_back_as_they_were() -> None:
    action = Action("text", (ToolCall("f", {"a": [1]}, "ok"), ToolCall("", {}, "invalid_json")), True)
    assert CallBody.model_validate({"call": 1, "action": action_to_json(action)}).action == action
    step = Step((), {"answer": 1.0, "tool": 0.5}, True, False, {"is_valid": True, "kept": "x"})
    assert step_from_json(step_to_json(step)) == step
