"""Environments in other processes, in Ray actors and behind servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from episode_data import HANG_S, episode_config
from http_servers import serving
from PIL import Image
from ray_apart import free_port
from waiting import until

from mobula.actors.environments.base import (
    Action,
    EpisodeError,
    Reset,
    Step,
    ToolCall,
    action_to_json,
    step_from_json,
    step_to_json,
)
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession, RemoteEnvironment
from mobula.actors.environments.rows import environment_split
from mobula.actors.environments.server import CallBody, EnvironmentServer, make_app
from mobula.cluster.errors import DatasetError
from mobula.configs.load import load_config
from mobula.configs.schema.data import EnvironmentConfig

BEFORE_A_CLUSTER = """
from pathlib import Path
import ray
from episode_data import episode_config
from mobula.actors.environments.hosts.pool import RayEnvironment
from mobula.actors.environments.rows import environment_split
from mobula.cluster.errors import PreflightError

name = "examples/calculator/calculator.py:Calculator"
options = {"images": False, "max_operand": 9, "max_turns": 2, "tool_bonus": 0.0}
asked = episode_config(Path("model"), "environment.host=ray").environment
asked = asked.model_copy(update={"num_train": 1, "name": name, "options": options})
[row] = environment_split(asked, "train", takes_images=True).rows
assert row.question and not ray.is_initialized()
print("made")
try:
    RayEnvironment(name, options, num_cpus=0, start_timeout_s=5, reset_timeout_s=5, step_s=5)
except PreflightError as error:
    assert "environment.host=process" in str(error)
    print("refused")
