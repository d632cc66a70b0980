"""Records of LLaMA-Factory's sharegpt format: `conversations` of `from` and `value`, `system`, `images`.

`image` is another name of `images`; both hold one picture or a list.

    {"conversations": [{"from": "human", "value": "<image>Which digit?"}, {"from": "gpt", "value": "It is 7."}],
     "images": ["a.png"]}

A last turn of `gpt` is the solution. `chosen` and `rejected`, each a turn, are the two responses of a preference pair.
A column `answer` holds the literal answer for rewards, where it is not the whole response.
"""

from __future__ import annotations

from typing import Any

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
    StoredMedia,
    asked_text,
    audios_of,
    first_given,
    first_of,
    images_of,
    others,
    present,
    videos_of,
)
from mobula.actors.datasets.formats.turns import response_of, split_response, turns_of
from mobula.actors.datasets.rows import Row, Turn

COLUMNS = (
    "id",
    "conversations",
    "system",
    "tools",
    *MEDIA_COLUMNS,
    "answer",
    "chosen",
    "rejected",
)
NAMES = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}


def read(record: Record) -> Draft:
    turns, pictures, videos, audios = turns_of(record.get("conversations"), "conversations")
    asked, response = split_response(turns, "conversations")
    system = first_of(record, "system")
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(response, chosen)
    return Draft(
        turns=[*([Turn("system", asked_text(system, "system"))] if system else []), *asked],
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        images=images_of(record, pictures),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        chosen=chosen,
        rejected=rejected,
        metadata=others(record, *COLUMNS),
    )


def write(row: Row, media: StoredMedia) -> dict[str, Any]:
    turns = list(row.history)
    record: dict[str, Any] = {"id": row.sample_id}
    if turns and turns[0].role == "system":
        record["system"] = turns.pop(0).text
    said = [_turn(turn.role, turn.text) for turn in (*turns, Turn("user", row.question))]
    if row.rejected is None:
        said.append(_turn("assistant", row.solution))
    else:
        record["chosen"] = _turn("assistant", row.chosen or "")
        record["rejected"] = _turn("assistant", row.rejected)
    record |= {"conversations": said, "answer": row.answer}
    return {**record, **media.columns(), **row.metadata}


def _turn(role: str, text: str) -> dict[str, str]:
    return {"from": NAMES[role], "value": text}


FORMAT = RowFormat(COLUMNS, read, write)
