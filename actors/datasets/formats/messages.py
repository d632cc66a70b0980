"""Records of chat turns, as in OpenAI's API: `messages`, with images in parts or in `images`.

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                                               {"type": "text", "text": "Which number?"}]}], "answer": "7"}

A last turn of the assistant is the solution, and the answer if there is no column `answer`. `chosen` and `rejected`
are the two responses of a preference pair.
"""

from __future__ import annotations

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
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
    turns, images, videos, audios = turns_of(record.get("messages"), "messages")
    asked, response = split_response(turns, "messages")
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(present(record, "solution"), response, chosen)
    metadata = record.get("metadata") or {}
    return Draft(
        turns=asked,
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        images=images_of(record, images),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        chosen=chosen,
        rejected=rejected,
        metadata={**others(record, *COLUMNS), **(plain(metadata) if isinstance(metadata, dict) else {})},
    )


FORMAT = RowFormat(COLUMNS, read)
