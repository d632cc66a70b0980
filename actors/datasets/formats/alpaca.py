"""Records of LLaMA-Factory's alpaca format: `instruction`, `input`, `output`, `system`, `history`, `images`
(or `image`).

    {"instruction": "<image>Which digit?", "input": "", "output": "It is 7.", "images": ["a.png"]}

`history` is a list of [question, answer] pairs. `chosen` and `rejected` are the two responses of a preference pair. A
column `answer` holds the literal answer for rewards, where it is not the whole output.
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
    text_of,
    videos_of,
)
from mobula.actors.datasets.formats.turns import response_of
from mobula.actors.datasets.rows import Row, RowError, Turn

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


def write(row: Row, media: StoredMedia) -> dict[str, Any]:
    turns = list(row.history)
    system = turns.pop(0).text if turns and turns[0].role == "system" else None
    roles = [turn.role for turn in turns]
    if roles != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(f"{row.sample_id} has the turns {', '.join(roles)}: write the format sharegpt or messages")
    record: dict[str, Any] = {"id": row.sample_id, "instruction": row.question, "input": ""}
    if row.rejected is None:
        record["output"] = row.solution
    else:
        record |= {"chosen": row.chosen, "rejected": row.rejected}
    if system is not None:
        record["system"] = system
    if turns:
        record["history"] = [[turns[i].text, turns[i + 1].text] for i in range(0, len(turns), 2)]
    return {**record, "answer": row.answer, **media.columns(), **row.metadata}


FORMAT = RowFormat(COLUMNS, read, write)
