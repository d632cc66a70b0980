r"""Records of a question and an answer, as in MAYE: `question`, `answer`, `image`.

    {"id": "12", "question": "<image>Which number?", "answer": "7", "solution": "\\boxed{7}", "image": "images/12.png"}

`image` (or `images`) is an image, a list of images (one for each `<image>`, in order), or absent; `video` (or `videos`)
and `audio` (or `audios`) are the same for `<video>` and `<audio>`. The default of `solution` is the answer in a
`\boxed{}`. `metadata`, a mapping, and all other columns are passed to reward functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
    asked_text,
    audios_of,
    images_of,
    others,
    plain,
    present,
    videos_of,
)
from mobula.actors.datasets.rows import RowError, Turn

COLUMNS = ("id", "question", "answer", "solution", *MEDIA_COLUMNS, "metadata")


def read(record: Record) -> Draft:
    nested = record.get("metadata", {})
    if nested is None:
        nested = {}
    if not isinstance(nested, Mapping):
        raise RowError("bad_metadata", f"`metadata` is a {type(nested).__name__}: write an object")
    return Draft(
        turns=[Turn("user", asked_text(record.get("question"), "question"))],
        answer=record.get("answer"),
        sample_id=present(record, "id"),
        solution=present(record, "solution"),
        images=images_of(record, ()),
        videos=videos_of(record, ()),
        audios=audios_of(record, ()),
        metadata={**others(record, *COLUMNS), **plain(nested)},
    )


FORMAT = RowFormat(COLUMNS, read)
