"""Fields of rows that change training are read or refused by name, others are counted; TRL's columns are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_rows import read_split
from typer.testing import CliRunner

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.rows import Row, Turn, count_by_reason
from mobula.cluster.errors import DatasetError
from mobula.configs.load import load_config
from mobula.deploy.cli import app
from mobula.deploy.preflight.rows import ROWS, find_in_rows, row_notes

ASKED = {"role": "user", "content": "Q?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}
RECORDS: dict[str, dict[str, Any]] = {
    "question": {"question": "Q?", "answer": "4"},
    "messages": {"messages": [ASKED, FOUR]},
    "verl": {"prompt": [ASKED], "reward_model": {"ground_truth": "4"}},
    "lightrft": {"prompt": "Q?", "reference": "4"},
    "alpaca": {"instruction": "Q?", "output": "4"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "4"}]},
}


def row_of(folder: Path, row_format: str, record: Any, **changes: Any) -> Row:
    (folder / "train.jsonl").write_text(json.dumps(record))
    [row] = read_split(folder, row_format=row_format, **changes).rows
    return row


def conversation_of(folder: Path, record: Any, form: str = "conversation", **options: Any) -> Any:
    (folder / "train.jsonl").write_text(json.dumps(record))
    [row] = read_conversations(folder, "train", form, **options).rows
    return row


@pytest.mark.parametrize("row_format", RECORDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kto_tag", False),
        ("weight", 0),
        ("loss", False),
        ("loss_multiplier", 0.5),
        ("system_prompt", "Be brief."),
        ("enable_thinking", False),
        ("rejected_response", "5"),
        ("tools_kwargs", {"x": 1}),
        ("agent_name", "tool_agent"),
        ("extra_info", {"need_tools_kwargs": True}),
    ],
)
def test_a_field_that_changes_training_elsewhere_is_refused_by_name(
    tmp_path: Path, row_format: str, field: str, value: Any
) -> None:
    record = {**RECORDS[row_format], field: value}
    name = next(iter(value)) if field == "extra_info" else field
    with pytest.raises(DatasetError, match=rf"unread_field 1.*`{name}`.*data.ignored_fields=\[{name}\]"):
        row_of(tmp_path, row_format, record)
    row = row_of(tmp_path, row_format, record, ignored_fields=(name,))
    assert (row.question, row.answer, name in row.metadata) == ("Q?", "4", False)


@pytest.mark.parametrize("row_format", RECORDS)
def test_values_that_change_nothing_are_read(tmp_path: Path, row_format: str) -> None:
    neutral = {
        "kto_tag": True,
        "weight": 1,
        "loss": True,
        "tools": [],
        "history": [],
        "agent_name": "single_turn_agent",
    }
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **neutral})
    assert (row.answer, row.template, row.unread) == ("4", "", ())


@pytest.mark.parametrize("row_format", RECORDS)
def test_the_columns_of_a_chat_template_are_kept_for_it(tmp_path: Path, row_format: str) -> None:
    columns = {"tools": json.dumps([TOOL["function"]]), "chat_template_kwargs": {"x": 0.50}, "system": "S", "level": 3}
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **columns})
    assert json.loads(row.template) == {"tools": [TOOL], "chat_template_kwargs": {"x": 0.5}}
    assert row.history == (Turn("system", "S"),)
    assert row.unread == ("level",)
    assert "tools" not in row.metadata and row.metadata["level"] == 3


@pytest.mark.parametrize("row_format", ["messages", "alpaca", "sharegpt"])
@pytest.mark.parametrize("change", [{"label": False}, {"margin": 0.5}, {"objects": {"ref": ["a"]}}, {"mask": "User"}])
def test_demonstrations_have_further_fields_that_are_refused(tmp_path: Path, row_format: str, change: Any) -> None:
    with pytest.raises(DatasetError, match="unread_field 1"):
        row_of(tmp_path, row_format, {**RECORDS[row_format], **change})
    with pytest.raises(DatasetError, match="which is not read here"):
        conversation_of(tmp_path, {**RECORDS["messages"], **change})


@pytest.mark.parametrize(
    ("turn", "name"),
    [
        ({**ASKED, "images": ["a.png"]}, "images"),
        ({**FOUR, "prefix": True}, "prefix"),
        ({**FOUR, "partial": True}, "partial"),
        ({**FOUR, "train_detail": [1]}, "train_detail"),
        ({**FOUR, "mask": True}, "mask"),
        ({**FOUR, "function_call": {"name": "f"}}, "function_call"),
        ({**ASKED, "content": [{"type": "text", "text": "Q?", "loss": False}]}, "loss"),
        ({**ASKED, "content": [{"type": "image", "image": "a.png", "max_pixels": 9}]}, "max_pixels"),
        ({**ASKED, "content": [{"type": "video", "video": "a.mp4", "fps": 9}]}, "fps"),
    ],
)
def test_fields_of_turns_and_parts_are_refused_by_name(tmp_path: Path, turn: Any, name: str) -> None:
    turns = [turn, FOUR] if turn["role"] == "user" else [ASKED, turn]
    for read in (lambda r: row_of(tmp_path, "messages", r), lambda r: conversation_of(tmp_path, r)):
        with pytest.raises(DatasetError, match=rf"`{name}`.*not read here"):
            read({"messages": turns})


@pytest.mark.parametrize("field", ["weight", "loss", "train", "train_on_turn", "loss_mask"])
def test_turns_out_of_the_loss_are_not_trained(tmp_path: Path, field: str) -> None:
    turns = [ASKED, {**FIVE, field: 0}, ASKED, {**FOUR, field: True}]
    row = conversation_of(tmp_path, {"messages": turns})
    assert [turn.is_trained for turn in row.endings[0].turns] == [False, False, True]
    with pytest.raises(DatasetError, match=f"{field} 0.5: write 0 or 1"):
        conversation_of(tmp_path, {"messages": [ASKED, {**FOUR, field: 0.5}]})
    history = row_of(tmp_path, "messages", {"messages": turns}).history
    assert [turn.is_trained for turn in history] == [False, False]
    with pytest.raises(DatasetError, match="the answer in `messages` has `weight`"):
        row_of(tmp_path, "messages", {"messages": [ASKED, {**FOUR, field: 0}]})


def test_tool_calls_and_thoughts_are_fields_of_their_turns(tmp_path: Path) -> None:
    spoken = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [spoken], "reasoning_content": "because"}
    turns = [ASKED, called, {"role": "tool", "content": "2", "name": "add"}, FOUR]
    fields = [{"tool_calls": [CALL], "reasoning_content": "because"}, {"name": "add"}, {}]
    row = conversation_of(tmp_path, {"messages": turns})
    assert [(turn.role, dict(turn.fields)) for turn in row.endings[0].turns] == list(
        zip(("assistant", "tool", "assistant"), fields, strict=True)
    )
    shared = [{"from": "human", "value": "Q?"}, {"from": "function_call", "value": json.dumps(CALL["function"])}]
    shared += [{"from": "observation", "value": "2"}, {"from": "human", "value": "And?"}]
    history = row_of(tmp_path, "sharegpt", {"conversations": shared, "answer": "4"}).history
    assert [dict(turn.fields) for turn in history] == [{}, {"tool_calls": [CALL]}, {}]
    with pytest.raises(DatasetError, match="the answer in `messages` has `reasoning_content`"):
        row_of(tmp_path, "messages", {"messages": [ASKED, {**FOUR, "reasoning_content": "because"}]})


TRLS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("conversation", {"prompt": "Q?", "completion": "4"}, ["Q?"], ["4"]),
    ("conversation", {"prompt": [ASKED], "completion": [FOUR]}, ["Q?"], ["4"]),
    ("pair", {"prompt": "Q?", "chosen": "4", "rejected": "5"}, ["Q?"], ["4", "5"]),
    ("pair", {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]}, ["Q?"], ["4", "5"]),
    ("pair", {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, ["Q?"], ["4", "5"]),
    ("pair", {"prompt": "Q?", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, ["Q?"], ["4", "5"]),
    (
        "pair",
        {"chosen": [ASKED, FIVE, ASKED, FOUR], "rejected": [ASKED, FIVE, ASKED, FIVE]},
        ["Q?", "5", "Q?"],
        ["4", "5"],
    ),
]


@pytest.mark.parametrize(("form", "record", "context", "answers"), TRLS)
def test_trls_columns_are_read(
    tmp_path: Path, form: str, record: dict[str, Any], context: list[str], answers: list[str]
) -> None:
    row = conversation_of(tmp_path, record, form)
    assert [turn.text for turn in row.context] == context
    assert [ending.turns[0].text for ending in row.endings] == answers
    read = row_of(tmp_path, "messages", {**record, "answer": "4"})
    assert [*(turn.text for turn in read.history), read.question] == context
    assert [read.chosen, read.rejected] == answers if form == "pair" else read.solution == "4"


def test_rows_that_cannot_be_read_name_the_next_action(tmp_path: Path) -> None:
    for record, said in (
        ({"text": "The sky is blue."}, "write `messages`, or `prompt` and `completion`"),
        ({"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE], "prompt": "Else?"}, "do not begin with the prompt"),
        ({"prompt": "Q?", "completion": "5", "label": False}, "KTO is not trained here"),
    ):
        with pytest.raises(DatasetError, match=said):
            conversation_of(tmp_path, record, "pair" if "chosen" in record else "conversation")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RECORDS["sharegpt"], ["data=sharegpt"]),
        (RECORDS["alpaca"], ["data=alpaca"]),
        (RECORDS["question"], ["data=jsonl", "data.columns={answer: answer, solution: answer}"]),
        (
            {"query": "Q?", "response": "4"},
            ["data=jsonl", "data.columns={question: query, answer: response, solution: response}"],
        ),
    ],
)
def test_the_words_that_an_error_names_convert_the_rows(tmp_path: Path, record: Any, words: list[str]) -> None:
    with pytest.raises(DatasetError) as caught:
        conversation_of(tmp_path, record)
    assert all(word in str(caught.value) for word in words)
    run = ["data", "convert", str(tmp_path / "out"), "--split", "train", *words, f"data.path={tmp_path}"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    [row] = read_conversations(tmp_path / "out", "train", "conversation").rows
    assert [turn.text for turn in (*row.context, *row.endings[0].turns)] == ["Q?", "4"]


def test_a_converted_row_keeps_its_fields(tmp_path: Path) -> None:
    turns = [ASKED, {**FIVE, "weight": 0}, ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    turns += [{"role": "tool", "content": "2"}, ASKED, FOUR]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns, "tools": [TOOL]}))
    run = ["data", "convert", str(tmp_path / "out"), "--split", "train", "data=messages", f"data.path={tmp_path}"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    [before] = read_conversations(tmp_path, "train", "conversation").rows
    [after] = read_conversations(tmp_path / "out", "train", "conversation").rows
    assert (after.context, after.endings, after.template) == (before.context, before.endings, before.template)


@pytest.mark.parametrize("row_format", ["question", "alpaca", "verl", "lightrft"])
def test_the_line_with_four_marks_is_the_answer(tmp_path: Path, row_format: str) -> None:
    worked = "48/2 = <<48/2=24>>24\n#### 24"
    column = {"question": "answer", "alpaca": "output", "lightrft": "reference"}.get(row_format)
    change = {column: worked} if column else {"reward_model": {"ground_truth": worked}}
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **change})
    assert row.answer == "24"
    assert row.solution == (worked if row_format == "alpaca" else "48/2 = <<48/2=24>>24\n\\boxed{24}")
    heading = row_of(tmp_path, row_format, RECORDS[row_format] | {"id": "#### 24"})
    assert heading.answer == "4"


def test_fields_and_references_out_of_reach_are_counted_once() -> None:
    config = load_config(["experiment=own", "policy.model=x", "data.path=x"])
    out_of_reach = ["He sells 4.\nThat is 4.", "x" * 201, '["Paris", "paris"]']
    in_reach = ["4", r"\boxed{4}" + "x" * 300, "\\begin{pmatrix}1\n2\\end{pmatrix}", "[1, 2]"]
    rows = [Row(str(n), "Q?", answer, "", unread=("level",)) for n, answer in enumerate([*out_of_reach, *in_reach])]
    notes: dict[str, int] = {}
    for row in rows:
        for note in row_notes(config, row):
            notes[note] = notes.get(note, 0) + 1
    assert notes[ROWS] == 7
    references, fields = map(str, find_in_rows(config, {"train": notes, "validation": {ROWS: 2, "field level": 2}}))
    assert references.startswith("3 of 7 references of train are longer than 200 characters")
    assert "level (9 rows)" in fields


def test_an_unknown_field_of_an_offline_row_is_counted(tmp_path: Path) -> None:
    row = conversation_of(tmp_path, {"messages": [{**ASKED, "foo": 1}, FOUR], "source": "web", "answer": "4"})
    assert row.unread == ("source", "messages.foo")
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [ASKED, FOUR], "kto_tag": False}) + "\n" * 2)
    with pytest.raises(DatasetError):
        read_conversations(tmp_path, "train", "conversation")
    read = read_conversations(tmp_path, "train", "conversation", ignored=("kto_tag",))
    assert count_by_reason(read.skipped) == {} and len(read.rows) == 1
