r"""The row formats: the columns of a record, and its conversion to a `Draft`.

All formats share the media columns (`images` or `image`, one or a list; `videos`, `audios`) and the columns of chat
turns, whose names are of OpenAI's API, TRL, LLaMA-Factory, Swift, Axolotl, OpenRLHF, verl, NeMo RL and torchtune. A
field in none of the lists below is counted as unread. Other columns, and those of an object `metadata`, are passed to
reward functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    ROLES,
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
from mobula.actors.datasets.rows import RowError, Turn
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.json_lines import parse_json
from mobula.cluster.records.markup import PART, PLACEHOLDERS, plain, text_part
from mobula.cluster.user_code import chosen, is_user_code
from mobula.configs.schema.data import SourceConfig

SHARED_COLUMNS = ("system", "tools", "chat_template_kwargs")
SHOWN_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking", "tool_plan")
"""Fields of a turn that the chat template must write."""
NAMING_FIELDS = ("name", "tool_call_id")
"""Fields of a turn that the chat template may write."""
LOSS_FIELDS = ("weight", "loss", "train", "training", "train_on_turn", "loss_mask")
"""Fields of a turn: 0 or false takes it out of the loss."""

_TURNS = ("messages", "conversations", "prompt", "completion", "input", "chosen", "rejected")  # columns of turns
_READ_IN_TURNS = ("role", "from", "content", "value", *SHOWN_FIELDS, *NAMING_FIELDS, *LOSS_FIELDS)
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA_PARTS = {kind: (kind, f"{kind}_url", f"input_{kind}") for kind in PLACEHOLDERS}  # types of a part, and its keys
HELD = ("url", "path", "bytes", "base64", "source")  # keys of a part of any kind
_READ_IN_PARTS = ("type", "text", *MEDIA_COLUMNS, *chain(*MEDIA_PARTS.values()), *HELD)

Rule = tuple[tuple[str, ...], tuple[Any, ...], str]  # names, values that change nothing, next action
_LOSS = "write `weight` 0 or 1 in the turns of the assistant"
_PAIR = "write the pair as `chosen` and `rejected`"
_PIXELS = "set data.min_pixels and data.max_pixels, or data.video, for all rows"
_OF_ROWS: tuple[Rule, ...] = (
    (("kto_tag", "kto_label"), (True,), "it is trained by `mobula kto` alone: remove the rows of false"),
    (
        ("weight", "sample_weight", "loss_weight", "loss_scale", "loss_multiplier", "loss", "train"),
        (True,),
        "rows count alike: remove those of 0, and the field",
    ),
    (("system_prompt", "system_message"), (), "name it in data.columns={system: COLUMN}"),
    (("functions", "function_call"), (), "write `tools`, and `tool_calls` in turns"),
    (("enable_thinking", "reasoning_effort"), (), "write it in `chat_template_kwargs` of the row"),
    (("history",), (), "write the turns in `messages`, with data.row_format=messages"),
    (("rejected_response", "rejected_messages", "rejected_tools", "rejected_images"), (), _PAIR),
    (
        ("tools_kwargs", "need_tools_kwargs", "interaction_kwargs", "agent_name"),
        (False, "single_turn_agent"),
        "an environment (docs/environments.md) has tools and turns of its own, a row has none",
    ),
)
_OF_ANSWERS: tuple[Rule, ...] = (  # in formats whose rows hold demonstrations
    (("margin",), (0,), "pairs have no margin here: remove it"),
    (("objects",), (), "write boxes and names of objects into the texts"),
    (("mask", "masked", "loss_mask", "completion_mask", "assistant_masks"), (False,), _LOSS),
    (("segments", "input_ids", "labels"), (), "write the texts of the turns in `messages`"),
)
_OF_TURNS: tuple[Rule, ...] = (
    (("prefix", "partial"), (False,), "an answer is sampled or trained whole: write the whole answer without it"),
    (MEDIA_COLUMNS, (), "write media as parts of the content, or in the columns of the row"),
    (("function_call",), (), "write `tool_calls`"),
    (("tools", "functions"), (), "write `tools` in the row"),
    (("mask", "masked", "loss_scale", "loss_weight", "train_detail", "training_detail"), (False,), _LOSS),
    (("channel", "recipient"), (), "write it into the content, as the model writes it"),
)
_OF_PARTS: tuple[Rule, ...] = (
    ((*LOSS_FIELDS, "mask", "masked", "loss_scale"), (True,), _LOSS),
    (("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"), (), _PIXELS),
    (("nframes", "min_frames", "max_frames", "video_start", "video_end"), (), "set data.video for all rows"),
)


def without(value: Any, names: Sequence[str]) -> Any:
    """Removes the fields `names` (`data.ignored_fields`) at every depth."""
    if not names:
        return value
    if isinstance(value, Mapping):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def unread_fields(record: Mapping[str, Any], columns: Sequence[str], *, has_answers: bool) -> tuple[str, ...]:
    """Returns the fields of a record that are not read; those of turns and parts with the column and a dot in front.
    `has_answers`: the format has demonstrations, which some fields would change."""
    if has_answers and record.get("label") is False and "kto_tag" not in columns:
        raise _refused("label", False, "the row", _OF_ROWS[0][2])
    rules = (*_OF_ROWS, *(_OF_ANSWERS if has_answers else ()))
    unread = dict.fromkeys(_unread(record, (*columns, *SHARED_COLUMNS), rules, "the row"))
    info = record.get("extra_info")
    list(_unread(info if isinstance(info, Mapping) else {}, (), _OF_ROWS, "`extra_info`"))
    for column in _TURNS:
        for turn in _mappings(record.get(column)):
            found = list(_unread(turn, _READ_IN_TURNS, _OF_TURNS, f"a turn of `{column}`"))
            for part in _mappings(turn.get("content", turn.get("value"))):
                if holds(part, "fps") and isinstance(next((part[k] for k in MEDIA_COLUMNS if k in part), ""), str):
                    raise _refused("fps", part["fps"], f"a part of `{column}`", "set data.video.fps for all rows")
                found += [f for f in _unread(part, _READ_IN_PARTS, _OF_PARTS, f"a part of `{column}`") if f != "fps"]
            unread |= dict.fromkeys(f"{column}.{field}" for field in found)
    return tuple(unread)


def holds(record: Mapping[str, Any], field: str) -> bool:
    """Whether a field has a value: a number, a truth value, or something that is not empty."""
    value = record.get(field)
    if isinstance(value, str | Mapping | Sequence | np.ndarray):
        return len(value) > 0
    return value is not None


def system_turn(record: Mapping[str, Any], turns: Sequence[Turn]) -> list[Turn]:
    """The column `system` as a turn in front of `turns`; empty without it. Raises: RowError: both have one."""
    if not holds(record, "system"):
        return []
    if turns[0].role == "system":
        raise RowError("bad_system", "the row has `system` and a system turn: keep one of them")
    return [Turn("system", asked_text(record["system"], "system"))]


def _call(call: Any, column: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not holds(function, "name"):
        raise RowError(f"bad_{column}", f"`tool_calls` has {call!r:.60}: write objects with `name` and `arguments`")
    arguments = _parsed(function["arguments"]) if holds(function, "arguments") else {}
    ids = {"id": call["id"]} if holds(call, "id") else {}
    return {**ids, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def in_loss(turn: Mapping[str, Any], role: str, column: str) -> bool:
    """Whether none of the `LOSS_FIELDS` of a turn takes it out of the loss."""
    values = {name: turn[name] for name in LOSS_FIELDS if turn.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RowError(f"bad_{column}", f"a turn has the {name} {value!r}: write 0 or 1")
        if value and role != "assistant" and name != "weight":
            raise RowError(
                f"bad_{column}", f"a turn of the {role} has the {name} {value!r}: the assistant's are trained"
            )
    return all(values.values())


def template_of(record: Mapping[str, Any]) -> str:
    """The columns of a row for the chat template, as a JSON object; empty if there are none."""
    found: dict[str, Any] = {}
    if holds(record, "tools"):
        tools = [_parsed(tool) for tool in _listed(_parsed(record["tools"]))]
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise RowError("bad_tools", f"`tools` is {record['tools']!r:.60}: write a list of objects, or its JSON")
        bare = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        found |= {"tools": json_value(bare)} if bare else {}
    if holds(record, "chat_template_kwargs"):
        if not isinstance(variables := _parsed(record["chat_template_kwargs"]), Mapping):
            raise RowError("bad_chat_template_kwargs", f"`chat_template_kwargs` is {variables!r:.60}: write an object")
        found["chat_template_kwargs"] = json_value(variables)
    return json.dumps(found, ensure_ascii=False) if found else ""


def _unread(record: Mapping[str, Any], read: Sequence[str], rules: Sequence[Rule], place: str) -> Iterator[str]:
    for field in record:
        if field in read or not holds(record, field):
            continue
        value = record[field]
        for names, neutral, action in rules:
            if field in names and not (isinstance(value, bool | int | float | str) and value in neutral):
                raise _refused(field, value, place, action)
        if not any(field in names for names, _, _ in rules):
            yield field


def _refused(field: str, value: Any, place: str, action: str) -> RowError:
    detail = f"{place} has `{field}` {value!r:.60}, which is not read here and changes training elsewhere: {action}"
    return RowError("unread_field", f"{detail}, or leave it out with data.ignored_fields=[{field}]")


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in _listed(value) if isinstance(item, Mapping)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError:
        return value


FROM_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "model": "assistant",
    "developer": "system",  # OpenAI's name since 2024
    "function_call": "assistant",  # the content is the JSON of `tool_calls`
    **{role: role for role in ROLES},
}
OTHER_FORMATS = {  # column -> the words that read its format
    "conversations": "data=sharegpt",
    "instruction": "data=alpaca",
    "question": "data=jsonl 'data.columns={answer: answer, solution: answer}'",
    "query": "data=jsonl 'data.columns={question: query, answer: response, solution: response}'",
}


def turns_of(messages: Any, column: str) -> tuple[list[Turn], dict[str, list[Any]]]:
    """Parses messages; returns the turns, and the media of their parts by kind, in order. A turn is `{"role",
    "content"}` or `{"from", "value"}`; content is a text or a list of parts. A media part without a medium is a
    placeholder for an entry of the row's media column."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RowError(f"bad_{column}", f"`{column}` is {_shown(messages)}: write a list of turns")
    turns: list[Turn] = []
    held: dict[str, list[Any]] = {kind: [] for kind in PLACEHOLDERS}
    for message in messages:
        if message is None:  # a list of fixed length is filled with null
            continue
        role, content, fields = _role_and_content(message, column)
        texts = []
        for part in content if isinstance(content, list | tuple) else [content]:
            kind, text, medium = ("text", "", None) if part is None else _part(part, column)
            texts.append(text)
            if medium is not None:
                held[kind].append(medium)
        turns.append(Turn(role, "".join(texts), in_loss(message, role, column), fields))
    return turns, held


