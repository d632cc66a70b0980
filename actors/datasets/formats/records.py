r"""The row formats: the columns of a record, and its conversion to a `Draft`.

All formats share the media columns (`images` or `image`, one or a list; `videos`, `audios`) and the columns of
`formats.turns`. Other columns, and those of an object `metadata`, are passed to reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
    asked_text,
    first_given,
    first_of,
    json_value,
    media_of,
    only_one,
    others,
    present,
    text_of,
)
from mobula.actors.datasets.formats.turns import as_messages, response_of, split_response, turns_of
from mobula.actors.datasets.rows import RowError, Turn
from mobula.cluster.errors import SkippedSample
from mobula.cluster.user_code import chosen, is_user_code
from mobula.configs.schema.data import SourceConfig

QUESTION = ("id", "question", "answer", "solution", "metadata", *MEDIA_COLUMNS)
MESSAGES = (
    *("id", "messages", "prompt", "completion", "answer", "solution", "chosen", "rejected", "metadata"),
    *MEDIA_COLUMNS,
)
VERL = ("prompt", "reward_model", "data_source", "extra_info", *MEDIA_COLUMNS)
LIGHTRFT = (
    *("id", "prompt", "input", "reference", "answer", "ground_truth", "label", "reward_model", "extra_info"),
    *MEDIA_COLUMNS,
)
REFERENCES = (
    *("reference", "answer", "extra_info.reference", "reward_model.ground_truth", "ground_truth"),
    "extra_info.constraints",
)
ALPACA = ("id", "instruction", "input", "output", "history", "answer", "chosen", "rejected", *MEDIA_COLUMNS)
SHAREGPT = ("id", "conversations", "answer", "chosen", "rejected", *MEDIA_COLUMNS)


def _question(record: Record) -> Draft:
    r"""A question and an answer, as in MAYE. The default of `solution` is the answer in a `\boxed{}`.

    {"id": "12", "question": "<image>Which number?", "answer": "7", "solution": "\\boxed{7}", "image": "images/12.png"}
    """
    return Draft(
        turns=[Turn("user", asked_text(record.get("question"), "question"))],
        answer=record.get("answer"),
        sample_id=present(record, "id"),
        solution=present(record, "solution"),
        metadata={**others(record, *QUESTION), **_object(record, "metadata")},
        **media_of(record),
    )


def _messages(record: Record) -> Draft:
    """Chat turns, as in OpenAI's API, or TRL's columns.

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                                               {"type": "text", "text": "Which number?"}]}], "answer": "7"}

    A last turn of the assistant is the solution, and the answer if there is no column `answer`. `chosen` and `rejected`
    are the two responses of a preference pair.
    """
    record = as_messages(record, is_offline=False)
    turns, media = turns_of(record["messages"], "messages")
    asked, response = split_response(turns, "messages")
    metadata = record.get("metadata")
    return _answered(
        record,
        MESSAGES,
        asked,
        media,
        first_given(present(record, "solution"), response),
        json_value(metadata) if isinstance(metadata, dict) else {},
    )


def _sharegpt(record: Record) -> Draft:
    """LLaMA-Factory's sharegpt format.

    {"conversations": [{"from": "human", "value": "<image>Which number?"}, {"from": "gpt", "value": "It is 7."}],
     "images": ["a.png"]}

    As `_messages`; an optional column `answer` has the literal answer for rewards, if it is not the whole response.
    """
    turns, media = turns_of(record.get("conversations"), "conversations")
    asked, response = split_response(turns, "conversations")
    return _answered(record, SHAREGPT, asked, media, response)


def _alpaca(record: Record) -> Draft:
    """LLaMA-Factory's alpaca format; `history` is a list of [question, answer] pairs. Else as `_sharegpt`.
    {"instruction": "<image>Which number?", "input": "", "output": "It is 7.", "images": ["a.png"]}"""
    asked = (first_of(record, "instruction"), first_of(record, "input"))
    question = "\n".join(asked_text(text, "instruction") for text in asked if text is not None)
    output = first_of(record, "output")
    if not isinstance(output, str | None):
        raise RowError("bad_output", "`output` is no text: write one answer, or a pair as `chosen` and `rejected`")
    if output is None and response_of(record.get("chosen"), "chosen") is None:
        raise RowError("missing_output", "the row has neither `output` nor `chosen`: add one of them")
    turns = [*_history(record.get("history")), Turn("user", text_of(question, "instruction"))]
    return _answered(record, ALPACA, turns, {}, output)


def _verl(record: Record) -> Draft:
    """verl's format. `data_source` is the label for reward recipes. If the ground truth is a list, the first item is
    the answer, and the metadata has the list.

    {"data_source": "geo3k", "prompt": [{"role": "user", "content": "<image>What is x?"}], "images": [{"bytes": ...}],
     "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"split": "train", "index": 0}}
    """
    prompt = record.get("prompt")
    turns, media = ([Turn("user", prompt)], {}) if isinstance(prompt, str) else turns_of(prompt, "prompt")
    asked, response = split_response(turns, "prompt")
    truth = only_one(first_of(record, "reward_model.ground_truth"))
    info = _object(record, "extra_info")
    metadata = {**others(record, *(column for column in VERL if column != "data_source")), **info}
    if isinstance(truth, list | tuple):
        metadata["ground_truth"] = json_value(truth)
        truth = truth[0] if truth else None
    return Draft(
        turns=asked,
        answer=truth,
        sample_id=info.get("id"),
        solution=response,
        label=record.get("data_source"),
        metadata=metadata,
        **media_of(record, media),
    )


def _lightrft(record: Record) -> Draft:
    """LightRFT's format. The prompt is a text or chat turns; answers of the assistant are left out. Media without
    placeholders precede the question. The reference is the first of `REFERENCES`. {"prompt": "Which number?", "images":
    ["a.png"], "reference": "7", "label": "read"}"""
    prompt = first_of(record, "input", "prompt")
    if prompt is None:
        raise RowError("missing_prompt", "the row has no `prompt`: add it")
    turns, media = ([Turn("user", prompt)], {}) if isinstance(prompt, str) else turns_of(prompt, "prompt")
    info = record.get("extra_info")
    return Draft(
        turns=split_response(turns, "prompt")[0],
        answer=only_one(first_of(record, *REFERENCES)),
        sample_id=present(record, "id"),
        label=first_of(record, "label", "extra_info.label"),
        metadata={**others(record, *LIGHTRFT), **(json_value(info) if isinstance(info, Mapping) else {})},
        has_media_in_front=True,
        **media_of(record, media),
    )


def _answered(
    record: Record, columns: tuple[str, ...], turns: list[Turn], media: Any, response: str | None, metadata: Any = ()
) -> Draft:
    """The draft of a row that may end in a demonstration or a preference pair."""
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(response, chosen)
    return Draft(
        turns=turns,
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        chosen=chosen,
        rejected=rejected,
        metadata={**others(record, *columns), **dict(metadata)},
        **media_of(record, media),
    )


def _object(record: Record, column: str) -> dict[str, Any]:
    value = record.get(column) or {}
    if not isinstance(value, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` is a {type(value).__name__}: write an object")
    return dict(json_value(value))


def _history(pairs: Any) -> list[Turn]:
    turns = []
    for pair in pairs or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("bad_history", f"`history` has {pair!r:.40}: write [question, answer] pairs")
        turns += [Turn("user", asked_text(pair[0], "history")), Turn("assistant", text_of(pair[1], "history"))]
    return turns


FORMATS: dict[str, RowFormat] = {
    "question": RowFormat(QUESTION, _question),
    "messages": RowFormat(MESSAGES, _messages, has_answers=True),
    "verl": RowFormat(VERL, _verl),
    "lightrft": RowFormat(LIGHTRFT, _lightrft),
    "alpaca": RowFormat(ALPACA, _alpaca, has_answers=True),
    "sharegpt": RowFormat(SHAREGPT, _sharegpt, has_answers=True),
}
"""`data.row_format` -> format."""


def format_of(source: SourceConfig, options: Mapping[str, Any]) -> RowFormat:
    """Returns the row format of `data.row_format`; user code is a function from a record to a `Draft`."""
    name = source.row_format
    readers = {known: row_format.read for known, row_format in FORMATS.items()}
    read = chosen(readers, name, "data.row_format", ("record",), options)
    if not is_user_code(name):
        return FORMATS[name]
    return RowFormat(tuple(source.columns), partial(_read_by_user, name, read), is_own=True)


def _read_by_user(name: str, read: Callable[[Record], Draft], record: Record) -> Draft:
    try:
        draft = read(record)
    except SkippedSample:
        raise
    except Exception as error:  # user code may raise errors of any type
        raise RowError("row_format_raised", f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(draft, Draft):
        raise RowError("row_format_raised", f"{name} returned a {type(draft).__name__}: return a Draft")
    return draft
