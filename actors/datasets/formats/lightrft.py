"""Records of LightRFT: `prompt` (or `input`), `images`, `reference`, `label`.

    {"prompt": "Which number?", "images": ["a.png"], "reference": "7", "label": "read"}

The prompt is a text or chat turns (`role`/`content` or `from`/`value`); answers of the assistant are left out. Media
without placeholders precede the question. The reference is the first of `reference`, `answer`, `extra_info.reference`,
`reward_model.ground_truth`, `ground_truth` and `extra_info.constraints`; the label is `label` or `extra_info.label`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mobula.actors.datasets.formats.base import (
    MEDIA_COLUMNS,
    Draft,
    Record,
    RowFormat,
    audios_of,
    first_of,
    images_of,
    only_one,
    others,
    plain,
    present,
    videos_of,
)
from mobula.actors.datasets.formats.turns import split_response, turns_of
from mobula.actors.datasets.rows import RowError, Turn

REFERENCES = (
    "reference",
    "answer",
    "extra_info.reference",
    "reward_model.ground_truth",
    "ground_truth",
    "extra_info.constraints",
)
COLUMNS = (
    "id",
    "prompt",
    "input",
    *MEDIA_COLUMNS,
    "reference",
    "answer",
    "ground_truth",
    "label",
    "reward_model",
    "extra_info",
)


def read(record: Record) -> Draft:
    prompt = first_of(record, "input", "prompt")
    if prompt is None:
        raise RowError("missing_prompt", "the row has no `prompt`: add it")
    asked_in = ([Turn("user", prompt)], [], [], []) if isinstance(prompt, str) else turns_of(prompt, "prompt")
    turns, images, videos, audios = asked_in
    asked, _ = split_response(turns, "prompt")
    info = record.get("extra_info")
    info = info if isinstance(info, Mapping) else {}
    return Draft(
        turns=asked,
        answer=only_one(first_of(record, *REFERENCES)),
        sample_id=present(record, "id"),
        images=images_of(record, images),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        label=first_of(record, "label", "extra_info.label"),
        metadata={**others(record, *COLUMNS), **plain(info)},
        has_media_in_front=True,
    )


FORMAT = RowFormat(COLUMNS, read)
