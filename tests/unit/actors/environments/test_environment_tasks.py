"""The built-in environments: deterministic by seed, right about their own rules, plain about unfit options."""

from __future__ import annotations

import shutil
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mobula.actors.environments.base import Action, ToolCall, observation_hash
from mobula.actors.environments.registry import build_environment
from mobula.actors.environments.tool_calls import parse_tool_calls
from mobula.configs.load import load_config
from mobula.configs.overrides import groups
from mobula.examples.calculator.calculator import evaluate
from mobula.examples.miniwob.browser import NAMES

CALCULATOR_CLASS = "examples/calculator/calculator.py:Calculator"
PIXEL_MAZE = "examples/pixel_maze/pixel_maze.py:PixelMaze"
LAKE = {
    "layout": "frozen_lake", "size": 3, "hole_share": 0.2, "square_pixels": 4, "max_turns": 9, "invalid_reward": -0.5,
}  # fmt: skip
CALCULATOR = {"images": False, "max_operand": 9, "max_turns": 3, "tool_bonus": 0.5}


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(content)))


# Those that need a server, a class of the user's or a Python of their own have tests of their own.
OTHERS = ("none", "openenv", "program", "trl", "vagen", "verifiers")
NEEDS_CHROMIUM = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="there is no chromium on this machine")
OPTIONS = [
    pytest.param(name, marks=NEEDS_CHROMIUM) if name == "miniwob" else name
    for name in groups()["environment"]
    if name not in OTHERS
]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_deterministic_by_seed(option: str) -> None:
    words = [f"environment={option}", "data=environment", "rewards=environment", "policy=tiny_qwen2_5_vl"]
    config = load_config(words).environment
    environment, hashes = build_environment(config.name, config.options), []
    for _ in range(2):
        for seed in (3, 4):
            found = [observation_hash(environment.reset(seed=seed, options={}).observation)]
            found.append(observation_hash(environment.step(Action("right")).observation))
            hashes.append(found)
    environment.close()
    assert hashes[:2] == hashes[2:]


def test_seeds_give_different_tasks() -> None:
    environment = build_environment(PIXEL_MAZE, LAKE)
    assert len({observation_hash(environment.reset(seed=n, options={}).observation) for n in range(20)}) > 15


def test_the_calculator_answers_a_call_and_pays_for_the_right_answer_alone() -> None:
    environment = build_environment(CALCULATOR_CLASS, CALCULATOR)
    start = environment.reset(seed=5, options={})
    calls = parse_tool_calls(start.info["solution"], environment.spec.tools)
    step = environment.step(Action(start.info["solution"], calls))
    assert step.observation[0].role == "tool"
    assert step.observation[0].text == start.info["answer"]
    assert not step.terminated
    end = environment.step(Action(f"It is {start.info['answer']}"))
    assert end.terminated
    assert end.reward == {"answer": 1.0, "tool": 0.5}
    environment.reset(seed=5, options={})
    assert environment.step(Action("It is 12345")).reward == {"answer": 0.0, "tool": 0.0}


def test_a_malformed_call_is_an_observation() -> None:
    environment = build_environment(CALCULATOR_CLASS, CALCULATOR)
    environment.reset(seed=5, options={})
    step = environment.step(Action("<tool_call>", (ToolCall("", {}, "unclosed_block"),)))
    assert step.observation[0].text == "error: unclosed_block"
    assert not step.terminated


@pytest.mark.parametrize("expression", ["2 ** 99", "__import__('os')", "9" * 65, "(" * 60, "a + 1", "1.5 + 1", ""])
def test_the_calculator_runs_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


def test_arithmetic_is_right() -> None:
    assert evaluate("3 * (4 - 9) + -2") == -17


def test_the_shortest_way_of_a_lake_leads_to_its_goal_and_pays_once() -> None:
    environment = build_environment(PIXEL_MAZE, LAKE)
    for seed in range(30):
        start = environment.reset(seed=seed, options={})
        goal = np.argwhere((pixels(start.observation[0].images[0]) == (40, 180, 60)).all(-1))
        assert len(goal) == 16, "one square of 4 x 4 pixels"
        step = environment.step(Action(f"I go {start.info['solution']}."))
        assert not step.terminated or step.reward == 1.0, "the first move of a shortest way meets no hole"


def test_a_turn_without_a_move_costs_what_the_options_set() -> None:
    environment = build_environment(PIXEL_MAZE, LAKE)
    environment.reset(seed=0, options={})
    step = environment.step(Action("hmm"))
    assert step.reward == -0.5
    assert step.observation[0].images == ()


def test_minigrid_is_seen_from_above() -> None:
    environment = build_environment(PIXEL_MAZE, {**LAKE, "layout": "minigrid"})
    start = environment.reset(seed=0, options={})
    assert pixels(start.observation[0].images[0]).shape == (36, 36, 3)
    assert environment.step(Action("forward")).info["is_valid"]
    environment.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "is unknown"),
        ("tests_missing:Thing", {}, "there is no module 'tests_missing'"),
        (CALCULATOR_CLASS, {"image": True}, "environment.options of examples/calculator"),
        (CALCULATOR_CLASS, {**CALCULATOR, "max_operand": -1}, "max_operand=-1 is unfit"),
        (PIXEL_MAZE, {**LAKE, "layout": "sea"}, "layout='sea' is unknown"),
        (
            "gymnasium",
            {"id": "CartPole-v1", "actions": ["a", "b", "c"], "instruction": "", "max_turns": 1},
            "2 actions",
        ),
    ],
)
def test_unfit_options_are_refused_with_what_to_do(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_environment(name, options)
