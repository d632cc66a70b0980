"""Environments of the examples, and tool calls in the text of a policy."""

from __future__ import annotations

import json
import random
import shutil
import time
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mobula.actors.environments.base import Action, Tool, ToolCall, describe_tools, observation_hash, parse_tool_calls
from mobula.actors.environments.programs.call_text import MAX_CALLS
from mobula.actors.environments.registry import build_environment
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


# Those that need a server, tools, a class of the user's or a Python of their own have tests of their own.
OTHERS = ("none", "openenv", "program", "tools", "trl", "vagen", "verifiers")
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


# Tool calls are read from any text without an exception, and `ok` means that the call is whole and known.

TOOLS = (Tool("calculator", "computes", {"expression": "1 + 1"}),)
PIECES = (
    "<tool_call>", "</tool_call>", "<tool_call", "tool_call>", '{"name": "calculator"', '"arguments": {}', "{", "}",
    "[", "]", '"', ",", ":", "null", "NaN", "1e999", "\\ud800", "\x00", "é", "\\", "calculator", " ", "\n", "[" * 3000,
)  # fmt: skip


TWICE = ('"args": {}, "args": {"a": 1}', '"args": {"a": 1, "a": 2}', '"args": {}, "parameters": {}')
UNREADABLE = ("{", "[" * 100_000, '{"name": "calculator"} and more', "{'name': 'calculator'}", "")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "calculator", "arguments": {"expression": "1+1"}}', "ok"),
        ('{"name": "calculator"}', "ok"),
        ('{"name": "rm", "arguments": {}}', "unknown_tool"),
        ('{"name": "calculator", "arguments": {"formula": "1"}}', "unknown_argument"),
        *[(body, "missing_name") for body in ('{"arguments": {}}', '{"name": 3}')],
        *[(body, "malformed_structure") for body in ("[1]", "[]", '{"name": "calculator", "expression": "1+1"}')],
        *[(f'{{"name": "calculator", "arguments": {value}}}', "malformed_structure") for value in ("[1]", '"1+1"')],
        *[(f'{{"name": "calculator", {pairs}}}', "malformed_structure") for pairs in TWICE],
        *[(body, "invalid_json") for body in UNREADABLE],
        *[(f'{{"name": "calculator", "arguments": {{"x": {x}}}}}', "invalid_json") for x in ("NaN", '"\\ud800"')],
    ],
)
def test_every_kind_of_call_has_its_status(body: str, status: str) -> None:
    (call,) = parse_tool_calls(f"first <tool_call>{body}</tool_call>", TOOLS)
    assert call.status == status
    (unclosed,) = parse_tool_calls('first <tool_call>{"name": "calculator"}', TOOLS)
    assert unclosed.status == "unclosed_block"


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "calculator", "arguments": {"expression": "1</tool_call>"}}',
        '{"name": "calculator", "parameters": {"expression": "1</tool_call>"}}',
        '{"name": "calculator", "args": {"expression": "1</tool_call>"}}',
        '\n{"id": "c1", "type": "function", "name": "calculator", "input": {"expression": "1</tool_call>"}}\n',
        json.dumps({"name": "calculator", "arguments": json.dumps({"expression": "1</tool_call>"})}),
        json.dumps({"name": "calculator", "arguments": json.dumps(json.dumps({"expression": "1</tool_call>"}))}),
        json.dumps({"function": {"name": "calculator", "arguments": '{"expression": "1</tool_call>"}'}}),
        '[{"name": "calculator", "arguments": {"expression": "1</tool_call>"}}]',
        '{"name": "calculator", "arguments": null, "parameters": {"expression": "1</tool_call>"}}',
    ],
)  # fmt: skip
def test_a_call_is_read_in_every_spelling_and_its_json_ends_it(body: str) -> None:
    text = f"So <tool_call>{body}</tool_call> then <tool_call>{body}</tool_call>"
    assert parse_tool_calls(text, TOOLS) == (ToolCall("calculator", {"expression": "1</tool_call>"}, "ok"),) * 2


def test_a_list_of_calls_is_several_calls() -> None:
    one, other = ({"name": name, "arguments": {}} for name in ("calculator", "rm"))
    calls = parse_tool_calls(f"<tool_call>{json.dumps([one, other])}</tool_call>", TOOLS)
    assert [(call.name, call.status) for call in calls] == [("calculator", "ok"), ("rm", "unknown_tool")]
    assert len(parse_tool_calls(f"<tool_call>{json.dumps([one] * 100)}</tool_call>", TOOLS)) == MAX_CALLS


def test_the_policy_reads_which_argument_is_unknown() -> None:
    [call] = parse_tool_calls('<tool_call>{"name": "calculator", "arguments": {"formula": "1"}}</tool_call>', TOOLS)
    assert call.error == "error: unknown_argument: calculator has no argument 'formula': it has expression"
    anything = (Tool("calculator", "computes", {"expression": "1 + 1", "**more": "any"}),)
    [call] = parse_tool_calls('<tool_call>{"name": "calculator", "arguments": {"formula": "1"}}</tool_call>', anything)
    assert (call.status, call.arguments) == ("ok", {"formula": "1"})


def test_text_without_calls_has_none_and_a_flood_of_calls_is_bounded() -> None:
    assert parse_tool_calls("7", TOOLS) == ()
    assert len(parse_tool_calls("<tool_call>{}</tool_call>" * 10_000, TOOLS)) == MAX_CALLS


def test_a_hundred_thousand_malformed_calls_raise_nothing_and_are_never_wrongly_ok() -> None:
    choice, start = random.Random(0), time.monotonic()
    num_ok = 0
    for _ in range(100_000):
        text = "<tool_call>" + "".join(choice.choices(PIECES, k=choice.randint(0, 8)))
        for call in parse_tool_calls(text, TOOLS):
            if call.status == "ok":
                num_ok += 1
                body = text.split("<tool_call>")[1:]
                known = [json.loads(b.split("</tool_call>")[0]) for b in body if b.startswith('{"name": "calculator"')]
                assert any(value.get("arguments", {}) == call.arguments for value in known)
    assert time.monotonic() - start < 60
    assert num_ok < 1000


def test_the_description_shows_a_call_that_the_parser_reads() -> None:
    text = describe_tools(TOOLS).replace("NAME", '"calculator"').replace("{...}", "{}")
    assert parse_tool_calls(text, TOOLS)[0].status == "ok"
