"""Adapters, each with a real environment of its library, classes of TRL and VAGEN as users write them, or programs."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import WSMsgType, web
from episode_data import write_program
from PIL import Image
from waiting import wait_until

from mobula.actors.environments.adapters.agent_endpoint import AgentEndpoint
from mobula.actors.environments.adapters.agents import Program
from mobula.actors.environments.adapters.libraries import OpenEnv
from mobula.actors.environments.base import (
    ROLES_OF_RESET,
    ROLES_OF_STEP,
    SEEDS_A_SPLIT,
    Action,
    Environment,
    EpisodeError,
    Message,
    Reset,
    ToolCall,
    checked_observation,
    checked_rewards,
    observation_hash,
)
from mobula.actors.environments.hosts.pool import EnvironmentPool
from mobula.actors.environments.registry import build_environment
from mobula.configs.load import load_config


def reset(environment: Environment, seed: int) -> Reset:
    """A reset that fits the contract."""
    found = environment.reset(seed=seed, options={})
    checked_observation(found.observation, ROLES_OF_RESET, max_bytes=1 << 22, takes_images=True)
    return found


def play(environment: Environment, *texts: str) -> tuple[list[float], bool, bool]:
    """The reward of each turn, and how the episode stands behind them."""
    rewards, step = [], None
    for text in texts:
        step = environment.step(Action(text))
        checked_observation(step.observation, ROLES_OF_STEP, max_bytes=1 << 22, takes_images=True)
        rewards.append(sum(checked_rewards(step.reward).values()))
    assert step is not None
    return rewards, step.terminated, step.truncated


@pytest.mark.parametrize("task", ["leg_counting", "chain_sum", "countdown"])
def test_reasoning_gym_scores_its_own_answer(task: str) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'mobula[reasoning_gym]'")
    environment = build_environment("reasoning_gym", {"task": task, "instruction": "Use <answer> tags."})
    start = reset(environment, 3)
    assert observation_hash(start.observation) == observation_hash(reset(environment, 3).observation)
    assert observation_hash(start.observation) != observation_hash(reset(environment, 4).observation)
    start = reset(environment, 3)
    assert play(environment, f"Well. <answer> {start.info['answer']} </answer>") == ([1.0], True, False)
    assert play(environment, str(start.info["answer"]))[0] == [0.0]  # no tags
    assert play(environment, start.info["solution"])[0] == [1.0]


def test_reasoning_gym_refuses_an_unknown_task() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'mobula[reasoning_gym]'")
    with pytest.raises(ValueError, match=r"options\.task='no_task'"):
        build_environment("reasoning_gym", {"task": "no_task", "instruction": ""})
    with pytest.raises(ValueError, match=r"options\.config"):
        build_environment("reasoning_gym", {"task": "chain_sum", "instruction": "", "config": {"wrong": 1}})


def first_column(observation: str) -> str:
    """The opponent of the game below: the first column with a number, [0] to [6]."""
    return "[col 0]"


def test_textarena_plays_a_game_of_one_to_its_end() -> None:
    pytest.importorskip("textarena", reason="pip install 'mobula[textarena]'")
    environment = build_environment("textarena", {"id": "GuessTheNumber-v0", "max_turns": 20})
    start = reset(environment, 5)
    assert observation_hash(start.observation) == observation_hash(reset(environment, 5).observation)
    low, high, rewards = 1, 20, []
    for _ in range(6):  # bisection finds one of 20 numbers in five guesses
        guess = (low + high) // 2
        step = environment.step(Action(f"[{guess}]"))
        rewards.append(step.reward)
        if step.terminated:
            break
        if "higher" in step.observation[0].text:
            low = guess + 1
        else:
            high = guess - 1
    assert step.terminated and rewards[-1] == 1.0 and rewards[:-1] == [0.0] * (len(rewards) - 1)


def test_textarena_plays_against_an_opponent() -> None:
    pytest.importorskip("textarena", reason="pip install 'mobula[textarena]'")
    options = {"id": "ConnectFour-v0", "max_turns": 20, "num_players": 2, "opponent": f"{__name__}:first_column"}
    environment = build_environment("textarena", options)
    reset(environment, 0)
    rewards, terminated, _ = play(environment, "[col 1]", "[col 2]", "[col 3]")
    assert not terminated and rewards == [0.0, 0.0, 0.0]
    rewards, terminated, _ = play(environment, "[col 4]")
    assert terminated and rewards == [1.0]  # four in the lowest row, beside the opponent's stack
    with pytest.raises(ValueError, match="name an opponent"):
        build_environment("textarena", {**options, "opponent": ""})
    with pytest.raises(ValueError, match=r"options\.id='NoGame'"):
        build_environment("textarena", {"id": "NoGame", "max_turns": 3})


class Counter:
    """An environment as TRL takes them: count up to the row's target."""

    def reset(self, target: int = 3, **row: Any) -> list[dict[str, Any]]:
        self._target, self._count = target, 0
        image = Image.new("RGB", (8, 8), (target, 0, 0))
        return [{"type": "text", "text": f"Count to {target}."}, {"type": "image", "image": image}]

    def add(self, amount: int) -> str:
        """Add to the count.

        Args:
            amount: how much.
        """
        self._count += amount
        return f"The count is {self._count}."

    def show(self) -> Image.Image:
        """Show the count as an image."""
        return Image.new("RGB", (8, 8), (self._count, 0, 0))

    def get_reward(self) -> float:
        return float(self._count == self._target)