assert not ray.is_initialized()
"""


def config(*words: str, fault: str = "", host: str = "inline", step_timeout_s: float = 0.5) -> EnvironmentConfig:
    least = (f"environment.options={{fault: '{fault}'}}", f"environment.step_timeout_s={step_timeout_s}")
    least += ("environment.start_timeout_s=240", "environment.num_train=3", f"environment.host={host}")
    return episode_config(Path("model"), *least, *words).environment


@asynccontextmanager
async def playing(fault: str, host: str) -> AsyncIterator[EnvironmentSession]:
    pool = EnvironmentPool(config(fault=fault, host=host), takes_images=True)
    try:
        async with pool.session() as session:
            yield session
    finally:
        pool.close()


async def failure(fault: str, host: str, *, takes_images: bool = True) -> EpisodeError:
    pool = EnvironmentPool(config(fault=fault, host=host), takes_images=takes_images)
    try:
        with pytest.raises(EpisodeError) as caught:
            async with pool.session() as session:
                await session.reset(1)
                await session.step(Action("go"))
        async with pool.session() as session:  # the slot is free, and the environment a new one
            if fault != "reset" and takes_images:
                await session.reset(2)
    finally:
        pool.close()
    return caught.value


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("raise", "raised"), ("reset", "raised"), ("role", "unknown_role"), ("large", "observation_too_large"),
     ("placeholder", "bad_observation"), ("", "image_in_text_model")],
)  # fmt: skip
async def test_a_fault_is_named(fault: str, kind: str) -> None:
    assert (await failure(fault, "inline", takes_images=kind != "image_in_text_model")).kind == kind


async def test_a_process_that_hangs_is_killed_at_its_deadline() -> None:
    with pytest.raises(EpisodeError) as caught:
        async with playing("hang", "process") as session:
            await session.reset(1)
            process, asked = session.environment._child._process, time.monotonic()
            await session.step(Action("go"))
    assert caught.value.kind == "timed_out"
    assert time.monotonic() - asked < HANG_S, "the step has not waited until the environment answered"
    assert await asyncio.to_thread(process.wait, HANG_S) == -signal.SIGKILL


async def test_a_fork_that_returns_from_a_step_gives_no_answer() -> None:
    async with playing("fork", "process") as session:
        await session.reset(1)
        assert [(await session.step(Action("go"))).reward for _ in range(3)] == [1, 2, 3]


async def test_a_process_gives_the_same_episode_as_the_thread() -> None:
    found = []
    for host in ("inline", "process"):
        async with playing("", host) as session:
            found.append((await session.reset(5), await session.step(Action("go"))))
    assert found[0] == found[1]


async def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    assert (await failure("hang", "process")).kind == "timed_out"
    assert (await failure("die", "process")).kind == "process_died"


def test_rows_carry_seed_and_hash_and_splits_share_no_seed() -> None:
    train, test = (environment_split(config(), name, takes_images=True).rows for name in ("train", "test"))
    assert [row.sample_id for row in train] == [f"episode_data:Scripted-{seed}" for seed in range(3)]
    assert {row.metadata["environment"]["seed"] for row in train}.isdisjoint(
        row.metadata["environment"]["seed"] for row in test
    )


def test_rows_for_ray_actors_are_made_before_there_is_a_cluster() -> None:
    """In a process of its own: other tests of this session have connected to Ray."""
    child = [sys.executable, "-c", BEFORE_A_CLUSTER]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(child, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["made", "refused"], done.stderr


def test_a_reset_that_ignores_its_seed_is_refused_before_the_run() -> None:
    with pytest.raises(DatasetError, match="gives two observations for seed 0"):
        environment_split(config(fault="seed"), "train", takes_images=True)


def test_a_reset_that_raises_is_refused_before_the_run() -> None:
    with pytest.raises(DatasetError, match="no reset today"):
        environment_split(config(fault="reset"), "train", takes_images=True)


def test_stages_take_turns_over_training_seeds_and_held_out_episodes_are_of_the_last() -> None:
    """Options of a stage reach the reset, and travel with the prompt."""
    stages = "environment.curriculum.stages=[{size: 2, hole_share: 0.0}, {size: 4, hole_share: 0.0}]"
    words = ["experiment=pixel_maze", "environment.curriculum.kind=success", stages, "environment.num_train=5"]
    found = load_config([*words, "environment.num_test=2"]).environment
    train, test = (environment_split(found, name, takes_images=True).rows for name in ("train", "test"))
    tasks = [row.metadata["environment"] for row in (*train, *test)]
    assert [task["stage"] for task in tasks] == [0, 1, 0, 1, 0, 1, 1]
    assert [task["options"]["size"] for task in tasks] == [2, 4, 2, 4, 2, 4, 4]
    widths = [Image.open(BytesIO(row.images[0].content)).width // 28 for row in (*train, *test)]
    assert widths == [2, 4, 2, 4, 2, 4, 4]


def test_an_option_of_a_stage_that_is_unknown_is_refused_before_the_run() -> None:
    stages = "environment.curriculum.stages=[{size: 2}, {colour: 4}]"
    words = ["experiment=pixel_maze", "environment.curriculum.kind=success", stages]
    with pytest.raises(DatasetError, match="colour"):
        environment_split(load_config(words).environment, "train", takes_images=True)


# Environments behind HTTP: the same episodes, exactly once, with failures named and nothing lost.

NAME = "episode_data:Scripted"


@contextmanager
def served(
    environment: EnvironmentConfig, *, port: int = 0, idle_s: float = 60
) -> Iterator[tuple[str, EnvironmentServer]]:
    server = EnvironmentServer(environment, idle_s=idle_s)
    with serving(make_app(server), port) as running:
        yield running.url, server


def connected(url: str, *, seconds: float = 5) -> RemoteEnvironment:
    return RemoteEnvironment(NAME, url, token_env="", start_timeout_s=seconds, reset_timeout_s=seconds, step_s=seconds)


def whole_episode(environment: Any) -> tuple[Reset, list[Step]]:
    return environment.reset(seed=5, options={}), [environment.step(Action(f"turn {n}")) for n in range(3)]


def test_a_remote_episode_equals_a_local_one() -> None:
    from episode_data import Scripted

    with served(config(step_timeout_s=1)) as (url, server):
        remote = connected(url)
        assert remote.spec == Scripted().spec
        assert whole_episode(remote) == whole_episode(Scripted())
        assert server.num_sessions == 1
        remote.close()
        assert server.num_sessions == 0


def test_a_call_that_comes_twice_is_made_once() -> None:
    with served(config(step_timeout_s=1)) as (url, _):
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
    with served(config(fault=fault, step_timeout_s=1)) as (url, server):
        remote = connected(url)
        remote.reset(seed=1, options={})
        with pytest.raises(EpisodeError) as caught:
            remote.step(Action("go"))
        assert caught.value.kind == kind
        remote.close()
        assert server.num_sessions == 0


def test_a_server_that_is_down_is_named_at_the_deadline_and_one_that_comes_back_is_used() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(EpisodeError, match="cannot be reached") as caught:
        connected(f"http://127.0.0.1:{port}", seconds=0.5)
    assert caught.value.kind == "server_unreachable" and time.monotonic() - start < 3
    with served(config(step_timeout_s=1), port=port) as (url, _):
        remote = connected(url)
        remote.reset(seed=1, options={})
    with served(config(step_timeout_s=1), port=port):  # it was started again, and knows no session
        with pytest.raises(EpisodeError) as caught:
            remote.step(Action("go"))
        assert caught.value.kind == "session_lost"
    remote.close()


async def test_a_pool_of_remote_environments_counts_what_fails_and_goes_on() -> None:
    with served(config(fault="raise", step_timeout_s=1)) as (url, server):
        words = (f"environment.url={url}", "environment.max_concurrent=4")
        remote = config(*words, fault="raise", host="remote", step_timeout_s=1)
        pool = EnvironmentPool(remote, takes_images=True)

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
        await until(lambda: server.num_sessions == 0, 5)  # sessions are ended from threads of the pool


def test_a_full_server_is_asked_again_and_an_abandoned_session_ends() -> None:
    with served(config("environment.max_concurrent=1", step_timeout_s=1), idle_s=0.4) as (url, server):
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
