"""Converts trajectory groups to Arrow records and back, for the journal and the trajectory log.

A record batch holds one group with one row per trajectory. Of the prompts' images only keys and sources are written,
because they can be processed again. Images of later turns are written as model inputs, each once per group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mobula.cluster.records.actions import Actions, KeptSets, LatentActions, PatchActions, TokenActions
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import (
    EpisodeTurn,
    FinishReason,
    Prompt,
    Response,
    Reward,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)

_MEDIUM = pa.struct(
    [
        ("key", pa.string()),
        ("modality", pa.string()),
        ("num_bytes", pa.int64()),
        ("source", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
    ]
)
_TENSOR = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("values", pa.binary())]
)
_IMAGE = pa.struct(
    [
        ("key", pa.string()),
        ("modality", pa.string()),
        ("inputs", pa.list_(_TENSOR)),
        ("thumbnail", pa.binary()),
        ("files", pa.list_(pa.binary())),
    ]
)
_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_ARRAY = [("values", pa.binary()), ("shape", pa.list_(pa.int32())), ("dtype", pa.string())]
_LATENTS = pa.struct(
    [
        *_ARRAY,
        ("step_index", pa.list_(pa.int32())),
        ("timesteps", pa.list_(pa.float32())),
        ("sigmas", pa.list_(pa.float32())),
    ]
)
_REWARD = pa.struct(
    [
        ("value", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("reasons", pa.map_(pa.string(), pa.string())),
    ]
)
_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("action", pa.string()),
        ("observation", pa.string()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("status", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # version made by training on the group; null before
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("sample_id", pa.string()),
        ("prompt_text", pa.string()),
        ("compact_ids", pa.list_(pa.int32())),
        ("expanded_ids", pa.list_(pa.int32())),
        ("media", pa.list_(_MEDIUM)),
        ("references", pa.list_(pa.string())),
        ("metadata", pa.string()),  # JSON
        ("token_ids", pa.list_(pa.int32())),  # null if the trajectory has latents
        ("kept_counts", pa.list_(pa.int32())),  # null if the distribution is not truncated
        ("kept_ids", pa.list_(pa.int32())),
        ("latents", _LATENTS),  # null if the trajectory has tokens
        ("patches", pa.struct(_ARRAY)),  # continuous tokens of an image; null if the trajectory has none
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("weight_spans", pa.list_(_SPAN)),
        ("finish_reason", pa.string()),
        ("response_text", pa.string()),
        ("response_num_tokens", pa.int32()),
        ("response_is_truncated", pa.bool_()),
        ("response_failure", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("later_media", pa.list_(_MEDIUM)),  # of observations; spans count from the first step
        ("later_images", pa.list_(_IMAGE)),  # without images in earlier rows of the group
        ("reward", _REWARD),  # null if scoring failed
        ("reference_logprobs", pa.list_(pa.float32())),  # null if they are not needed
    ]
)
_ROW = pa.struct(SCHEMA)
_OF_PROMPT = ("prompt_text", "compact_ids", "expanded_ids", "media", "references", "metadata")
_ARRAYS = {
    "compact_ids": np.int32,
    "expanded_ids": np.int32,
    "token_ids": np.int32,
    "kept_counts": np.int32,
    "kept_ids": np.int32,
    "behavior_logprobs": np.float32,
    "action_mask": np.bool_,
    "reference_logprobs": np.float32,
}
_OF_LATENTS = {"step_index": np.int32, "timesteps": np.float32, "sigmas": np.float32}


@dataclass(frozen=True)
class RecordedGroup:
    """One group read from a record. Media of the prompt have keys and sources but no reference."""

    group: TrajectoryGroup
    rewards: tuple[Reward | None, ...]
    reference_logprobs: tuple[np.ndarray, ...] | None = None  # float32 [T], one per trajectory

    @property
    def has_all_media(self) -> bool:
        """Whether the prompt can be prepared again with all media, and the images of later turns were written."""
        return all(h.reference is not None for t in self.group.trajectories for h in t.actions.media)


def to_rows(
    group: TrajectoryGroup,
    rewards: Sequence[Reward | None],
    reference_logprobs: Sequence[np.ndarray] | None = None,
    step: int | None = None,
) -> list[dict[str, Any]]:
    """Returns one row per trajectory, each with the whole prompt."""
    shared = {"step": step, "group_id": group.group_id, **_prompt_columns(group.prompt)}
    references = [None] * len(group.trajectories) if reference_logprobs is None else reference_logprobs
    written: set[str] = set()
    return [
        {
            **shared,
            **_trajectory_columns(t),
            "later_images": _images(t.actions.media, written),
            "reward": _reward_value(reward),
            "reference_logprobs": reference,
        }
        for t, reward, reference in zip(group.trajectories, rewards, references, strict=True)
    ]


def record_batch(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Builds a batch from rows of `SCHEMA`; missing values are null. Via structs it takes half the time of columns."""
    return pa.RecordBatch.from_struct_array(pa.array(rows, _ROW))


