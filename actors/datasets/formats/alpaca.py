"""Records of LLaMA-Factory's alpaca format: `instruction`, `input`, `output`, `system`, `history`, `images`
(or `image`).

    {"instruction": "<image>Which number?", "input": "", "output": "It is 7.", "images": ["a.png"]}

`history` is a list of [question, answer] pairs. `chosen` and `rejected` are the two responses of a preference pair. An
optional column `answer` has the literal answer for rewards, if it is not the whole output.
"""

from __future__ import annotations

from typing import Any

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
    text_of,
    videos_of,
)
from mobula.actors.datasets.formats.turns import response_of
from mobula.actors.datasets.rows import RowError, Turn

COLUMNS = (
    "id",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    *MEDIA_COLUMNS,
    "answer",
    "chosen",
    "rejected",
)


def read(record: Record) -> Draft:
    system = first_of(record, "system")
    asked = (first_of(record, "instruction"), first_of(record, "input"))
    question = "\n".join(asked_text(text, "instruction") for text in asked if text is not None)
    chosen, rejected = (response_of(record.get(column), column) for column in ("chosen", "rejected"))
    solution = first_given(first_of(record, "output"), chosen)
    if solution is None:
        raise RowError("missing_output", "the row has neither `output` nor `chosen`: add one of them")
    return Draft(
        turns=[
            *([Turn("system", asked_text(system, "system"))] if system else []),
            *_history(record.get("history")),
            Turn("user", text_of(question, "instruction")),
        ],
        answer=first_given(first_of(record, "answer"), solution),
        sample_id=present(record, "id"),
        solution=solution,
        images=images_of(record, ()),
        videos=videos_of(record, ()),
        audios=audios_of(record, ()),
        chosen=chosen,
        rejected=rejected,
        metadata=others(record, *COLUMNS),
    )


def _history(pairs: Any) -> list[Turn]:
    turns = []
    for pair in pairs or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError("bad_history", f"`history` has {pair!r:.40}: write [question, answer] pairs")
        turns += [Turn("user", asked_text(pair[0], "history")), Turn("assistant", text_of(pair[1], "history"))]
    return turns


FORMAT = RowFormat(COLUMNS, read)
