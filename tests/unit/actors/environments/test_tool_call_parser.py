"""Tool calls are read from any text without an exception, and `ok` means that the call is whole and known."""

from __future__ import annotations

import json
import random
import time

import pytest

from actors.environments.base import Tool
from actors.environments.tool_calls import MAX_CALLS, describe_tools, parse_tool_calls

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
    ],
)
def test_every_kind_of_call_has_its_status(text: str, status: str) -> None:
    (call,) = parse_tool_calls(f"first {text}", TOOLS)
    assert call.status == status


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