def to_batch(group: TrajectoryGroup, rewards: Sequence[Reward | None]) -> pa.RecordBatch:
    """Converts a group to a record batch. Only the first row has the prompt."""
    first, *others = to_rows(group, rewards)
    without_prompt = dict.fromkeys(_OF_PROMPT)
    return record_batch([first, *({**row, **without_prompt} for row in others)])


def from_batch(batch: pa.RecordBatch) -> RecordedGroup:
    """Reads the group of a record batch. It does not reference the batch's memory."""
    scalars = batch.select([name for name in batch.schema.names if name not in _ARRAYS])
    rows = scalars.to_pylist(maps_as_pydicts="strict")
    for name in _ARRAYS:
        for row, array in zip(rows, arrays(batch, name), strict=True):
            row[name] = array
    references = tuple(row["reference_logprobs"] for row in rows)
    images = {p["key"]: _image(p) for row in rows for p in row["later_images"] or ()}
    return RecordedGroup(
        TrajectoryGroup(_prompt(rows[0]), tuple(_trajectory(row, images) for row in rows)),
        tuple(None if row["reward"] is None else Reward(**row["reward"]) for row in rows),
        None if any(array is None for array in references) else references,
    )


def arrays(batch: pa.RecordBatch, name: str) -> Iterable[np.ndarray | None]:
    """Returns the rows of a list column as separate numpy arrays; None for a null row."""
    for scalar in batch.column(name):
        yield np.array(scalar.values, dtype=_ARRAYS[name]) if scalar.is_valid else None


def _media_column(media: Sequence[MediaHandle], spans: Sequence[MediaSpan]) -> list[dict[str, Any]]:
    return [
        {"key": m.key, "modality": m.modality, "num_bytes": m.num_bytes, "source": m.source, **vars(span)}
        for m, span in zip(media, spans, strict=True)
    ]


def _media(
    column: Sequence[Mapping[str, Any]], images: Mapping[str, ProcessedMedia]
) -> tuple[tuple[MediaHandle, ...], tuple[MediaSpan, ...]]:
    media = tuple(
        MediaHandle(m["key"], m["modality"], m["num_bytes"], images.get(m["key"]), m["source"]) for m in column
    )
    return media, tuple(MediaSpan(m["start"], m["end"]) for m in column)


def _images(media: Sequence[MediaHandle], written: set[str]) -> list[dict[str, Any]]:
    """Returns the media inside the group that are not in `written`, and adds their keys to it."""
    rows = []
    for handle in media:
        medium = handle.reference
        if handle.key in written or not isinstance(medium, ProcessedMedia):
            continue
        written.add(handle.key)
        tensors = [
            {"name": name, "dtype": array.dtype.name, "shape": array.shape, "values": array.tobytes()}
            for name, array in medium.inputs.items()
        ]
        rest = {"modality": medium.modality, "thumbnail": medium.thumbnail, "files": list(medium.files)}
        rows.append({"key": handle.key, "inputs": tensors, **rest})
    return rows


