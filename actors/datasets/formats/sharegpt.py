"""Records of LLaMA-Factory's sharegpt format: `conversations` of `from` and `value`, `system`, `images`.

`image` is another name of `images`; both hold one image or a list.

    {"conversations": [{"from": "human", "value": "<image>Which number?"}, {"from": "gpt", "value": "It is 7."}],
     "images": ["a.png"]}

A last turn of `gpt` is the solution. `chosen` and `rejected`, each a turn, are the two responses of a preference pair.
An optional column `answer` has the literal answer for rewards, if it is not the whole response.
"""

from __future__ import annotations

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
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
from mobula.actors.datasets.rows import Turn

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


def read(record: Record) -> Draft:
    turns, images, videos, audios = turns_of(record.get("conversations"), "conversations")
    asked, response = split_response(turns, "conversations")
    system = first_of(record, "system")
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(response, chosen)
    return Draft(
        turns=[*([Turn("system", asked_text(system, "system"))] if system else []), *asked],
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        images=images_of(record, images),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        chosen=chosen,
        rejected=rejected,
        metadata=others(record, *COLUMNS),
    )


FORMAT = RowFormat(COLUMNS, read)
