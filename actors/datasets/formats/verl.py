"""Records of verl: `prompt` (chat turns), `images`, `reward_model.ground_truth`, `data_source`, `extra_info`.

    {"data_source": "geo3k", "prompt": [{"role": "user", "content": "<image>What is x?"}], "images": [{"bytes": ...}],
     "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"split": "train", "index": 0}}

`data_source` is the label for reward recipes. If the ground truth is a list, the first item is the answer, and the
metadata has the list.
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
    videos_of,
)
from mobula.actors.datasets.formats.turns import split_response, turns_of
from mobula.actors.datasets.rows import RowError, Turn

COLUMNS = ("prompt", *MEDIA_COLUMNS, "reward_model", "data_source", "extra_info")


def read(record: Record) -> Draft:
    prompt = record.get("prompt")
    asked_in = ([Turn("user", prompt)], [], [], []) if isinstance(prompt, str) else turns_of(prompt, "prompt")
    turns, images, videos, audios = asked_in
    asked, response = split_response(turns, "prompt")
    truth = only_one(first_of(record, "reward_model.ground_truth"))
    info = record.get("extra_info") or {}
    if not isinstance(info, Mapping):
        raise RowError("bad_extra_info", f"`extra_info` is a {type(info).__name__}: write a mapping")
    metadata = {
        **others(record, "prompt", *MEDIA_COLUMNS, "reward_model", "extra_info"),
        **plain(info),
    }
    if isinstance(truth, list | tuple):
        metadata["ground_truth"] = plain(truth)
        truth = truth[0] if truth else None
    return Draft(
        turns=asked,
        answer=truth,
        sample_id=info.get("id"),
        solution=response,
        images=images_of(record, images),
        videos=videos_of(record, videos),
        audios=audios_of(record, audios),
        label=record.get("data_source"),
        metadata=metadata,
    )


FORMAT = RowFormat(COLUMNS, read)
