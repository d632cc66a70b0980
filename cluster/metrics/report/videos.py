"""Reads the videos of the first and the last step with videos for a run's report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.metrics.files import read_verified
from mobula.cluster.records.json_lines import read_lines

ARTIFACTS_FOLDER = "artifacts"  # of the run folder
INDEX = "artifacts.jsonl"  # in it: a row per image or video
MAX_VIDEOS = 4  # per step
MAX_BYTES = 4 << 20  # of an embedded video; for a larger video the report has only the file name


@dataclass(frozen=True)
class Video:
    """One video."""

    file: str  # relative to the run folder
    prompt: str
    reward: float | None
    sha256: str
    poster: bytes  # JPEG of the first frame
    mp4: bytes | None


def read_artifacts(folder: Path) -> list[dict[str, Any]]:
    """Reads the rows of artifacts.jsonl; empty if the file does not exist."""
    path = folder / INDEX
    return [json.loads(line) for _, line in read_lines(path)] if path.exists() else []


def read_videos(run_folder: Path) -> list[tuple[int, list[Video]]]:
    """Returns (step, videos) of the first and the last step with videos.

    Raises:
        ValueError: a file was changed after it was written.
    """
    rows = [row for row in read_artifacts(run_folder / ARTIFACTS_FOLDER) if "poster" in row]
    steps = sorted({int(str(row["step"])) for row in rows})
    chosen = steps if len(steps) == 1 else [steps[0], steps[-1]] if steps else []
    videos: list[tuple[int, list[Video]]] = []
    for step in chosen:
        of_step = [row for row in rows if row["step"] == step]
        videos.append((step, [_video(run_folder, row) for row in of_step[:MAX_VIDEOS]]))
    return videos


def _video(run_folder: Path, row: dict[str, object]) -> Video:
    folder = run_folder / ARTIFACTS_FOLDER
    digest = str(row["sha256"])
    mp4 = read_verified(folder / str(row["file"]), digest, INDEX)
    reward = row["reward"]
    return Video(
        file=f"{ARTIFACTS_FOLDER}/{row['file']}",
        prompt=str(row["prompt"]),
        reward=None if reward is None else float(str(reward)),
        sha256=digest,
        poster=(folder / str(row["poster"])).read_bytes(),
        mp4=mp4 if len(mp4) <= MAX_BYTES else None,
    )
