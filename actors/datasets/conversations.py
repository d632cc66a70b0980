"""Reads conversations for offline jobs, one JSON object a line: OpenAI's messages, pairs of answers, scored answers.

Lines of `<folder>/<split>.jsonl` (docs/offline_training.md):

    {"messages": [{"role": "user", "content": "<image>Which number?"}, {"role": "assistant", "content": "7"}],
     "images": ["images/12.png"]}                                                          a conversation
    {"messages": [{"role": "user", "content": "2 + 2?"}], "solution": "4"}                 with separate answer
    {"messages": [{"role": "user", "content": "2 + 2?"}], "chosen": "4", "rejected": "5"}  a pair
    {"messages": [..., {"role": "assistant", "content": "4"}], "score": 0.9}               a scored answer
    {"messages": [..., {"role": "assistant", "content": "5"}], "label": false}             a labelled answer

`content` is a text or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url":
PATH}}`, `{"type": "video", "video": PATH}` and `{"type": "audio", "audio": PATH}`. A medium is a part, or a placeholder
(`<image>`, `<video>`, `<audio>`) in a text and an entry of the column `images`, `videos` or `audios`, in order. A video
is a file, a folder of frames or a list of frames. The columns may also be named `image`, `video` and `audio`, and hold
one medium or a list. Paths are relative to the folder and may not leave it. Instead of a path, a data URL or an object
`{"bytes": BASE64}` is accepted. Unusable lines are skipped and reported; a split without usable lines is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mobula.actors.datasets.formats.base import MEDIA_COLUMNS, first_of
from mobula.actors.datasets.formats.records import (
    SHARED_COLUMNS,
    as_messages,
    as_turns,
    system_turn,
    template_of,
    turns_of,
    unread_fields,
    without,
)
from mobula.actors.datasets.media import (
    Audio,
    AudioInputs,
    ImageError,
    ImageInputs,
    ImageSource,
    MediaInputs,
    Video,
    VideoInputs,
    path_below,
)
from mobula.actors.datasets.open_split import read_split
from mobula.actors.datasets.rows import RowError, Split, Turn
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.markup import PART, PLACEHOLDERS, literal, placed, plain

COLUMNS = (
    *("id", "messages", "prompt", "completion", "solution", "answer", "chosen", "rejected", "score", "metadata"),
    *MEDIA_COLUMNS,
)
LABELS = ("label", "kto_tag")  # columns of labelled rows
MEDIA: Mapping[str, type[MediaInputs]] = {"image": ImageInputs, "video": VideoInputs, "audio": AudioInputs}
CHOSEN, REJECTED = 1.0, 0.0
"""Labels of the answers of a pair. A conversation to imitate has the label CHOSEN."""
MISMATCHED = -1.0
"""Label of the answer of another row, by which KTO estimates a divergence."""


@dataclass(frozen=True)
class Ending:
    """The turns after the context. The first and the last turn are the assistant's."""

    turns: tuple[Turn, ...]
    label: float


@dataclass(frozen=True)
class Conversation:
    """One row: a context that ends in a question, and one ending or a pair."""

    sample_id: str
    context: tuple[Turn, ...]
    endings: tuple[Ending, ...]
    images: tuple[ImageSource, ...]  # one for each `<image>` of context and endings, in order
    videos: tuple[Video, ...] = ()  # one for each `<video>`
    audios: tuple[Audio, ...] = ()  # one for each `<audio>`
    template: str = ""  # as in `Row`
    unread: tuple[str, ...] = ()


def _refuse_url(kind: str, url: str) -> Path:
    raise ImageError(f"remote_{kind}", f"{url[:80]!r} is no path: save the {kind} below the data folder and name it")


def read_conversations(
    folder: Path,
    split: str,
    form: str,
    *,
    key: str = "data.path",
    placeholders: Mapping[str, str] = MappingProxyType(PLACEHOLDERS),
    numbers_ids: bool = False,
    ignored: Sequence[str] = (),
) -> Split[Conversation]:
    """Reads `<folder>/<split>.jsonl`; `form` is `conversation`, `pair`, `scored` or `labelled`, whose rows also get the
    answer of the next row. `key` is the configuration key of the folder, `placeholders` and `ignored` are
    `data.placeholders` and `data.ignored_fields`; with `numbers_ids`, ids end in the number of their line."""
    root = folder.resolve()

    def read(fields: Mapping[str, Any], name: str) -> Conversation:
        columns = (*COLUMNS, *LABELS) if form == "labelled" else COLUMNS
        return _read_row(without(fields, ignored), root, name, FORMS[form], placeholders, columns)

    found = read_split(folder, split, key, read, numbers_ids=numbers_ids)
    return _with_mismatched(found, key) if form == "labelled" else found


