"""A real environment of verifiers in its own Python: its calls become turns of training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from episode_data import engine_settings
from verifiers_tasksets import NEEDS_VERIFIERS, PYTHON, write_tasksets
from waiting import wait_until

from mobula.actors.environments.base import SEEDS_A_SPLIT, Action, Environment, EpisodeError, Message
from mobula.actors.environments.hosts.pool import EnvironmentPool, ProcessEnvironment
from mobula.actors.environments.registry import build_environment
from mobula.actors.environments.rows import environment_split
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import MediaBatcher
from mobula.actors.rollout.episodes import EpisodeRunner
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import FinishReason, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.learner.policies.tiny import TINY

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(600), NEEDS_VERIFIERS]


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasksets(tmp_path_factory.mktemp("tasksets"))


def options(tasksets: Path, **env: Any) -> dict[str, Any]:
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "mobula-chat"}}
    return {
        "python": str(PYTHON), "import_path": [str(tasksets)], "max_turns": 4, "max_tasks": 100,
        "num_validation": 1, "num_test": 1, "env": {"taskset": {"id": "mobula-letters"}, "agent": agent, **env},
    }  # fmt: skip


@pytest.fixture(scope="module")
def letters(tasksets: Path) -> Iterator[Environment]:
    with closing(build_environment("verifiers", options(tasksets))) as made:
        yield made


def test_an_episode_is_a_rollout_with_the_rewards_of_its_rubric(letters: Environment) -> None:
    start = letters.reset(seed=1, options={})
    assert start.observation == (Message("system", "Be brief."), Message("user", "Say b."))
    step = letters.step(Action("well, b"))
    assert step == ((Message("user", "That has 7 letters. Again."),), 0.0, False, False, {})
    end = letters.step(Action("b"))
    assert (end.observation, end.reward, end.terminated, end.truncated) == (
        (), {"has_letter": 1.0, "is_short": 0.5}, True, False,
    )  # fmt: skip


def test_splits_have_tasks_of_their_own_and_an_episode_may_be_left(letters: Environment) -> None:
    seeds = [0, 3, 4, SEEDS_A_SPLIT, SEEDS_A_SPLIT + 1, 2 * SEEDS_A_SPLIT]
    asked = [letters.reset(seed=seed, options={}).observation[-1].text for seed in seeds]
    assert asked == ["Say a.", "Say d.", "Say a.", "Say e.", "Say e.", "Say f."]


def test_a_rollout_without_a_reward_is_a_failure_and_no_reward_of_0(letters: Environment) -> None:
    letters.reset(seed=2, options={})
    letters.step(Action("c"))
    with pytest.raises(EpisodeError, match="this task cannot be scored") as raised:
        letters.step(Action("c"))
    assert raised.value.kind == "program_failed"
    letters.reset(seed=0, options={})  # the next episode is not touched


def test_tools_of_a_taskset_are_called_in_texts(tasksets: Path) -> None:
    with closing(build_environment("verifiers", options(tasksets, taskset={"id": "mobula-abacus"}))) as made:
        system, question = made.reset(seed=1, options={}).observation
        assert (system.role, question) == ("system", Message("user", "1 + 4?"))
        [tool] = [json.loads(line) for line in system.text.splitlines() if line.startswith("{")]
        assert tool["description"] == "The sum of two numbers." and set(tool["parameters"]["properties"]) == {"a", "b"}
        call = json.dumps({"name": tool["name"], "arguments": {"a": 1, "b": 4}})
        assert made.step(Action(f"<tool_call>{call}</tool_call>")).observation == (Message("user", "5"),)
        [wrong] = made.step(Action("<tool_call>{oops</tool_call>")).observation
        assert wrong.text.startswith("error: no call")
        end = made.step(Action("5"))
        assert (end.terminated, end.reward) == (True, {"is_right": 1.0})


def test_a_program_that_forgets_its_conversation_is_refused(tasksets: Path) -> None:
    with closing(build_environment("verifiers", options(tasksets, forgets=True))) as made:
        made.reset(seed=0, options={})
        with pytest.raises(EpisodeError, match="does not continue the one before") as raised:
            made.step(Action("a"))
        assert raised.value.kind == "conversation_branched"


async def test_a_rollout_that_hangs_costs_its_episode(tasksets: Path) -> None:
    words = ["environment=verifiers", "data=environment", "rewards=environment", "environment.step_timeout_s=20"]
    config = load_config(words, is_complete=False).environment
    pool = EnvironmentPool(config.model_copy(update={"options": options(tasksets)}), takes_images=True)
    try:
        with pytest.raises(EpisodeError) as raised:
            async with pool.session() as session:
                await session.reset(3)
                await session.step(Action("d"))
                await session.step(Action("d"))
        assert raised.value.kind == "timed_out"
        async with pool.session() as session:
            await session.reset(0)
            await session.step(Action("a"))
            assert (await session.step(Action("a"))).reward == {"has_letter": 1.0, "is_short": 0.5}
    finally:
        pool.close()


def test_an_environment_that_cannot_be_loaded_is_refused(tasksets: Path) -> None:
    with pytest.raises(ValueError, match="before it had loaded"):
        build_environment("verifiers", options(tasksets, taskset={"id": "there-is-none"}))
    with pytest.raises(ValueError, match="leave none to train on"):
        build_environment("verifiers", {**options(tasksets), "num_test": 5})


def test_a_host_process_that_is_killed_takes_verifiers_with_it(tasksets: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    times = {"start_timeout_s": 180, "reset_timeout_s": 60, "step_s": 60}
    with closing(ProcessEnvironment("verifiers", options(tasksets), **times)) as host:
        assert host.reset(seed=0, options={}).observation[-1].text == "Say a."
        children = {process.pid for process in psutil.Process().children(recursive=True)} - before
        assert len(children) > 1, "the process of the environment and those of verifiers"
    wait_until(lambda: not any(map(psutil.pid_exists, children)), 30, lambda: "verifiers outlives the environment")


def test_calls_become_trajectories_with_the_exact_tokens(tasksets: Path, tmp_path: Path) -> None:
    """The path of training: rows, a runner with an engine, trajectories."""
    model = TINY["qwen2.5-vl"](tmp_path / "model")
    words = [
        "policy=tiny_qwen2_5_vl", f"policy.model={model}", "data=environment", "rewards=environment",
        "environment=verifiers", f"environment.options.python={PYTHON}", "environment.num_train=2",
        f"environment.options.import_path=[{tasksets}]", "environment.options.env.taskset.id=mobula-letters",
        "environment.options.num_validation=1", "environment.options.num_test=1", "data.max_prompt_tokens=400",
        "data.max_pixels=50176", "sampler.max_images_per_prompt=8", "sampler.max_tokens=6",
    ]  # fmt: skip
    config = load_config(words)
    store = MediaStore(lambda media: media, 1 << 28)
    chat = ChatProcessor(str(model), config.data, config.sampler, store, keep_files=False)
    sampler = HuggingFaceSampler(engine_settings(model, chat))
    reader = MediaBatcher(MediaReader(timeout_s=5, max_items=64))

    async def generate() -> TrajectoryGroup:
        await sampler.start()
        runner = EpisodeRunner(config.environment, chat, sampler, reader, model=str(model), max_images=8)
        prompt = chat.prepare(row, "0/0/x")
        try:
            return await runner.generate(prompt, SamplingSettings(2, 0.8, 5, seed=7), Attempt("r"))
        finally:
            runner.close()
            await sampler.close()

    row = environment_split(config.environment, "train", takes_images=True).rows[1]
    group = asyncio.run(generate())
    for trajectory in group.trajectories:
        first, second = trajectory.response.turns
        assert trajectory.finish_reason is FinishReason.TERMINATED and not trajectory.response.failure
        assert set(second.rewards) == {"has_letter", "is_short"} and first.rewards == {"reward": 0.0}
        assert second.rewards["has_letter"] == float("b" in second.action)
        between = chat.decode(trajectory.actions.token_ids[first.end : second.start])
        assert f"That has {len(first.action.strip())} letters. Again." in between
        mask = np.zeros(trajectory.num_steps, dtype=bool)
        mask[first.start : first.end] = mask[second.start : second.end] = True
        assert np.array_equal(trajectory.action_mask, mask)
