"""Tool calls are read from any text without an exception, and `ok` means that the call is whole and known."""

from __future__ import annotations

import json
import random
import time

import pytest

from mobula.actors.environments.base import Tool, ToolCall
from mobula.actors.environments.tool_calls import MAX_CALLS, describe_tools, parse_tool_calls

TOOLS = (Tool("calculator", "computes", {"expression": "1 + 1"}),)
PIECES = (
    "<tool_call>", "</tool_call>", "<tool_call", "tool_call>", '{"name": "calculator"', '"arguments": {}', "{", "}",
    "[", "]", '"', ",", ":", "null", "NaN", "1e999", "\\ud800", "\x00", "é", "\\", "calculator", " ", "\n", "[" * 3000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>', "ok"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "ok"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name"),
        ('<tool_call>{"name": 3}</tool_call>', "missing_name"),
        ('<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>', "malformed_structure"),
        ("<tool_call>[1]</tool_call>", "malformed_structure"),
        ("<tool_call>{</tool_call>", "invalid_json"),
        ('<tool_call>{"name": "calculator", "arguments": {"x": NaN}}</tool_call>', "invalid_json"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "invalid_json"),
        ('<tool_call>{"name": "calculator"}', "unclosed_block"),
        ('<tool_call>{"name": "calculator", "arguments": {"formula": "1"}}</tool_call>', "unknown_argument"),
        ('<tool_call>{"name": "calculator", "expression": "1+1"}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "calculator", "arguments": "1+1"}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "calculator", "args": {}, "args": {"a": 1}}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "calculator", "args": {"a": 1, "a": 2}}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "calculator", "args": {}, "parameters": {}}</tool_call>', "malformed_structure"),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud800"}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "calculator"} and more</tool_call>', "invalid_json"),
        ("<tool_call>{'name': 'calculator'}</tool_call>", "invalid_json"),
        ("<tool_call>[]</tool_call>", "malformed_structure"),
        ("<tool_call></tool_call>", "invalid_json"),
    ],
)  # fmt: skip
def test_every_kind_of_call_has_its_status(text: str, status: str) -> None:
    (call,) = parse_tool_calls(f"first {text}", TOOLS)
    assert call.status == status


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