def response_of(value: Any, column: str) -> str | None:
    """The text of a response, given as text, turn, or list with one turn; None for None."""
    if value is None or value == "":
        return None
    if not isinstance(value, Mapping | list | tuple):
        return text_of(value, column)
    turns, media = turns_of(value if isinstance(value, list | tuple) else [value], column)
    if len(turns) != 1 or any(media.values()):
        raise RowError(f"bad_{column}", f"`{column}` has {len(turns)} turns: write one response of text")
    return _text_alone(turns[0], column) or None


def split_response(turns: Sequence[Turn], column: str) -> tuple[list[Turn], str | None]:
    """Splits turns into the prompt, which ends with a user turn, and the assistant's final answer, if any."""
    asked = list(turns)
    response = _text_alone(asked.pop(), column) if asked and asked[-1].role == "assistant" else None
    if not asked or asked[-1].role != "user":
        raise RowError(f"bad_{column}", f"`{column}` has no user turn to answer: end it in one, or in an answer to one")
    return asked, response


def as_messages(record: Record, *, is_offline: bool) -> Record:
    """Returns the record with `messages`, from these or the columns of TRL's formats: `prompt` with `completion` or a
    pair, or a pair of whole conversations, which is split behind the turns that both have."""
    prompt = as_turns(record.get("messages") or record.get("prompt"), "user")
    chosen, rejected = (as_turns(record.get(column), "assistant") for column in ("chosen", "rejected"))
    if max(len(chosen), len(rejected)) > 1 and chosen[:1] == rejected[:1]:
        num = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), len(chosen))
        if prompt and prompt not in (chosen, chosen[:num], chosen[:num][-1:]):
            detail = "`chosen` and `rejected` are whole conversations that do not begin with the prompt of the row"
            raise RowError("bad_pair", f"{detail}: remove it, or write one answer in each")
        return {**record, "messages": chosen[:num], "chosen": chosen[num:], "rejected": rejected[num:]}
    if not record.get("messages") and prompt:
        return {**record, "messages": [*prompt, *as_turns(record.get("completion"), "assistant")]}
    if record.get("messages"):
        return record
    column, words = next((item for item in OTHER_FORMATS.items() if item[0] in record), ("", ""))
    if words:
        convert = f"`mobula data convert OUTPUT --split SPLIT {words} data.path=FOLDER`, and train on OUTPUT"
        raise RowError(
            "missing_messages", f"the row has `{column}`: {f'run {convert}' if is_offline else f'set {words}'}"
        )
    if "text" in record:
        detail = "the row has `text`, which is neither a question nor an answer of a chat template"
        raise RowError("missing_messages", f"{detail}: write `messages`, or `prompt` and `completion`")
    raise RowError("missing_messages", "the row has no list `messages`, and no `prompt`: add one of them")


