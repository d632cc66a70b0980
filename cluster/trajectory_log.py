"""TrajectoryLog: the append-only Parquet record of what was trained on, one file a step, one row a trajectory."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.actions import TokenActions
from cluster.media import MediaHandle
from cluster.objects import fetch
from cluster.trajectory import (
    FinishReason,
    MediaSpan,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
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
_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_REWARD = pa.struct(
    [
        ("value", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("reasons", pa.map_(pa.string(), pa.string())),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # the version that training on it made
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("sample_id", pa.string()),
        ("prompt_text", pa.string()),
        ("compact_ids", pa.list_(pa.int32())),
        ("expanded_ids", pa.list_(pa.int32())),
        ("media", pa.list_(_MEDIUM)),
        ("references", pa.list_(pa.string())),
        ("metadata", pa.string()),  # JSON
        ("token_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("weight_spans", pa.list_(_SPAN)),
        ("finish_reason", pa.string()),
        ("response_text", pa.string()),
        ("response_num_tokens", pa.int32()),
        ("response_is_truncated", pa.bool_()),
        ("reward", _REWARD),  # null where it could not be scored
    ]
)


@dataclass(frozen=True)
class LoggedGroup:
    """One group as it was trained on. Its media have keys and sources but no reference: pictures are not logged."""

    group: TrajectoryGroup
    rewards: tuple[Reward | None, ...]


class TrajectoryLog:
    """Writes and reads the record of one run; a step's file is complete or absent, whenever the process is killed."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """`timeout_s` bounds the fetch of one step's groups."""
        self._folder = folder
        self._timeout_s = timeout_s
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
        """Record the groups that made version `step`; a step that is trained again after a resume replaces its file."""
        what = f"{len(groups)} groups of step {step} to log"
        values = fetch([group.group for group in groups], timeout_s=self._timeout_s, what=what)
        rows = [row for scored, group in zip(groups, values, strict=True) for row in _rows(step, group, scored.rewards)]
        path = self._path(step)
        draft = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        with draft.open("wb") as file:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        return path

    def steps(self) -> list[int]:
        """The recorded steps, oldest first."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self._folder.glob("step-*.parquet"))

    def read(self, step: int) -> list[LoggedGroup]:
        """The groups of one step, in the order in which they were appended."""
        rows = pq.read_table(self._path(step), schema=SCHEMA).to_pylist(maps_as_pydicts="strict")
        return [_logged_group(list(siblings)) for _, siblings in groupby(rows, key=lambda row: row["group_id"])]

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.parquet"


def _rows(step: int, group: TrajectoryGroup, rewards: Sequence[Reward | None]) -> Iterator[dict[str, Any]]:
    shared = {"step": step, "group_id": group.group_id, **_prompt_columns(group.prompt)}
    for trajectory, reward in zip(group.trajectories, rewards, strict=True):
        yield {**shared, **_trajectory_columns(trajectory), "reward": _reward_value(reward)}


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    media = [
        {"key": m.key, "modality": m.modality, "num_bytes": m.num_bytes, "source": m.source, **asdict(span)}
        for m, span in zip(prompt.media, prompt.media_spans, strict=True)
    ]
    return {
        "sample_id": prompt.sample_id,
        "prompt_text": prompt.text,
        "compact_ids": prompt.compact_ids,
        "expanded_ids": prompt.expanded_ids,
        "media": media,
        "references": list(prompt.references),
        "metadata": json.dumps(dict(prompt.metadata)),
    }


def _trajectory_columns(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "token_ids": trajectory.actions.token_ids,
        "behavior_logprobs": trajectory.behavior_logprobs,
        "action_mask": trajectory.action_mask,
        "weight_spans": [asdict(span) for span in trajectory.weight_spans],
        "finish_reason": trajectory.finish_reason.value,
        "response_text": trajectory.response.text,
        "response_num_tokens": trajectory.response.num_tokens,
        "response_is_truncated": trajectory.response.is_truncated,
    }


def _reward_value(reward: Reward | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {
        "value": reward.value,
        "components": list(reward.components.items()),
        "reasons": list(reward.reasons.items()),
    }


def _logged_group(rows: Sequence[Mapping[str, Any]]) -> LoggedGroup:
    group = TrajectoryGroup(_prompt(rows[0]), tuple(_trajectory(row) for row in rows))
    return LoggedGroup(group, tuple(None if row["reward"] is None else Reward(**row["reward"]) for row in rows))


def _prompt(row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        prompt_id=row["group_id"],
        sample_id=row["sample_id"],
        text=row["prompt_text"],
        compact_ids=np.array(row["compact_ids"], dtype=np.int32),
        expanded_ids=np.array(row["expanded_ids"], dtype=np.int32),
        media=tuple(MediaHandle(m["key"], m["modality"], m["num_bytes"], None, m["source"]) for m in row["media"]),
        media_spans=tuple(MediaSpan(m["start"], m["end"]) for m in row["media"]),
        references=tuple(row["references"]),
        metadata=json.loads(row["metadata"]),
    )


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        actions=TokenActions(np.array(row["token_ids"], dtype=np.int32)),
        behavior_logprobs=np.array(row["behavior_logprobs"], dtype=np.float32),
        action_mask=np.array(row["action_mask"], dtype=bool),
        weight_spans=tuple(WeightSpan(**span) for span in row["weight_spans"]),
        finish_reason=FinishReason(row["finish_reason"]),
        response=Response(row["response_text"], row["response_num_tokens"], row["response_is_truncated"]),
    )
