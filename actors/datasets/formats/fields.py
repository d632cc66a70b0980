"""Fields of rows, turns and parts: those that all formats read, and those of other trainers that are refused by name.

A field in none of the lists is counted as unread. Names are of OpenAI's API, TRL, LLaMA-Factory, Swift, Axolotl,
OpenRLHF, verl, NeMo RL and torchtune.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mobula.actors.datasets.formats.base import asked_text, plain
from mobula.actors.datasets.rows import RowError, Turn
from mobula.cluster.records.json_lines import parse_json

SHARED_COLUMNS = ("system", "tools", "chat_template_kwargs")
SHOWN_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking", "tool_plan")
"""Fields of a turn that the chat template must write."""
NAMING_FIELDS = ("name", "tool_call_id")
"""Fields of a turn that the chat template may write."""
LOSS_FIELDS = ("weight", "loss", "train", "training", "train_on_turn", "loss_mask")
"""Fields of a turn: 0 or false takes it out of the loss."""

_TURNS = ("messages", "conversations", "prompt", "completion", "input", "chosen", "rejected")  # columns of turns
_READ_IN_TURNS = ("role", "from", "content", "value", *SHOWN_FIELDS, *NAMING_FIELDS, *LOSS_FIELDS)
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_READ_IN_PARTS: tuple[str, ...] = (
    *_MEDIA,
    "type",
    "text",
    "image_url",
    "input_image",
    "video_url",
    "input_video",
    "audio_url",
)
_READ_IN_PARTS += ("input_audio", "url", "path", "bytes", "base64", "source")

Rule = tuple[tuple[str, ...], tuple[Any, ...], str]  # names, values that change nothing, next action
_LOSS = "write `weight` 0 or 1 in the turns of the assistant"
_PAIR = "write the pair as `chosen` and `rejected`"
_PIXELS = "set data.min_pixels and data.max_pixels, or data.video, for all rows"
_OF_ROWS: tuple[Rule, ...] = (
    (("kto_tag", "kto_label"), (True,), "KTO is not trained here: remove the rows of false"),
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
    (_MEDIA, (), "write media as parts of the content, or in the columns of the row"),
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

    Args:
        columns: of the format.
        has_answers: the format has demonstrations, which some fields would change.
    """
    if has_answers and record.get("label") is False:
        raise _refused("label", False, "the row", _OF_ROWS[0][2])
    rules = (*_OF_ROWS, *(_OF_ANSWERS if has_answers else ()))
    unread = dict.fromkeys(_unread(record, (*columns, *SHARED_COLUMNS), rules, "the row"))
    info = record.get("extra_info")
    list(_unread(info if isinstance(info, Mapping) else {}, (), _OF_ROWS, "`extra_info`"))
    for column in _TURNS:
        for turn in _mappings(record.get(column)):
            found = list(_unread(turn, _READ_IN_TURNS, _OF_TURNS, f"a turn of `{column}`"))
            for part in _mappings(turn.get("content", turn.get("value"))):
                if holds(part, "fps") and isinstance(next((part[k] for k in _MEDIA if k in part), ""), str):
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


def shown_fields(turn: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The fields of a turn for the chat template. Arguments of tool calls become objects, as templates expect."""
    fields = {name: turn[name] for name in (*SHOWN_FIELDS, *NAMING_FIELDS) if holds(turn, name)}
    if "tool_calls" in fields:
        fields["tool_calls"] = [_call(_parsed(call), column) for call in _listed(_parsed(fields["tool_calls"]))]
    return {name: plain(value) for name, value in fields.items()}


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
        found |= {"tools": plain(bare)} if bare else {}
    if holds(record, "chat_template_kwargs"):
        if not isinstance(variables := _parsed(record["chat_template_kwargs"]), Mapping):
            raise RowError("bad_chat_template_kwargs", f"`chat_template_kwargs` is {variables!r:.60}: write an object")
        found["chat_template_kwargs"] = plain(variables)
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
    """The value of a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode())
    except ValueError:
        return value
