"""Videos that a policy made in the first and in the last step that left some, as a run's report shows them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.metrics.files import read_verified
from mobula.cluster.records.json_lines import read_lines

ARTIFACTS_FOLDER = "artifacts"  # of the run folder
INDEX = "artifacts.jsonl"  # in it: a row for each picture or video
MAX_VIDEOS = 4  # of a step
MAX_BYTES = 4 << 20  # of a video in the report; of a larger one only the file is named


@dataclass(frozen=True)
class Video:
    """One video."""

    file: str  # below the run folder
    prompt: str
    reward: float | None
    sha256: str
    poster: bytes  # JPEG of the first frame
    mp4: bytes | None


def read_artifacts(folder: Path) -> list[dict[str, Any]]:
    """The rows of artifacts.jsonl; empty if there is none."""
    path = folder / INDEX
    return [json.loads(line) for _, line in read_lines(path)] if path.exists() else []


def read_videos(run_folder: Path) -> list[tuple[int, list[Video]]]:
    """(step, its videos) of the first and of the last step.

    Raises:
        ValueError: the content of a file differs from what was written.
    """
    rows = [row for row in read_artifacts(run_folder / ARTIFACTS_FOLDER) if "poster" in row]
    steps = sorted({int(str(row["step"])) for row in rows})
    chosen = steps if len(steps) == 1 else [steps[0], steps[-1]] if steps else []
    found: list[tuple[int, list[Video]]] = []
    for step in chosen:
        of_step = [row for row in rows if row["step"] == step]
        found.append((step, [_video(run_folder, row) for row in of_step[:MAX_VIDEOS]]))
    return found


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
