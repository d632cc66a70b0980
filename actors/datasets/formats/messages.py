"""Records of chat turns, as in OpenAI's API: `messages`, pictures in their parts or in `images`.

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                                               {"type": "text", "text": "Which digit?"}]}], "answer": "7"}

A last turn of the assistant is the solution, and the answer if there is no column `answer`. `chosen` and `rejected`
are the two responses of a preference pair.
"""

from __future__ import annotations

from typing import Any

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
    StoredMedia,
    audios_of,
    first_given,
    first_of,
    images_of,
    others,
    plain,
    present,
    videos_of,
)
from mobula.actors.datasets.formats.turns import response_of, split_response, turns_of
from mobula.actors.datasets.rows import Row
from mobula.cluster.records.markup import BREAK, parts_of

COLUMNS = (
    "id",
    "messages",
    "answer",
    "solution",
    *MEDIA_COLUMNS,
    "chosen",
    "rejected",
    "metadata",
)


def read(record: Record) -> Draft:
    turns, pictures, videos, audios = turns_of(record.get("messages"), "messages")
    asked, response = split_response(turns, "messages")
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(present(record, "solution"), response, chosen)
    metadata = record.get("metadata") or {}
    return Draft(
        turns=asked,
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        images=images_of(record, pictures),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        chosen=chosen,
        rejected=rejected,
        metadata={**others(record, *COLUMNS), **(plain(metadata) if isinstance(metadata, dict) else {})},
    )


def write(row: Row, media: StoredMedia) -> dict[str, Any]:
    turns = [{"role": turn.role, "content": _content(turn.text)} for turn in row.history]
    record: dict[str, Any] = {
        "id": row.sample_id,
        "messages": [*turns, {"role": "user", "content": _content(row.question)}],
        "answer": row.answer,
        "solution": row.solution,
    }
    for column, value in (("chosen", row.chosen), ("rejected", row.rejected)):
        if value is not None:
            record[column] = value
    return {**record, **media.columns(), **({"metadata": row.metadata} if row.metadata else {})}


def _content(text: str) -> str | list[dict[str, str]]:
    """Parts where a text holds what looks like a placeholder."""
    return parts_of(text) if BREAK in text else text


FORMAT = RowFormat(COLUMNS, read, write)