def _with_mismatched(split: Split[Conversation], key: str) -> Split[Conversation]:
    rows = split.rows
    if len(rows) < 2:
        raise DatasetError(
            f"{key} has {len(rows)} labelled rows in {split.name}: KTO compares the answers of two or more"
        )
    others = [row.endings[0] for row in (*rows[1:], rows[0])]
    pairs = zip(rows, others, strict=True)
    shown = tuple(replace(row, endings=(*row.endings, replace(o, label=MISMATCHED))) for row, o in pairs)
    return replace(split, rows=shown)


Turns = tuple[Turn, ...]
Parts = tuple[Turns, tuple[Ending, ...]]


def _read_row(
    fields: Mapping[str, Any],
    folder: Path,
    name: str,
    form: Callable[[Mapping[str, Any], Turns], Parts],
    placeholders: Mapping[str, str],
    columns: Sequence[str],
) -> Conversation:
    fields = as_messages(fields, is_offline=True)
    unread = unread_fields(fields, columns, has_answers=True)
    turns, named = turns_of(fields["messages"], "message")
    if empty := next((turn for turn in turns if not turn.text and "tool_calls" not in turn.fields), None):
        raise RowError("bad_message", f"the content of a message of the {empty.role} is empty: write a text or parts")
    turns = [*system_turn(fields, turns), *turns]
    context, endings = form(fields, tuple(turns))
    if not any(turn.role == "user" for turn in context):
        raise RowError("no_question", "no user's message comes before the first answer: add one")
    for ending in endings:
        for turn in ending.turns:
            if turn.role == "assistant" and PART in turn.text:
                raise RowError(
                    "image_in_answer", "an assistant's message holds an image, a video or a sound: write texts alone"
                )
    inputs = {kind: make(folder, partial(_refuse_url, kind), takes_absolute=False) for kind, make in MEDIA.items()}
    listed = {kind: inputs[kind].each(first_of(fields, f"{kind}s", kind)) for kind in MEDIA}
    num_media = {kind: len(named[kind]) + len(listed[kind]) for kind in MEDIA}
    turns = [*context, *(turn for ending in endings for turn in ending.turns)]
    # Answers of the assistant hold no placeholders, and other text is literal.
    asked = [turn.role != "assistant" for turn in turns]
    texts = [turn.text if is_asked else "" for turn, is_asked in zip(turns, asked, strict=True)]
    for kind, own in placeholders.items():
        texts = placed(texts, kind, own, num_media[kind])
    written = [
        replace(turn, text=text if is_asked else literal(plain(turn.text)))
        for turn, text, is_asked in zip(turns, texts, asked, strict=True)
    ]
    context, rest = tuple(written[: len(context)]), written[len(context) :]
    endings = tuple(replace(ending, turns=tuple(rest.pop(0) for _ in ending.turns)) for ending in endings)
    if not all(isinstance(item, str | dict) for item in listed["image"]):
        raise RowError(
            "bad_images", f"`images` is {listed['image']!r:.80}: write a list of paths, data URLs or objects"
        )
    shown = [*context, *endings[0].turns]
    _refuse_mismatch(shown, "image", len(named["image"]), len(listed["image"]))  # before its files are looked for
    media = []
    for kind in MEDIA:
        media.append(inputs[kind].resolve(named[kind] or listed[kind], name))
        _refuse_mismatch(shown, kind, len(named[kind]), len(listed[kind]))
    images, videos, audios = media
    return Conversation(name, context, endings, images, videos, audios, template_of(fields), unread)


def _conversation(fields: Mapping[str, Any], turns: Turns) -> Parts:
    if turns[-1].role == "user" and fields.get("solution") not in (None, ""):
        turns = (*turns, _answer(fields["solution"], "solution"))
    start = next((index for index, turn in enumerate(turns) if turn.role == "assistant"), None)
    if start is None or turns[-1].role != "assistant":
        detail = "the last message is not the assistant's: end the row in the answer to imitate, or give `solution`"
        raise RowError("no_answer", detail)
    if not any(turn.is_trained for turn in turns[start:]):
        raise RowError("nothing_to_train", "every message of the assistant has weight 0: give one the weight 1")
    return turns[:start], (Ending(turns[start:], CHOSEN),)


def _pair(fields: Mapping[str, Any], turns: Turns) -> Parts:
    missing = [key for key in ("chosen", "rejected") if fields.get(key) in (None, "")]
    if missing:
        raise RowError("missing_pair", f"the row has no `{missing[0]}`: a pair needs `chosen` and `rejected`")
    if turns[-1].role not in ("user", "tool"):
        raise RowError("no_question", "`messages` of a pair end in the user's: the answers are `chosen` and `rejected`")
    chosen, rejected = (_answer(fields[key], key) for key in ("chosen", "rejected"))
    if not (chosen.is_trained and rejected.is_trained):
        raise RowError("nothing_to_train", "an answer of the pair has weight 0: remove the row, or the weight")
    if chosen == rejected:
        raise RowError("equal_pair", "`chosen` and `rejected` are equal: remove the row")
    return turns, (Ending((chosen,), CHOSEN), Ending((rejected,), REJECTED))