def as_turns(value: Any, role: str) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value if isinstance(value, Mapping) else {"role": role, "content": value}]


def _text_alone(turn: Turn, column: str) -> str:
    """The text of an answer. Raises: RowError: it has more than text, or is not trained."""
    if turn.fields or not turn.in_loss:
        field = next(iter(turn.fields), "weight")
        detail = f"the answer in `{column}` has `{field}`, and a row of RL has the text of an answer alone"
        raise RowError("unread_field", f"{detail}: remove the turn, or write {field} into its content")
    return plain(turn.text)


def _role_and_content(message: Any, column: str) -> tuple[str, Any, dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` has {_shown(message)} in the place of a turn: write an object")
    name = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    role = FROM_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"bad_{column}", f"`{column}` has a turn of {name!r}: use one of {', '.join(FROM_ROLES)}")
    if name == "function_call":
        content, message = "", {"tool_calls": content}
    fields = {name: message[name] for name in (*SHOWN_FIELDS, *NAMING_FIELDS) if holds(message, name)}
    if "tool_calls" in fields:  # arguments become objects, as templates expect
        fields["tool_calls"] = [_call(_parsed(call), column) for call in _listed(_parsed(fields["tool_calls"]))]
    fields = {name: json_value(value) for name, value in fields.items()}
    if content is None and "tool_calls" not in fields:
        raise RowError(f"bad_{column}", f"`{column}` has a {role} turn without text: write its `content`")
    return role, content, fields


def _part(part: Any, column: str) -> tuple[str, str, Any]:
    """Parses a part; returns the kind, the text (a placeholder for a medium), and the medium, if any."""
    if isinstance(part, str | Real):
        return "text", str(part), None
    if not isinstance(part, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` has {_shown(part)} as content: write a text or a list of parts")
    kind = part.get("type")
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return "text", text_part(part["text"]), None
    for medium, names in MEDIA_PARTS.items():
        if kind in names:
            held = next((part[key] for key in (*names, *HELD) if part.get(key)), None)  # None: only a placeholder
            if held is not None and held is part.get("base64"):
                held = {"bytes": held}
            if medium == "video" and isinstance(held, list | tuple):
                held = {"video": held, "fps": part.get("fps")}
            return medium, PLACEHOLDERS[medium] + PART, held
    raise RowError(f"bad_{column}", f"`{column}` has a part of type {kind!r}: use text, image_url, video or audio")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:60]


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
