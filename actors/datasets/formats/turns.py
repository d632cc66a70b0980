"""Parses chat turns of datasets: text with placeholders, or lists of parts as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from mobula.actors.datasets.formats.base import ROLES, Record, text_of
from mobula.actors.datasets.formats.fields import in_loss, shown_fields
from mobula.actors.datasets.rows import RowError, Turn
from mobula.cluster.records.markup import PART, PLACEHOLDERS, plain, text_part

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
HELD = ("url", "path", "bytes", "base64", "source")  # keys of a part of any kind
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


def turns_of(messages: Any, column: str) -> tuple[list[Turn], list[Any], list[Any], list[Any]]:
    """Parses messages; returns the turns, and the images, videos and sounds of their parts, in order.

    A turn is `{"role", "content"}` or `{"from", "value"}`; content is a text or a list of parts. A media part without
    a medium is a placeholder for an entry of the row's media column.
    """
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
    return turns, held["image"], held["video"], held["audio"]


def medium_of(part: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The medium of a part, under one of `names` or under a key of transformers' templates or Anthropic's API; None if
    the part is only a placeholder.
    """
    held = next((part[key] for key in (*names, *HELD) if part.get(key)), None)
    return {"bytes": held} if held is not None and held is part.get("base64") else held


def response_of(value: Any, column: str) -> str | None:
    """The text of a response, given as text, turn, or list with one turn; None for None."""
    if value is None or value == "":
        return None
    if not isinstance(value, Mapping | list | tuple):
        return text_of(value, column)
    turns, *media = turns_of(value if isinstance(value, list | tuple) else [value], column)
    if len(turns) != 1 or any(media):
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
    pair, or a pair of whole conversations, which is split behind the turns that both have.
    """
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
    """The role, the content, and the fields for the chat template."""
    if not isinstance(message, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` has {_shown(message)} in the place of a turn: write an object")
    name = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    role = FROM_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"bad_{column}", f"`{column}` has a turn of {name!r}: use one of {', '.join(FROM_ROLES)}")
    if name == "function_call":
        content, message = "", {"tool_calls": content}
    fields = shown_fields(message, column)
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
    if kind in IMAGE_PARTS:
        return "image", PLACEHOLDERS["image"] + PART, medium_of(part, IMAGE_PARTS)
    if kind in VIDEO_PARTS:
        held = medium_of(part, VIDEO_PARTS)
        video = {"video": held, "fps": part.get("fps")} if isinstance(held, list | tuple) else held
        return "video", PLACEHOLDERS["video"] + PART, video
    if kind in AUDIO_PARTS:
        return "audio", PLACEHOLDERS["audio"] + PART, medium_of(part, AUDIO_PARTS)
    raise RowError(f"bad_{column}", f"`{column}` has a part of type {kind!r}: use text, image_url, video or audio")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:60]