def _scored(fields: Mapping[str, Any], turns: Turns) -> Parts:
    score = fields.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise RowError("bad_score", f"`score` is {score!r}: give a finite number")
    if turns[-1].role != "assistant":
        raise RowError("no_answer", "the last message is not the assistant's: end the row in the answer that is scored")
    return turns[:-1], (Ending(turns[-1:], float(score)),)


def _labelled(fields: Mapping[str, Any], turns: Turns) -> Parts:
    label = fields.get("label", fields.get("kto_tag"))
    if not isinstance(label, bool):
        raise RowError("bad_label", f"`label` is {label!r}: write true for an answer to learn from, or false")
    if turns[-1].role != "assistant":
        raise RowError("no_answer", "the last message is not the assistant's: end the row in the answer of `label`")
    return turns[:-1], (Ending(turns[-1:], CHOSEN if label else REJECTED),)


FORMS: Mapping[str, Callable[[Mapping[str, Any], Turns], Parts]] = {
    "conversation": _conversation,
    "pair": _pair,
    "scored": _scored,
    "labelled": _labelled,
}


def _answer(given: Any, key: str) -> Turn:
    """Parses an answer: a text, an assistant's message, or a list with one message."""
    turns, media = turns_of(as_turns(given, "assistant"), key)
    if [turn.role for turn in turns] != ["assistant"] or any(media.values()):
        raise RowError("bad_pair", f"`{key}` is no text and no assistant's message: write one answer")
    return turns[0]


def _refuse_mismatch(shown: Sequence[Turn], kind: str, num_named: int, num_listed: int) -> None:
    """Checks placeholders against `num_named` parts of messages and `num_listed` entries of the column."""
    placeholder = PLACEHOLDERS[kind]
    num_placeholders = sum(turn.text.count(placeholder) for turn in shown)
    if num_placeholders != num_named + num_listed or (num_named and num_listed):
        raise RowError(
            "placeholder_mismatch",
            f"the messages have {num_placeholders - num_named} {placeholder} and {num_named} {kind} parts, "
            f"`{kind}s` names {num_listed} {kind}s: write parts alone, or one {placeholder} for each of `{kind}s`; "
            f"where {placeholder} is text, write media as parts, or set data.placeholders.{kind}=''",
        )


# Reads image pairs for preference optimisation of flow models, one JSON object a line of `<folder>/<split>.jsonl`:
#
#     {"id": "12", "prompt": "write 42", "chosen": "images/12a.png", "rejected": "images/12b.png"}
#
# A path is relative to the folder and may not leave it. It names an image, or latents in a NumPy file (`.npy`).
# Unusable lines are skipped and reported; a split without usable lines is an error.


@dataclass(frozen=True)
class ImagePair:
    """One row: a prompt, and the files of the preferred and the rejected image (or latents)."""

    sample_id: str
    question: str
    chosen: Path
    rejected: Path
    unread: tuple[str, ...] = ()


def read_image_pairs(folder: Path, split: str, ignored: Sequence[str] = ()) -> Split[ImagePair]:
    """Reads the rows of a split, in order; `ignored` is `data.ignored_fields`."""
    return read_split(folder, split, "data.path", partial(_image_pair, folder.resolve(), ignored))


def _image_pair(folder: Path, ignored: Sequence[str], fields: Mapping[str, Any], name: str) -> ImagePair:
    fields = without(fields, ignored)
    unread = unread_fields(fields, ("id", "prompt", "chosen", "rejected"), has_answers=True)
    if shared := next((column for column in SHARED_COLUMNS if fields.get(column)), None):
        raise RowError("unread_field", f"the row has `{shared}`, and the text of a flow model is its prompt: remove it")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("missing_prompt", f"`prompt` is {prompt!r}: write what the images should show")
    chosen, rejected = (_file(fields, key, folder) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowError("same_image", f"`chosen` and `rejected` are both {chosen.name}: a pair has two")
    return ImagePair(name, prompt, chosen, rejected, unread)


def _file(fields: Mapping[str, Any], key: str, folder: Path) -> Path:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise RowError("missing_image", f"`{key}` is {value!r}: write the path of an image, or of latents")
    path = path_below(folder, value)
    if path is None:
        raise RowError(
            "outside_folder", f"`{key}` is {value!r}, which leads out of the data folder: use a path below it"
        )
    if not path.is_file():
        raise RowError("missing_file", f"there is no file {path}: add it, or fix `{key}`")
    return path