def called(name: str, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, arguments, "ok"),))


def test_a_trl_class_has_tools_images_and_its_reward_at_the_end(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "A task.", "target": 2}\n{"prompt": [{"role": "user", "content": "B"}], "target": 4}\n')
    options = {"target": f"{__name__}:Counter", "max_turns": 3, "instruction": "", "rows": str(rows)}
    environment = build_environment("trl", options)
    assert {tool.name: dict(tool.parameters) for tool in environment.spec.tools} == {
        "add": {"amount": "int"},
        "show": {},
    }
    start = reset(environment, 0)
    assert "A task.\nCount to 2.<image>" in start.observation[0].text and len(start.observation[0].images) == 1
    step = environment.step(called("add", amount=2))
    assert step.observation[0].role == "tool" and step.observation[0].text == "The count is 2."
    assert environment.step(called("show")).observation[0].images
    assert play(environment, "Done.") == ([1.0], True, False)
    assert "B\nCount to 4." in reset(environment, 1).observation[0].text
    assert "error: TypeError" in environment.step(called("add")).observation[0].text
    for turn in (2, 3):  # the reward of an episode that max_turns ends
        step = environment.step(called("add", amount=2))
        assert (step.reward, step.truncated) == ((1.0, True) if turn == 3 else (0.0, False))


class Echo:
    """An environment as VAGEN takes them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._goal = config["goal"]

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Say the goal."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        await asyncio.sleep(0)
        image = Image.new("RGB", (8, 8), (seed % 256, 0, 0))
        return {"obs_str": f"<image> seed {seed}", "multi_modal_input": {"<image>": [image]}}, {}

    async def step(self, text: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        done = self._goal in text
        return {"obs_str": "done" if done else "again"}, float(done), done, {}

    async def close(self) -> None:
        """Nothing is held."""


def test_a_vagen_class_keeps_its_system_prompt_and_images() -> None:
    options = {"target": f"{__name__}:Echo", "max_turns": 4, "config": {"goal": "yes"}}
    environment = build_environment("vagen", options)
    start = reset(environment, 9)
    assert [message.role for message in start.observation] == ["system", "user"]
    assert len(start.observation[1].images) == 1
    assert play(environment, "no", "yes") == ([0.0, 1.0], True, False)
    environment.close()


class OpenEnvServer:
    """A server that speaks OpenEnv's WebSocket messages: it echoes, and ends with the message `end`."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            given = json.loads(message.data)
            self.received.append(given)
            if given["type"] == "close":
                break
            if given["type"] == "reset":
                await self._observe(socket, f"seed {given['data']['seed']}", None, done=False)
            elif given["data"].get("message") == "fail":
                error = {"message": "no such move", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
            else:
                text = given["data"]["message"]
                await self._observe(socket, text, len(text) / 10, done=text == "end")
        return socket

    async def _observe(self, socket: web.WebSocketResponse, text: str, reward: float | None, *, done: bool) -> None:
        png = base64.b64encode(PNG).decode()
        observation = {"echoed": text, "screen": png}
        await socket.send_json(
            {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
        )


PNG = b"\x89PNG not looked at here"


@pytest.fixture
def openenv_url() -> Iterator[tuple[str, OpenEnvServer]]:
    server, loop, app = OpenEnvServer(), asyncio.new_event_loop(), web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app)

    async def serve() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    yield f"http://127.0.0.1:{port}", server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def openenv(url: str, **options: Any) -> OpenEnv:
    return OpenEnv(
        url=url, instruction="Echo.", max_turns=5, text_fields=["echoed"], image_fields=["screen"], **options
    )


def test_openenv_speaks_the_messages_of_its_server(openenv_url: tuple[str, OpenEnvServer]) -> None:
    url, server = openenv_url
    environment = openenv(url)
    start = reset(environment, 7)
    assert start.observation[0].text == "Echo.\n<image>seed 7" and start.observation[0].images == (PNG,)
    assert play(environment, "hello", "end") == ([0.5, 0.3], True, False)
    with pytest.raises(EpisodeError, match="no such move") as caught:
        environment.step(Action("fail"))
    assert caught.value.kind == "server_error"
    environment.close()
    asked = [message["type"] for message in server.received]
    assert asked == ["reset", "step", "step", "step", "close"]
    assert server.received[1]["data"] == {"message": "hello"}


def test_openenv_takes_json_actions_and_says_when_there_is_none(openenv_url: tuple[str, OpenEnvServer]) -> None:
    environment = openenv(openenv_url[0], action_format="json")
    reset(environment, 1)
    step = environment.step(Action("no JSON"))
    assert step.reward == 0.0 and not step.terminated and "JSON" in step.observation[0].text
    assert play(environment, '{"message": "end"}') == ([0.3], True, False)
    environment.close()


def test_an_openenv_server_that_is_down_is_named() -> None:
    environment = openenv("http://127.0.0.1:9")
    with pytest.raises(EpisodeError, match=r"ws://127\.0\.0\.1:9/ws") as caught:
        environment.reset(seed=0, options={})
    assert caught.value.kind == "server_unreachable"
    environment.close()
    with pytest.raises(ValueError, match="no URL"):
        openenv("localhost:8000")


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