def _image(row: Mapping[str, Any]) -> ProcessedMedia:
    inputs = {t["name"]: np.frombuffer(t["values"], t["dtype"]).reshape(t["shape"]) for t in row["inputs"]}
    return ProcessedMedia(row["modality"], inputs, row["thumbnail"], tuple(row["files"]))


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "sample_id": prompt.sample_id,
        "prompt_text": prompt.text,
        "compact_ids": prompt.compact_ids,
        "expanded_ids": prompt.expanded_ids,
        "media": _media_column(prompt.media, prompt.media_spans),
        "references": list(prompt.references),
        "metadata": json.dumps(dict(prompt.metadata)),
    }


def _trajectory_columns(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        **_action_columns(trajectory.actions),
        "behavior_logprobs": trajectory.behavior_logprobs,
        "action_mask": trajectory.action_mask,
        "weight_spans": [vars(span) for span in trajectory.weight_spans],
        "finish_reason": trajectory.finish_reason.value,
        "response_text": trajectory.response.text,
        "response_num_tokens": trajectory.response.num_tokens,
        "response_is_truncated": trajectory.response.is_truncated,
        "response_failure": trajectory.response.failure,
        "turns": [{**vars(turn), "rewards": list(turn.rewards.items())} for turn in trajectory.response.turns],
    }


def _action_columns(actions: Actions) -> dict[str, Any]:
    if isinstance(actions, TokenActions):
        kept = actions.kept
        sets = {} if kept is None else {"kept_counts": kept.counts, "kept_ids": kept.ids}
        later = _media_column(actions.media, actions.media_spans)
        return {"token_ids": actions.token_ids, "later_media": later, **sets}
    assert isinstance(actions, LatentActions)
    schedule = {name: getattr(actions, name) for name in _OF_LATENTS}
    patches = {"patches": _array_column(actions.tokens)} if isinstance(actions, PatchActions) else {}
    return {"latents": {**_array_column(actions.latents), **schedule}, **patches}


def _array_column(array: np.ndarray) -> dict[str, Any]:
    return {"values": array.tobytes(), "shape": array.shape, "dtype": array.dtype.name}


def _array(written: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(written["values"], dtype=written["dtype"]).reshape(written["shape"])


def _actions(row: Mapping[str, Any], images: Mapping[str, ProcessedMedia]) -> Actions:
    if (written := row["latents"]) is None:
        kept = None if row["kept_ids"] is None else KeptSets(row["kept_counts"], row["kept_ids"])
        return TokenActions(row["token_ids"], kept, *_media(row["later_media"], images))
    schedule = {name: np.array(written[name], dtype) for name, dtype in _OF_LATENTS.items()}
    if (patches := row["patches"]) is not None:
        return PatchActions(_array(written), **schedule, tokens=_array(patches))
    return LatentActions(_array(written), **schedule)


def _reward_value(reward: Reward | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {
        "value": reward.value,
        "components": list(reward.components.items()),
        "reasons": list(reward.reasons.items()),
    }


def _prompt(row: Mapping[str, Any]) -> Prompt:
    media, spans = _media(row["media"], {})
    return Prompt(
        prompt_id=row["group_id"],
        sample_id=row["sample_id"],
        text=row["prompt_text"],
        compact_ids=row["compact_ids"],
        expanded_ids=row["expanded_ids"],
        media=media,
        media_spans=spans,
        references=tuple(row["references"]),
        metadata=json.loads(row["metadata"]),
    )


def _trajectory(row: Mapping[str, Any], images: Mapping[str, ProcessedMedia]) -> Trajectory:
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        actions=_actions(row, images),
        behavior_logprobs=row["behavior_logprobs"],
        action_mask=row["action_mask"],
        weight_spans=tuple(WeightSpan(**span) for span in row["weight_spans"]),
        finish_reason=FinishReason(row["finish_reason"]),
        response=Response(
            row["response_text"],
            row["response_num_tokens"],
            row["response_is_truncated"],
            turns=tuple(EpisodeTurn(**turn) for turn in row["turns"]),
            failure=row["response_failure"],
        ),
    )
